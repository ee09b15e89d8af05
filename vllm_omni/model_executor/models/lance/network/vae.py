# SPDX-License-Identifier: Apache-2.0
"""`LanceWanVAE`: the Wan 2.2 autoencoder (48 channels, 16x16x4) for single images and whole clips.

The network is `StreamingWanVAE`, which processes each clip as a complete stream. Latents are
normalised fp32 tensors [B, C, T, h, w]. T latent frames correspond to 4 T - 3 video frames.
"""

# B clips, C channels, T frames, H height, W width

from typing import Literal

import torch
from torch import nn

from vllm_omni.model_executor.models.lance.config import (
    FRAMES_PER_LATENT,
    LATENT_CHANNELS,
    PIXELS_PER_LATENT,
)
from vllm_omni.model_executor.models.wan.architecture import VAEConfig
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE


class LanceWanVAE(nn.Module):
    """The Wan 2.2 autoencoder for single images and whole clips. `dtype` is the dtype of the
    weights and activations.
    """

    z_channels = LATENT_CHANNELS

    def __init__(self, config: VAEConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.vae = StreamingWanVAE(config, dtype=dtype, single_images=True)

    @torch.no_grad()
    def encode_video(
        self, pixels_BCTHW: torch.Tensor, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        """Encode pixels [B, 3, T, H, W] in [-1, 1] to normalised latents [B, C, 1 + (T-1)//4, H/16,
        W/16], fp32.

        If `generator` is None, the latents are the posterior's mean. Otherwise, they are a random
        sample from the posterior. As in the original, the noise is scaled by the raw standard
        deviation rather than the normalised one.
        """
        mean, log_var = self.posterior(pixels_BCTHW)
        if generator is None:
            return mean
        noise = torch.randn(mean.shape, generator=generator, dtype=torch.float32).to(mean.device)
        return mean + torch.exp(log_var / 2) * noise

    def posterior(self, pixels_BCTHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the posterior's normalised mean and log-variance, fp32."""
        _, _, frames, height, width = pixels_BCTHW.shape
        if frames < 1 or height % PIXELS_PER_LATENT or width % PIXELS_PER_LATENT:
            raise ValueError(
                "a video must have frames, and sides that are multiples of "
                f"{PIXELS_PER_LATENT}, got {frames} frames of {height}x{width}"
            )
        used = 1 + FRAMES_PER_LATENT * ((frames - 1) // FRAMES_PER_LATENT)
        moments, _ = self.vae.encode_moments(pixels_BCTHW[:, :, :used], None)
        mean, log_var = moments.float().chunk(2, dim=1)
        log_var = log_var.clamp(-30.0, 20.0)
        return (mean - self.vae.latents_mean) / self.vae.latents_std, log_var

    @torch.no_grad()
    def decode_video(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """Decode normalised latents [B, C, t, h, w] to pixels [B, 3, 4t - 3, 16h, 16w] in [-1, 1],
        in the model's dtype.
        """
        if latents_BCTHW.shape[2] == 1:
            return self.vae.decode_image(latents_BCTHW)
        return self.vae.decode(latents_BCTHW, None)[0]

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encode clips as `encode_video` does, or images [B, 3, H, W] to latents [B, C, h, w]. The
        latents are the posterior's mean.
        """
        if pixels.dim() == 4:
            return self.encode_video(pixels.unsqueeze(2)).squeeze(2)
        return self.encode_video(pixels)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode clips as `decode_video` does, or image latents [B, C, h, w] to pixels [B, 3, H,
        W].
        """
        if latents.dim() == 4:
            return self.decode_video(latents.unsqueeze(2)).squeeze(2)
        return self.decode_video(latents)


def to_tokens(latents_CTHW: torch.Tensor) -> torch.Tensor:
    """Rearrange latents [C, T, h, w] to tokens [T * h * w, C]."""
    return latents_CTHW.permute(1, 2, 3, 0).flatten(0, 2)


def from_tokens(tokens_NC: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
    """Rearrange tokens [T * h * w, C] to latents [C, T, h, w]."""
    return tokens_NC.view(*grid, -1).permute(3, 0, 1, 2)


def to_uint8(
    pixels_CTHW: torch.Tensor, rounding: Literal["round", "truncate"] = "round"
) -> torch.Tensor:
    """Convert pixels [3, T, H, W] in [-1, 1] to uint8 frames [T, H, W, 3]. The values are clamped,
    scaled to the range 0 to 255, and rounded or truncated, in fp32.
    """
    levels = (pixels_CTHW.float().clamp(-1.0, 1.0) * 0.5 + 0.5) * 255
    if rounding == "round":
        levels = levels.round_()
    return levels.permute(1, 2, 3, 0).to(torch.uint8).contiguous()
