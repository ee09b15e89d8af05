# SPDX-License-Identifier: Apache-2.0
"""Replacements for layers of diffusers' Wan autoencoders, with the same parameters, parameter names
and results.

*Streamed* layers process every latent frame of a stream except the first. For the first latent
frame of a stream, diffusers' feature cache contains None or a string. For every later latent frame,
it contains tensors, whose shapes do not change. A streamed layer therefore does not need the
branches in diffusers' layers that `torch.compile` cannot trace. With torch releases before 2.13,
diffusers' comparison of a tensor with a string splits the decoder into more than a dozen graphs.

*CPU* layers are faster on CPUs, where torch's 3-D convolution reaches only a tenth of the speed of
its 2-D convolution. A causal convolution over three frames is computed as a 2-D convolution with
the three frames as input channels. `weight` is stored in the memory layout that the 2-D convolution
needs, so the 2-D weight is a view of `weight`, even after `weight` has been loaded or converted.
Activations are channels-last. `use_cpu_layers` must be called while the network is on a CPU. If the
network is later moved to another device, its layers use diffusers' implementation.
"""

# B streams or clips, C channels, T frames, H rows, W columns, O channels of the result

from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanCausalConv3d,
    WanResample,
    WanRMS_norm,
)
from torch import nn
from torch.nn import functional


def cached_convolution(
    convolution: WanCausalConv3d, x_BCTHW: torch.Tensor, feat_cache: list[Any], feat_idx: list[int]
) -> torch.Tensor:
    """Convolve the cached frames followed by `x_BCTHW`, and cache the last frames for the next
    call.
    """
    index = feat_idx[0]
    past = feat_cache[index]
    feat_cache[index] = torch.cat((past, x_BCTHW), dim=2)[:, :, -past.shape[2] :].clone()
    feat_idx[0] += 1
    return convolution(x_BCTHW, past)


class StreamedUpsample(WanResample):
    """Upsamples streams in space and, depending on the mode, in time. This class uses the layers of
    `whole`.

    If convolutions return channels-last tensors (on CUDA), this layer also returns channels-last
    tensors, even for a single frame. With diffusers' layer, torch would infer a different layout
    for the result and transpose the features of the next convolution.
    """

    def __init__(self, whole: WanResample) -> None:
        nn.Module.__init__(self)
        self.dim, self.mode = whole.dim, whole.mode
        self.resample = whole.resample
        if self.mode == "upsample3d":
            self.time_conv = whole.time_conv

    def forward(
        self,
        x_BCTHW: torch.Tensor,
        feat_cache: list[Any] | None = None,
        feat_idx: list[int] | None = None,
    ) -> torch.Tensor:
        """Upsample [B, C, T, H, W] to [B, O, T or 2 T, 2 H, 2 W]. O is C / 2 in Wan 2.1 and C in
        Wan 2.2. The first latent frame of a stream is not upsampled in time.
        """
        frames = x_BCTHW.transpose(1, 2).flatten(0, 1)
        if self.mode == "upsample3d":
            if (
                feat_cache is None
                or feat_idx is None
                or not isinstance(feat_cache[feat_idx[0]], torch.Tensor)
            ):
                return super().forward(x_BCTHW, feat_cache, feat_idx)
            pairs_B2CTHW = cached_convolution(
                self.time_conv, x_BCTHW, feat_cache, feat_idx
            ).unflatten(1, (2, -1))
            frames = pairs_B2CTHW.permute(0, 3, 1, 2, 4, 5).flatten(0, 2)
        out = self.resample(frames)
        streams = len(x_BCTHW)
        # For one stream, `unsqueeze` is used, because the strides that `unflatten` returns for a
        # single frame are not those of channels-last.
        return (out.unsqueeze(0) if streams == 1 else out.unflatten(0, (streams, -1))).transpose(
            1, 2
        )


def stream_upsamplers(decoder: nn.Module) -> None:
    """Replace the upsamplers of a `WanDecoder3d` with `StreamedUpsample`, in place."""
    replace_layers(decoder, _streamed)


def _streamed(layer: nn.Module) -> nn.Module | None:
    if isinstance(layer, WanResample) and layer.mode in ("upsample2d", "upsample3d"):
        return StreamedUpsample(layer)
    return None


def replace_layers(
    network: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]
) -> None:
    """Replace each layer of `network` with `replacement(layer)`, unless that result is None."""
    for parent in list(network.modules()):
        for name, layer in list(parent.named_children()):
            other = replacement(layer)
            if other is not None:
                setattr(parent, name, other)


class FoldedCausalConv3d(WanCausalConv3d):
    """A causal convolution computed as a 2-D convolution. It shares its parameters with `whole`."""

    def __init__(self, whole: WanCausalConv3d) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(whole))
        self.weight.data = fold_memory(self.weight.data)
        left, right, top, bottom, frames_before, _ = map(int, self._padding)
        assert (left, top) == (right, bottom) and self.groups == 1 and self.dilation == (1, 1, 1)
        self.frames_before, self.padding_HW = frames_before, (top, left)

    def forward(self, x_BCTHW: torch.Tensor, cache_x: torch.Tensor | None = None) -> torch.Tensor:
        if x_BCTHW.device.type != "cpu":
            return super().forward(x_BCTHW, cache_x)
        x = x_BCTHW
        missing = self.frames_before
        if cache_x is not None and missing > 0:
            x = torch.cat((cache_x, x), dim=2)
            missing -= cache_x.shape[2]
        if missing > 0:
            x = functional.pad(x, (0, 0, 0, 0, missing, 0))
        taps, step = self.kernel_size[0], self.stride[0]
        if taps > 1 or step > 1:
            last = (x.shape[2] - taps) // step * step
            x = torch.cat([x[:, :, tap : tap + last + 1 : step] for tap in range(taps)], dim=1)
        frames = x.transpose(1, 2)
        out = functional.conv2d(
            frames.flatten(0, 1), folded(self.weight), self.bias, self.stride[1:], self.padding_HW
        )
        # For one clip, `unsqueeze` is used, because the strides that `unflatten` returns for a
        # single frame are not those of channels-last.
        clips = out.unsqueeze(0) if len(frames) == 1 else out.unflatten(0, frames.shape[:2])
        return clips.transpose(1, 2)


class CPURMSNorm(WanRMS_norm):
    """Normalisation over channels with little memory traffic for fp32 tensors on a CPU. The layer
    shares its parameters with `whole`. For other tensors, it uses diffusers' implementation.
    """

    def __init__(self, whole: WanRMS_norm) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(whole))
        assert self.channel_first and not isinstance(self.bias, nn.Parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32 or x.device.type != "cpu":
            return super().forward(x)
        channels = x.shape[1]
        x_C = x.movedim(1, -1)
        # The mean is computed as a matrix-vector product, because torch's sum over few channels is
        # slower.
        squares = torch.mv(
            x_C.square().reshape(-1, channels), x.new_full((channels,), 1 / channels)
        )
        scale = squares.add_(_TINY).rsqrt_().view(*x_C.shape[:-1], 1)
        return (x_C * scale).mul_(self.gamma.flatten()).movedim(-1, 1)


_TINY = 1e-30
"""Small number that avoids a division by zero, so that zeros are normalised to zero."""


def use_cpu_layers(network: Any) -> None:
    """Replace, in place, layers that are slow on a CPU. Parameters keep their names, values and
    identity.

    Args:
        network: A Wan encoder, decoder or autoencoder. It is left unchanged if any of its
            parameters is not on a CPU.
    """
    if any(parameter.device.type != "cpu" for parameter in network.parameters()):
        return
    replace_layers(network, _cpu_layer)
    for layer in network.modules():
        if isinstance(layer, nn.SiLU):
            # The activation follows a norm whose result nothing else reads, so it can run in place.
            layer.inplace = True
        elif isinstance(layer, nn.Conv2d):
            layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)


def _cpu_layer(layer: nn.Module) -> nn.Module | None:
    if type(layer) is WanCausalConv3d:
        return FoldedCausalConv3d(layer)
    return CPURMSNorm(layer) if type(layer) is WanRMS_norm else None


def fold_memory(weight_OCTHW: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its memory in the order O, H, W, T, C, which is channels-last for the
    2-D convolution.
    """
    return weight_OCTHW.permute(0, 3, 4, 2, 1).contiguous().permute(0, 4, 3, 1, 2)


def folded(weight_OCTHW: torch.Tensor) -> torch.Tensor:
    """Return the weight as a tensor [O, T C, H, W]. The returned tensor is a view if the weight's
    memory has the order of `fold_memory`; otherwise, it is a copy.
    """
    return weight_OCTHW.transpose(1, 2).flatten(1, 2)
