# SPDX-License-Identifier: Apache-2.0
"""The cache mode determines which cached keys and values a denoise step sees. In these tests, the
cached values encode the frame and the step that they belong to.
"""

import pytest
import torch

from vllm_omni.model_executor.layers.kv_cache.window import KVWindow
from vllm_omni.model_executor.models.causal_wan.cache import ChunkCache
from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan

STEPS = 4


def make_window(window: int, sink: int, spare: int = 0) -> KVWindow:
    return KVWindow(
        num_layers=1,
        window_frames=window,
        sink_frames=sink,
        spare_frames=spare,
        tokens_per_frame=1,
        num_heads=1,
        head_dim=1,
        dtype=torch.float32,
        device="cpu",
    )


def write(cache: ChunkCache, step: int, frames: range) -> None:
    """Write the value f + s / 10 for every frame f at step s. The clean-context pass is step
    `STEPS`.
    """
    values = torch.tensor([[[frame + step / 10]] for frame in frames])
    cache.at(step).write(0, frames, values, -values)


def seen(cache: ChunkCache, step: int, frames: range) -> list[float]:
    keys, values = cache.at(step).visible(0, frames)
    assert torch.equal(keys, -values)
    return sorted(round(value, 1) for value in keys.flatten().tolist())


def run(cache: ChunkCache, plan: ChunkPlan, chunks: int, steps: int) -> list[list[list[float]]]:
    shown = []
    for chunk in range(chunks):
        frames = plan.frames(chunk)
        cache.check_frames(frames)
        shown.append([])
        for step in range(steps):
            write(cache, step, frames)
            shown[-1].append(seen(cache, step, frames))
        cache.commit(frames.stop)
    return shown


def visible_frames(plan: ChunkPlan, frames: range) -> list[int]:
    ring = range(
        max(plan.sink_frames, frames.stop - (plan.window_frames - plan.sink_frames)), frames.stop
    )
    return sorted({*range(min(plan.sink_frames, frames.stop)), *ring})


PLANS = [
    ChunkPlan(3, 3, 9, 3),
    ChunkPlan(2, 1, 6, 3),
    ChunkPlan(1, 1, 4, 0),
    ChunkPlan(3, 3, 7, 2),
    ChunkPlan(3, 3, 30, 30),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_the_strict_cache_shows_clean_chunks(plan: ChunkPlan) -> None:
    shown = run(
        ChunkCache.strict(make_window(plan.window_frames, plan.sink_frames)), plan, 8, STEPS + 1
    )
    for chunk, steps in enumerate(shown):
        frames = plan.frames(chunk)
        for step, values in enumerate(steps):
            expected = [
                f + (step if f in frames else STEPS) / 10 for f in visible_frames(plan, frames)
            ]
            assert values == pytest.approx(expected)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_the_noise_matched_cache_shows_each_step_its_own_noise_level(plan: ChunkPlan) -> None:
    """Every step sees the first chunk at the last step's noise level, and all other chunks at its
    own noise level.
    """
    windows = [make_window(plan.window_frames, plan.sink_frames) for _ in range(STEPS)]
    shown = run(ChunkCache.noise_matched(windows), plan, 8, STEPS)
    for chunk, steps in enumerate(shown):
        frames, first = plan.frames(chunk), plan.frames(0)
        for step, values in enumerate(steps):
            expected = [
                f + (STEPS - 1 if chunk and f in first else step) / 10
                for f in visible_frames(plan, frames)
            ]
            assert values == pytest.approx(expected)


def test_a_capture_finds_positions_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring buffer with spare frames caches token positions on the device, because a CUDA graph
    capture cannot copy them from the host.
    """
    (expected, window), frames = (make_window(4, 1, spare=2) for _ in range(2)), range(6, 8)
    for each in (expected, window):
        each.write(0, frames, torch.ones(2, 1, 1), torch.ones(2, 1, 1))
    assert window.graph_key(frames) != window.graph_key(range(8, 10)), "other slots"
    assert window.graph_key(frames) != window.graph_key(range(16, 18)), (
        "the same slots in another order"
    )
    monkeypatch.setattr(
        window,
        "token_positions",
        lambda slots: pytest.fail("token positions must be cached when the key is computed"),
    )
    assert torch.equal(window.visible(0, frames)[0], expected.visible(0, frames)[0])
    assert window.graph_key(frames) == window.graph_key(range(36, 38)), (
        "the same slots and order, some rounds later"
    )
