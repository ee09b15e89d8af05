# SPDX-License-Identifier: Apache-2.0
"""Similarity of a video to the rendered truth: PSNR and sharpness, because PSNR alone rewards blur.

Frames are [B, T, 3, H, W] in [0, 1]. Tested by tests/training/tiny_world/test_measure.py.
"""

import torch
from torch.nn import functional

_CAP = 1e-10
"""Smallest mean squared error, so that equal images have 100 dB."""
_SSIM_TAPS, _SSIM_SIGMA = 11, 1.5


def psnr(made: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return the PSNR of each clip in dB, [B]."""
    return decibels((made.float() - truth.float()).square().flatten(1).mean(dim=1))


def squared_error(made: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of each frame, [B, T]."""
    return (made.float() - truth.float()).square().flatten(2).mean(dim=2)


def decibels(squared_error: torch.Tensor) -> torch.Tensor:
    """Return the PSNR of mean squared errors of images in [0, 1], at most 100 dB."""
    return -10 * squared_error.clamp(min=_CAP).log10()


def sharpness(made: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return the sharpness of each clip relative to the truth, [B].

    Sharpness is the mean difference of horizontally adjacent pixels.
    """
    return _edges(made) / _edges(truth).clamp(min=1e-6)


def ssim(made: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return the structural similarity of each frame, [B, T]: 1 if equal, near 0 if unrelated.

    Wang et al. 2004: Gaussian windows of 11 pixels (sigma 1.5), whole windows only, mean over the
    three colours.
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


def mean_colour(frames: torch.Tensor) -> torch.Tensor:
    """Return the mean colour of each clip, [B, 3]."""
    return frames.float().mean(dim=(1, 3, 4))


def named_style(colours_N3: torch.Tensor, styles_NS3: torch.Tensor) -> torch.Tensor:
    """Return the index of the style whose colour is nearest to each row, [N]."""
    return (styles_NS3 - colours_N3[:, None]).norm(dim=-1).argmin(dim=1)


def _edges(frames: torch.Tensor) -> torch.Tensor:
    return (frames[..., 1:] - frames[..., :-1]).abs().float().flatten(1).mean(dim=1)


def _window_mean(images_BCHW: torch.Tensor) -> torch.Tensor:
    away = torch.arange(_SSIM_TAPS, device=images_BCHW.device) - _SSIM_TAPS // 2
    taps = torch.exp(-away.float().square() / (2 * _SSIM_SIGMA**2))
    taps = (taps / taps.sum()).expand(images_BCHW.shape[1], 1, 1, -1)
    groups = len(taps)
    rows = functional.conv2d(images_BCHW, taps, groups=groups)
    return functional.conv2d(rows, taps.mT.contiguous(), groups=groups)


def image_errors(made: torch.Tensor, truth: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the means of the absolute error, its square and its gradients, as decoder losses."""
    error = made - truth
    across, down = error[..., 1:] - error[..., :-1], error[..., 1:, :] - error[..., :-1, :]
    return {
        "l1": error.abs().mean(),
        "mse": error.square().mean(),
        "gradient": across.abs().mean() + down.abs().mean(),
    }


def image_loss(errors: dict[str, torch.Tensor]) -> torch.Tensor:
    return errors["l1"] + errors["mse"] + 0.4 * errors["gradient"]
