# SPDX-License-Identifier: Apache-2.0
"""A tiny decoder of Wan 2.1 latents (TAEHV layout, `taew2_1.pth`) as a stream: about 25 times cheaper, not exact.

The network is a chain of 2-D convolutions over frames; only its memory blocks look back, each at the frame before it at
its own rate. So a stream needs one activation for each of them, and a stream cut anywhere equals one call over the
whole clip. Every latent frame becomes 4 video frames, of which a stream's first latent keeps only the last.

Layout of the weights: madebyollin/taehv, class TAEHV with decoder upscaling (no, yes, yes) in time; its encoder is not
used. Held by tests/model_executor/models/wan/test_tiny_vae.py.
"""

# C channels, T frames, h, w latent cells, H, W pixels

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from vllm_omni.model_executor.models.wan.checkpoint import TINY_VAE_FILE, WanComponents
from vllm_omni.model_executor.models.wan.vae import CacheLayout, VAECache
from vllm_omni.model_executor.tensor_files import open_tensors
from vllm_omni.model_executor.weights import load_strict, shapes_of

CHANNELS = (256, 128, 64, 64)
"""Released widths, a level each and the last."""
_FRAMES = (1, 2, 2)
"""How many frames each level makes of one."""
_MEMORIES = 3
"""Memory blocks at each level."""
_LATENT_CHANNELS = 16
REACH = math.ceil(sum(_MEMORIES / math.prod(_FRAMES[:level]) for level in range(len(_FRAMES))))
"""How many latents before a chunk its frames depend on: behind so many, a stream may begin anywhere."""


class MemoryBlock(nn.Module):
    """A residual block over each frame and the frame before it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(2 * channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x_TCHW: torch.Tensor, before_1CHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (result, the next call's `before_1CHW`)."""
        past_TCHW = torch.cat((before_1CHW, x_TCHW[:-1]))
        out_TCHW = functional.relu(self.conv(torch.cat((x_TCHW, past_TCHW), dim=1)) + x_TCHW)
        return out_TCHW, x_TCHW[-1:].clone()


class GrowTime(nn.Module):
    """One frame becomes `factor` frames, from as many groups of channels."""

    def __init__(self, channels: int, factor: int) -> None:
        super().__init__()
        self.channels = channels
        self.conv = nn.Conv2d(channels, channels * factor, 1, bias=False)

    def forward(self, x_TCHW: torch.Tensor) -> torch.Tensor:
        return self.conv(x_TCHW).unflatten(1, (-1, self.channels)).flatten(0, 1)


class SoftClamp(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x / 3) * 3


class TinyVAEDecoder(nn.Module):
    """The decoder with an explicit cache; parameter names are TAEHV's. dtype: of weights, activations and cache."""

    def __init__(self, channels: Sequence[int] = CHANNELS, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.channels = tuple(channels)
        layers: list[nn.Module] = [SoftClamp(), nn.Conv2d(_LATENT_CHANNELS, channels[0], 3, padding=1), nn.ReLU()]
        for level, frames in enumerate(_FRAMES):
            here, below = channels[level], channels[level + 1]
            layers += [MemoryBlock(here) for _ in range(_MEMORIES)]
            layers += [nn.Upsample(scale_factor=2), GrowTime(here, frames)]
            layers += [nn.Conv2d(here, below, 3, padding=1, bias=False)]
        layers += [nn.ReLU(), nn.Conv2d(channels[-1], 3, 3, padding=1)]
        self.decoder = nn.Sequential(*layers).to(dtype)
        self.dtype = dtype
        self.requires_grad_(False)
        for weight in self.parameters():
            if weight.device.type == "cpu" and weight.dim() == 4:  # the layout its kernels are fastest in
                weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        self.eval()

    @torch.no_grad()
    def decode(self, latents_1CTHW: torch.Tensor, cache: VAECache | None) -> tuple[torch.Tensor, VAECache]:
        """Decode the next latents of a stream; `cache` None starts one.

        latents_1CTHW: [1, 16, n, h, w], normalised, any float dtype. Returns pixels [1, 3, T, 8h, 8w] in [-1, 1], T =
        4n (4n - 3 at a start), and the next cache.
        """
        x = latents_1CTHW[0].transpose(0, 1).to(self.dtype)
        before = [x.new_zeros(shape) for shape in self._cache_shapes(*x.shape[2:])] if cache is None else cache.features
        past = iter(before)
        kept = []
        for layer in self.decoder:
            if isinstance(layer, MemoryBlock):
                x, last = layer(x, next(past))
                kept.append(last)
            else:
                x = layer(x)
        if cache is None:
            x = x[3:]  # the first latent frame has no past
        pixels_1CTHW = (x * 2 - 1).clamp_(-1.0, 1.0).transpose(0, 1).unsqueeze(0)
        return pixels_1CTHW, VAECache(tuple(kept))

    def decoder_cache_layout(self, height: int, width: int) -> CacheLayout:
        """Layout of the cache of a stream of `height` x `width` pixels."""
        return CacheLayout(tuple(self._cache_shapes(height // 8, width // 8)), self.dtype)

    def decoder_cache_nbytes(self, height: int, width: int) -> int:
        return self.decoder_cache_layout(height, width).nbytes

    def _cache_shapes(self, latent_height: int, latent_width: int) -> list[tuple[int, int, int, int]]:
        """One frame before each memory block: [1, C, height, width] at the block's level."""
        return [
            (1, self.channels[level], latent_height * 2**level, latent_width * 2**level)
            for level in range(len(_FRAMES))
            for _ in range(_MEMORIES)
        ]


def tiny_vae_channels(path: Path | None) -> tuple[int, ...]:
    """Return the widths of a TAEHV file; without a file, the released ones. Raises ValueError if it is none."""
    if path is None:
        return CHANNELS
    shapes = open_tensors(path).shapes
    names = ["decoder.1.weight", "decoder.8.weight", "decoder.14.weight", "decoder.20.weight"]
    if any(name not in shapes for name in names):
        raise ValueError(f"{path} is no TAEHV file: it lacks {', '.join(name for name in names if name not in shapes)}")
    return tuple(shapes[name][0] for name in names)


def load_tiny_vae(decoder: TinyVAEDecoder, path: Path) -> None:
    """Load the decoder's half of a TAEHV file, strictly. Raises ValueError."""
    source = open_tensors(path)
    encoder = [name for name in source.shapes if name.startswith("encoder.")]
    load_strict(decoder, source, shapes_of(decoder), what="tiny VAE", ignored=encoder)


def load_wanted(decoder: TinyVAEDecoder | None, layout: WanComponents, wanted_by: str | None) -> None:
    """Fill this rank's tiny decoder from the checkpoint's directory, if it has one.

    wanted_by: who needs it, as a user would name it; then a file that is not there is refused on every rank, also on
    those that do not decode. Raises ValueError.
    """
    if wanted_by is not None and layout.tiny_vae is None:
        raise ValueError(f"{layout.root} lacks {TINY_VAE_FILE}, which {wanted_by} needs (madebyollin/taehv)")
    if decoder is not None and layout.tiny_vae is not None:
        load_tiny_vae(decoder, layout.tiny_vae)
