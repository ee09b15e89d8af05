# SPDX-License-Identifier: Apache-2.0
"""Tests of a model's action space and of parsing a request's controls."""

import msgspec
import pytest
import torch

from vllm_omni.actions import ActionEntry, ActionFrame, ActionSpace, Axis, Button, read_actions
from vllm_omni.inputs import DiffusionParams
from vllm_omni.outputs import RequestFailed

SPACE = ActionSpace(
    buttons=(Button("w", "forward", ("KeyW",)), Button("s", "back", ("KeyS",))),
    axes=(Axis(name="yaw", title="turn", unit="of the training's step", low=-1, high=1),),
    scroll=True,
)


def test_entries_become_rows_and_missing_ones_are_idle() -> None:
    """A list that names each frame's held buttons is parsed into one row per frame. A frame without
    an entry is idle.
    """
    rows = read_actions(
        SPACE, [["w"], ActionFrame(buttons=("w", "s"), axes={"yaw": -0.5}, scroll=3)], {}, 3
    )
    assert rows is not None
    assert rows.buttons_NB.tolist() == [[True, False], [True, True], [False, False]]
    assert rows.axes_NA.tolist() == [[0.0], [-0.5], [0.0]]
    assert rows.scroll_N.tolist() == [0.0, 1.0, 0.0]
    assert rows.held(SPACE) == [("w",), ("w", "s"), ()]


def test_dense_arrays_are_equivalent_to_typed_frames() -> None:
    """A dense array's columns are the action space's buttons and axes, in the same order."""
    tensors = {
        "buttons": torch.tensor([[1, 0], [0, 1]]),
        "axes": torch.tensor([[0.5], [0.0]], dtype=torch.float64),
    }
    dense = read_actions(SPACE, None, tensors, 2)
    typed = read_actions(SPACE, [ActionFrame(("w",), {"yaw": 0.5}), ["s"]], {}, 2)
    assert dense is not None and typed is not None
    assert torch.equal(dense.buttons_NB, typed.buttons_NB) and torch.equal(
        dense.axes_NA, typed.axes_NA
    )


def test_rows_of_latent_frames_are_held_over_their_pixel_frames() -> None:
    """A latent frame's action applies to all of its pixel frames. The first latent frame of a
    stream has one pixel frame, and each later latent frame has four.
    """
    rows = read_actions(SPACE, [["w"], []], {}, 2)
    assert rows is not None
    assert rows.repeated([1, 4]).buttons_NB[:, 0].tolist() == [True, False, False, False, False]


def test_a_request_without_actions_has_none() -> None:
    """If a request contains no actions, parsing returns None, so the model can use camera poses or
    stay idle.
    """
    assert read_actions(SPACE, None, {}, 3) is None


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([["w"]] * 4, "at most 3 entries"),
        ([["jump"]], "holds the button 'jump'; this model takes buttons w, s; axes yaw; scroll"),
        ([ActionFrame(axes={"pitch": 0.1})], "moves the axis 'pitch'; this model takes"),
        ([ActionFrame(axes={"yaw": 1.5})], r"yaw must lie in \[-1, 1\]"),
        ([ActionFrame(axes={"yaw": float("nan")})], r"yaw must lie in \[-1, 1\]"),
        ([ActionFrame(scroll=float("inf"))], "scroll must be finite"),
    ],
)
def test_controls_a_model_does_not_take_are_refused(entries: list[ActionEntry], says: str) -> None:
    """Controls that the model does not accept are refused, and the error lists the controls that it
    accepts.
    """
    with pytest.raises(RequestFailed, match=says) as refused:
        read_actions(SPACE, entries, {}, 3)
    assert refused.value.code == "invalid_action"


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"buttons": torch.zeros(3, 3)}, r"shape \[3, 2\]"),
        ({"buttons": torch.full((3, 2), 0.5)}, "zeros and ones"),
        ({"axes": torch.full((3, 1), 2.0)}, "must lie in"),
        ({"scroll": torch.zeros(2)}, r"shape \[3\]"),
    ],
)
def test_dense_arrays_of_another_shape_or_range_are_refused(
    tensors: dict[str, torch.Tensor], says: str
) -> None:
    """A dense array is rejected if its shape is wrong, if a value is out of range, or if a button's
    value is strictly between zero and one.
    """
    with pytest.raises(RequestFailed, match=says):
        read_actions(SPACE, None, tensors, 3)


def test_a_model_may_take_one_button_at_a_time_and_no_wheel() -> None:
    """An action space can forbid simultaneous buttons and scrolling."""
    one = ActionSpace(buttons=SPACE.buttons, exclusive=True)
    with pytest.raises(RequestFailed, match="one at a time"):
        read_actions(one, [["w", "s"]], {}, 1)
    with pytest.raises(RequestFailed, match="scrolls; this model takes buttons w, s"):
        read_actions(one, [ActionFrame(scroll=1)], {}, 1)
    with pytest.raises(RequestFailed, match="the tensor scroll arrived"):
        read_actions(one, None, {"scroll": torch.zeros(1)}, 1)


def test_typed_frames_travel_in_a_request() -> None:
    """When a request is converted to JSON types and back, lists of button names and typed frames do
    not change.
    """
    params = DiffusionParams(session_id="a", actions=[["w"], ActionFrame(("s",), {"yaw": 0.25}, 1)])
    sent = {"omni": msgspec.to_builtins(params)}
    assert DiffusionParams.from_extra_kwargs(sent) == params
    assert sent["omni"]["actions"] == [
        ["w"],
        {"buttons": ("s",), "axes": {"yaw": 0.25}, "scroll": 1},
    ]
