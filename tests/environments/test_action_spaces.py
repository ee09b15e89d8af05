# SPDX-License-Identifier: Apache-2.0
"""A model's action space is converted to a gymnasium space, and that space's samples are converted
to engine actions.
"""

from typing import Any

import numpy as np
import pytest
from helpers.needs_gymnasium import gymnasium

from vllm_omni.actions import ActionFrame, ActionSpace, Axis, Button, read_actions
from vllm_omni.environments.action_spaces import action_frame, gymnasium_space
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.models.lingbot_world.camera import ACTION_SPACE
from vllm_omni.model_executor.models.waypoint.config import action_space
from vllm_omni.model_executor.models.waypoint.releases import released_config

GAME = ActionSpace(
    buttons=(Button("left", "left"), Button("fire", "fire")),
    axes=(Axis(name="yaw", title="turn", unit="degrees", low=-2, high=2),),
    scroll=True,
)
ONE_KEY = ActionSpace(buttons=(Button("n", "north"), Button("s", "south")), exclusive=True)


def test_keys_of_a_camera_world_are_bits_by_name() -> None:
    space = gymnasium_space(ACTION_SPACE)
    assert isinstance(space, gymnasium.spaces.Dict) and set(space) == {"buttons", "axes"}
    assert space["buttons"] == gymnasium.spaces.MultiBinary(len(ACTION_SPACE.button_names))
    held = np.array([name in ("w", "l") for name in ACTION_SPACE.button_names], np.int8)
    frame = action_frame(ACTION_SPACE, {"buttons": held})
    assert set(frame.buttons) == {"w", "l"}
    assert set(frame.axes.values()) == {0.0}, "what is left out is at rest"


def test_every_kind_of_control_has_its_space() -> None:
    space = gymnasium_space(GAME)
    assert isinstance(space, gymnasium.spaces.Dict) and set(space) == {"buttons", "axes", "scroll"}
    action = {
        "buttons": np.array([0, 1]),
        "axes": np.array([1.5], np.float32),
        "scroll": np.int64(-1),
    }
    assert space.contains({**action, "buttons": np.array([0, 1], np.int8)})
    assert action_frame(GAME, action) == ActionFrame(
        buttons=("fire",), axes={"yaw": 1.5}, scroll=-1.0
    )


@pytest.mark.parametrize(("number", "names"), [(0, ()), (1, ("n",)), (2, ("s",))])
def test_one_button_at_a_time_is_a_number(number: int, names: tuple[str, ...]) -> None:
    assert gymnasium_space(ONE_KEY) == gymnasium.spaces.Dict(
        {"buttons": gymnasium.spaces.Discrete(3)}
    )
    assert action_frame(ONE_KEY, {"buttons": np.int64(number)}).buttons == names


def test_all_buttons_of_a_model_may_be_held_at_once() -> None:
    """A random action can hold all of a model's buttons at once. On average, a random action holds
    half of them.
    """
    space = action_space(released_config("waypoint"))
    held = {
        "buttons": np.ones(256, np.int8),
        "axes": np.zeros(2, np.float32),
        "scroll": np.int64(1),
    }
    sent = DiffusionParams(session_id="s", actions=[action_frame(space, held)]).to_pooling_params()
    rows = read_actions(space, DiffusionParams.from_extra_kwargs(sent.extra_kwargs).actions, {}, 1)
    assert rows is not None and rows.buttons_NB.all() and rows.scroll_N.tolist() == [1.0]


def test_a_model_without_actions_only_continues() -> None:
    assert gymnasium_space(ActionSpace()) == gymnasium.spaces.Discrete(1)
    assert action_frame(ActionSpace(), np.int64(0)) == ActionFrame()


@pytest.mark.parametrize("action", [{"buttons": np.zeros(2), "pedals": 1}, np.int64(0)])
def test_an_action_of_another_shape_says_what_the_model_takes(action: Any) -> None:
    with pytest.raises(
        ValueError, match=r"may contain \['axes', 'buttons', 'scroll'\].*takes buttons left, fire"
    ):
        action_frame(GAME, action)
