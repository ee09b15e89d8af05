# SPDX-License-Identifier: Apache-2.0
"""`VideoVAE`: diffusers' `AutoencoderKLWan` with normalised latents at both doors; 2.1's and 2.2's.

The network keeps its feature cache inside between frames of one call and clears it, so calls must not overlap.
Held by tests/model_executor/models/wan2_2/test_wan22_parity.py.
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
    """values: `vae/config.json` without its underscored keys. tiling: work in overlapping tiles. Raises ValueError."""

    def __init__(self, values: Mapping[str, Any], *, dtype: torch.dtype = torch.float32, tiling: bool = False) -> None:
        super().__init__()
        check_vae_keys(dict(values))
        self.dtype = dtype
        network: Any = AutoencoderKLWan(**values)
        self.network = network.to(dtype).eval().requires_grad_(False)
        use_cpu_layers(self.network)
        if tiling:
            self.network.enable_tiling()
        statistics = (self.network.config.latents_mean, self.network.config.latents_std)
        self._mean, self._std = (torch.tensor(each, device="cpu").view(1, -1, 1, 1, 1) for each in statistics)

    @torch.no_grad()
    def encode(self, pixels_1CTHW: torch.Tensor) -> torch.Tensor:
        """[1, 3, T, H, W] in [-1, 1] -> the normalised posterior mean [z_dim, F, h, w], fp32."""
        mean = self.network.encode(pixels_1CTHW.to(self.dtype)).latent_dist.mode().float()
        return ((mean - self._mean.to(mean.device)) * (1.0 / self._std).to(mean.device))[0]

    @torch.no_grad()
    def decode(self, latents_CTHW: torch.Tensor) -> torch.Tensor:
        """Normalised latents [z_dim, F, h, w] -> pixels [1, 3, T, H, W] in [-1, 1], in the VAE's type."""
        latents = latents_CTHW.unsqueeze(0).to(self.dtype)
        mean, std = self._mean.to(latents.device, self.dtype), (1.0 / self._std).to(latents.device, self.dtype)
        return self.network.decode(latents / std + mean, return_dict=False)[0]
