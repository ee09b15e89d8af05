# SPDX-License-Identifier: Apache-2.0
"""A clip through the streaming VAE in pieces, as a session's chunks come."""

import torch

from vllm_omni.model_executor.models.wan.vae import StreamingWanVAE, VAECache


def encode_stream(vae: StreamingWanVAE, pixels: torch.Tensor, cuts: list[int]) -> tuple[torch.Tensor, VAECache]:
    """Return all latents and what the stream remembers after them. cuts: pixel frames of each piece."""
    latents, cache = [], None
    for piece in pixels.split(cuts, dim=2):
        latent, cache = vae.encode(piece, cache)
        latents.append(latent)
    assert cache is not None
    return torch.cat(latents, dim=2), cache


def decode_stream(vae: StreamingWanVAE, latents: torch.Tensor, cuts: list[int]) -> tuple[torch.Tensor, VAECache]:
    """Return all pixels and what the stream remembers after them. cuts: latent frames of each piece."""
    pixels, cache = [], None
    for piece in latents.split(cuts, dim=2):
        frames, cache = vae.decode(piece, cache)
        pixels.append(frames)
    assert cache is not None
    return torch.cat(pixels, dim=2), cache
