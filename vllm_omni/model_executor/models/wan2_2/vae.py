# SPDX-License-Identifier: Apache-2.0
"""`VideoVAE`: diffusers' `AutoencoderKLWan` (2.1's and 2.2's) with normalised latents as input and
output.

The network stores its feature cache internally between the frames of one call and then clears it,
so calls must not overlap.
"""

# C channels, T frames, H height, W width

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from torch import nn

from vllm_omni.model_executor.models.wan.vae_layers import use_cpu_layers
from vllm_omni.model_executor.models.wan2_2.checkpoint import check_vae_keys


class VideoVAE(nn.Module):
    """The autoencoder of a checkpoint.

    `values` is `vae/config.json` without keys that start with an underscore. `tiling` processes
    overlapping tiles. Raises ValueError.
    """

    def __init__(
        self, values: Mapping[str, Any], *, dtype: torch.dtype = torch.float32, tiling: bool = False
    ) -> None:
        super().__init__()
        check_vae_keys(dict(values))
        self.dtype = dtype
        network: Any = AutoencoderKLWan(**values)
        self.network = network.to(dtype).eval().requires_grad_(False)
        use_cpu_layers(self.network)
        if tiling:
            self.network.enable_tiling()
        statistics = (self.network.config.latents_mean, self.network.config.latents_std)
        self._mean, self._std = (
            torch.tensor(each, device="cpu").view(1, -1, 1, 1, 1) for each in statistics
        )

    @torch.no_grad()
    def encode(self, pixels_1CTHW: torch.Tensor) -> torch.Tensor:
        """Encode [1, 3, T, H, W] in [-1, 1] to the normalised posterior mean [z_dim, F, h, w],
        fp32."""
        mean = self.network.encode(pixels_1CTHW.to(self.dtype)).latent_dist.mode().float()
        return ((mean - self._mean.to(mean.device)) * (1.0 / self._std).to(mean.device))[0]

    @torch.no_grad()
    def decode(self, latents_CTHW: torch.Tensor) -> torch.Tensor:
        """Decode normalised latents [z_dim, F, h, w] to pixels [1, 3, T, H, W] in [-1, 1], in the
        VAE's dtype."""
        latents = latents_CTHW.unsqueeze(0).to(self.dtype)
        mean, std = (
            self._mean.to(latents.device, self.dtype),
            (1.0 / self._std).to(latents.device, self.dtype),
        )
        return self.network.decode(latents / std + mean, return_dict=False)[0]
