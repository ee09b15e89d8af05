# SPDX-License-Identifier: Apache-2.0
"""Layers of diffusers' Wan decoder in the form in which a stream's later latents go through them.

A stream's first latent leaves marks of another kind in diffusers' feature cache (None, a text); every later call finds
a tensor and leaves one of the same shape. Knowing that, a call needs no question that `torch.compile` cannot trace:
before torch 2.13 diffusers' comparison of a tensor with its text splits the decoder into more than a dozen graphs.
Held by tests/model_executor/models/wan/test_vae.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanResample
from torch import nn

# B streams, C channels, T frames, H rows, W columns


def cached_convolution(
    convolution: WanCausalConv3d, x_BCTHW: torch.Tensor, feat_cache: list[Any], feat_idx: list[int]
) -> torch.Tensor:
    """Convolve frames behind those of the cache, and keep the newest of both (as many as there were) for the next."""
    index = feat_idx[0]
    past = feat_cache[index]
    feat_cache[index] = torch.cat((past, x_BCTHW), dim=2)[:, :, -past.shape[2] :].clone()
    feat_idx[0] += 1
    return convolution(x_BCTHW, past)


class StreamedUpsample(WanResample):
    """Upsampling of streams in space, and in time if the mode says so. Takes over the layers of `whole`.

    Its result lies channels-last, also in a dimension of one frame, if convolutions give that (on CUDA). Of diffusers'
    own, torch would conclude otherwise and turn round all that the next convolution remembers.
    """

    def __init__(self, whole: WanResample) -> None:
        nn.Module.__init__(self)
        self.dim, self.mode = whole.dim, whole.mode
        self.resample = whole.resample
        if self.mode == "upsample3d":
            self.time_conv = whole.time_conv

    def forward(
        self, x_BCTHW: torch.Tensor, feat_cache: list[Any] | None = None, feat_idx: list[int] | None = None
    ) -> torch.Tensor:
        """[B, C, T, H, W] -> [B, C / 2, T or 2 T, 2 H, 2 W]; a stream's first latent is not upsampled in time."""
        frames = x_BCTHW.transpose(1, 2).flatten(0, 1)
        if self.mode == "upsample3d":
            if feat_cache is None or feat_idx is None or not isinstance(feat_cache[feat_idx[0]], torch.Tensor):
                return super().forward(x_BCTHW, feat_cache, feat_idx)
            pairs_B2CTHW = cached_convolution(self.time_conv, x_BCTHW, feat_cache, feat_idx).unflatten(1, (2, -1))
            frames = pairs_B2CTHW.permute(0, 3, 1, 2, 4, 5).flatten(0, 2)
        out = self.resample(frames)
        streams = len(x_BCTHW)
        # Not `unflatten` for one stream: of one frame it leaves strides that torch no longer takes for channels-last.
        return (out.unsqueeze(0) if streams == 1 else out.unflatten(0, (streams, -1))).transpose(1, 2)


def stream_upsamplers(decoder: nn.Module) -> None:
    """Replace, in place, the upsamplers of a `WanDecoder3d`."""
    replace_layers(decoder, _streamed)


def _streamed(layer: nn.Module) -> nn.Module | None:
    if isinstance(layer, WanResample) and layer.mode in ("upsample2d", "upsample3d"):
        return StreamedUpsample(layer)
    return None


def replace_layers(network: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> None:
    """Put `replacement(layer)` in the place of each layer, throughout `network`; None = it stays."""
    for parent in list(network.modules()):
        for name, layer in list(parent.named_children()):
            other = replacement(layer)
            if other is not None:
                setattr(parent, name, other)
