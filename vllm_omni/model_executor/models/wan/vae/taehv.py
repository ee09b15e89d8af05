# SPDX-License-Identifier: Apache-2.0
"""TAEHV, a tiny streaming autoencoder: the complete network and its layers.

The network is a sequence of 2-D convolutions over frames. Only its memory blocks depend on the
past. Each memory block reads the previous frame at the block's own frame rate, so a stream caches
one activation per memory block. Processing a stream in parts produces the same result as processing
the whole clip in one call. Wan's tiny decoder (`tiny_vae.py`) and Waypoint 1.5 use this network.

The weights have the layout of the TAEHV class in madebyollin/taehv. The second and third decoder
levels upscale in time, but the first does not.
"""

# C channels, T frames, H, W pixels

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from vllm_omni.model_executor.checkpoint.tensor_files import open_tensors
from vllm_omni.model_executor.layers.attention.attention import in_words
from vllm_omni.model_executor.models.wan.vae.vae import VAECache, lay_channels_last

FRAMES_PER_LATENT: Final = 4
_SHRINK, _GROW = (2, 2, 1), (1, 2, 2)
"""Number of consecutive frames that each encoder level joins, and number of frames that each
decoder level creates from one frame.
"""
_MEMORIES = 3
"""Number of memory blocks per level."""
REACH = math.ceil(sum(_MEMORIES / math.prod(_GROW[:level]) for level in range(len(_GROW))))
"""Number of preceding latent frames that a chunk's frames depend on. A decode that starts this many
latent frames before a chunk reproduces the chunk's frames exactly.
"""


class MemoryBlock(nn.Module):
    """A residual block that reads each frame and the previous frame."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(2 * channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(
        self, x_TCHW: torch.Tensor, before_1CHW: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output, and the `before_1CHW` argument for the next call."""
        past_TCHW = torch.cat(
            (before_1CHW.contiguous(memory_format=torch.channels_last), x_TCHW[:-1])
        )
        out_TCHW = functional.relu(self.conv(torch.cat((x_TCHW, past_TCHW), dim=1)) + x_TCHW)
        return out_TCHW, x_TCHW[-1:].clone()


class TemporalUpsample(nn.Module):
    """Upsampling that turns one frame into `factor` frames of twice the height and width. Each of
    these frames comes from one group of channels.

    TAEHV upsamples first and then applies the 1x1 convolution. To compute the same values from a
    quarter of the pixels, this class applies the convolution before the upsampling.
    """

    def __init__(self, channels: int, factor: int) -> None:
        super().__init__()
        self.factor = factor
        self.conv = nn.Conv2d(channels, channels * factor, 1, bias=False)

    def forward(self, x_TCHW: torch.Tensor) -> torch.Tensor:
        groups_THWC = self.conv(x_TCHW).permute(0, 2, 3, 1).contiguous()
        time, height, width, channels = groups_THWC.shape
        groups = in_words(
            groups_THWC.reshape(time, height, 1, width, 1, self.factor, channels // self.factor)
        )
        # dimensions: T, factor, H, 2, W, 2, C
        frames = groups.expand(-1, -1, 2, -1, 2, -1, -1).permute(0, 5, 1, 2, 3, 4, 6)
        out_THWC = frames.reshape(time * self.factor, 2 * height, 2 * width, -1).view(x_TCHW.dtype)
        return out_THWC.permute(0, 3, 1, 2)


class JoinTime(nn.Module):
    """Concatenates `factor` consecutive frames along channels, earlier frames first, and applies
    a 1x1 convolution.
    """

    def __init__(self, channels: int, factor: int) -> None:
        super().__init__()
        self.factor = factor
        self.conv = nn.Conv2d(channels * factor, channels, 1, bias=False)

    def forward(self, x_TCHW: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.conv(x_TCHW.unflatten(0, (-1, self.factor)).flatten(1, 2))
        return out


class SoftClamp(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x / 3) * 3


def encoder(pixels: int, width: int, latent_channels: int) -> nn.Sequential:
    """Build the encoder. It reduces the number of frames to a quarter and the height and width to
    an eighth. `pixels` is the number of channels in an input frame.
    """
    layers: list[nn.Module] = [nn.Conv2d(pixels, width, 3, padding=1), nn.ReLU()]
    for factor in _SHRINK:
        layers += [
            JoinTime(width, factor),
            nn.Conv2d(width, width, 3, stride=2, padding=1, bias=False),
        ]
        layers += [MemoryBlock(width) for _ in range(_MEMORIES)]
    return nn.Sequential(*layers, nn.Conv2d(width, latent_channels, 3, padding=1))


def decoder(latent_channels: int, widths: Sequence[int], pixels: int) -> nn.Sequential:
    """Build the decoder. It converts each latent frame to four frames with eight times its height
    and width.
    """
    layers: list[nn.Module] = [
        SoftClamp(),
        nn.Conv2d(latent_channels, widths[0], 3, padding=1),
        nn.ReLU(),
    ]
    for level, factor in enumerate(_GROW):
        here, below = widths[level], widths[level + 1]
        layers += [MemoryBlock(here) for _ in range(_MEMORIES)]
        # The identity replaces TAEHV's separate upsampling layer, so that layer names stay the
        # same.
        layers += [nn.Identity(), TemporalUpsample(here, factor)]
        layers += [nn.Conv2d(here, below, 3, padding=1, bias=False)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(widths[-1], pixels, 3, padding=1))


def run_stream(
    layers: nn.Sequential, x_TCHW: torch.Tensor, cache: VAECache | None
) -> tuple[torch.Tensor, VAECache]:
    """Run the next frames of a stream through `layers`, and return the result and the next
    cache. If `cache` is None, the stream starts with these frames.
    """
    past = None if cache is None else iter(cache.features)
    retained, x = [], x_TCHW
    for layer in layers:
        if isinstance(layer, MemoryBlock):
            x, last = layer(x, torch.zeros_like(x[:1]) if past is None else next(past))
            retained.append(last)
        else:
            x = layer(x)
    return x, VAECache(tuple(retained))


def decoder_memory(
    widths: Sequence[int], height: int, width: int
) -> tuple[tuple[int, int, int, int], ...]:
    """Return the shapes of a decoder's cache, which contains one frame per memory block. `height`
    and `width` are the latent height and width.
    """
    levels = [level for level in range(len(_GROW)) for _ in range(_MEMORIES)]
    return tuple((1, widths[level], height * 2**level, width * 2**level) for level in levels)


class TAEHV(nn.Module):
    """The TAEHV encoder and decoder with explicit caches.

    Args:
        channels: Number of latent channels.
        encoder_width: Number of channels in the encoder's layers.
        decoder_widths: Number of channels of each decoder level and, as the last entry, of the last
            layer.
        patch: Side length, in pixels, of the patches folded into a frame's channels.
        dtype: Dtype of weights, activations and caches.
    """

    def __init__(
        self,
        channels: int,
        encoder_width: int,
        decoder_widths: Sequence[int],
        *,
        patch: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.decoder_widths, self.patch, self.dtype = tuple(decoder_widths), patch, dtype
        self.encoder = encoder(3 * patch**2, encoder_width, channels).to(dtype)
        self.decoder = decoder(channels, decoder_widths, 3 * patch**2).to(dtype)
        lay_channels_last(self)  # this layout has the fastest kernels on every device
        self.requires_grad_(False)
        self.eval()

    def encode(
        self, frames_TCHW: torch.Tensor, cache: VAECache | None
    ) -> tuple[torch.Tensor, VAECache]:
        """Encode the next 4 n frames of a stream.

        Args:
            frames_TCHW: Video frames [4 n, 3, H, W] in [0, 1]. H and W must be multiples of 8 *
                `patch`.
            cache: Result of the previous call, or None if the stream starts with these frames.

        Returns:
            Latents [n, C, h, w] and the next cache.
        """
        if len(frames_TCHW) % FRAMES_PER_LATENT:
            raise ValueError(
                f"a latent frame is {FRAMES_PER_LATENT} video frames, got {len(frames_TCHW)}"
            )
        return run_stream(
            self.encoder, functional.pixel_unshuffle(frames_TCHW.to(self.dtype), self.patch), cache
        )

    def decode(
        self, latents_TCHW: torch.Tensor, cache: VAECache | None
    ) -> tuple[torch.Tensor, VAECache]:
        """Decode the next n latents of a stream.

        Args:
            latents_TCHW: Latents [n, C, h, w].
            cache: Result of the previous call, or None if the stream starts with these latents. At
                the start of a stream, three copies of the first latent frame are decoded first, and
                the resulting frames are discarded.

        Returns:
            Frames [4 n, 3, H, W] in [0, 1] and the next cache.
        """
        x = latents_TCHW.to(self.dtype)
        if cache is None:
            x = torch.cat((x[:1].expand(FRAMES_PER_LATENT - 1, -1, -1, -1), x))
        out, retained = run_stream(self.decoder, x, cache)
        frames = functional.pixel_shuffle(out, self.patch).clamp(0, 1)
        return frames[-FRAMES_PER_LATENT * len(latents_TCHW) :], retained

    def decoder_memory(self, height: int, width: int) -> tuple[tuple[int, int, int, int], ...]:
        """Return the shapes of the decoder's cache for frames of `height` x `width` pixels."""
        stride = 8 * self.patch
        return decoder_memory(self.decoder_widths, height // stride, width // stride)


def decoder_widths(path: Path) -> tuple[int, ...]:
    """Return the decoder widths stored in a TAEHV file.

    Raises:
        ValueError: The file is not a TAEHV file.
    """
    shapes = open_tensors(path).shapes
    names = ["decoder.1.weight", "decoder.8.weight", "decoder.14.weight", "decoder.20.weight"]
    if any(name not in shapes for name in names):
        raise ValueError(
            f"{path} is no TAEHV file: it lacks "
            f"{', '.join(name for name in names if name not in shapes)}"
        )
    return tuple(shapes[name][0] for name in names)
