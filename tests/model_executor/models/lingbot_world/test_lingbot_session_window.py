# SPDX-License-Identifier: Apache-2.0
"""A session can have its own window and sinks while other sessions use the server's."""

from pathlib import Path

import pytest
import torch
from lingbot_world_driver import load_world, open_session, run_chunk

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import SupportsSessionWindows
from vllm_omni.model_executor.models.lingbot_world.pipeline import LingBotWorld
from vllm_omni.model_executor.models.lingbot_world.state import LingBotSession
from vllm_omni.outputs import RequestFailed

OWN = {"window_frames": 5, "sink_frames": 1}


@pytest.fixture(scope="module")
def world(lingbot_world: Path) -> LingBotWorld:
    return load_world(lingbot_world, window_frames=7, sink_frames=2)


def latents(world: LingBotWorld, count: int, **window: int) -> list[torch.Tensor]:
    session = open_session(world, output="latents", **window)
    return [
        run_chunk(world, session, prompt="a beach", output="latents")[1]["latents"]
        for _ in range(count)
    ]


def test_a_session_window_equals_a_server_with_that_window(
    world: LingBotWorld, lingbot_world: Path
) -> None:
    """A session with its own window generates the same latents, bit for bit, as a session on a
    server configured with that window, even once the window is full. The server's other sessions
    see more frames.
    """
    served = load_world(lingbot_world, **OWN)
    own, there, usual = latents(world, 4, **OWN), latents(served, 4), latents(world, 4)
    assert all(torch.equal(a, b) for a, b in zip(own, there, strict=True))
    assert torch.equal(own[0], usual[0]) and not torch.equal(own[3], usual[3])


def test_a_smaller_window_takes_less_memory(world: LingBotWorld) -> None:
    assert isinstance(world, SupportsSessionWindows)
    own = DiffusionParams(session_id="a", prompt="a beach", **OWN)  # type: ignore[arg-type]
    nbytes = world.session_nbytes(own)
    assert nbytes == world.new_session(own).nbytes
    assert nbytes < world.session_nbytes(DiffusionParams(session_id="b", prompt="a beach"))


def test_forks_and_restored_sessions_have_the_same_window(
    world: LingBotWorld,
) -> None:
    session = open_session(world, **OWN)
    assert isinstance(session, LingBotSession)
    for _ in range(3):
        run_chunk(world, session, prompt="a beach")
    copy, restored = session.fork("copy"), world.new_session(session.start_params())
    assert (
        restored.shape == session.shape
        and restored.plan == session.plan
        and restored.nbytes == session.nbytes
    )
    expected = run_chunk(world, session, prompt="a beach")[1]["frames"]
    assert torch.equal(run_chunk(world, copy, prompt="a beach")[1]["frames"], expected)


@pytest.mark.parametrize(
    ("window", "reason"),
    [
        ({"window_frames": 8}, "window_frames is at most the server's 7, got 8"),
        (
            {"window_frames": 4},
            "a window of 4 latent frames with 2 sink frames leaves no room for chunks of 3",
        ),
        ({"sink_frames": 5}, "a window of 7 latent frames with 5 sink frames leaves no room"),
    ],
)
def test_an_invalid_session_window_is_refused(
    world: LingBotWorld, window: dict[str, int], reason: str
) -> None:
    with pytest.raises(RequestFailed, match=reason):
        open_session(world, **window)


def test_the_first_chunk_fixes_the_window(world: LingBotWorld) -> None:
    session = open_session(world, **OWN)
    run_chunk(world, session, prompt="a beach", **OWN)
    with pytest.raises(
        RequestFailed, match="window_frames is fixed at 5 by the session's first chunk, got 7"
    ):
        run_chunk(world, session, prompt="a beach", window_frames=7)
