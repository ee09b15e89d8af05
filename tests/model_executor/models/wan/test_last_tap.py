# SPDX-License-Identifier: Apache-2.0
"""A single frame through an autoencoder's convolutions: the last tap alone gives what all three
give.
"""

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d
from torch import nn
from torch.nn import functional

from vllm_omni.model_executor.models.lance.network.vae import LanceVAEConfig, LanceWanVAE
from vllm_omni.model_executor.models.wan.last_tap import LastTapConv3d, use_last_taps

CONVOLUTIONS = {
    "three taps": {"kernel_size": 3, "padding": 1},
    "one tap": {"kernel_size": 1},
    "taps over time alone": {"kernel_size": (3, 1, 1), "padding": (1, 0, 0)},
    "columns": {"kernel_size": (3, 1, 3), "padding": (1, 0, 1)},
    "every second frame": {"kernel_size": (3, 1, 1), "stride": (2, 1, 1)},
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@pytest.mark.parametrize(("frames", "remembered"), [(1, 0), (1, 2), (4, 0)])
def test_a_convolution_is_diffusers_own(kind: str, frames: int, remembered: int) -> None:
    """Of a first frame, of a later one behind what was kept of two, and of a clip."""
    torch.manual_seed(0)
    whole = WanCausalConv3d(4, 6, **CONVOLUTIONS[kind])
    past = torch.randn(2, 4, remembered, 5, 7) if remembered else None
    x = torch.randn(2, 4, frames if kind != "every second frame" else 3, 5, 7)
    torch.testing.assert_close(LastTapConv3d(whole)(x, past), whole(x, past))


def test_a_first_frame_costs_one_product_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    network = nn.Sequential(WanCausalConv3d(4, 6, 3, padding=1))
    use_last_taps(network)
    seen = []
    convolve = functional.conv2d
    monkeypatch.setattr(
        functional,
        "conv2d",
        lambda x, weight, *rest: seen.append(weight) or convolve(x, weight, *rest),
    )
    network(torch.randn(1, 4, 1, 5, 7))
    assert [tuple(weight.shape) for weight in seen] == [(6, 4, 3, 3)]


def small_vae() -> LanceWanVAE:
    torch.manual_seed(1)
    return LanceWanVAE(LanceVAEConfig(base_dim=8, decoder_base_dim=8))


@torch.no_grad()
def test_a_image_is_the_first_frame_of_its_clip() -> None:
    vae = small_vae()
    latents = torch.randn(1, 48, 2, 3, 4)
    torch.testing.assert_close(
        vae.decode_video(latents[:, :, :1]), vae.decode_video(latents)[:, :, :1]
    )


@torch.no_grad()
def test_a_image_is_what_diffusers_decodes() -> None:
    """By its own method, which keeps every layer's input for a next frame."""
    vae = small_vae()
    latents = torch.randn(1, 48, 1, 3, 4)
    raw = latents * vae.latents_std + vae.latents_mean
    torch.testing.assert_close(vae.decode_video(latents), vae.vae.decode(raw, return_dict=False)[0])
