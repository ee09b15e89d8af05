# SPDX-License-Identifier: Apache-2.0
"""`LanceWanVAE`: the Wan 2.2 autoencoder (48 channels, 16x16x4) for single images and whole clips.

The network is diffusers' `AutoencoderKLWan`. This module owns its architecture, the names in Wan's
own file, and normalisation. Input and output latents are normalised fp32 [B, C, T, h, w]. T latent
frames stand for 4 T - 3 video frames.
"""

# B clips, C channels, T frames, H height, W width

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify
from torch import nn

from vllm_omni.model_executor.dtypes import default_dtype
from vllm_omni.model_executor.models.lance.config import (
    FRAMES_PER_LATENT,
    LATENT_CHANNELS,
    PIXELS_PER_LATENT,
)
from vllm_omni.model_executor.models.wan.checkpoint.component_names import VAE_COMMON_RULES
from vllm_omni.model_executor.models.wan.last_tap import use_last_taps
from vllm_omni.model_executor.models.wan.vae_layers import use_cpu_layers

_MEAN = (
    -0.2289,
    -0.0052,
    -0.1323,
    -0.2339,
    -0.2799,
    0.0174,
    0.1838,
    0.1557,
    -0.1382,
    0.0542,
    0.2813,
    0.0891,
    0.1570,
    -0.0098,
    0.0375,
    -0.1825,
    -0.2246,
    -0.1207,
    -0.0698,
    0.5109,
    0.2665,
    -0.2108,
    -0.2158,
    0.2502,
    -0.2055,
    -0.0322,
    0.1109,
    0.1567,
    -0.0729,
    0.0899,
    -0.2799,
    -0.1230,
    -0.0313,
    -0.1649,
    0.0117,
    0.0723,
    -0.2839,
    -0.2083,
    -0.0520,
    0.3748,
    0.0152,
    0.1957,
    0.1433,
    -0.2944,
    0.3573,
    -0.0548,
    -0.1681,
    -0.0667,
)
_STD = (
    0.4765,
    1.0364,
    0.4514,
    1.1677,
    0.5313,
    0.4990,
    0.4818,
    0.5013,
    0.8158,
    1.0344,
    0.5894,
    1.0901,
    0.6885,
    0.6165,
    0.8454,
    0.4978,
    0.5759,
    0.3523,
    0.7135,
    0.6804,
    0.5833,
    1.4146,
    0.8986,
    0.5659,
    0.7069,
    0.5338,
    0.4889,
    0.4917,
    0.4069,
    0.4999,
    0.6866,
    0.4093,
    0.5709,
    0.6065,
    0.6415,
    0.4944,
    0.5726,
    1.2042,
    0.5458,
    1.6887,
    0.3971,
    1.0600,
    0.3943,
    0.5537,
    0.5444,
    0.4089,
    0.7468,
    0.7744,
)


VAE_RULES = (
    *VAE_COMMON_RULES,
    (
        r"\.downsamples\.(\d+)\.downsamples\.\d+\.(resample|time_conv)\.",
        r".down_blocks.\1.downsampler.\2.",
    ),
    (r"\.downsamples\.(\d+)\.downsamples\.(\d+)\.", r".down_blocks.\1.resnets.\2."),
    (r"\.upsamples\.(\d+)\.upsamples\.\d+\.(resample|time_conv)\.", r".up_blocks.\1.upsampler.\2."),
    (r"\.upsamples\.(\d+)\.upsamples\.(\d+)\.", r".up_blocks.\1.resnets.\2."),
)
"""Wan 2.2's own names -> diffusers `AutoencoderKLWan`."""


@dataclass(frozen=True)
class LanceVAEConfig:
    """Architecture of the autoencoder. The defaults are those of Wan 2.2."""

    base_dim: int = 160
    """First width of the encoder."""
    decoder_base_dim: int = 256
    """Last width of the decoder."""
    z_dim: int = LATENT_CHANNELS
    """Latent channels."""
    latents_mean: tuple[float, ...] = _MEAN
    """Mean of each latent channel, for normalisation."""
    latents_std: tuple[float, ...] = _STD
    """Standard deviation of each latent channel, for normalisation."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "LanceVAEConfig":
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }

    def diffusers_config(self) -> dict[str, Any]:
        return {
            "base_dim": self.base_dim,
            "decoder_base_dim": self.decoder_base_dim,
            "z_dim": self.z_dim,
            "dim_mult": [1, 2, 4, 4],
            "num_res_blocks": 2,
            "attn_scales": [],
            "temperal_downsample": [False, True, True],
            "latents_mean": list(self.latents_mean),
            "latents_std": list(self.latents_std),
            "is_residual": True,
            "in_channels": 12,
            "out_channels": 12,
            "patch_size": 2,
            "scale_factor_temporal": FRAMES_PER_LATENT,
            "scale_factor_spatial": PIXELS_PER_LATENT,
        }


class LanceWanVAE(nn.Module):
    """The Wan 2.2 autoencoder. See the module docstring. `dtype` is that of weights and
    activations."""

    z_channels = LATENT_CHANNELS

    latents_mean: torch.Tensor
    latents_std: torch.Tensor

    def __init__(self, config: LanceVAEConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        with default_dtype(dtype):
            self.vae: Any = AutoencoderKLWan(**config.diffusers_config())
        use_cpu_layers(cast(nn.Module, self.vae))
        use_last_taps(cast(nn.Module, self.vae))
        for name, values in (
            ("latents_mean", config.latents_mean),
            ("latents_std", config.latents_std),
        ):
            self.register_buffer(
                name,
                torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1, 1),
                persistent=False,
            )
        self.requires_grad_(False)
        self.eval()

    @torch.no_grad()
    def encode_video(
        self, pixels_BCTHW: torch.Tensor, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        """Pixels [B, 3, T, H, W] in [-1, 1] -> normalised latents [B, C, 1 + (T-1)//4, H/16, W/16],
        fp32.

        generator: None = the posterior's mean; otherwise a sample around it, as the original draws
        it: the noise is scaled with the raw deviation, not the normalised one.
        """
        mean, log_var = self.posterior(pixels_BCTHW)
        if generator is None:
            return mean
        noise = torch.randn(mean.shape, generator=generator, dtype=torch.float32).to(mean.device)
        return mean + torch.exp(log_var / 2) * noise

    def posterior(self, pixels_BCTHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (normalised mean, log-variance), fp32."""
        _, _, frames, height, width = pixels_BCTHW.shape
        if frames < 1 or height % PIXELS_PER_LATENT or width % PIXELS_PER_LATENT:
            raise ValueError(
                "a video must have frames, and sides that are multiples of "
                f"{PIXELS_PER_LATENT}, got {frames} frames of {height}x{width}"
            )
        used = 1 + FRAMES_PER_LATENT * ((frames - 1) // FRAMES_PER_LATENT)
        moments = self.vae.encode(pixels_BCTHW[:, :, :used].to(self.dtype), return_dict=False)[
            0
        ].parameters
        mean, log_var = moments.float().chunk(2, dim=1)
        return (mean - self.latents_mean) / self.latents_std, log_var

    @torch.no_grad()
    def decode_video(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """Decode normalised latents [B, C, t, h, w] to pixels [B, 3, 4t - 3, 16h, 16w] in [-1, 1],
        in the dtype of the model."""
        raw = (latents_BCTHW.float() * self.latents_std + self.latents_mean).to(self.dtype)
        if latents_BCTHW.shape[2] == 1:
            return self._decode_image(raw)
        pixels: torch.Tensor = self.vae.decode(raw, return_dict=False)[0]
        return pixels

    def _decode_image(self, raw_BC1hw: torch.Tensor) -> torch.Tensor:
        """Decode as diffusers does for one latent frame, but without caching layer inputs for a
        next one."""
        cells = self.vae.decoder(self.vae.post_quant_conv(raw_BC1hw), first_chunk=True)
        return unpatchify(cells, self.vae.config.patch_size).clamp(-1.0, 1.0)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """`encode_video` for images [B, 3, H, W] -> [B, C, h, w] or clips, the posterior's mean."""
        if pixels.dim() == 4:
            return self.encode_video(pixels.unsqueeze(2)).squeeze(2)
        return self.encode_video(pixels)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """`decode_video` for images [B, C, h, w] -> [B, 3, H, W] or clips."""
        if latents.dim() == 4:
            return self.decode_video(latents.unsqueeze(2)).squeeze(2)
        return self.decode_video(latents)


def to_tokens(latents_CTHW: torch.Tensor) -> torch.Tensor:
    """Reshape [C, T, h, w] to token order [T * h * w, C]."""
    return latents_CTHW.permute(1, 2, 3, 0).flatten(0, 2)


def from_tokens(tokens_NC: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
    """Reshape token order [T * h * w, C] to [C, T, h, w]."""
    return tokens_NC.view(*grid, -1).permute(3, 0, 1, 2)


def to_uint8(
    pixels_CTHW: torch.Tensor, rounding: Literal["round", "truncate"] = "round"
) -> torch.Tensor:
    """Pixels [3, T, H, W] in [-1, 1] -> uint8 [T, H, W, 3]: clamped, scaled to 255 and rounded
    (or cut) in fp32.
    """
    levels = (pixels_CTHW.float().clamp(-1.0, 1.0) * 0.5 + 0.5) * 255
    if rounding == "round":
        levels = levels.round_()
    return levels.permute(1, 2, 3, 0).to(torch.uint8).contiguous()
