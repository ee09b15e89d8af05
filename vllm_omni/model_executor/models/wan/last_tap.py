# SPDX-License-Identifier: Apache-2.0
"""Causal convolutions of diffusers' Wan autoencoder for one frame: an image, or the first frame of
a clip.

The frames before the first one are zeros, so only the kernel's last temporal tap contributes, and
the convolution can run in 2-D with a third of the multiplications. The parameters, their names and
the computed sums are the same as those of the 3-D convolution.
"""

# B clips, C channels, T frames, H rows, W columns

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d
from torch import nn
from torch.nn import functional

from vllm_omni.model_executor.models.wan.vae_layers import replace_layers


class LastTapConv3d(WanCausalConv3d):
    """A causal convolution that has a 2-D path for single frames. It shares its parameters with
    `whole`.
    """

    def __init__(self, whole: WanCausalConv3d) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(whole))

    def forward(self, x_BCTHW: torch.Tensor, cache_x: torch.Tensor | None = None) -> torch.Tensor:
        columns, _, rows, _, frames_before, _ = map(int, self._padding)
        is_whole = frames_before == self.kernel_size[0] - 1 and self.stride[0] == 1
        if cache_x is not None or x_BCTHW.shape[2] != 1 or not is_whole:
            return super().forward(x_BCTHW, cache_x)
        last = self.weight[:, :, -1].contiguous(memory_format=torch.channels_last)
        out = functional.conv2d(x_BCTHW[:, :, 0], last, self.bias, self.stride[1:], (rows, columns))
        return out.unsqueeze(2)


def use_last_taps(network: nn.Module) -> None:
    """Replace diffusers' causal convolutions in `network` with `LastTapConv3d`, in place."""
    replace_layers(
        network, lambda layer: LastTapConv3d(layer) if type(layer) is WanCausalConv3d else None
    )
