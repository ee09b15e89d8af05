# SPDX-License-Identifier: Apache-2.0
"""Parts of a fused Wan encoder and decoder: convolutions laid out for 2-D kernels, and one pass before each of them.

The same sums as diffusers' layers in another order (`stacked_frames.py` says how), on the same parameters and the same
feature cache: a stream may go on here that began in the plain network, and the other way round. Nothing is compiled.

Held by tests/model_executor/models/wan/test_fused_decoder.py and test_fused_encoder.py there.
"""

# B streams, T frames, N = B T, H rows, W columns, R rows with edges, C channels; activations are [N, H, W, C] in memory

from collections.abc import Callable, Iterable
from dataclasses import dataclass
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

from vllm_omni.model_executor.models.wan.split_decode import RowBands
from vllm_omni.model_executor.models.wan.stacked_frames import Activation, StackFrames, fold_memory, folded


@dataclass(frozen=True)
class Passes:
    """The two passes beside convolutions, from `stack_kernels.py` or, as a reference, `stacked_frames.py`."""

    stack_frames: StackFrames
    add_up: Callable[[Activation], torch.Tensor]


def fastest_passes(weight: torch.Tensor) -> Passes | None:
    """The kernels for a network with such weights; None on a CPU, on an old GPU, in fp32 and without Triton."""
    if not (HAS_TRITON and weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16)):
        return None
    if torch.version.cuda is not None and torch.cuda.get_device_capability(weight.device) < (8, 0):
        return None
    from vllm_omni.model_executor.models.wan import stack_kernels

    return Passes(stack_kernels.stack_frames, stack_kernels.add_up)


class FusedLayers:
    """Lays the weights of a network's convolutions over three frames out in place, and convolves with them.

    in_three_dimensions: parts whose convolutions stay 3-D, since cuDNN's is the faster one there: they see one frame of
    latent size at a time, or few channels.
    """

    def __init__(
        self, network: nn.Module, in_three_dimensions: Iterable[nn.Module], bands: RowBands | None, passes: Passes
    ) -> None:
        self.bands, self.passes = bands, passes
        solid = (layer for part in in_three_dimensions for layer in part.modules())
        self._in_three_dimensions = {
            id(layer) for layer in solid if isinstance(layer, WanCausalConv3d) and layer.kernel_size == (3, 3, 3)
        }
        for layer in network.modules():
            if isinstance(layer, WanCausalConv3d) and self.lies_side_by_side(layer):
                layer.weight.data = fold_memory(layer.weight.data)

    def convolve(self, layer: WanCausalConv3d, frames: torch.Tensor, streams: int) -> torch.Tensor:
        """`StackFrames` for `layer` -> [N, H, W, O], without the bias."""
        rows = 0 if self.bands is not None else 1
        if not self.lies_side_by_side(layer):
            return rows_last(functional.conv3d(by_streams(frames, streams), layer.weight, padding=(0, rows, 1)))
        return convolved(frames, folded(layer.weight), (rows, 1))

    def lies_side_by_side(self, layer: nn.Module) -> bool:
        return id(layer) not in self._in_three_dimensions


class FramesPass:
    """Frames of some streams on their way through a network. features: replaced in the list; in_place: written to."""

    def __init__(self, layers: FusedLayers, features: list[Any], streams: int, *, in_place: bool = False) -> None:
        self.layers, self.features, self.streams, self.in_place = layers, features, streams, in_place
        self.index = 0
        """Of the next layer's feature."""

    def stacked(
        self, layer: WanCausalConv3d, at: Activation, *, want_sum: bool = False, side_by_side: bool = True, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The input of `layer` and the sum; its feature is replaced."""
        bands = self.layers.bands if layer.kernel_size[1] > 1 else None
        past_BCTHW = self.features[self.index]
        stacked = self.layers.passes.stack_frames(
            at,
            past_BCTHW.permute(0, 2, 3, 4, 1).contiguous(),
            side_by_side=side_by_side and self.layers.lies_side_by_side(layer),
            edge_rows=0 if bands is None else 1,
            want_sum=want_sum,
            **more,
        )
        if bands is not None:
            bands.fill_edges(stacked.frames)
        self.keep(stacked.newest.permute(0, 4, 1, 2, 3))
        return stacked.frames, stacked.total

    def keep(self, newest_BCTHW: torch.Tensor) -> None:
        """Replace the next feature."""
        if self.in_place:
            self.features[self.index].copy_(newest_BCTHW)
        else:
            self.features[self.index] = newest_BCTHW
        self.index += 1

    def convolve(self, layer: WanCausalConv3d, at: Activation, **more: Any) -> Activation:
        """`layer` behind its pass, of which only the convolution's input is wanted."""
        frames, _ = self.stacked(layer, at, **more)
        return Activation(self.layers.convolve(layer, frames, self.streams), layer.bias)

    def residual(self, block: WanResidualBlock, at: Activation) -> Activation:
        frames, total = self.stacked(block.conv1, at, gamma=block.norm1.gamma.flatten(), want_sum=True)
        assert total is not None
        at = Activation(self.layers.convolve(block.conv1, frames, self.streams), block.conv1.bias)
        del frames
        frames, _ = self.stacked(block.conv2, at, gamma=block.norm2.gamma.flatten())
        del at
        x = self.layers.convolve(block.conv2, frames, self.streams)
        if isinstance(block.conv_shortcut, WanCausalConv3d):
            shortcut = block.conv_shortcut
            total = functional.linear(total, shortcut.weight.flatten(1), shortcut.bias)
        return Activation(x, block.conv2.bias, total)

    def middle(self, mid_block: Any, at: Activation) -> Activation:
        """mid_block: diffusers' of an encoder or a decoder."""
        at = self.residual(mid_block.resnets[0], at)
        for attention, block in zip(mid_block.attentions, mid_block.resnets[1:], strict=True):
            at = self.residual(block, self._attention(attention, at))
        return at

    def _attention(self, layer: WanAttentionBlock, at: Activation) -> Activation:
        x_BCTHW = by_streams(self.layers.passes.add_up(at), self.streams)
        return Activation(rows_last(layer(x_BCTHW)))


def convolved(x_NRWC: torch.Tensor, weight: torch.Tensor, padding: tuple[int, int]) -> torch.Tensor:
    out = functional.conv2d(x_NRWC.permute(0, 3, 1, 2), weight, padding=padding)
    return out.permute(0, 2, 3, 1).contiguous()


def rows_last(x_BCTHW: torch.Tensor) -> torch.Tensor:
    """[B, C, T, H, W] -> [B T, H, W, C], contiguous."""
    return x_BCTHW.permute(0, 2, 3, 4, 1).flatten(0, 1).contiguous()


def by_streams(x_NHWC: torch.Tensor, streams: int) -> torch.Tensor:
    """[B T, H, W, C] -> [B, C, T, H, W], a view."""
    return x_NHWC.unflatten(0, (streams, -1)).permute(0, 4, 1, 2, 3)


def zero_features(x_BCTHW: torch.Tensor, shapes: Iterable[tuple[int, ...]]) -> list[Any]:
    """[B, C, 1 or 2, h, w] each, channels-last: of the zero frames before the first of streams. shapes: of one's."""
    of_each = (x_BCTHW.new_zeros(len(x_BCTHW), *shape[2:], shape[1]) for shape in shapes)
    return [zeros.permute(0, 4, 1, 2, 3) for zeros in of_each]
