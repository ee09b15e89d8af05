# SPDX-License-Identifier: Apache-2.0
"""`omni.suspend_idle_s`: more live sessions than the device holds, with a real model."""

from typing import Any

import pytest
import torch
from helpers.snapshot_steps import Worker, game_chunk, world_chunk

from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams

NUM_SESSIONS = 4


@pytest.mark.parametrize(
    ("family", "chunk"), [("lingbot_world", world_chunk), ("matrix_game", game_chunk)]
)
def test_sessions_take_turns_on_the_device(
    make_runner: Any, request: pytest.FixtureRequest, family: str, chunk: Any
) -> None:
    """Four sessions play in turn where two fit, bit for bit as where all fit."""
    checkpoint = request.getfixturevalue(family)
    roomy = Worker(make_runner(checkpoint, {}))
    params = DiffusionParams(session_id="s", prompt="a harbour", output="latents")
    nbytes = int(roomy.runner.model.session_nbytes(params))
    tight = Worker(
        make_runner(checkpoint, {"suspend_idle_s": 0, "max_suspended_bytes": 2 * nbytes})
    )
    tight.runner.sessions.max_bytes = 2 * nbytes
    for index in range(3):
        for number in range(NUM_SESSIONS):
            ours, theirs = (
                chunk(worker, f"s{number}", index, output="latents")["latents"]
                for worker in (tight, roomy)
            )
            assert torch.equal(ours, theirs), (index, number)
    stats = tight.runner.sessions.stats()
    assert (stats["sessions"], stats["suspended"]) == (NUM_SESSIONS, NUM_SESSIONS - 2)
    assert stats["bytes"] == stats["suspended_bytes"] == 2 * nbytes
    assert roomy.runner.sessions.stats()["suspended"] == 0


@pytest.mark.parametrize(
    ("check", "size"), [(OmniConfig.check_ranks, 2), (OmniConfig.check_stages, 2)]
)
def test_several_ranks_are_refused(check: Any, size: int) -> None:
    with pytest.raises(ValueError, match="suspend_idle_s requires a single rank"):
        check(OmniConfig(suspend_idle_s=1.0), size)


def test_windows_that_grow_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_growth"):
        OmniConfig(suspend_idle_s=1.0, kv_growth=True)
