# SPDX-License-Identifier: Apache-2.0
"""Layers of the fused Wan encoder and decoder: convolutions in the memory layout of 2-D kernels,
and a single pass over memory before each convolution.

The layers compute the same sums as diffusers' layers, in a different order (see
`stacked_frames.py`). They use the same parameters and the same feature cache as the plain network,
so a stream can switch between the two. Nothing is compiled.
"""

# B streams, T frames, N = B T, H rows, W columns, R rows with edges, C channels; activations are
# [N, H, W, C] in memory

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanAttentionBlock,
    WanCausalConv3d,
    WanResidualBlock,
)
from torch import nn
from torch.nn import functional

from vllm_omni.model_executor.layers.fast_path import (
    FastPath,
    Lack,
    lacks_capability,
    lacks_gpu,
    lacks_half,
    lacks_triton,
)
from vllm_omni.model_executor.models.wan.vae.split_decode import RowBands
from vllm_omni.model_executor.models.wan.vae.stacked_frames import (
    FrameLayout,
    PendingSum,
    StackFrames,
)
from vllm_omni.model_executor.models.wan.vae.winograd import OF_FRAMES
from vllm_omni.model_executor.models.wan.vae_layers import fold_memory


@dataclass(frozen=True)
class FusedPasses:
    """Implementation of the two passes between convolutions: the kernels in `stack_kernels.py`, or
    the reference in `stacked_frames.py`.
    """

    stack_frames: StackFrames
    """Function that implements `StackFrames`."""
    add_up: Callable[[PendingSum], torch.Tensor]
    """Function that computes the sum of a `PendingSum`."""


def fused_vae(device: torch.device, dtype: torch.dtype) -> FastPath:
    """Return whether the fused implementation is used for a network with weights of this dtype on
    this device. It is not used on CPUs or old GPUs, in fp32, or without Triton.
    """
    lack = lacks_gpu(device) or lacks_half(dtype, "omni.model.vae_dtype") or lacks_triton()
    is_nvidia = torch.version.cuda is not None
    lack = lack or (lacks_capability(device, (8, 0)) if is_nvidia else Lack())
    return lack.of("fused_vae", "diffusers' Wan autoencoder")


def fastest_passes(weight: torch.Tensor) -> FusedPasses | None:
    """Return the kernels for a network whose weights have the device and dtype of `weight`, or None
    if the fused implementation is not used for such a network (`fused_vae`).
    """
    if not fused_vae(weight.device, weight.dtype).is_on:
        return None
    from vllm_omni.model_executor.models.wan.vae import stack_kernels

    return FusedPasses(stack_kernels.stack_frames, stack_kernels.add_up)


_CHANNEL_STEP = 8
"""Frames of other layers than `FrameLayout.COMBINED` are padded to a multiple of this number of
channels, because cuDNN's kernels for tensor cores support no other number. Without padding, the
first convolution of the encoder, which has 3 input channels, would not use tensor cores.
"""


def padded_inputs(weight_OCTHW: torch.Tensor) -> torch.Tensor:
    """Pad a convolution's weight with zeros to a multiple of `_CHANNEL_STEP` input channels. The
    result is channels-last.
    """
    missing = -weight_OCTHW.shape[1] % _CHANNEL_STEP
    padded = functional.pad(weight_OCTHW, (0, 0, 0, 0, 0, 0, 0, missing))
    return padded.contiguous(memory_format=torch.channels_last_3d)


class FusedLayers:
    """Computes a network's convolutions over three frames as 2-D convolutions where 2-D is faster.

    Weights derived from the network's weights are cached. Call `clear_derived` after new weights
    have been loaded.

    Args:
        network: The encoder or decoder.
        frames: The network's modules, each with the number of frames that its convolutions process
            for each latent frame after the first. If this number is in `OF_FRAMES`, the
            convolutions combine frames (Winograd). All other convolutions remain 3-D, because cuDNN
            is faster for them: their frames are small or have few channels.
        bands: This rank's band of rows. None if the rank decodes whole frames.
        passes: Implementation of the two passes between convolutions.
    """

    def __init__(
        self,
        network: nn.Module,
        frames: Iterable[tuple[nn.Module, int]],
        bands: RowBands | None,
        passes: FusedPasses,
    ) -> None:
        self.bands, self.passes = bands, passes
        self._combining = {
            layer: OF_FRAMES[count]
            for part, count in frames
            for layer in part.modules()
            if count in OF_FRAMES
            and isinstance(layer, WanCausalConv3d)
            and layer.kernel_size == (3, 3, 3)
        }
        self._derived: dict[Hashable, torch.Tensor] = {}
        for layer in network.modules():
            if (
                isinstance(layer, WanCausalConv3d)
                and self.layout(layer) is FrameLayout.SIDE_BY_SIDE
            ):
                layer.weight.data = fold_memory(layer.weight.data)

    def layout(self, layer: WanCausalConv3d) -> FrameLayout:
        """Return the layout of the input frames of `layer`, except for a stream's first frame."""
        if layer in self._combining:
            return FrameLayout.COMBINED
        return FrameLayout.IN_TURN if layer.kernel_size == (3, 3, 3) else FrameLayout.SIDE_BY_SIDE

    def convolve(
        self, layer: WanCausalConv3d, frames: torch.Tensor, layout: FrameLayout, streams: int
    ) -> PendingSum:
        """Apply `layer` to `StackedFrames.frames`. `layout` is the result of `self.layout` or
        `ALONE`.
        """
        rows = 0 if self.bands is not None else 1
        if layout is FrameLayout.COMBINED:
            x = convolved_each(
                frames, self.derived(layer, self._combining[layer].transformed), (rows, 1)
            )
            return PendingSum(x, layer.bias, products=True)
        weight = layer.weight
        if missing := -frames.shape[-1] % _CHANNEL_STEP:
            frames = functional.pad(frames, (0, missing))
            weight = self.derived(layer, padded_inputs)
        if layout is FrameLayout.ALONE:
            last = weight[:, :, -1].contiguous(memory_format=torch.channels_last)
            return PendingSum(convolved(frames, last, (rows, 1)), layer.bias)
        x_BCTHW = functional.conv3d(by_streams(frames, streams), weight, padding=(0, rows, 1))
        return PendingSum(rows_last(x_BCTHW), layer.bias)

    def derived(
        self, layer: nn.Module, form: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Apply `form` to the layer's weight, and cache the result."""
        key = layer, form
        if key not in self._derived:
            weight: Any = layer.weight
            self._derived[key] = form(weight)
            if weight.is_cuda:
                # Synchronise, because the next decode may run on a different CUDA stream.
                torch.cuda.current_stream(weight.device).synchronize()
        return self._derived[key]

    def derive(self) -> None:
        """Compute the weights for combined frames in advance, because they must exist before a
        graph is captured.
        """
        for layer, winograd in self._combining.items():
            self.derived(layer, winograd.transformed)

    def clear_derived(self) -> None:
        self._derived.clear()


class FramesPass:
    """One pass of several streams' frames through a network.

    Args:
        layers: The network's layers.
        features: Feature cache. The pass replaces the entries in this list. None: the frames are
            the only frames of their streams.
        streams: Number of streams.
        first: Whether these are the first frames of the streams.
        in_place: Whether to overwrite the feature tensors instead of replacing them.
    """

    def __init__(
        self,
        layers: FusedLayers,
        features: list[Any] | None,
        streams: int,
        *,
        first: bool,
        in_place: bool = False,
    ) -> None:
        assert first or features is not None, "only first frames have no past"
        self.layers, self.features, self.streams = layers, features, streams
        self.first, self.in_place = first, in_place
        self.index = 0
        """Index of the feature that the next layer uses."""

    def stacked(
        self,
        layer: WanCausalConv3d,
        at: PendingSum,
        layout: FrameLayout,
        *,
        want_sum: bool = False,
        **more: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the input of `layer` and, if `want_sum` is true, the sum. This call replaces the
        layer's feature.
        """
        bands = self.layers.bands if layer.kernel_size[1] > 1 else None
        past_BTHWC: torch.Tensor
        if self.features is None:  # the past of first frames is not read
            shape = self.streams, 2, *at.size, layer.in_channels
            past_BTHWC = at.x.new_empty(1, dtype=at.dtype).expand(shape)
        else:
            past_BTHWC = self.features[self.index].permute(0, 2, 3, 4, 1)
        stacked = self.layers.passes.stack_frames(
            at,
            past_BTHWC if layout is FrameLayout.ALONE else past_BTHWC.contiguous(),
            layout=layout,
            edge_rows=0 if bands is None else 1,
            want_sum=want_sum,
            want_newest=self.features is not None,
            **more,
        )
        if bands is not None:
            bands.fill_edges(stacked.frames.flatten(0, -4))
        if stacked.newest is not None:
            self.store_feature(stacked.newest.permute(0, 4, 1, 2, 3))
        return stacked.frames, stacked.total

    def store_feature(self, newest_BCTHW: torch.Tensor) -> None:
        """Replace the feature at `index`, and advance `index`."""
        assert self.features is not None
        if self.in_place:
            self.features[self.index].copy_(newest_BCTHW)
        else:
            self.features[self.index] = newest_BCTHW
        self.index += 1

    def convolve(
        self, layer: WanCausalConv3d, at: PendingSum, *, want_sum: bool = False, **more: Any
    ) -> tuple[PendingSum, torch.Tensor | None]:
        """Run the pass before `layer`, then apply `layer`. Return the result and, if `want_sum` is
        true, the sum that the pass computed.
        """
        layout = FrameLayout.ALONE if self.first else self.layers.layout(layer)
        frames, total = self.stacked(layer, at, layout, want_sum=want_sum, **more)
        return self.layers.convolve(layer, frames, layout, self.streams), total

    def residual(self, block: WanResidualBlock, at: PendingSum) -> PendingSum:
        return self.residuals([block], at)[0]

    def residuals(
        self, blocks: Iterable[WanResidualBlock], at: PendingSum
    ) -> tuple[PendingSum, torch.Tensor]:
        """Run residual blocks. Return their result, and the first block's input as a tensor."""
        first: torch.Tensor | None = None
        for block in blocks:
            gamma1, gamma2 = block.norm1.gamma.flatten(), block.norm2.gamma.flatten()
            at, total = self.convolve(block.conv1, at, gamma=gamma1, want_sum=True)
            assert total is not None
            first = total if first is None else first
            at, _ = self.convolve(block.conv2, at, gamma=gamma2)
            if isinstance(block.conv_shortcut, WanCausalConv3d):
                shortcut = block.conv_shortcut
                total = functional.linear(total, shortcut.weight.flatten(1), shortcut.bias)
            at = replace(at, residual=total)
        assert first is not None, "a level has residual blocks"
        return at, first

    def middle(self, mid_block: Any, at: PendingSum) -> PendingSum:
        """Run the middle block of diffusers' encoder or decoder."""
        at = self.residual(mid_block.resnets[0], at)
        for attention, block in zip(mid_block.attentions, mid_block.resnets[1:], strict=True):
            at = self.residual(block, self._attention(attention, at))
        return at

    def _attention(self, layer: WanAttentionBlock, at: PendingSum) -> PendingSum:
        x_BCTHW = by_streams(self.layers.passes.add_up(at), self.streams)
        return PendingSum(rows_last(layer(x_BCTHW)))


def convolved(x_NRWC: torch.Tensor, weight: torch.Tensor, padding: tuple[int, int]) -> torch.Tensor:
    out = functional.conv2d(x_NRWC.permute(0, 3, 1, 2), weight, padding=padding)
    return out.permute(0, 2, 3, 1).contiguous()


def convolved_each(
    x_JBRWC: torch.Tensor, weight_JOCHW: torch.Tensor, padding: tuple[int, int]
) -> torch.Tensor:
    """Convolve a tensor [J, B, R, W, C] with a separate weight for each index J, and return one
    tensor [J, B, H, W, O].
    """
    streams, rows, width = x_JBRWC.shape[1:4]
    shape = (
        len(x_JBRWC),
        streams,
        rows + 2 * padding[0] - 2,
        width + 2 * padding[1] - 2,
        weight_JOCHW.shape[1],
    )
    out_JBHWO = x_JBRWC.new_empty(shape)
    for x_BRWC, weight, out_BHWO in zip(x_JBRWC, weight_JOCHW, out_JBHWO, strict=True):
        x, out = x_BRWC.permute(0, 3, 1, 2), out_BHWO.permute(0, 3, 1, 2)
        if x.is_cuda and torch.version.cuda is not None:
            cudnn = torch.backends.cudnn
            flags = (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32)
            torch.cudnn_convolution(x, weight, padding, (1, 1), (1, 1), 1, *flags, out=out)
        else:
            out.copy_(functional.conv2d(x, weight, padding=padding))
    return out_JBHWO


def rows_last(x_BCTHW: torch.Tensor) -> torch.Tensor:
    """Rearrange a tensor [B, C, T, H, W] to a contiguous tensor [B T, H, W, C]."""
    return x_BCTHW.permute(0, 2, 3, 4, 1).flatten(0, 1).contiguous()


def by_streams(x_NHWC: torch.Tensor, streams: int) -> torch.Tensor:
    """Return a view [B, C, T, H, W] of a tensor [B T, H, W, C]."""
    return x_NHWC.unflatten(0, (streams, -1)).permute(0, 4, 1, 2, 3)


def zero_features(x_BCTHW: torch.Tensor, shapes: Iterable[tuple[int, ...]]) -> list[Any]:
    """Return the zero features that streams start with, each [B, C, 1 or 2, h, w] and
    channels-last. `shapes` are the shapes of one stream's features.
    """
    of_each = (x_BCTHW.new_zeros(len(x_BCTHW), *shape[2:], shape[1]) for shape in shapes)
    return [zeros.permute(0, 4, 1, 2, 3) for zeros in of_each]
