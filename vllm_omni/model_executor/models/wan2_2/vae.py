# SPDX-License-Identifier: Apache-2.0
"""The autoencoders of Wan 2.1 and 2.2 for whole clips (`VideoVAE`). Latents are normalised.

The network is `StreamingWanVAE`, which streaming models also use. With tiling, and on GPUs where
`StreamingWanVAE` cannot be fused, diffusers' `AutoencoderKLWan` is used instead. `AutoencoderKLWan`
stores its feature cache in the model during a call, so calls must not overlap.
"""

# C channels, T frames, H height, W width

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from torch import nn

from vllm_omni.model_executor.layers.fast_path import FastPath
from vllm_omni.model_executor.models.wan.architecture import VAEConfig
from vllm_omni.model_executor.models.wan.vae.fused_layers import fused_vae
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE
from vllm_omni.model_executor.models.wan.vae_layers import use_cpu_layers
from vllm_omni.model_executor.models.wan2_2.checkpoint import check_vae_keys


class VideoVAE(nn.Module):
    """The autoencoder of a checkpoint.

    Args:
        values: Content of `vae/config.json`, without keys that start with an underscore.
        dtype: Dtype of weights and activations.
        tiling: Whether to process overlapping tiles.

    Raises:
        ValueError: The config contains unknown keys or is not supported.
    """

    network: Any
    """The network. Its parameters have diffusers' names."""

    def __init__(
        self, values: Mapping[str, Any], *, dtype: torch.dtype = torch.float32, tiling: bool = False
    ) -> None:
        super().__init__()
        check_vae_keys(dict(values))
        self.dtype = dtype
        config = VAEConfig.from_dict(values)
        device = torch.empty(0).device  # torch's default device, where layers are built
        fused = fused_vae(device, dtype)
        self.fast_paths: tuple[FastPath, ...] = ()
        if not tiling and (device.type == "cpu" or fused.is_on):
            self.network = StreamingWanVAE(config, dtype=dtype)
        else:
            self.fast_paths = () if tiling else (fused,)
            whole: Any = AutoencoderKLWan(**values)
            self.network = whole.to(dtype).eval().requires_grad_(False)
            use_cpu_layers(self.network)
            if tiling:
                whole.enable_tiling()
        self._mean, self._std = (
            torch.tensor(each, device="cpu").view(1, -1, 1, 1, 1)
            for each in (config.latents_mean, config.latents_std)
        )

    def clear_derived(self) -> None:
        """Discard tensors derived from weights. Call this method after loading new weights."""
        if isinstance(self.network, StreamingWanVAE):
            self.network.clear_derived()

    @torch.no_grad()
    def encode(self, pixels_1CTHW: torch.Tensor) -> torch.Tensor:
        """Encode pixels [1, 3, T, H, W] in [-1, 1] as the normalised posterior mean [z_dim, F,
        h, w], fp32.
        """
        pixels, network = pixels_1CTHW.to(self.dtype), self.network
        if isinstance(network, StreamingWanVAE):
            moments, _ = network.encode_moments(pixels, None)
            mean = moments[:, : network.config.z_dim].float()
        else:
            mean = network.encode(pixels).latent_dist.mode().float()
        return ((mean - self._mean.to(mean.device)) * (1.0 / self._std).to(mean.device))[0]

    @torch.no_grad()
    def decode(self, latents_CTHW: torch.Tensor) -> torch.Tensor:
        """Decode normalised latents [z_dim, F, h, w] to pixels [1, 3, T, H, W] in [-1, 1], in the
        VAE's dtype.
        """
        latents, network = latents_CTHW.unsqueeze(0).to(self.dtype), self.network
        mean, std = (
            self._mean.to(latents.device, self.dtype),
            (1.0 / self._std).to(latents.device, self.dtype),
        )
        raw = latents / std + mean
        if isinstance(network, StreamingWanVAE):
            return network.decode_raw(raw, None)[0]
        pixels: torch.Tensor = network.decode(raw, return_dict=False)[0]
        return pixels
