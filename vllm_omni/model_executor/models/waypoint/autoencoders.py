# SPDX-License-Identifier: Apache-2.0
"""Waypoint's autoencoders with a common interface (`FrameCodec`). Waypoint 1.5 uses TAEHV, which
processes streams. Waypoint-1 uses an autoencoder for single images.

Latents are not normalised. Waypoint-1's autoencoder is a residual network with weight-normalised
convolutions. This autoencoder always processes images of 512x512 pixels.
"""

# T frames, C channels, H, W pixels

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from vllm_omni.model_executor.models.wan.vae.taehv import FRAMES_PER_LATENT, TAEHV
from vllm_omni.model_executor.models.wan.vae.vae import CacheLayout, VAECache
from vllm_omni.model_executor.models.waypoint.config import WaypointConfig


class FrameCodec(nn.Module):
    """An autoencoder for sessions. The size of the decoder's cache does not depend on the video
    size.
    """

    layout: CacheLayout | None = None
    """Shapes of the decoder's cache, or None if the decoder has no cache."""

    def encode_image(self, image_HWC: torch.Tensor) -> torch.Tensor:
        """Encode a start image, uint8 of any size on the codec's device, as fp32 [C, h, w]."""
        raise NotImplementedError

    def decode_latent(
        self, latent_CThw: torch.Tensor, size: tuple[int, int], memory: VAECache | None
    ) -> tuple[torch.Tensor, VAECache | None]:
        """Decode one latent frame.

        Args:
            latent_CThw: Latents of one frame, so T = 1.
            size: Height and width of the frames.
            memory: Cache after the previous frame, or None if the stream starts with this frame.

        Returns:
            The video frames, uint8 [frames, *size, 3], and the next cache.
        """
        raise NotImplementedError

    def decode_frames(
        self,
        latents_CFhw: torch.Tensor,
        size: tuple[int, int],
        before: VAECache | None,
        *,
        tiny: bool = False,
    ) -> tuple[torch.Tensor, VAECache | None]:
        """Decode the latents with `decode_latent`. There is no tiny decoder."""
        assert not tiny
        return self.decode_latent(latents_CFhw, size, before)

    def can_be_tiny(self, before: VAECache | None) -> bool:
        return False

    def most_streams(self, before: VAECache | None, latents_CFhw: torch.Tensor) -> int:
        """Return 1, because each chunk is decoded separately."""
        return 1

    def decode_frames_together(
        self, latents_CFhw: Sequence[torch.Tensor], before: Sequence[VAECache | None]
    ) -> list[tuple[torch.Tensor, VAECache | None]]:
        raise NotImplementedError("each chunk is decoded alone (`most_streams`)")

    def state_layout(self, height: int, width: int) -> CacheLayout | None:
        return self.layout

    def state_nbytes(self, height: int, width: int) -> int:
        return 0 if self.layout is None else self.layout.nbytes


# -- 1.5 -------------------------------------------------------------------------------------------


class StreamingTAEHV(TAEHV, FrameCodec):
    """The `taehv1_5` autoencoder, as a `FrameCodec` for streams.

    Args:
        size: Height and width of the autoencoder's frames in pixels.

    The other arguments are those of `TAEHV`.
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
        super().__init__(channels, encoder_width, decoder_widths, patch=2, dtype=dtype)
        self.size, self.layout = size, CacheLayout(self.decoder_memory(*size), dtype)

    def encode_image(self, image_HWC: torch.Tensor) -> torch.Tensor:
        """Encode a start image. The image is repeated for the four video frames of its latent
        frame.
        """
        frames = to_codec(image_HWC.unsqueeze(0), self.size, self.dtype).expand(
            FRAMES_PER_LATENT, -1, -1, -1
        )
        return self.encode(frames, None)[0][0].float()

    def decode_latent(
        self, latent_CThw: torch.Tensor, size: tuple[int, int], memory: VAECache | None
    ) -> tuple[torch.Tensor, VAECache | None]:
        frames, retained = self.decode(latent_CThw.transpose(0, 1), memory)
        return to_pixels(frames, size), retained


def to_codec(frames_THWC: torch.Tensor, size: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Convert uint8 [T, H, W, 3] of any size to TAEHV's input, [T, 3, *size] in [0, 1]."""
    return functional.interpolate(
        frames_THWC.permute(0, 3, 1, 2).to(dtype) / 255, size=size, mode="bilinear"
    )


def to_pixels(frames_TCHW: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Convert [T, 3, H, W] in [0, 1] to uint8 [T, *size, 3]."""
    x = functional.interpolate(frames_TCHW, size=size, mode="bilinear")
    return (x.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)


# -- Waypoint-1 ------------------------------------------------------------------------------------

IMAGE_SIZE, IMAGE_CODEC_SIZE = (360, 640), (512, 512)
"""Height and width of Waypoint-1's video frames, and of its autoencoder's images."""
_BLOCKS = (1, 1, 1, 1)
"""Number of residual blocks in each of the four stages."""


def _conv(
    inputs: int, outputs: int, kernel: int, *, bias: bool = True, groups: int = 1
) -> nn.Module:
    return weight_norm(
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=bias, groups=groups)
    )


def _projection(inputs: int, outputs: int, kernel: int, *, bias: bool = True) -> nn.Module:
    return nn.Sequential(OrderedDict(proj=_conv(inputs, outputs, kernel, bias=bias)))


class ResBlock(nn.Sequential):
    """A residual block of three convolutions. The middle convolution has groups of 16 channels."""

    def __init__(self, channels: int) -> None:
        wide = 2 * channels
        first, second = _conv(channels, wide, 1), _conv(wide, wide, 3, groups=wide // 16)
        third = _conv(wide, channels, 1, bias=False)
        act1, act2 = nn.LeakyReLU(0.01), nn.LeakyReLU(0.01)
        super().__init__(OrderedDict(conv1=first, act1=act1, conv2=second, act2=act2, conv3=third))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x) + x
        return out


def _residual(channels: int, count: int) -> nn.Module:
    return nn.Sequential(*(ResBlock(channels) for _ in range(count)))


class ImageStages(nn.Module):
    """A sequence of stages. Each stage changes the number of channels from one entry of `widths` to
    the next. The parameters have the same names as in the checkpoint file.

    The output of a stage is the sum of its layers' output and a shortcut. The shortcut consists of
    a convolution and `fold`, which moves pixels into channels or channels into pixels.

    Args:
        blocks: Number of residual blocks in each stage.
        stage: Function that creates the layers of a stage from (width, next width, blocks).
        folded: Number of channels before `fold` for each channel after it.
    """

    def __init__(
        self,
        inputs: int,
        widths: Sequence[int],
        outputs: int,
        blocks: Sequence[int],
        stage: Callable[[int, int, int], Mapping[str, nn.Module]],
        fold: Callable[[torch.Tensor, int], torch.Tensor],
        folded: float,
    ) -> None:
        super().__init__()
        self.conv_in, self.fold = _projection(inputs, widths[0], 3), fold
        self.blocks, self.residuals = nn.ModuleList(), nn.ModuleList()
        for (here, below), count in zip(pairwise(widths), blocks, strict=True):
            self.blocks.append(nn.Sequential(OrderedDict(stage(here, below, count))))
            self.residuals.append(_projection(here, int(below * folded), 3))
        self.conv_out = _projection(widths[-1], outputs, 3)

    def through_stages(self, x: torch.Tensor) -> torch.Tensor:
        for stage, residual in zip(self.blocks, self.residuals, strict=True):
            x = stage(x) + self.fold(residual(x), 2)
        return x


class ImageEncoder(ImageStages):
    """Image encoder that returns the mean of the latents. Its arguments are the keys of the
    released YAML file.
    """

    def __init__(
        self,
        latent_channels: int = 16,
        ch_0: int = 64,
        ch_max: int = 256,
        encoder_blocks_per_stage: Sequence[int] = _BLOCKS,
        channels: int = 3,
        skip_logvar: bool = False,
    ) -> None:
        def stage(here: int, below: int, count: int) -> dict[str, nn.Module]:
            half = nn.Upsample(scale_factor=0.5, mode="bicubic")
            return {
                "blocks": _residual(here, count),
                "resize": half,
                "down": _projection(here, below, 1, bias=False),
            }

        widths = [
            min(ch_0 * 2**level, ch_max) for level in range(len(encoder_blocks_per_stage) + 1)
        ]
        fold = functional.pixel_unshuffle
        super().__init__(
            channels, widths, latent_channels, encoder_blocks_per_stage, stage, fold, 1 / 4
        )
        if not skip_logvar:
            self.conv_out_logvar = _conv(widths[-1], 1, 3)  # in the file, but unused
        self.channels, self.groups = channels, widths[-1] // latent_channels

    def forward(self, images_THWC: torch.Tensor) -> torch.Tensor:
        """Encode uint8 [T, H, W, 3] of any size as [T, C, 32, 32] in the dtype of the weights."""
        x = images_THWC.permute(0, 3, 1, 2).to(next(self.parameters()).dtype) / 127.5 - 1
        x = functional.pad(x, (0, 0, 0, 0, 0, self.channels - x.shape[1]))
        x = self.through_stages(
            self.conv_in(functional.interpolate(x, IMAGE_CODEC_SIZE, mode="bicubic"))
        )
        out: torch.Tensor = self.conv_out(x) + x.unflatten(1, (self.groups, -1)).mean(
            1
        ) * math.sqrt(self.groups)
        return out


class ImageDecoder(ImageStages):
    """Image decoder. Its arguments are the keys of the released YAML file."""

    def __init__(
        self,
        latent_channels: int = 16,
        ch_0: int = 128,
        ch_max: int = 1024,
        decoder_blocks_per_stage: Sequence[int] = _BLOCKS,
        channels: int = 3,
    ) -> None:
        def stage(here: int, below: int, count: int) -> dict[str, nn.Module]:
            up = _projection(here, below, 1, bias=False) if here != below else nn.Identity()
            twice = nn.Upsample(scale_factor=2.0, mode="bicubic")
            return {"up": up, "resize": twice, "blocks": _residual(below, count)}

        widths = [
            min(ch_0 * 2**level, ch_max) for level in range(len(decoder_blocks_per_stage), -1, -1)
        ]
        super().__init__(
            latent_channels,
            widths,
            channels,
            decoder_blocks_per_stage,
            stage,
            functional.pixel_shuffle,
            4,
        )
        self.repeats = widths[0] // latent_channels

    def forward(
        self, latents_TCHW: torch.Tensor, size: tuple[int, int] = IMAGE_SIZE
    ) -> torch.Tensor:
        """Return images [T, channels, *size] with values approximately in [-1, 1]."""
        repeated = latents_TCHW.repeat_interleave(self.repeats, 1) / math.sqrt(self.repeats)
        x = self.through_stages(self.conv_in(latents_TCHW) + repeated)
        return functional.interpolate(self.conv_out(functional.silu(x)), size, mode="bicubic")


def image_to_uint8(images_TCHW: torch.Tensor) -> torch.Tensor:
    """Convert the decoder's images to uint8 [T, H, W, 3]."""
    return (
        ((images_TCHW[:, :3] / 2 + 0.5).clamp(0, 1) * 255)
        .round()
        .to(torch.uint8)
        .permute(0, 2, 3, 1)
    )


class ImageCodec(FrameCodec):
    """Image encoder and decoder.

    Args:
        encoder: `ImageEncoder` arguments that override the released ones.
        decoder: `ImageDecoder` arguments that override the released ones.
        dtype: Dtype of weights and activations.
    """

    def __init__(
        self, encoder: Mapping[str, Any], decoder: Mapping[str, Any], *, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.encoder, self.decoder, self.dtype = (
            ImageEncoder(**encoder),
            ImageDecoder(**decoder),
            dtype,
        )
        self.to(dtype).requires_grad_(False).eval()

    def encode_image(self, image_HWC: torch.Tensor) -> torch.Tensor:
        latent: torch.Tensor = self.encoder(image_HWC.unsqueeze(0))[0]
        return latent.float()

    def decode_latent(
        self, latent_CThw: torch.Tensor, size: tuple[int, int], memory: VAECache | None
    ) -> tuple[torch.Tensor, VAECache | None]:
        return image_to_uint8(self.decoder(latent_CThw.transpose(0, 1).to(self.dtype), size)), None


def make_codec(config: WaypointConfig, sizes: Mapping[str, Any], dtype: torch.dtype) -> FrameCodec:
    """Build the autoencoder of a checkpoint. `sizes` contains the arguments that override the
    released ones.
    """
    if config.temporal_compression > 1:
        return StreamingTAEHV(config.channels, **sizes, size=config.codec_size, dtype=dtype)
    return ImageCodec(sizes.get("encoder", {}), sizes.get("decoder", {}), dtype=dtype)
