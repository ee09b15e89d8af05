# SPDX-License-Identifier: Apache-2.0
"""Similarity of images and videos: PSNR, SSIM and sharpness.

Frames are tensors [B, T, 3, H, W] with values in [0, 1], as `unit` returns them.
"""

import torch
from torch.nn import functional

_CAP = 1e-10
"""Lower bound on the mean squared error. It gives identical images a PSNR of 100 dB."""
_SSIM_TAPS, _SSIM_SIGMA = 11, 1.5


def unit(frames: torch.Tensor) -> torch.Tensor:
    """Convert uint8 frames [..., H, W, 3] to float frames [..., 3, H, W] with values in [0, 1]."""
    return frames.movedim(-1, -3).float() / 255


def psnr(made: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return the PSNR of each clip relative to the ground truth, in dB. Shape: [B]."""
    return decibels((made.float() - truth.float()).square().flatten(1).mean(dim=1))


def squared_error(made: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of each frame. Shape: [B, T]."""
    return (made.float() - truth.float()).square().flatten(2).mean(dim=2)


def decibels(squared_error: torch.Tensor) -> torch.Tensor:
    """Convert mean squared errors of images in [0, 1] to PSNR in dB, at most 100."""
    return -10 * squared_error.clamp(min=_CAP).log10()


def edges(frames: torch.Tensor) -> torch.Tensor:
    """Return the mean absolute difference between horizontally adjacent pixels in each clip. Shape:
    [B].
    """
    return (frames[..., 1:] - frames[..., :-1]).abs().float().flatten(1).mean(dim=1)


def sharpness(made: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return the ratio of each clip's sharpness, as measured by `edges`, to that of the ground
    truth. Shape: [B].
    """
    return edges(made) / edges(truth).clamp(min=1e-6)


def ssim(made: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return each frame's structural similarity to the ground truth: 1 if equal, near 0 if
    unrelated.

    The parameters are those of Wang et al. 2004: Gaussian windows of 11 pixels with sigma 1.5. Only
    windows that lie entirely inside the frame are used. The result is the mean over the three
    colours. Shape: [B, T].
    """
    shape = made.shape[:2]
    a, b = (frames.flatten(0, 1).float() for frames in (made, truth))
    mean_a, mean_b = _window_mean(a), _window_mean(b)
    variance_a, variance_b = _window_mean(a * a) - mean_a**2, _window_mean(b * b) - mean_b**2
    covariance = _window_mean(a * b) - mean_a * mean_b
    c1, c2 = 0.01**2, 0.03**2
    similar = (2 * mean_a * mean_b + c1) * (2 * covariance + c2)
    similar = similar / ((mean_a**2 + mean_b**2 + c1) * (variance_a + variance_b + c2))
    return similar.flatten(1).mean(dim=1).view(shape)


def _window_mean(images_BCHW: torch.Tensor) -> torch.Tensor:
    away = torch.arange(_SSIM_TAPS, device=images_BCHW.device) - _SSIM_TAPS // 2
    taps = torch.exp(-away.float().square() / (2 * _SSIM_SIGMA**2))
    taps = (taps / taps.sum()).expand(images_BCHW.shape[1], 1, 1, -1)
    groups = len(taps)
    rows = functional.conv2d(images_BCHW, taps, groups=groups)
    return functional.conv2d(rows, taps.mT.contiguous(), groups=groups)
