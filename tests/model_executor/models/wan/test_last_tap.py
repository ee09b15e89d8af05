# SPDX-License-Identifier: Apache-2.0
"""Causal convolutions that use only their last temporal tap for a single frame produce the same
results as diffusers' convolutions.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
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
    """The convolution equals diffusers' convolution for a first frame, for a later frame after two
    cached frames, and for a clip.
    """
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


@pytest.mark.parametrize("frames", [1, 3])
@torch.no_grad()
def test_images_and_clips_equal_diffusers_autoencoder(frames: int) -> None:
    """Encoding and decoding two images or clips in one call produces the same results as diffusers'
    autoencoder.
    """
    vae = small_vae()
    diffusers: Any = AutoencoderKLWan(**vae.config.to_dict())
    diffusers.load_state_dict(vae.vae.state_dict())
    diffusers.eval()
    latents = torch.randn(2, 48, frames, 3, 4)
    raw = latents * vae.vae.latents_std + vae.vae.latents_mean
    pixels = vae.decode_video(latents)
    torch.testing.assert_close(
        pixels, diffusers.decode(raw, return_dict=False)[0], atol=1e-5, rtol=0
    )
    posterior = diffusers.encode(pixels).latent_dist
    mean, log_var = vae.posterior(pixels)
    expected = (posterior.mean - vae.vae.latents_mean) / vae.vae.latents_std
    torch.testing.assert_close(mean, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(log_var, posterior.logvar, atol=1e-5, rtol=0)
