# SPDX-License-Identifier: Apache-2.0
"""Computes the mean colours of clips, the nearest style for a colour, and decoder losses.

Frames are [B, T, 3, H, W] in [0, 1]. PSNR, SSIM and sharpness are implemented in
`vllm_omni.evaluation.likeness`.
"""

import torch


def mean_colour(frames: torch.Tensor) -> torch.Tensor:
    """Return the mean colour of each clip, [B, 3]."""
    return frames.float().mean(dim=(1, 3, 4))


def named_style(colours_N3: torch.Tensor, styles_NS3: torch.Tensor) -> torch.Tensor:
    """Return the index of the style whose colour is nearest to each row of `colours_N3`, [N]."""
    return (styles_NS3 - colours_N3[:, None]).norm(dim=-1).argmin(dim=1)


def image_errors(made: torch.Tensor, truth: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return losses for decoders: the mean absolute error (`l1`), the mean squared error (`mse`)
    and the mean absolute error of the horizontal and vertical differences (`gradient`).
    """
    error = made - truth
    across, down = error[..., 1:] - error[..., :-1], error[..., 1:, :] - error[..., :-1, :]
    return {
        "l1": error.abs().mean(),
        "mse": error.square().mean(),
        "gradient": across.abs().mean() + down.abs().mean(),
    }


def image_loss(errors: dict[str, torch.Tensor]) -> torch.Tensor:
    return errors["l1"] + errors["mse"] + 0.4 * errors["gradient"]
