# SPDX-License-Identifier: Apache-2.0
"""How near a video is to the rendered truth: PSNR, and sharpness beside it, since PSNR alone rewards blur."""

import torch


def psnr(made: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Decibels of each clip, [B]; frames in [0, 1], [B, T, 3, H, W]."""
    error = (made.float() - truth.float()).square().flatten(1).mean(dim=1)
    return -10 * error.clamp(min=1e-10).log10()


def sharpness(made: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Mean horizontal difference of neighbouring pixels over the truth's, each clip, [B]."""
    return _edges(made) / _edges(truth).clamp(min=1e-6)


def _edges(frames: torch.Tensor) -> torch.Tensor:
    return (frames[..., 1:] - frames[..., :-1]).abs().float().flatten(1).mean(dim=1)
