# SPDX-License-Identifier: Apache-2.0
"""A Wan encoder for GPUs that makes few passes over memory. It is the counterpart of the decoder in
`fused_decoder.py`.

The encoder is built from `fused_layers.py`. It encodes the video frames of one latent frame at a
time, so encoding a stream in parts is bit-identical to encoding the whole clip in one call. The
`fused_encoder` function determines whether this encoder is used.
"""

# B streams, T frames, C channels, H rows, W columns

from collections.abc import Iterator
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanResample,
    WanResidualBlock,
    WanResidualDownBlock,
)
from torch import nn

from vllm_omni.model_executor.models.wan.vae.fused_layers import (
    FramesPass,
    FusedLayers,
    FusedPasses,
    by_streams,
    fastest_passes,
    rows_last,
    zero_features,
)
from vllm_omni.model_executor.models.wan.vae.stacked_frames import PendingSum


def fused_encoder(encoder: Any) -> "FusedEncoder | None":
    """Return a fused version of a `WanEncoder3d`, or None if `fastest_passes` returns None."""
    passes = fastest_passes(encoder.conv_in.weight)
    return None if passes is None else FusedEncoder(encoder, passes)


class FusedEncoder(FusedLayers):
    """Encodes frames with the layers of a `WanEncoder3d`. The weights are converted to the memory
    layout that the convolutions use.
    """

    def __init__(self, encoder: Any, passes: FusedPasses) -> None:
        super().__init__(encoder, _frames_of_blocks(encoder), None, passes)
        self.encoder = encoder

    def __call__(
        self, x_BCTHW: torch.Tensor, features: list[Any] | None, shapes: tuple[tuple[int, ...], ...]
    ) -> tuple[torch.Tensor, list[Any]]:
        """Encode the video frames of one latent frame for each of several streams.

        Args:
            x_BCTHW: Video frames with T = 4 (1 at the start of the streams).
            features: The streams' feature cache, which is replaced in place. None if the streams
                start with these frames.
            shapes: Shapes of one stream's features.

        Returns:
            The posterior's moments [B, 2 C, 1, h, w], and the features.
        """
        first = features is None
        if features is None:
            features = zero_features(x_BCTHW, shapes)
        return _LatentPass(self, features, len(x_BCTHW), first).encode(x_BCTHW), features


def _frames_of_blocks(encoder: Any) -> Iterator[tuple[nn.Module, int]]:
    """Yield each residual block, and the number of frames that it processes for each latent frame
    after the first.
    """
    layers = [
        layer
        for layer in encoder.modules()
        if isinstance(layer, WanResidualBlock | WanResample)
        and not any(layer is block for block in encoder.mid_block.resnets)
    ]
    frames = 2 ** sum(
        isinstance(layer, WanResample) and layer.mode == "downsample3d" for layer in layers
    )
    for layer in layers:
        if isinstance(layer, WanResidualBlock):
            yield layer, frames
        elif layer.mode == "downsample3d":
            frames //= 2


class _LatentPass(FramesPass):
    """Encodes the video frames of one latent frame. `first` is true for the first latent frame of a
    stream.
    """

    def __init__(self, whole: FusedEncoder, features: list[Any], streams: int, first: bool) -> None:
        super().__init__(whole, features, streams, first=first)
        self.whole = whole

    def encode(self, x_BCTHW: torch.Tensor) -> torch.Tensor:
        encoder = self.whole.encoder
        at, _ = self.convolve(encoder.conv_in, PendingSum(rows_last(x_BCTHW)))
        for layer in encoder.down_blocks:
            if isinstance(layer, WanResidualBlock):
                at = self.residual(layer, at)
            elif isinstance(layer, WanResidualDownBlock):
                at = self._level(layer, at)
            else:
                at = self._downsample(layer, at)
        at = self.middle(encoder.mid_block, at)
        at, _ = self.convolve(encoder.conv_out, at, gamma=encoder.norm_out.gamma.flatten())
        return by_streams(self.whole.passes.add_up(at), self.streams)

    def _level(self, level: WanResidualDownBlock, at: PendingSum) -> PendingSum:
        """Run one level of the Wan 2.2 encoder. The shortcut around the level adds the level's
        input, downsampled by averaging.
        """
        blocks: Any = level.resnets
        at, x_NHWC = self.residuals(blocks, at)
        if level.downsampler is not None:
            at = self._downsample(level.downsampler, at)
        shortcut = rows_last(level.avg_shortcut(by_streams(x_NHWC, self.streams)))
        return PendingSum(self.whole.passes.add_up(at), residual=shortcut)

    def _downsample(self, layer: WanResample, at: PendingSum) -> PendingSum:
        """Downsample with the original layers. These layers move little data, because their
        convolutions are strided.
        """
        x_NCHW = self.whole.passes.add_up(at).permute(0, 3, 1, 2)
        x_NHWC = layer.resample(x_NCHW).permute(0, 2, 3, 1)
        if layer.mode == "downsample3d":
            x_BCTHW = by_streams(x_NHWC, self.streams)
            assert self.features is not None
            past_BCTHW = self.features[self.index]
            self.store_feature(x_BCTHW[:, :, -1:].clone(memory_format=torch.channels_last_3d))
            if not self.first:  # the first video frame becomes a latent frame by itself
                x_BCTHW = layer.time_conv(torch.cat((past_BCTHW, x_BCTHW), dim=2))
            return PendingSum(rows_last(x_BCTHW))
        return PendingSum(x_NHWC.contiguous())
