# SPDX-License-Identifier: Apache-2.0
"""Waypoint's autoencoders as a session uses them (`Codec`): TAEHV of 1.5, a stream, and Waypoint-1's, of single images.

Latents are used as they are. Waypoint-1's is a residual network, all of whose convolutions are weight-normalised; it
works on 512x512 pixels, whatever the frame's size.
Held by tests/model_executor/models/waypoint/test_waypoint_parity.py and test_waypoint_autoencoders.py.
"""

# T frames, C channels, H, W pixels

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from vllm_omni.model_executor.host_copies import to_device
from vllm_omni.model_executor.models.wan.taehv import FRAMES_PER_LATENT, TAEHV
from vllm_omni.model_executor.models.wan.vae import CacheLayout, VAECache
from vllm_omni.model_executor.models.waypoint.config import WaypointConfig
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


# -- 1.5 ---------------------------------------------------------------------------------------------------------------


class StreamingTAEHV(TAEHV, Codec):
    """`taehv1_5`. size: height and width of its frames, in pixels. The other arguments are `TAEHV`'s."""

    def __init__(
        self,
        channels: int = 32,
        encoder_width: int = 64,
        decoder_widths: Sequence[int] = (256, 128, 64, 64),
        *,
        size: tuple[int, int] = (512, 1024),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(channels, encoder_width, decoder_widths, patch=2, dtype=dtype)
        self.size = size

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
        return CodecLayout(self.decoder_memory(*self.size), self.dtype)


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


class Bicubic(nn.Module):
    def __init__(self, *, factor: float | None = None, size: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.options: dict[str, Any] = {"scale_factor": factor, "size": size}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.interpolate(x, **self.options, mode="bicubic", align_corners=False, antialias=False)


class ResBlock(nn.Sequential):
    """x + three convolutions of it, the middle one in groups of 16 channels."""

    def __init__(self, channels: int) -> None:
        wide = 2 * channels
        super().__init__(
            _named(
                conv1=_conv(channels, wide, 1),
                act1=nn.LeakyReLU(0.01),
                conv2=_conv(wide, wide, 3, groups=wide // 16),
                act2=nn.LeakyReLU(0.01),
                conv3=_conv(wide, channels, 1, bias=False),
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x) + x
        return out


def _named(**layers: nn.Module) -> OrderedDict[str, nn.Module]:
    """For `nn.Sequential`: layers under the names that their parameters have in the file."""
    return OrderedDict(layers)


def _conv(inputs: int, outputs: int, kernel: int, *, bias: bool = True, groups: int = 1) -> nn.Module:
    return weight_norm(nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=bias, groups=groups))


def _projection(inputs: int, outputs: int, kernel: int, *, bias: bool = True) -> nn.Module:
    return nn.Sequential(_named(proj=_conv(inputs, outputs, kernel, bias=bias)))


def _residual_blocks(channels: int, count: int) -> nn.Module:
    return nn.Sequential(*(ResBlock(channels) for _ in range(count)))


def _widths(first: int, largest: int) -> list[int]:
    """Of an encoder's stages and behind them: doubled up to `largest`."""
    return [first, *(min(first * 2**stage, largest) for stage in range(1, _STAGES + 1))]


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
        skip_logvar: bool = False,
    ) -> None:
        super().__init__()
        widths = _widths(first, largest)
        self.channels, self.resize = channels, Bicubic(size=IMAGE_CODEC_SIZE)
        self.conv_in = _projection(channels, first, 3)
        self.blocks, self.residuals = nn.ModuleList(), nn.ModuleList()
        for here, below, count in zip(widths, widths[1:], blocks, strict=False):
            down = _projection(here, below, 1, bias=False)
            layers = _named(blocks=_residual_blocks(here, count), resize=Bicubic(factor=0.5), down=down)
            self.blocks.append(nn.Sequential(layers))
            self.residuals.append(_projection(here, below // 4, 3))
        self.conv_out = _projection(widths[-1], latent_channels, 3)
        if not skip_logvar:
            self.conv_out_logvar = _conv(widths[-1], 1, 3)  # in the file, not used
        self.groups = widths[-1] // latent_channels

    def forward(self, images_THWC: torch.Tensor) -> torch.Tensor:
        """uint8 [T, H, W, 3] of any size -> [T, C, 32, 32], in the type of the weights."""
        x = images_THWC.permute(0, 3, 1, 2).to(next(self.parameters()).dtype) / 127.5 - 1
        x = functional.pad(x, (0, 0, 0, 0, 0, self.channels - x.shape[1]))
        x = self.conv_in(self.resize(x))
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
        self.repeats = widths[0] // latent_channels
        self.conv_in = _projection(latent_channels, widths[0], 3)
        self.blocks, self.residuals = nn.ModuleList(), nn.ModuleList()
        for here, below, count in zip(widths, widths[1:], blocks, strict=False):
            up = _projection(here, below, 1, bias=False) if here != below else nn.Identity()
            layers = _named(up=up, resize=Bicubic(factor=2.0), blocks=_residual_blocks(below, count))
            self.blocks.append(nn.Sequential(layers))
            self.residuals.append(_projection(here, 4 * below, 3))
        self.conv_out = _projection(first, channels, 3)

    def forward(self, latents_TCHW: torch.Tensor, size: tuple[int, int] = IMAGE_SIZE) -> torch.Tensor:
        """Return [T, channels, *size], about [-1, 1]."""
        repeated = latents_TCHW.repeat_interleave(self.repeats, 1) / math.sqrt(self.repeats)
        x = self.conv_in(latents_TCHW) + repeated
        for stage, residual in zip(self.blocks, self.residuals, strict=True):
            x = stage(x) + functional.pixel_shuffle(residual(x), 2)
        out: torch.Tensor = Bicubic(size=size)(self.conv_out(functional.silu(x)))
        return out


def image_to_uint8(images_TCHW: torch.Tensor) -> torch.Tensor:
    """The decoder's images -> uint8 [T, H, W, 3]."""
    return ((images_TCHW[:, :3] / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)


class ImageCodec(Codec):
    """Both halves. encoder, decoder: arguments of `ImageEncoder` and `ImageDecoder`, the released ones if left out."""

    def __init__(
        self, encoder: Mapping[str, Any] | None = None, decoder: Mapping[str, Any] | None = None, *, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.encoder, self.decoder = ImageEncoder(**(encoder or {})), ImageDecoder(**(decoder or {}))
        self.to(dtype).requires_grad_(False).eval()
        self.dtype = dtype

    def encode_image(self, image_HWC: torch.Tensor) -> torch.Tensor:
        image = to_device(image_HWC, next(self.parameters()).device)
        latent: torch.Tensor = self.encoder(image.unsqueeze(0))[0]
        return latent.float()

    def decode_frames(
        self, latent_CThw: torch.Tensor, size: tuple[int, int], memory: VAECache | None
    ) -> tuple[torch.Tensor, VAECache | None]:
        return image_to_uint8(self.decoder(latent_CThw.transpose(0, 1).to(self.dtype), size)), None


def make_codec(config: WaypointConfig, sizes: Mapping[str, Any], dtype: torch.dtype) -> Codec:
    """The autoencoder of a checkpoint. sizes: its arguments that differ from the released ones."""
    if config.temporal_compression > 1:
        return StreamingTAEHV(config.channels, **sizes, size=config.codec_size, dtype=dtype)
    return ImageCodec(**sizes, dtype=dtype)
