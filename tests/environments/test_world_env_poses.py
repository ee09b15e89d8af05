# SPDX-License-Identifier: Apache-2.0
"""Tests of environments' start poses and world poses, with an engine that tracks motion but returns
empty frames.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.walking import SPACE, Walker

from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.environments.world import WorldVectorEnv
from vllm_omni.inputs import DiffusionParams
from vllm_omni.outputs import pack
from vllm_omni.worlds.start_pose import StartPose

NORTH = {"x_m": 1.0, "z_m": 2.0, "heading_degrees": 0.0}
EAST = {**NORTH, "heading_degrees": 90.0}


class WalkingLLM:
    """A fake `LLM` whose `encode` runs a world that has poses. Frames and latents are zero."""

    def __init__(self) -> None:
        self.llm_engine = SimpleNamespace(vllm_config=None)
        self.walkers: dict[str, Walker | None] = {}

    def encode(self, prompts: Any, pooling: Any, **options: Any) -> list[Any]:
        each = [self._run(DiffusionParams.from_extra_kwargs(one.extra_kwargs)) for one in pooling]
        return [SimpleNamespace(outputs=SimpleNamespace(data=envelope)) for envelope in each]

    def _run(self, params: DiffusionParams) -> torch.Tensor:
        if params.op == "fork":
            walker = self.walkers[params.session_id]
            self.walkers[str(params.fork_to)] = None if walker is None else walker.copy()
        if params.op != "generate":
            return pack({"op": params.op})
        if params.chunk_index == 0:
            start = params.options.get("start_pose")
            self.walkers[params.session_id] = None if start is None else Walker(StartPose(**start))
        walker = self.walkers[params.session_id]
        poses = {}
        if walker is not None:
            assert params.actions is not None
            poses = {"world_poses": walker.walk(params.actions, starts=params.chunk_index == 0)}
        frames = torch.zeros(9 if params.chunk_index == 0 else 12, 16, 16, 3, dtype=torch.uint8)
        return pack(poses, {"frames": frames, "latents": torch.zeros(4, 3, 2, 2)})


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> WorldVectorEnv:
    info = StreamInfo(actions=SPACE, height=16, width=16)
    monkeypatch.setattr(StreamInfo, "from_vllm_config", lambda config, model: info)
    llm: Any = WalkingLLM()
    return WorldVectorEnv(llm, 2, prompt="p", max_steps=2)


def action(env: WorldVectorEnv, *held: str) -> dict[str, np.ndarray]:
    buttons = np.array(
        [[name in each for name in env.model_actions.button_names] for each in held], np.int8
    )
    return {
        "buttons": buttons,
        "axes": np.zeros((len(held), len(env.model_actions.axes)), np.float32),
    }


def test_environments_start_at_the_given_poses(env: WorldVectorEnv) -> None:
    """Environments start at the given poses: either one pose for all environments, or one pose for
    each environment.

    Moving forward covers 0.5 m per latent frame.
    """
    _, infos = env.reset(options={"start_pose": [NORTH, EAST]})
    assert infos["world_poses"].shape == (2, 3, 4)
    assert infos["world_poses"][:, -1].tolist() == [[1, 2, 0, 0], [1, 2, pytest.approx(90), 0]]
    *_, infos = env.step(action(env, "w", "w"))
    assert infos["world_poses"][:, -1, :2] == pytest.approx(
        np.array([[1, 3.5], [2.5, 2]]), abs=1e-5
    )
    _, infos = env.reset(options={"start_pose": EAST, "reset_mask": np.array([True, False])})
    assert infos["world_poses"][:, -1, :2] == pytest.approx(np.array([[1, 2], [2.5, 2]]), abs=1e-5)


def test_an_unknown_pose_is_nan(env: WorldVectorEnv) -> None:
    """A world pose is NaN if no start pose was given and the start image's pose was not
    recognised.
    """
    assert np.isnan(env.reset()[1]["world_poses"]).all()


def test_an_episode_that_ends_starts_from_the_same_pose_again(env: WorldVectorEnv) -> None:
    """A start pose applies to every new episode until the next `reset` call."""
    env.reset(options={"start_pose": EAST})
    for _ in range(3):
        *_, infos = env.step(action(env, "w", "w"))
    assert infos["chunks"].tolist() == [1, 1]
    assert infos["world_poses"][0, -1].tolist() == [1, 2, pytest.approx(90), 0]


def test_forks_and_replays_have_the_same_poses(env: WorldVectorEnv) -> None:
    env.reset(options={"start_pose": EAST})
    env.step(action(env, "w", ""))
    env.fork(0, [1])
    *_, infos = env.step(action(env, "w", "w"))
    assert np.array_equal(infos["world_poses"][0], infos["world_poses"][1])
    episode = env.episodes[1]
    assert episode is not None
    assert episode.start_pose == StartPose(**EAST)
    env.replay(0, episode)
    assert np.array_equal(env._infos()["world_poses"][0], infos["world_poses"][1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"start_pose": {"x_m": 1.0}}, "start_pose: Object missing required field `z_m`"),
        ({"start_pose": [NORTH]}, r"one per environment \(2\); got 1"),
        ({"pose": NORTH}, "unknown options: pose; known: reset_mask, start_pose"),
    ],
)
def test_a_wrong_option_is_named(env: WorldVectorEnv, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        env.reset(options=options)
