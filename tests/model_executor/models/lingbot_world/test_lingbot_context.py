# SPDX-License-Identifier: Apache-2.0
"""Later chunks attend to keys and values written by either the clean-context pass or the last
denoise step.
"""

from pathlib import Path

import torch
from helpers.chunks import finish, step
from lingbot_world_driver import load_world, make_request, open_session

from vllm_omni.model_executor.interfaces import DiffusionRequest
from vllm_omni.model_executor.layers.kv_cache.window import KVWindow
from vllm_omni.model_executor.models.lingbot_world.pipeline import LingBotWorld

CHUNK_FRAMES = SINK_FRAMES = 3


def _window_of(request: DiffusionRequest) -> torch.Tensor:
    assert isinstance(request.work.window, KVWindow)
    return request.work.window.buffer.clone()


def _run_chunks(world: LingBotWorld, chunks: int) -> list[tuple[list[torch.Tensor], torch.Tensor]]:
    """For each chunk, return the latents and the K/V window after each pass."""
    session, results = open_session(world, output="latents"), []
    for _ in range(chunks):
        request, windows = make_request(world, session, prompt="a beach", output="latents"), []
        world.prepare_encode(request)
        while request.step < request.num_steps:
            step(world, [request])
            windows.append(_window_of(request))
        results.append((windows, finish(world, request)[1]["latents"]))
    return results


def test_later_chunks_attend_to_the_last_step(lingbot_world: Path) -> None:
    """With `last_step`, the clean-context pass is skipped from the second chunk on. The first chunk
    keeps its clean-context pass, because it contains the sinks.
    """
    options = {"window_frames": 9, "sink_frames": SINK_FRAMES}
    clean = _run_chunks(load_world(lingbot_world, **options), 3)
    saved = _run_chunks(load_world(lingbot_world, context_kv="last_step", **options), 3)
    assert [len(windows) for windows, _ in clean] == [5, 5, 5]
    assert [len(windows) for windows, _ in saved] == [5, 4, 4]
    for chunk in (0, 1):  # chunks 0 and 1 attend only to the clean first chunk
        assert torch.equal(clean[chunk][1], saved[chunk][1])
    assert torch.equal(clean[1][0][3], saved[1][0][-1]), "the K/V before the clean pass remain"
    assert not torch.equal(clean[1][0][4], saved[1][0][-1])
    assert not torch.equal(clean[2][1], saved[2][1])


def test_a_chunk_of_one_step_has_the_clean_pass(lingbot_world: Path) -> None:
    """A one-step chunk keeps its clean-context pass, because its only step sees nothing but noise.
    This applies both if all chunks have one step (the `realtime` preset of a world model trained
    for one step) and if only this chunk was reduced to one step.
    """
    world = load_world(lingbot_world, context_kv="last_step", sink_frames=0)
    request = make_request(world, open_session(world), prompt="a beach")
    world.prepare_encode(request)
    request.work.frames = range(CHUNK_FRAMES, 2 * CHUNK_FRAMES)
    assert world.clean_passes(request.work, world.plan) == 0
    request.work.schedule = load_world(lingbot_world, denoise_indices=[0]).schedule
    assert world.clean_passes(request.work, world.plan) == 1
