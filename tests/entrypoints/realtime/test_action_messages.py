# SPDX-License-Identifier: Apache-2.0
"""Parsing of actions in messages. Error messages list the model's actions."""

from typing import Any

import pytest

from vllm_omni.actions import CAMERA_SPACE, ActionFrame, ActionSpace, Axis, Button
from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.realtime.controls.action_messages import (
    camera_buttons,
    camera_frames,
    read_actions_message,
)
from vllm_omni.entrypoints.realtime.controls.control_track import (
    ControlScript,
    ControlStates,
    ControlTransition,
)

SPACE = ActionSpace(
    buttons=(Button("w", "forward", ("KeyW",)), Button("leap", "jump", ("KeyI", "Space"))),
    axes=(
        Axis(name="steer", title="steer", unit="of full", low=-1, high=1),
        Axis(name="dx", title="turn", unit="pixels", kind="motion", low=-5, high=5, mouse="x"),
    ),
    scroll=True,
)
ONE = ActionSpace(buttons=SPACE.buttons, exclusive=True)


def test_frames_become_a_script() -> None:
    """Each frame of a script may be a list of names or a map, and a repeated name counts once."""
    read = read_actions_message([["w", "w"], {"axes": {"dx": 3}, "scroll": -2}, []], SPACE)
    assert read == ControlScript(
        (ActionFrame(("w",)), ActionFrame(axes={"dx": 3.0}, scroll=-2.0), ActionFrame())
    )


def test_a_transition_changes_only_the_keys_it_names() -> None:
    """A transition changes only the keys that it names. Its motion may exceed the range of a single
    frame, because motion is summed.
    """
    message = {
        "mode": "state",
        "transitions": [{"buttons": []}, {"axes": {"dx": 500.0}, "client_ts_ms": 1.5}],
    }
    assert read_actions_message(message, SPACE) == ControlStates(
        (ControlTransition(()), ControlTransition(None, {"dx": 500.0}))
    )


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (
            [["fly"]],
            r"actions\[0\] holds the button 'fly'; this model takes buttons w, leap; axes steer, "
            r"dx; scroll",
        ),
        ([{"axes": {"yaw": 1}}], r"actions\[0\] moves the axis 'yaw'; this model takes buttons w"),
        ([{"axes": {"dx": 6}}], r"the axis dx must lie in \[-5, 5\] pixels, got 6"),
        ([{"axes": {"dx": float("nan")}}], "this model takes buttons w"),
        ([{"keys": ["w"]}], "unknown field `keys`.*; this model takes buttons w"),
        ([["w"]] * 513, "513 frames arrived; at most 512"),
        ("w", "this model takes buttons w"),
        ({"mode": "state"}, "missing required field"),
        (
            {"mode": "state", "transitions": [{"buttons": ["fly"]}]},
            r"transitions\[0\] holds the button 'fly'",
        ),
        ({"mode": "state", "transitions": [{"axes": {"steer": 2}}]}, "steer must lie in"),
        (
            {"mode": "state", "transitions": [{"axes": {"dx": float("inf")}}]},
            "this model takes buttons w",
        ),
        ({"mode": "state", "transitions": [{}] * 513}, "length <= 512"),
    ],
)
def test_other_actions_are_refused_with_the_actions_of_the_model(value: Any, says: str) -> None:
    with pytest.raises(EndpointError, match=says) as refused:
        read_actions_message(value, SPACE)
    assert refused.value.code == "invalid_action"


def test_an_exclusive_model_refuses_two_buttons_and_scrolling() -> None:
    for value, says in (
        ([["w", "leap"]], "one at a time"),
        ([{"scroll": 1}], "scrolls; this model takes"),
    ):
        with pytest.raises(EndpointError, match=says):
            read_actions_message(value, ONE)


def test_camera_keys_press_the_buttons_they_belong_to() -> None:
    """A camera key presses the button with the same name or, if there is none, the button with the
    same key code. Keys without a button are ignored.
    """
    assert camera_buttons(["W", "i", "k", "x", "wa"], SPACE) == ("w", "leap")
    assert camera_buttons(["i", "w"], ONE) == ("leap",)
    assert camera_frames([["w"], ["d", "l"]], CAMERA_SPACE) == ControlScript(
        (ActionFrame(("w",)), ActionFrame(("d", "l")))
    )
