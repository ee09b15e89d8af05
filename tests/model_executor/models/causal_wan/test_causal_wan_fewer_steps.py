# SPDX-License-Identifier: Apache-2.0
"""Tests of chunks with fewer denoise steps (`omni.degradations`): their latents, and which models
support or refuse such chunks.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from causal_wan_driver import (
    check_refusals,
    input_video,
    load_model,
    make_request,
    open_session,
)
from helpers.chunks import run_request

from vllm_omni.model_executor.models.causal_wan.pipeline import CausalWan


def chunks(
    model: CausalWan, degradations: tuple[str, ...], source: str
) -> tuple[list[torch.Tensor], list[int]]:
    """Return the latents of two chunks, and the number of forward passes for each."""
    options = {"source": source}
    session = open_session(model, output="latents", options=options)
    latents, forwards = [], []
    for frames in (range(9), range(9, 21)):
        tensors = {"video": input_video(frames)} if source == "video" else None
        request = make_request(
            session, tensors, prompt="a beach", output="latents", options=options
        )
        request.degradations = degradations
        latents.append(run_request(model, request)[1]["latents"])
        forwards.append(request.num_steps)
    return latents, forwards


@pytest.mark.parametrize("source", ["text", "video"])
def test_fewer_steps_equal_a_model_of_every_second_step(causal_wan: Path, source: str) -> None:
    """A chunk with fewer steps is bit-identical to a chunk from a model that has only two of the
    four denoise steps. Both run the clean-context pass.
    """
    full = load_model(causal_wan)
    half = load_model(
        causal_wan, denoising_steps=[1000.0, 500.0], video_denoising_steps=[700.0, 400.0]
    )
    found, forwards = chunks(full, ("fewer_steps",), source)
    expected, same = chunks(half, (), source)
    assert forwards == same == [3, 3] and chunks(full, (), source)[1] == [5, 5]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("fewer_steps", {"cache": "noise_matched"}, "a window for every step"),
        ("fewer_steps", {"denoising_steps": [1000.0]}, "1 of at most 2 denoise steps"),
        ("tiny_vae", {"decoder": "tiny"}, "decodes all chunks"),
    ],
)
def test_an_unsupported_degradation_is_refused_with_the_reason(
    causal_wan: Path, name: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=rf"'{name}': Causal Wan 2.1 does not support.*{reason}"):
        check_refusals(causal_wan, 1, model=options, scheduling="deadline", degradations=(name,))
