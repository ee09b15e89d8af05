# SPDX-License-Identifier: Apache-2.0
"""A Wan decoder for a GPU, in few passes over memory: convolutions, and one kernel before each of them.

The same sums as diffusers' layers in another order (`stacked_frames.py` says how), on the same parameters and the same
feature cache: a stream may go on here that began in the plain decoder, and the other way round. Nothing is compiled.
A latent frame at a time, so a stream cut anywhere equals one call over the whole clip bit for bit.

`fused_decoder` says where it is used. Held by tests/model_executor/models/wan/test_fused_decoder.py.
"""

# B streams, T frames, N = B T, H rows, W columns, R rows with edges, C channels; activations are [N, H, W, C] in memory

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanAttentionBlock,
    WanCausalConv3d,
    WanResidualBlock,
)
from torch import nn
from torch.nn import functional
from vllm.triton_utils import HAS_TRITON

from vllm_omni.model_executor.models.wan.decoder_graphs import DecoderGraphs
from vllm_omni.model_executor.models.wan.split_decode import RowBands
from vllm_omni.model_executor.models.wan.stacked_frames import (
    Activation,
    StackFrames,
    fold_memory,
    folded,
    subpixel,
    sum_of_taps,
    taps_as_channels,
)
from vllm_omni.model_executor.models.wan.streamed_layers import StreamedUpsample


@dataclass(frozen=True)
class Passes:
    """The two passes beside convolutions, from `decoder_kernels.py` or, as a reference, `stacked_frames.py`."""

    stack_frames: StackFrames
    add_up: Callable[[Activation], torch.Tensor]


def fused_decoder(decoder: Any, bands: RowBands | None, *, cuda_graphs: bool = False) -> "FusedDecoder | None":
    """The fused form of a built `WanDecoder3d`, or None on a CPU, on an old GPU, in fp32 and without Triton.

    bands: those of `split_decoder`, if that was called. cuda_graphs: launch latent frames as graphs.
    """
    weight = decoder.conv_in.weight
    if not (HAS_TRITON and weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16)):
        return None
    if torch.version.cuda is not None and torch.cuda.get_device_capability(weight.device) < (8, 0):
        return None
    from vllm_omni.model_executor.models.wan import decoder_kernels

    passes = Passes(decoder_kernels.stack_frames, decoder_kernels.add_up)
    return FusedDecoder(decoder, bands, passes, DecoderGraphs() if cuda_graphs else None)


class FusedDecoder:
    """Decodes latent frames by the layers of a `WanDecoder3d`, whose weights it lays out for its convolutions.

    It keeps weights that it derives from some; `forget` them when weights were loaded. graphs: None = latent frames are
    launched kernel by kernel.
    """

    def __init__(
        self, decoder: Any, bands: RowBands | None, passes: Passes, graphs: DecoderGraphs | None = None
    ) -> None:
        self.decoder, self.bands, self.passes, self.graphs = decoder, bands, passes, graphs
        self._in_three_dimensions = {id(layer) for layer in _at_latent_size(decoder)}
        self._derived: dict[nn.Module, torch.Tensor] = {}
        for layer in decoder.modules():
            if isinstance(layer, WanCausalConv3d) and id(layer) not in self._in_three_dimensions:
                layer.weight.data = fold_memory(layer.weight.data)

    def __call__(
        self, x_BCTHW: torch.Tensor, features: list[Any] | None, shapes: tuple[tuple[int, ...], ...]
    ) -> tuple[torch.Tensor, list[Any]]:
        """Decode one latent frame of streams.

        x_BCTHW: T = 1. features: their feature cache, replaced in place; None starts streams. shapes: of a stream's
        features. Returns frames [B, 3, T, H, W], T = 4 (1 at a start), and the features, which are good until the next
        decode of other streams (`kept`).
        """
        first = features is None
        if features is None:
            features = [_zeros(x_BCTHW, shape) for shape in shapes]
        latent_height = None if self.bands is None else self.bands.latent_height
        if self.graphs is not None and self.graphs.serve(features, latent_height):
            return self.graphs(x_BCTHW, features, partial(self._decode_in_place, first=first), first=first)
        return _LatentPass(self, features, len(x_BCTHW), first).decode(x_BCTHW), features

    def kept(self, features: list[Any]) -> list[Any]:
        """Features that decodes of other streams leave as they are."""
        return features if self.graphs is None else self.graphs.kept(features)

    def _decode_in_place(self, x_BCTHW: torch.Tensor, features: list[torch.Tensor], *, first: bool) -> torch.Tensor:
        return _LatentPass(self, features, len(x_BCTHW), first, in_place=True).decode(x_BCTHW)

    def forget(self) -> None:
        self._derived.clear()
        if self.graphs is not None:
            self.graphs.forget()

    def derived(self, layer: nn.Module, form: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """`form` of the layer's weight, kept."""
        if layer not in self._derived:
            weight: Any = layer.weight
            self._derived[layer] = form(weight)
            if weight.is_cuda:
                torch.cuda.current_stream(weight.device).synchronize()  # the next decode may run on another stream
        return self._derived[layer]

    def convolve(self, layer: WanCausalConv3d, frames: torch.Tensor, streams: int) -> torch.Tensor:
        """`StackFrames` for `layer` -> [N, H, W, O], without the bias."""
        rows = 0 if self.bands is not None else 1
        if not self.lies_side_by_side(layer):
            x_BCTRW = frames.unflatten(0, (streams, -1)).permute(0, 4, 1, 2, 3)
            out = functional.conv3d(x_BCTRW, layer.weight, padding=(0, rows, 1))
            return out.permute(0, 2, 3, 4, 1).flatten(0, 1).contiguous()
        return _convolved(frames, folded(layer.weight), (rows, 1))

    def lies_side_by_side(self, layer: nn.Module) -> bool:
        """At the size of latents, one frame, cuDNN's 3-D convolution is the faster one."""
        return id(layer) not in self._in_three_dimensions


class _LatentPass:
    """One latent frame on its way through the decoder. in_place: features are written to, not replaced."""

    def __init__(
        self, whole: FusedDecoder, features: list[Any], streams: int, first: bool, *, in_place: bool = False
    ) -> None:
        self.whole, self.features, self.streams, self.first = whole, features, streams, first
        self.in_place = in_place
        self.index = 0

    def decode(self, x_BCTHW: torch.Tensor) -> torch.Tensor:
        decoder = self.whole.decoder
        frames, _ = self._stacked(decoder.conv_in, Activation(_rows_last(x_BCTHW)))
        at = Activation(self.whole.convolve(decoder.conv_in, frames, self.streams), decoder.conv_in.bias)
        at = self._residual(decoder.mid_block.resnets[0], at)
        for attention, block in zip(decoder.mid_block.attentions, decoder.mid_block.resnets[1:], strict=True):
            at = self._residual(block, self._attention(attention, at))
        for level in decoder.up_blocks:
            for block in level.resnets:
                at = self._residual(block, at)
            if level.upsamplers is not None:
                at = self._upsample(level.upsamplers[0], at)
        return self._pixels(at)

    def _stacked(
        self, layer: WanCausalConv3d, at: Activation, *, want_sum: bool = False, side_by_side: bool = True, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The input of `layer` and the sum; its feature is replaced."""
        bands = self.whole.bands if layer.kernel_size[1] > 1 else None
        past_BCTHW = self.features[self.index]
        stacked = self.whole.passes.stack_frames(
            at,
            past_BCTHW.permute(0, 2, 3, 4, 1).contiguous(),
            side_by_side=side_by_side and self.whole.lies_side_by_side(layer),
            edge_rows=0 if bands is None else 1,
            want_sum=want_sum,
            **more,
        )
        if bands is not None:
            bands.fill_edges(stacked.frames)
        newest_BCTHW = stacked.newest.permute(0, 4, 1, 2, 3)
        if self.in_place:
            past_BCTHW.copy_(newest_BCTHW)
        else:
            self.features[self.index] = newest_BCTHW
        self.index += 1
        return stacked.frames, stacked.total

    def _residual(self, block: WanResidualBlock, at: Activation) -> Activation:
        frames, total = self._stacked(block.conv1, at, gamma=block.norm1.gamma.flatten(), want_sum=True)
        assert total is not None
        at = Activation(self.whole.convolve(block.conv1, frames, self.streams), block.conv1.bias)
        del frames
        frames, _ = self._stacked(block.conv2, at, gamma=block.norm2.gamma.flatten())
        del at
        x = self.whole.convolve(block.conv2, frames, self.streams)
        if isinstance(block.conv_shortcut, WanCausalConv3d):
            shortcut = block.conv_shortcut
            total = functional.linear(total, shortcut.weight.flatten(1), shortcut.bias)
        return Activation(x, block.conv2.bias, total)

    def _attention(self, layer: WanAttentionBlock, at: Activation) -> Activation:
        x_NHWC = self.whole.passes.add_up(at)
        x_BCTHW = x_NHWC.unflatten(0, (self.streams, -1)).permute(0, 4, 1, 2, 3)
        return Activation(_rows_last(layer(x_BCTHW)))

    def _upsample(self, layer: StreamedUpsample, at: Activation) -> Activation:
        x = self._doubled(layer.time_conv, at) if layer.mode == "upsample3d" else self.whole.passes.add_up(at)
        convolution: Any = layer.resample[1]
        bands, rows = self.whole.bands, 1
        if bands is not None:
            x = bands.with_neighbours(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
            rows = 0
        cells = _convolved(x, self.whole.derived(convolution, subpixel), (rows, 1))
        return Activation(cells, convolution.bias, shuffled=True)

    def _doubled(self, layer: WanCausalConv3d, at: Activation) -> torch.Tensor:
        """Two frames of each, but of a stream's first latent, which leaves the layer's zeros as they are."""
        if self.first:
            self.index += 1
            return self.whole.passes.add_up(at)
        frames, _ = self._stacked(layer, at)
        pairs = functional.linear(frames, folded(layer.weight).flatten(1), layer.bias)
        return pairs.unflatten(-1, (2, -1)).movedim(-2, 1).flatten(0, 1).contiguous()

    def _pixels(self, at: Activation) -> torch.Tensor:
        """The last convolution, to so few channels that its three taps are made beside each other and then added."""
        decoder = self.whole.decoder
        layer = decoder.conv_out
        frames, _ = self._stacked(layer, at, gamma=decoder.norm_out.gamma.flatten(), side_by_side=False)
        rows = 0 if self.whole.bands is not None else 1
        of_taps = _convolved(frames, self.whole.derived(layer, taps_as_channels), (rows, 1))
        pixels_BTHWO = sum_of_taps(of_taps.unflatten(0, (self.streams, -1)), layer.bias)
        return pixels_BTHWO.permute(0, 4, 1, 2, 3)


def _at_latent_size(decoder: Any) -> list[WanCausalConv3d]:
    """The convolutions over three frames before the first upsampling."""
    parts = [decoder.conv_in, *decoder.mid_block.modules(), *decoder.up_blocks[0].resnets.modules()]
    return [layer for layer in parts if isinstance(layer, WanCausalConv3d) and layer.kernel_size == (3, 3, 3)]


def _convolved(x_NRWC: torch.Tensor, weight: torch.Tensor, padding: tuple[int, int]) -> torch.Tensor:
    out = functional.conv2d(x_NRWC.permute(0, 3, 1, 2), weight, padding=padding)
    return out.permute(0, 2, 3, 1).contiguous()


def _rows_last(x_BCTHW: torch.Tensor) -> torch.Tensor:
    """[B, C, T, H, W] -> [B T, H, W, C], contiguous."""
    return x_BCTHW.permute(0, 2, 3, 4, 1).flatten(0, 1).contiguous()


def _zeros(like_BCTHW: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """[B, C, 2, h, w], channels-last: the zero frames before a stream's first."""
    zeros = like_BCTHW.new_zeros(len(like_BCTHW), *shape[2:], shape[1])
    return zeros.permute(0, 4, 1, 2, 3)
