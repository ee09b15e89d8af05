# SPDX-License-Identifier: Apache-2.0
"""Tests of LingBot World with the tiny decoder: frames and invalid options."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from lingbot_world_driver import HEIGHT, WIDTH, load_world, open_session, run_chunk

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.models.lingbot_world.checkpoint import find_layout, hf_config
from vllm_omni.model_executor.models.lingbot_world.config import LingBotOptions
from vllm_omni.model_executor.models.lingbot_world.family import FAMILY
from vllm_omni.model_executor.models.lingbot_world.pipeline import LingBotWorld, WorldSetup
from vllm_omni.model_executor.models.wan.vae.tiny_vae import (
    TinyVAEDecoder,
    load_tiny_vae,
    tiny_vae_channels,
)
from vllm_omni.model_executor.models.wan.vae.vae import to_uint8

SMALL: dict[str, Any] = {"window_frames": 7, "sink_frames": 2}


@pytest.mark.parametrize("chunk", [3, 1])
def test_frames_are_the_sessions_latents_decoded_as_one_clip(
    lingbot_world: Path, chunk: int
) -> None:
    """A session's frames equal its latents decoded as one clip, so chunk boundaries are invisible.
    The weights are in the checkpoint's directory, and the exact decoder is not loaded.
    """
    world = load_world(lingbot_world, decoder="tiny", latent_frames_per_chunk=chunk, **SMALL)
    assert world.vae.has_encoder and not world.vae.has_decoder
    frames, latents = open_session(world, "rgb"), open_session(world, "latents", output="latents")
    keys: list[list[str]] = [["w"]] * chunk
    made = [
        run_chunk(world, frames, prompt="a beach", seed=5, actions=keys)[1]["frames"]
        for _ in range(4)
    ]
    clip = [
        run_chunk(world, latents, prompt="a beach", seed=5, actions=keys, output="latents")[1][
            "latents"
        ]
        for _ in range(4)
    ]
    path = find_layout(lingbot_world).tiny_vae
    assert path is not None
    decoder = TinyVAEDecoder(tiny_vae_channels(path))
    load_tiny_vae(decoder, path)
    pixels, _ = decoder.decode(torch.cat(clip, dim=1)[None], None)
    # Decoding in chunks changes the order of summation.
    assert (torch.cat(made).int() - to_uint8(pixels).int()).abs().max() <= 1


def test_missing_weights_are_refused_at_start(lingbot_world: Path) -> None:
    """If the tiny decoder's weights are missing, every rank refuses to start, including ranks that
    do not decode.
    """
    layout = dataclasses.replace(find_layout(lingbot_world), tiny_vae=None)
    for parallel in (ParallelContext(), ParallelContext(vae_stage=True)):
        omni = OmniConfig(height=HEIGHT, width=WIDTH, model={"decoder": "tiny"})
        setup = WorldSetup.of_checkpoint(
            hf_config(lingbot_world)["lingbot_world"], layout, omni, torch.float32, parallel
        )
        with pytest.raises(
            ValueError, match=r"lacks taew2_1.pth, which omni.model.decoder 'tiny' needs"
        ):
            LingBotWorld(setup).load_checkpoint(layout)


def test_unsupported_combinations_are_refused(lingbot_world: Path) -> None:
    with pytest.raises(ValueError, match="convention 'pr3701' restarts decoder 'wan'"):
        LingBotOptions.parse({"decoder": "tiny", "convention": "pr3701"})
    omni = OmniConfig(height=HEIGHT, width=WIDTH, model={"decoder": "tiny"}, vae_parallel=True)
    with pytest.raises(ValueError, match="decoder 'tiny' is too small to gain"):
        FAMILY.check_refusals(hf_config(lingbot_world), omni, 1)
