# SPDX-License-Identifier: Apache-2.0
"""Functions that run clips through the streaming VAE in parts, as a session's chunks do, and
functions that build VAEs with random weights.
"""

from dataclasses import replace
from typing import Any

import torch

from vllm_omni.model_executor.models.wan.architecture import WAN_2_2_VAE
from vllm_omni.model_executor.models.wan.vae.fused_decoder import FusedDecoder
from vllm_omni.model_executor.models.wan.vae.fused_encoder import FusedEncoder
from vllm_omni.model_executor.models.wan.vae.fused_layers import FusedPasses
from vllm_omni.model_executor.models.wan.vae.split_decode import RowBands
from vllm_omni.model_executor.models.wan.vae.stacked_frames import add_up, stack_frames
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE, VAECache, VAEConfig


def encode_stream(
    vae: StreamingWanVAE, pixels: torch.Tensor, cuts: list[int]
) -> tuple[torch.Tensor, VAECache]:
    """Return all latents and the final cache.

    Args:
        cuts: Number of pixel frames in each part.
    """
    latents, cache = [], None
    for part in pixels.split(cuts, dim=2):
        latent, cache = vae.encode(part, cache)
        latents.append(latent)
    assert cache is not None
    return torch.cat(latents, dim=2), cache


def decode_stream(
    vae: StreamingWanVAE, latents: torch.Tensor, cuts: list[int]
) -> tuple[torch.Tensor, VAECache]:
    """Return all pixels and the final cache.

    Args:
        cuts: Number of latent frames in each part.
    """
    pixels, cache = [], None
    for part in latents.split(cuts, dim=2):
        frames, cache = vae.decode(part, cache)
        pixels.append(frames)
    assert cache is not None
    return torch.cat(pixels, dim=2), cache


def assert_caches_close(cache: VAECache, expected: VAECache) -> None:
    """Assert that two fp32 caches are equal within the error that a different order of summation
    causes.
    """
    for feature, wanted in zip(cache.features, expected.features, strict=True):
        torch.testing.assert_close(feature, wanted, atol=1e-4, rtol=1e-4)


RELEASES = {
    "2.1": VAEConfig(),
    "2.2": replace(
        WAN_2_2_VAE,
        z_dim=VAEConfig.z_dim,
        latents_mean=VAEConfig.latents_mean,
        latents_std=VAEConfig.latents_std,
    ),
}
"""VAE configs of Wan 2.1 and Wan 2.2, both with Wan 2.1's latent channels."""


def random_vae(
    seed: int = 0, base_dim: int = 4, release: str = "2.1", **options: Any
) -> StreamingWanVAE:
    """Return a VAE with random weights that produce frames with contrast. By default, it has no
    encoder. `options` override this default.
    """
    config = replace(RELEASES[release], base_dim=base_dim, decoder_base_dim=None)
    vae = StreamingWanVAE(config, **{"encoder": False, **options})
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in vae.named_parameters():
        scale = 0.6 / parameter[0].numel() ** 0.5 if parameter.dim() > 1 else 0.6
        noise = torch.randn(parameter.shape, generator=generator, device="cpu")
        parameter.data.copy_(noise * scale + ("gamma" in name))
    return vae


def plainly_fused(decoder: Any, bands: RowBands | None) -> FusedDecoder:
    """Return a fused decoder whose passes run in plain torch."""
    return FusedDecoder(decoder, bands, FusedPasses(stack_frames, add_up))


def plainly_fused_encoder(encoder: Any) -> FusedEncoder:
    """Return a fused encoder whose passes run in plain torch."""
    return FusedEncoder(encoder, FusedPasses(stack_frames, add_up))
