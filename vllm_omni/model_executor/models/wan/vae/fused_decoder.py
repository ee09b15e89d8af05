# SPDX-License-Identifier: Apache-2.0
"""A Wan decoder for GPUs that makes few passes over memory. It runs a single kernel before each
convolution.

Like the fused encoder, it is built from `fused_layers.py`. It decodes one latent frame at a time,
so decoding a stream in parts is bit-identical to decoding the whole clip in one call. The
`fused_decoder` function determines whether this decoder is used.
"""

# B streams, T frames, N = B T, H rows, W columns, R rows with edges, C channels; activations are
# [N, H, W, C] in memory

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanResidualUpBlock
from torch import nn
from torch.nn import functional

from vllm_omni.model_executor.models.wan.vae.decoder_graphs import DecoderGraphs
from vllm_omni.model_executor.models.wan.vae.fused_layers import (
    FramesPass,
    FusedLayers,
    FusedPasses,
    convolved,
    fastest_passes,
    rows_last,
    zero_features,
)
from vllm_omni.model_executor.models.wan.vae.split_decode import RowBands
from vllm_omni.model_executor.models.wan.vae.stacked_frames import (
    DuplicatedPixels,
    FrameLayout,
    PendingSum,
    subpixel,
    sum_of_taps,
    taps_as_channels,
)
from vllm_omni.model_executor.models.wan.vae_layers import StreamedUpsample, folded


def fused_decoder(
    decoder: Any, bands: RowBands | None, *, cuda_graphs: bool = False
) -> "FusedDecoder | None":
    """Return a fused version of a `WanDecoder3d`, or None if `fastest_passes` returns None.

    Args:
        decoder: diffusers' decoder.
        bands: Bands passed to `split_decoder`. None if `split_decoder` was not called.
        cuda_graphs: Whether to decode latent frames by replaying CUDA graphs.
    """
    passes = fastest_passes(decoder.conv_in.weight)
    if passes is None:
        return None
    return FusedDecoder(decoder, bands, passes, DecoderGraphs() if cuda_graphs else None)


class FusedDecoder(FusedLayers):
    """Decodes latent frames with the layers of a `WanDecoder3d`. The weights are converted to the
    memory layout that the convolutions use.

    `graphs` is None if latent frames are decoded eagerly.
    """

    def __init__(
        self,
        decoder: Any,
        bands: RowBands | None,
        passes: FusedPasses,
        graphs: DecoderGraphs | None = None,
    ) -> None:
        super().__init__(decoder, _frames_of_levels(decoder), bands, passes)
        self.decoder, self.graphs = decoder, graphs

    def __call__(
        self, x_BCTHW: torch.Tensor, features: list[Any] | None, shapes: tuple[tuple[int, ...], ...]
    ) -> tuple[torch.Tensor, list[Any]]:
        """Decode one latent frame of each of several streams.

        Args:
            x_BCTHW: Latents with T = 1.
            features: The streams' feature cache, which is replaced in place. None if the streams
                start with this frame.
            shapes: Shapes of one stream's features.

        Returns:
            Frames [B, C, T, H, W] with T = 4 (1 at the start of the streams), and the features. The
            features are valid until other streams are decoded; `kept` returns features that remain
            valid.
        """
        self.derive()
        first = features is None
        if features is None:
            features = zero_features(x_BCTHW, shapes)
        latent_height = None if self.bands is None else self.bands.latent_height
        if self.graphs is not None and self.graphs.serve(features, latent_height):
            return self.graphs(
                x_BCTHW, features, partial(self._decode_in_place, first=first), first=first
            )
        return _LatentPass(self, features, len(x_BCTHW), first).decode(x_BCTHW), features

    def decode_image(self, x_BCTHW: torch.Tensor) -> torch.Tensor:
        """Decode latents with T = 1 as the only frames of their streams. Unlike a call, this
        allocates no features.
        """
        return _LatentPass(self, None, len(x_BCTHW), first=True).decode(x_BCTHW)

    def kept(self, features: list[Any]) -> list[Any]:
        """Return the features, copied if necessary, so that decoding other streams does not
        overwrite them.
        """
        return features if self.graphs is None else self.graphs.pool(features)

    def _decode_in_place(
        self, x_BCTHW: torch.Tensor, features: list[torch.Tensor], *, first: bool
    ) -> torch.Tensor:
        return _LatentPass(self, features, len(x_BCTHW), first, in_place=True).decode(x_BCTHW)

    def clear_derived(self) -> None:
        super().clear_derived()
        if self.graphs is not None:
            self.graphs.clear_graphs()


def _frames_of_levels(decoder: Any) -> Iterator[tuple[nn.Module, int]]:
    """Yield each level's blocks, and the number of frames that they process for each latent frame
    after the first.
    """
    frames = 1
    for level in decoder.up_blocks:
        yield level.resnets, frames
        upsampler = _upsampler(level)
        if upsampler is not None and upsampler.mode == "upsample3d":
            frames *= 2


def _upsampler(level: Any) -> Any:
    """Return the upsampling layer of a Wan 2.1 or 2.2 level, or None for the last level."""
    if isinstance(level, WanResidualUpBlock):
        return level.upsampler
    return None if level.upsamplers is None else level.upsamplers[0]


class _LatentPass(FramesPass):
    """Decodes one latent frame. `first` is true for the first latent frame of a stream."""

    def __init__(
        self,
        whole: FusedDecoder,
        features: list[Any] | None,
        streams: int,
        first: bool,
        *,
        in_place: bool = False,
    ) -> None:
        super().__init__(whole, features, streams, first=first, in_place=in_place)
        self.whole = whole

    def decode(self, x_BCTHW: torch.Tensor) -> torch.Tensor:
        decoder = self.whole.decoder
        at, _ = self.convolve(decoder.conv_in, PendingSum(rows_last(x_BCTHW)))
        at = self.middle(decoder.mid_block, at)
        for level in decoder.up_blocks:
            at, x = self.residuals(level.resnets, at)
            upsampler = _upsampler(level)
            if upsampler is not None:
                at = self._upsample(upsampler, at)
            if isinstance(level, WanResidualUpBlock) and level.avg_shortcut is not None:
                shortcut = level.avg_shortcut
                at = replace(
                    at,
                    residual=DuplicatedPixels(
                        x, shortcut.factor_t, shortcut.repeats, last=self.first
                    ),
                )
        return self._pixels(at)

    def _upsample(self, layer: StreamedUpsample, at: PendingSum) -> PendingSum:
        x = (
            self._doubled(layer.time_conv, at)
            if layer.mode == "upsample3d"
            else self.whole.passes.add_up(at)
        )
        convolution: Any = layer.resample[1]
        bands, rows = self.whole.bands, 1
        if bands is not None:
            x = bands.with_neighbours(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
            rows = 0
        cells = convolved(x, self.whole.derived(convolution, subpixel), (rows, 1))
        return PendingSum(cells, convolution.bias, shuffled=True)

    def _doubled(self, layer: WanCausalConv3d, at: PendingSum) -> torch.Tensor:
        """Double the number of frames. A stream's first latent frame is passed through, and the
        layer's features remain zero.
        """
        if self.first:
            self.index += 1
            return self.whole.passes.add_up(at)
        frames, _ = self.stacked(layer, at, self.whole.layout(layer))
        pairs = functional.linear(frames, folded(layer.weight).flatten(1), layer.bias)
        return pairs.unflatten(-1, (2, -1)).movedim(-2, 1).flatten(0, 1).contiguous()

    def _pixels(self, at: PendingSum) -> torch.Tensor:
        """Apply the last convolution. Because it has few output channels, its three temporal taps
        are computed side by side, then added. Only the last tap applies to a stream's first frame.
        """
        decoder = self.whole.decoder
        layer, gamma = decoder.conv_out, decoder.norm_out.gamma.flatten()
        layout = FrameLayout.ALONE if self.first else FrameLayout.IN_TURN
        frames, _ = self.stacked(layer, at, layout, gamma=gamma)
        rows = 0 if self.whole.bands is not None else 1
        of_taps = convolved(frames, self.whole.derived(layer, taps_as_channels), (rows, 1))
        pixels_BTHWO = sum_of_taps(
            of_taps.unflatten(0, (self.streams, -1)), layer.bias, first=self.first
        )
        return pixels_BTHWO.permute(0, 4, 1, 2, 3)
