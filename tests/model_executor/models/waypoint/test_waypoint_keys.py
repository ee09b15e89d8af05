# SPDX-License-Identifier: Apache-2.0
"""Tests of Windows virtual-key codes as buttons, and of the list of these codes in error
messages.
"""

import pytest

from vllm_omni.actions import ActionSpace, Axis, read_actions
from vllm_omni.model_executor.models.waypoint.config import virtual_key
from vllm_omni.outputs import RequestFailed

KEYBOARD = ActionSpace(
    buttons=tuple(virtual_key(code) for code in range(256)),
    axes=(Axis(name="dx", title="", unit="px"),),
    scroll=True,
)


def test_every_code_has_a_unique_name() -> None:
    assert len(set(KEYBOARD.button_names)) == 256
    named = {
        code: KEYBOARD.button_names[code] for code in (0x01, 0x20, 0x25, 0x30, 0x57, 0x70, 0x5B)
    }
    assert list(named.values()) == ["mouse_left", "space", "left", "0", "w", "f1", "vk_5b"]
    assert virtual_key(0x57).codes == ("KeyW",) and virtual_key(0x5B).codes == ()


def test_a_refusal_lists_common_keys_first() -> None:
    """The error message for an unknown key first lists common keys, such as letters, space and the
    mouse buttons. It then states how many other keys there are and where the complete list is.
    """
    with pytest.raises(RequestFailed, match="holds the button 'jump'") as refused:
        read_actions(KEYBOARD, [["jump"]], {}, 1)
    listed = refused.value.message.split("buttons ")[1]
    assert listed.startswith("a, b, c, ") and ", w, " in listed
    assert all(f" {name}," in listed for name in ("space", "mouse_left", "shift", "left"))
    assert (
        "vk_" not in listed
        and "and 220 more (the server's greeting lists them under `actions`)" in listed
    )
    assert listed.endswith("; axes dx; scroll")
