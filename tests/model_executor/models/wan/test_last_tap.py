# SPDX-License-Identifier: Apache-2.0
"""A single frame needs only the last temporal tap of a causal convolution."""

from dataclasses import replace

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d

from vllm_omni.model_executor.models.lance.network.vae import LanceWanVAE
from vllm_omni.model_executor.models.wan.architecture import WAN_2_2_VAE
from vllm_omni.model_executor.models.wan.last_tap import LastTapConv3d

CONVOLUTIONS = {
    "three taps": {"kernel_size": 3, "padding": 1},
    "one tap": {"kernel_size": 1},
    "taps over time alone": {"kernel_size": (3, 1, 1), "padding": (1, 0, 0)},
    "columns": {"kernel_size": (3, 1, 3), "padding": (1, 0, 1)},
    "every second frame": {"kernel_size": (3, 1, 1), "stride": (2, 1, 1)},
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize(("frames", "remembered"), [(1, 0), (1, 2), (4, 0)])
def test_a_convolution_equals_diffusers(kind: str, frames: int, remembered: int) -> None:
    """For a first frame, a later frame after two cached ones, and a clip."""
    torch.manual_seed(0)
    whole = WanCausalConv3d(4, 6, **CONVOLUTIONS[kind])
    past = torch.randn(2, 4, remembered, 5, 7) if remembered else None
    x = torch.randn(2, 4, frames if kind != "every second frame" else 3, 5, 7)
    torch.testing.assert_close(LastTapConv3d(whole)(x, past), whole(x, past))


def small_vae() -> LanceWanVAE:
    torch.manual_seed(1)
    return LanceWanVAE(replace(WAN_2_2_VAE, base_dim=8, decoder_base_dim=None))


@torch.no_grad()
def test_an_image_equals_the_first_frame_of_its_clip() -> None:
    vae = small_vae()
    latents = torch.randn(1, 48, 2, 3, 4)
    torch.testing.assert_close(
        vae.decode_video(latents[:, :, :1]), vae.decode_video(latents)[:, :, :1]
    )


@torch.no_grad()
def test_an_image_equals_diffusers_decode() -> None:
    """diffusers caches every layer's input for a next frame."""
    vae = small_vae()
    latents = torch.randn(1, 48, 1, 3, 4)
    raw = latents * vae.latents_std + vae.latents_mean
    torch.testing.assert_close(vae.decode_video(latents), vae.vae.decode(raw, return_dict=False)[0])
