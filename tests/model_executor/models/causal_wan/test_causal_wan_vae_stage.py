# SPDX-License-Identifier: Apache-2.0
"""A stream decoded on a separate pipeline stage produces the same frames as one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from causal_wan_driver import (
    HEIGHT,
    WIDTH,
    input_video,
    load_model,
    make_request,
    open_session,
    run_chunk,
)
from helpers.chunks import run_vae_stage

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import SupportsVAEStage
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext

WINDOW = {"window_frames": 7, "sink_frames": 2}
PROMPTS = ("a beach", None, "a town at night", None)


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("text", {}),
        ("text", {"cache": "noise_matched"}),
        ("video", {}),
        ("text", {"prompt_switch": "recompute"}),
    ],
    ids=["strict", "noise-matched", "video", "recomputed"],
)
def test_frames_equal_those_of_one_rank(
    causal_wan: Path, source: str, options: dict[str, Any]
) -> None:
    """A separate VAE stage produces the same frames as one rank. The test cases include a prompt
    switch, runs with and without a clean-context pass, and input video, which only the rank with
    transformer layers encodes.
    """
    one = load_model(causal_wan, **WINDOW, **options)
    layers = load_model(causal_wan, ParallelContext(vae_stage=True), **WINDOW, **options)
    vae = load_model(causal_wan, ParallelContext(stage=1, vae_stage=True), **WINDOW, **options)
    assert isinstance(vae, SupportsVAEStage) and not vae.vae.has_encoder and layers.decoder is None
    fields = {"options": {"source": source}}
    params = DiffusionParams(session_id="a", prompt="a beach", options=fields["options"])
    assert vae.session_nbytes(params) == vae.vae.decoder_cache_nbytes(HEIGHT, WIDTH) > 0
    assert layers.session_nbytes(params) + vae.session_nbytes(params) == one.session_nbytes(params)
    sessions = [open_session(model, **fields) for model in (one, layers, vae)]
    for index, prompt in enumerate(PROMPTS):
        tensors = {"video": input_video(one.plan.pixel_frames(index))} if source == "video" else {}
        expected_meta, expected = run_chunk(one, sessions[0], tensors, prompt=prompt, **fields)
        ours, theirs = (
            make_request(session, tensors, prompt=prompt, **fields) for session in sessions[1:]
        )
        meta, frames = run_vae_stage(layers, vae, ours, theirs)
        assert torch.equal(frames["frames"], expected["frames"]) and meta == expected_meta
    assert [session.chunk_index for session in sessions] == [len(PROMPTS)] * 3
    copy = sessions[2].fork("b")
    assert copy.scalars() == sessions[2].scalars()
