# SPDX-License-Identifier: Apache-2.0
"""Contexts that contain only text are padded, and all of them are written in one forward pass."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.chunks import step
from lance_driver import load_lance, make_request, prepare, request_of

from vllm_omni.model_executor.models.lance.network.pack import BranchCache, PackBuilder
from vllm_omni.model_executor.models.lance.pipeline import Lance
from vllm_omni.model_executor.models.lance.tasks.context import VisualContents

CAT: dict[str, Any] = {"prompt": "a cat", "height": 64, "width": 96, "num_inference_steps": 2}


@pytest.fixture(scope="module")
def lance(checkpoint: Path) -> Lance:
    return load_lance(checkpoint)


@torch.no_grad()
def test_a_padded_context_equals_its_segments(lance: Lance) -> None:
    """The keys and values of a context's tokens do not depend on the padding."""
    request = make_request(CAT)
    prepare(lance, request)
    generation = request.work.generation
    assert generation is not None
    writer, decoder = lance.stepper.writer, lance.network.language_model
    caches: list[BranchCache] = []
    for padded in (False, True):
        cache, builder = decoder.new_cache(generation.cond[0].capacity, 5), PackBuilder()
        if padded:
            writer.add_text_context(builder, cache, generation.plan.cond)
        else:
            writer.append_segments(builder, cache, generation.plan.cond, VisualContents())
        decoder(builder.build())
        caches.append(cache)
    plain, padded_cache = caches
    assert 0 < plain.length == padded_cache.length < padded_cache.capacity
    written = slice(plain.block, plain.end)
    for name in ("k", "v"):
        found, wanted = getattr(padded_cache, name)[:, written], getattr(plain, name)[:, written]
        assert wanted.abs().sum() > 0
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("task", "passes"), [("t2i", 1), ("image_edit", 2)])
def test_forward_passes_of_the_first_step(
    lance: Lance, monkeypatch: pytest.MonkeyPatch, task: str, passes: int
) -> None:
    """The first step writes all contexts in one forward pass, unless they share a reference, which
    is computed only once.
    """
    request = request_of(task, num_inference_steps=2)
    prepare(lance, request)
    packs, forward = [], lance.network.language_model.hidden_states
    monkeypatch.setattr(
        lance.network.language_model,
        "hidden_states",
        lambda pack, *rest: packs.append(pack) or forward(pack, *rest),
    )
    step(lance, [request])
    assert len(packs) == passes
    generation = request.work.generation
    assert generation is not None and generation.uncond
    for cache, context in (
        (generation.cond[0], generation.plan.cond),
        (generation.uncond[0], generation.plan.uncond),
    ):
        assert cache.length == sum(placed.segment.length for placed in context)
