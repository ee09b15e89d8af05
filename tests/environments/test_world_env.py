# SPDX-License-Identifier: Apache-2.0
"""Tests of worlds as a gymnasium `VectorEnv`: steps, seeds, forks, replays and truncation.

Only the last test uses a real engine.
"""

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helpers.needs_gymnasium  # noqa: F401
import numpy as np
import pytest
from helpers.waits import seconds
from in_process_llm import InProcessLLM

from vllm_omni.environments.world import WorldVectorEnv
from vllm_omni.outputs import RequestFailed

SIZE = {"height": 32, "width": 48}
IMAGE = np.full((32, 48, 3), 90, np.uint8)


@pytest.fixture(scope="module")
def llm(lingbot_world: Path) -> Any:
    return InProcessLLM(lingbot_world, {**SIZE, "max_sessions": 6})


@pytest.fixture
def env(llm: Any) -> Iterator[WorldVectorEnv]:
    env = WorldVectorEnv(llm, 3, prompt=["a village", "a town", "a village"], image=IMAGE, **SIZE)
    yield env
    env.close()


def keys(env: WorldVectorEnv, *held: str) -> dict[str, np.ndarray]:
    """Return one action per environment, with the given keys held."""
    names = env.model_actions.button_names
    return {"buttons": np.array([[name in each for name in names] for each in held], np.int8)}


def test_a_step_is_a_chunk_of_every_environment(env: WorldVectorEnv) -> None:
    """A step generates one chunk for each environment. Observations are frames, and `info` contains
    latents and seeds.

    The first chunk after a reset is shorter, so it is padded at its start.
    """
    frames, infos = env.reset(seed=5)
    assert env.observation_space.contains(frames) and frames.shape == (3, 12, 32, 48, 3)
    assert np.array_equal(frames[:, 0], frames[:, 3]) and infos["seed"].tolist() == [5, 6, 7]
    env.action_space.seed(0)
    frames, rewards, terminations, truncations, infos = env.step(env.action_space.sample())
    assert env.observation_space.contains(frames) and infos["latents"].shape == (3, 16, 3, 4, 6)
    assert infos["chunks"].tolist() == [2, 2, 2] and not rewards.any()
    assert not terminations.any() and not truncations.any()


def test_the_same_seeds_and_actions_give_the_same_bits(env: WorldVectorEnv) -> None:
    """The same seeds and actions yield bit-identical results, even if the environment has a
    different index in the vector environment.

    Different keys, seeds or prompts yield different frames.
    """
    env.reset(seed=[1, 1, 2])
    first = env.step(keys(env, "w", "w", "w"))[0]
    env.reset(seed=[2, 1, 1])
    again = env.step(keys(env, "w", "w", "w"))[0]
    assert np.array_equal(first[2], again[0]) and np.array_equal(first[1], again[1])
    assert np.array_equal(first[0], again[2]) and not np.array_equal(first[0], first[1])
    env.reset(seed=[1, 1, 1])
    assert not np.array_equal(env.step(keys(env, "s", "w", "wl"))[0][0], first[0])


def test_a_fork_continues_like_its_source_and_then_diverges(env: WorldVectorEnv) -> None:
    env.reset(seed=1)
    env.step(keys(env, "w", "", ""))
    env.fork(0, [1, 2])
    frames = env.step(keys(env, "w", "w", "s"))[0]
    assert np.array_equal(frames[0], frames[1]) and not np.array_equal(frames[0], frames[2])
    assert [len(episode.actions) for episode in env.episodes if episode is not None] == [2, 2, 2]


def test_an_episode_is_played_again_bit_for_bit(env: WorldVectorEnv) -> None:
    """An episode can be replayed bit for bit from its seed, prompt and actions, even at a different
    index in the vector environment.

    A forked episode's record includes the steps before the fork.
    """
    frames = [env.reset(seed=1)[0][1][-9:]]
    frames += [env.step(keys(env, "", held, ""))[0][1] for held in ("w", "wl")]
    episode = env.episodes[1]
    assert episode is not None
    assert np.array_equal(env.replay(0, episode), np.concatenate(frames))
    env.fork(1, [2])
    copy = env.episodes[2]
    assert copy is not None and np.array_equal(env.replay(0, copy), np.concatenate(frames))


def test_an_episode_that_is_long_enough_starts_anew(llm: Any) -> None:
    """The step after the end of an episode resets the environment, as gymnasium's `NEXT_STEP` mode
    requires.
    """
    env = WorldVectorEnv(
        llm, 2, prompt="a village", image=IMAGE, max_steps=2, reward=lambda f, z: np.ones(2), **SIZE
    )
    env.reset(seed=0)
    seen = [env.step(keys(env, "w", "w")) for _ in range(4)]
    assert [step[3].tolist() for step in seen] == [
        [False] * 2,
        [True] * 2,
        [False] * 2,
        [False] * 2,
    ]
    assert [step[1].tolist() for step in seen] == [[1.0] * 2, [1.0] * 2, [0.0] * 2, [1.0] * 2]
    assert seen[2][4]["chunks"].tolist() == [1, 1] and seen[2][4]["seed"].tolist() != [0, 1]
    env.close()


def test_a_start_pose_needs_a_world_with_poses(env: WorldVectorEnv) -> None:
    """A start pose is refused for a model that receives only relative motion, because the poses of
    the model's frames cannot be known.
    """
    start = {"x_m": 1.0, "z_m": 2.0, "heading_degrees": 0.0}
    with pytest.raises(RequestFailed, match="start_pose"):
        env.reset(options={"start_pose": start})
    assert np.isnan(env.reset(seed=1)[1]["world_poses"]).all()


def test_some_environments_start_anew(env: WorldVectorEnv) -> None:
    env.reset(seed=1)
    before = env.step(keys(env, "w", "w", "w"))[0]
    frames, infos = env.reset(seed=9, options={"reset_mask": np.array([False, True, False])})
    assert np.array_equal(frames[[0, 2]], before[[0, 2]]) and infos["chunks"].tolist() == [2, 1, 2]
    assert infos["seed"].tolist() == [1, 10, 3]


def test_a_failed_chunk_ends_only_its_own_episode(env: WorldVectorEnv) -> None:
    env.reset(seed=1)
    lost = env._engine._sessions[1]
    env._engine._llm.sessions.pop(lost)
    with pytest.raises(RequestFailed):
        env.step(keys(env, "w", "w", "w"))
    assert env.episodes[1] is None and env.episodes[0] is not None
    with pytest.raises(ValueError, match="environment 1 has no episode; call reset"):
        env.step(keys(env, "w", "w", "w"))


def test_a_refused_fork_raises_and_leaves_no_session_behind(env: WorldVectorEnv) -> None:
    """The engine copies one environment and refuses the next. The caller must learn it, and the
    finished copy must be closed with the other sessions.
    """
    env.reset(seed=1)
    llm = env._engine._llm
    llm.refused_forks = iter([False, True])
    with pytest.raises(RequestFailed, match="capacity"):
        env.fork(0, [1, 2])
    assert env.episodes[0] is not None and env.episodes[1:] == [None, None]
    with pytest.raises(ValueError, match="environment 1 has no episode; call reset"):
        env.step(keys(env, "w", "w", "w"))
    assert len(llm.sessions) == 1
    env.reset(seed=1)


@pytest.mark.parametrize("targets", [[1, 9], [1, 1], [-1]])
def test_a_fork_to_wrong_targets_changes_nothing(env: WorldVectorEnv, targets: list[int]) -> None:
    env.reset(seed=1)
    with pytest.raises(ValueError, match="targets must be different numbers from 0 to 2"):
        env.fork(0, targets)
    assert env.step(keys(env, "w", "w", "w"))[-1]["chunks"].tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("count", "prompt", "message"),
    [
        (9, "a village", "at most 6 sessions, but 9 environments"),
        (2, ["a village"], r"one per environment \(2\); got 1"),
    ],
)
def test_what_does_not_fit_is_refused(
    count: int, prompt: str | list[str], message: str, llm: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        WorldVectorEnv(llm, count, prompt=prompt, image=IMAGE, **SIZE)


def test_closing_frees_the_sessions(llm: Any) -> None:
    env = WorldVectorEnv(llm, 2, prompt="a village", image=IMAGE, **SIZE)
    before = len(llm.sessions)
    env.reset(seed=0)
    assert len(llm.sessions) == before + 2
    env.close()
    assert len(llm.sessions) == before


@pytest.mark.engine
def test_an_engine_steps_forks_and_replays(lingbot_world: Path) -> None:
    """Two worlds run with vLLM's `LLM` as the engine, and a replay is bit-identical to the original
    run.

    Closing the environment stops the engine.
    """
    before = set(multiprocessing.active_children())
    env = WorldVectorEnv.load(lingbot_world, 2, prompt="a village", image=IMAGE, **SIZE)
    frames = [env.reset(seed=1)[0][0][-9:]]
    frames += [env.step(keys(env, held, ""))[0][0] for held in ("w", "wl")]
    env.fork(0, [1])
    episode = env.episodes[1]
    assert episode is not None and np.array_equal(env.replay(1, episode), np.concatenate(frames))
    engine = set(multiprocessing.active_children()) - before
    assert engine
    env.close()
    for process in engine:
        process.join(seconds(20))
    assert not any(process.is_alive() for process in engine)
