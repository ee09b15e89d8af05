# SPDX-License-Identifier: Apache-2.0
"""Windows virtual-key codes as buttons: for models whose keyboard is that of a recorded PC game.

Held by tests/test_virtual_keys.py.
"""

from typing import Final

from vllm_omni.actions import Button

_NAMED: Final = {
    0x01: Button("mouse_left", "left button", ("Mouse0",)),
    0x02: Button("mouse_right", "right button", ("Mouse2",)),
    0x04: Button("mouse_middle", "middle button", ("Mouse1",)),
    0x08: Button("backspace", "Backspace", ("Backspace",)),
    0x09: Button("tab", "Tab", ("Tab",)),
    0x0D: Button("enter", "Enter", ("Enter",)),
    0x10: Button("shift", "Shift", ("ShiftLeft",)),
    0x11: Button("ctrl", "Ctrl", ("ControlLeft",)),
    0x12: Button("alt", "Alt", ("AltLeft",)),
    0x1B: Button("escape", "Escape", ("Escape",)),
    0x20: Button("space", "Space", ("Space",)),
    0x25: Button("left", "arrow left", ("ArrowLeft",)),
    0x26: Button("up", "arrow up", ("ArrowUp",)),
    0x27: Button("right", "arrow right", ("ArrowRight",)),
    0x28: Button("down", "arrow down", ("ArrowDown",)),
    **{0x30 + digit: Button(str(digit), str(digit), (f"Digit{digit}",)) for digit in range(10)},
    **{ord(letter): Button(letter.lower(), letter, (f"Key{letter}",)) for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"},
    **{0x6F + number: Button(f"f{number}", f"F{number}", (f"F{number}",)) for number in range(1, 13)},
}


def virtual_key(code: int) -> Button:
    """The button of a virtual-key code, with the browser's code of its key; rare ones are named by code, vk_5b."""
    return _NAMED.get(code) or Button(f"vk_{code:02x}", f"virtual key {code:#04x}")
