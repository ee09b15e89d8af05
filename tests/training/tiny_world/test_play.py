# SPDX-License-Identifier: Apache-2.0
"""Tests of walks in the real engine: concurrent sessions, prompt changes, and saved and restored
sessions.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from training.tiny_world.play import EngineWorld, Played, SeveralEngines, _runs

WALK = Played((0.0, 0.0), 0.0, ("", "w", "l", "w", "wl", "j"), 0, {0: "a field"}, 5)
OTHER = replace(WALK, keys=WALK.keys[:3])
SWITCHED = replace(WALK, prompts={0: "a field", 3: "a harbour in the snow"})


def _played(checkpoint: Path, engines: int = 1, **options: int) -> tuple[list[torch.Tensor], dict]:
    shared = {"omni": {}, "batch": 2, "dtype": "float32", "enforce_eager": True, **options}
    world: EngineWorld | SeveralEngines
    if engines > 1:
        world = SeveralEngines(engines, checkpoint, (32, 48), **shared)
    else:
        world = EngineWorld(checkpoint, (32, 48), **shared)
    images = torch.arange(3 * 32 * 48 * 3).remainder(251).to(torch.uint8).view(3, 32, 48, 3)
    images[2] = images[0]
    try:
        return world.play([WALK, OTHER, SWITCHED], images), world.times.summary()
    finally:
        world.close()


@pytest.mark.nightly
def test_walks_come_back_in_order_and_a_snapshot_changes_nothing(lingbot_world: Path) -> None:
    """Walks are returned in order, and saving and restoring a session does not change its video.

    A video of two chunks has 9 + 12 frames. A new prompt affects the chunk that it is sent with.
    Saved and restored sessions continue bit for bit. The timings report the number of chunks,
    each of which has three latent frames. Two engines generate the same videos.
    """
    videos, times = _played(lingbot_world)
    assert [len(video) for video in videos] == [21, 9, 21]
    assert torch.equal(videos[0][:9], videos[2][:9]) and not torch.equal(
        videos[0][9:], videos[2][9:]
    )
    assert not torch.equal(videos[0][:9], videos[1])
    assert times["chunks"] == 5 and times["wall"] > 0 and times["stages_ms"]["decode"] > 0
    restored, _ = _played(lingbot_world, snapshot_every=1)
    assert all(torch.equal(a, b) for a, b in zip(videos, restored, strict=True))
    shared_out, times = _played(lingbot_world, engines=2)
    assert all(torch.equal(a, b) for a, b in zip(videos, shared_out, strict=True))
    assert times["chunks"] == 5


def test_a_batch_holds_walks_of_one_length() -> None:
    assert list(_runs([3, 0, 2, 1], [5, 6, 6, 6], 2)) == [[3], [0, 2], [1]]
    assert list(_runs([], [], 2)) == []
