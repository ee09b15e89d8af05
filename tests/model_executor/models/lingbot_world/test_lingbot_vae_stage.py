# SPDX-License-Identifier: Apache-2.0
"""LingBot World produces the same frames whether decoding runs on a separate pipeline stage or
everything runs on one rank.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.chunks import run_vae_stage
from lingbot_world_driver import HEIGHT, WIDTH, load_world, make_request, open_session, run_chunk

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import SupportsVAEStage
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext

SMALL: dict[str, Any] = {"window_frames": 7, "sink_frames": 2}
RESTART: dict[str, Any] = {**SMALL, "convention": "pr3701"}
TINY: dict[str, Any] = {**SMALL, "decoder": "tiny"}
PROMPTS = ("a beach", None, "a town at night", None)


@pytest.mark.parametrize("options", [SMALL, RESTART, TINY], ids=["cache", "restart", "tiny"])
def test_frames_equal_those_of_one_rank(lingbot_world: Path, options: dict[str, Any]) -> None:
    """The frames are the same as with one rank, even after a prompt switch. The stage with the
    transformer layers has no decoder.
    """
    one = load_world(lingbot_world, **options)
    layers = load_world(lingbot_world, ParallelContext(vae_stage=True), **options)
    vae = load_world(lingbot_world, ParallelContext(stage=1, vae_stage=True), **options)
    assert isinstance(vae, SupportsVAEStage) and layers.decoder is None
    sessions = [open_session(world) for world in (one, layers, vae)]
    params = DiffusionParams(session_id="a", prompt="a beach")
    assert vae.decoder is not None
    assert vae.session_nbytes(params) == vae.decoder.state_nbytes(HEIGHT, WIDTH) > 0
    assert layers.session_nbytes(params) + vae.session_nbytes(params) == one.session_nbytes(params)
    for prompt in PROMPTS:
        _, expected = run_chunk(one, sessions[0], prompt=prompt)
        ours, theirs = (
            make_request(world, session, prompt=prompt)
            for world, session in zip((layers, vae), sessions[1:], strict=True)
        )
        meta, frames = run_vae_stage(layers, vae, ours, theirs)
        assert torch.equal(frames["frames"], expected["frames"]) and meta["num_frames"] == len(
            frames["frames"]
        )
    assert [session.chunk_index for session in sessions] == [len(PROMPTS)] * 3
    copy = sessions[2].fork("b")
    assert copy.scalars() == sessions[2].scalars()
