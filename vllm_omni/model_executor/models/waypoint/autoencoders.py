# SPDX-License-Identifier: Apache-2.0
"""The two autoencoders: TAEHV as a stream (1.5: four video frames a latent) and one of single images (Waypoint-1).

Both are a `Codec`: a start image to a latent, a latent to frames of the video's size, with what a stream remembers.
TAEHV's convolutions see one frame; only its memory blocks look back, each at its input one frame earlier. So a stream
keeps one activation for each of them. Parameters have the names of the released files (TAEHV: madebyollin/taehv, MIT;
the image autoencoder was written from a description of its layers).
Held by tests/model_executor/models/waypoint/test_waypoint_parity.py and test_waypoint_autoencoders.py.
"""

# T frames, C channels, H, W pixels

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from vllm_omni.model_executor.host_copies import to_device
from vllm_omni.model_executor.models.wan.tiny_vae import GrowTime, MemoryBlock, SoftClamp
from vllm_omni.model_executor.models.wan.vae import CacheLayout, VAECache
from vllm_omni.sessions.snapshot import SavedTensors


@dataclass(frozen=True)
class CodecLayout(CacheLayout):
    """Layout of what a stream keeps between its frames."""

    def restore(self, saved: SavedTensors, device: torch.device | str, num_latents: int = 0) -> VAECache:
        return VAECache.restore(saved, "", device, self)


class Codec(nn.Module):
    """An autoencoder as a session uses it. memory: the decoder's of a stream; None = at its start, or it has none."""

    def encode_image(self, image_HWC: torch.Tensor) -> torch.Tensor:
        """uint8 of any size -> its latent, fp32 [C, h, w] on the codec's device, at a stream's start."""
        raise NotImplementedError

    def decode_frames(
        self, latent_CThw: torch.Tensor, size: tuple[int, int], memory: VAECache | None
    ) -> tuple[torch.Tensor, VAECache | None]:
        """The latent of one frame, T = 1 -> (uint8 [frames, *size, 3], the next memory)."""
        raise NotImplementedError

    def decoder_layout(self) -> CodecLayout | None:
        """Of the decoder's memory, whatever the video's size; None = it has none."""
        return None

    def state_nbytes(self, height: int, width: int) -> int:
        """Bytes of the decoder's memory for a video of `height` x `width` pixels."""
        layout = self.decoder_layout()
        return 0 if layout is None else layout.nbytes


FRAMES_PER_LATENT = 4
_SHRINK, _GROW = (2, 2, 1), (1, 2, 2)
"""Consecutive frames that each level of the encoder joins, and that each of the decoder makes of one."""
_MEMORIES = 3
_PATCH = 2


class JoinFrames(nn.Module):
    """`count` consecutive frames become one, side by side in its channels, earlier first; then a 1x1 convolution."""

    def __init__(self, channels: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.conv = nn.Conv2d(channels * count, channels, 1, bias=False)

    def forward(self, x_TCHW: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.conv(x_TCHW.unflatten(0, (-1, self.count)).flatten(1, 2))
        return out


class StreamingTAEHV(Codec):
    """Encoder and decoder of `taehv1_5`. size: height and width of its frames, in pixels.

    encoder_width, decoder_widths, channels: other than 64, ... only in tests.
    """

    def __init__(
        self,
        channels: int = 32,
        encoder_width: int = 64,
        decoder_widths: Sequence[int] = (256, 128, 64, 64),
        *,
        size: tuple[int, int] = (512, 1024),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.channels, self.encoder_width, self.decoder_widths = channels, encoder_width, tuple(decoder_widths)
        self.size, self.dtype = size, dtype
        pixels, width = 3 * _PATCH**2, encoder_width
        encoder: list[nn.Module] = [nn.Conv2d(pixels, width, 3, padding=1), nn.ReLU()]
        for count in _SHRINK:
            encoder += [JoinFrames(width, count), nn.Conv2d(width, width, 3, stride=2, padding=1, bias=False)]
            encoder += [MemoryBlock(width) for _ in range(_MEMORIES)]
        encoder += [nn.Conv2d(width, channels, 3, padding=1)]
        decoder: list[nn.Module] = [SoftClamp(), nn.Conv2d(channels, decoder_widths[0], 3, padding=1), nn.ReLU()]
        for level, count in enumerate(_GROW):
            here, below = decoder_widths[level], decoder_widths[level + 1]
            decoder += [MemoryBlock(here) for _ in range(_MEMORIES)]
            decoder += [nn.Upsample(scale_factor=2), GrowTime(here, count)]
            decoder += [nn.Conv2d(here, below, 3, padding=1, bias=False)]
        decoder += [nn.ReLU(), nn.Conv2d(decoder_widths[-1], pixels, 3, padding=1)]
        self.encoder, self.decoder = nn.Sequential(*encoder).to(dtype), nn.Sequential(*decoder).to(dtype)
        for weight in self.parameters():
            if weight.dim() == 4:  # the layout its kernels are fastest in
                weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        self.requires_grad_(False)
        self.eval()

    def encode(self, frames_TCHW: torch.Tensor, cache: VAECache | None) -> tuple[torch.Tensor, VAECache]:
        """Encode the next four frames of a stream; `cache` None starts one.

        frames_TCHW: [4 n, 3, H, W] in [0, 1], H and W multiples of 16. Returns latents [n, C, H/16, W/16].
        """
        if len(frames_TCHW) % FRAMES_PER_LATENT:
            raise ValueError(f"a latent frame is {FRAMES_PER_LATENT} video frames, got {len(frames_TCHW)}")
        return _stream(self.encoder, functional.pixel_unshuffle(frames_TCHW.to(self.dtype), _PATCH), cache)

    def decode(self, latents_TCHW: torch.Tensor, cache: VAECache | None) -> tuple[torch.Tensor, VAECache]:
        """Decode the next latents of a stream; `cache` None starts one, with three dropped copies of the first latent.

        Returns frames [4 n, 3, 16 h, 16 w] in [0, 1].
        """
        x = latents_TCHW.to(self.dtype)
        if cache is None:
            x = torch.cat((x[:1].expand(FRAMES_PER_LATENT - 1, -1, -1, -1), x))
        out, kept = _stream(self.decoder, x, cache)
        frames = functional.pixel_shuffle(out, _PATCH).clamp(0, 1)
        return frames[-FRAMES_PER_LATENT * len(latents_TCHW) :], kept

    def encode_image(self, image_HWC: torch.Tensor) -> torch.Tensor:
        """The image stands still for the four frames of its latent."""
        image = to_device(image_HWC, next(self.parameters()).device)
        frames = to_codec(image.unsqueeze(0), self.size, self.dtype).expand(FRAMES_PER_LATENT, -1, -1, -1)
        return self.encode(frames, None)[0][0].float()

    def decode_frames(
        self, latent_CThw: torch.Tensor, size: tuple[int, int], memory: VAECache | None
    ) -> tuple[torch.Tensor, VAECache | None]:
        frames, kept = self.decode(latent_CThw.transpose(0, 1), memory)
        return to_pixels(frames, size), kept

    def decoder_layout(self) -> CodecLayout:
        """One frame before each memory block, at the block's level."""
        shapes = [
            (1, self.decoder_widths[level], *(side * 2**level // 16 for side in self.size))
            for level in range(len(_GROW))
            for _ in range(_MEMORIES)
        ]
        return CodecLayout(tuple(shapes), self.dtype)


def _stream(layers: nn.Sequential, x: torch.Tensor, cache: VAECache | None) -> tuple[torch.Tensor, VAECache]:
    past = None if cache is None else iter(cache.features)
    kept = []
    for layer in layers:
        if isinstance(layer, MemoryBlock):
            x, last = layer(x, torch.zeros_like(x[:1]) if past is None else next(past))
            kept.append(last)
        else:
            x = layer(x)
    return x, VAECache(tuple(kept))


def to_codec(frames_THWC: torch.Tensor, size: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """uint8 [T, H, W, 3] of any size -> [T, 3, *size] in [0, 1]: what TAEHV reads."""
    x = frames_THWC.permute(0, 3, 1, 2).to(dtype) / 255
    return functional.interpolate(x, size=size, mode="bilinear", align_corners=False, antialias=False)


def to_pixels(frames_TCHW: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """[T, 3, H, W] in [0, 1] -> uint8 [T, *size, 3]."""
    x = functional.interpolate(frames_TCHW, size=size, mode="bilinear", align_corners=False, antialias=False)
    return (x.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)


# -- Waypoint-1 --------------------------------------------------------------------------------------------------------

IMAGE_SIZE, IMAGE_CODEC_SIZE = (360, 640), (512, 512)
"""Height and width of Waypoint-1's frames, and of the image that its autoencoder sees."""
_STAGES = 4


def _conv(inputs: int, outputs: int, kernel: int, *, bias: bool = True, groups: int = 1) -> nn.Module:
    conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=bias, groups=groups)
    return weight_norm(conv)


def _bicubic(x: torch.Tensor, *, size: tuple[int, int] | None = None, factor: float | None = None) -> torch.Tensor:
    return functional.interpolate(x, size, factor, mode="bicubic", align_corners=False, antialias=False)


class _Projection(nn.Module):
    """A convolution under the name `proj`."""

    def __init__(self, inputs: int, outputs: int, kernel: int, *, bias: bool = True) -> None:
        super().__init__()
        self.proj = _conv(inputs, outputs, kernel, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.proj(x)
        return out


class _ResBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 2 * channels
        self.conv1 = _conv(channels, wide, 1)
        self.conv2 = _conv(wide, wide, 3, groups=wide // 16)
        self.conv3 = _conv(wide, channels, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.leaky_relu(self.conv1(x), 0.01)
        out: torch.Tensor = self.conv3(functional.leaky_relu(self.conv2(inner), 0.01)) + x
        return out


class _Down(nn.Module):
    def __init__(self, inputs: int, outputs: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(_ResBlock(inputs) for _ in range(blocks)))
        self.down = _Projection(inputs, outputs, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(_bicubic(self.blocks(x), factor=0.5))
        return out


class _Up(nn.Module):
    def __init__(self, inputs: int, outputs: int, blocks: int) -> None:
        super().__init__()
        self.up = _Projection(inputs, outputs, 1, bias=False) if inputs != outputs else nn.Identity()
        self.blocks = nn.Sequential(*(_ResBlock(outputs) for _ in range(blocks)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.blocks(_bicubic(self.up(x), factor=2.0))
        return out


def _widths(first: int, largest: int) -> list[int]:
    widths = [first]
    for _ in range(_STAGES):
        widths.append(min(2 * widths[-1], largest))
    return widths


class ImageEncoder(nn.Module):
    """Images -> latents, mean only. first, largest: widths. blocks: residual blocks of each stage."""

    def __init__(
        self,
        latent_channels: int = 16,
        first: int = 64,
        largest: int = 256,
        blocks: Sequence[int] = (1,) * _STAGES,
        *,
        channels: int = 3,
        log_variance: bool = True,
    ) -> None:
        super().__init__()
        widths = _widths(first, largest)
        stages = list(zip(widths, widths[1:], blocks, strict=False))
        self.channels = channels
        self.conv_in = _Projection(channels, first, 3)
        self.blocks = nn.ModuleList(_Down(*stage) for stage in stages)
        self.residuals = nn.ModuleList(_Projection(here, below // 4, 3) for here, below, _ in stages)
        self.conv_out = _Projection(widths[-1], latent_channels, 3)
        if log_variance:
            self.conv_out_logvar = _conv(widths[-1], 1, 3)  # in the file, not used
        self.groups = widths[-1] // latent_channels
        self.requires_grad_(False)
        self.eval()

    def forward(self, images_THWC: torch.Tensor) -> torch.Tensor:
        """uint8 [T, H, W, 3] of any size -> [T, C, 32, 32], in the type of the weights."""
        x = images_THWC.permute(0, 3, 1, 2).to(next(self.parameters()).dtype) / 127.5 - 1
        x = functional.pad(x, (0, 0, 0, 0, 0, self.channels - x.shape[1]))
        x = self.conv_in(_bicubic(x, size=IMAGE_CODEC_SIZE))
        for stage, residual in zip(self.blocks, self.residuals, strict=True):
            x = stage(x) + functional.pixel_unshuffle(residual(x), 2)
        mean = x.unflatten(1, (self.groups, -1)).mean(1) * math.sqrt(self.groups)
        out: torch.Tensor = self.conv_out(x) + mean
        return out


class ImageDecoder(nn.Module):
    """Latents -> images; arguments as of `ImageEncoder`."""

    def __init__(
        self,
        latent_channels: int = 16,
        first: int = 128,
        largest: int = 1024,
        blocks: Sequence[int] = (1,) * _STAGES,
        *,
        channels: int = 3,
    ) -> None:
        super().__init__()
        widths = _widths(first, largest)[::-1]
        stages = list(zip(widths, widths[1:], blocks, strict=False))
        self.repeats = widths[0] // latent_channels
        self.conv_in = _Projection(latent_channels, widths[0], 3)
        self.blocks = nn.ModuleList(_Up(*stage) for stage in stages)
        self.residuals = nn.ModuleList(_Projection(here, 4 * below, 3) for here, below, _ in stages)
        self.conv_out = _Projection(first, channels, 3)
        self.requires_grad_(False)
        self.eval()

    def forward(self, latents_TCHW: torch.Tensor, size: tuple[int, int] = IMAGE_SIZE) -> torch.Tensor:
        """Return [T, channels, *size], about [-1, 1]."""
        repeated = latents_TCHW.repeat_interleave(self.repeats, 1) / math.sqrt(self.repeats)
        x = self.conv_in(latents_TCHW) + repeated
        for stage, residual in zip(self.blocks, self.residuals, strict=True):
            x = stage(x) + functional.pixel_shuffle(residual(x), 2)
        return _bicubic(self.conv_out(functional.silu(x)), size=size)


def image_to_uint8(images_TCHW: torch.Tensor) -> torch.Tensor:
    """The decoder's images -> uint8 [T, H, W, 3]."""
    return ((images_TCHW[:, :3] / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)


class ImageCodec(Codec):
    """Both halves. encoder, decoder: arguments of `ImageEncoder` and `ImageDecoder`, the released ones if left out."""

    def __init__(
        self, encoder: Mapping[str, Any] | None = None, decoder: Mapping[str, Any] | None = None, *, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.encoder, self.decoder = (
            ImageEncoder(**(encoder or {})).to(dtype),
            ImageDecoder(**(decoder or {})).to(dtype),
        )
        self.dtype = dtype

    def encode_image(self, image_HWC: torch.Tensor) -> torch.Tensor:
        image = to_device(image_HWC, next(self.parameters()).device)
        latent: torch.Tensor = self.encoder(image.unsqueeze(0))[0]
        return latent.float()

    def decode_frames(
        self, latent_CThw: torch.Tensor, size: tuple[int, int], memory: VAECache | None
    ) -> tuple[torch.Tensor, VAECache | None]:
        return image_to_uint8(self.decoder(latent_CThw.transpose(0, 1).to(self.dtype), size)), None
