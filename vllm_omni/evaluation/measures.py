# SPDX-License-Identifier: Apache-2.0
"""Reference-free metrics of a video: sharpness, contrast, colour, flicker, and whether the video
returns to its first view.

Levels are 8-bit pixel values from 0 to 255. Ratios and differences over time compare the last tenth
of the frames with the first tenth; each tenth contains at least one frame.
"""

# T frames, H height, W width

from collections.abc import Mapping

import numpy as np
import torch

from vllm_omni.evaluation.likeness import decibels, edges, squared_error, ssim, unit

_LUMA = torch.tensor([0.299, 0.587, 0.114])
"""Weights of red, green and blue in the brightness (luma), as in ITU-R BT.601."""


def appearance(frames_THWC: np.ndarray) -> dict[str, float]:
    """Measure the frames of a video or a single image.

    Args:
        frames_THWC: Frames, uint8 RGB.

    Returns:
        The metrics by name. Every result contains `sharpness`, the mean difference between
        horizontally adjacent pixels in levels, and `contrast`, the standard deviation of the
        brightness in levels.

        With two or more frames, the result contains four additional metrics. `sharpness_ratio` and
        `contrast_ratio` are each the value at the end divided by the value at the start.
        `colour_drift` is the change in each colour's mean in levels, as the root mean square across
        the three colours. `frame_difference` is the mean absolute difference between consecutive
        frames in levels.

        With three or more frames, the result also contains `flicker`, the mean difference in levels
        between a frame's brightness and the mean brightness of the two adjacent frames.
    """
    rows, differences, before = [], [], None
    for frame_HWC in frames_THWC:
        image_3HW = unit(torch.from_numpy(np.ascontiguousarray(frame_HWC)))
        luma_HW = (_LUMA[:, None, None] * image_3HW).sum(dim=0)
        rows.append(
            torch.stack([edges(image_3HW[None])[0], luma_HW.std(), *image_3HW.mean(dim=(1, 2))])
        )
        if before is not None:
            differences.append(float((image_3HW - before).abs().mean()))
        before = image_3HW
    sharp_T, contrast_T, colour_T3 = (255 * torch.stack(rows).double()).split([1, 1, 3], dim=1)
    found = {"sharpness": float(sharp_T.mean()), "contrast": float(contrast_T.mean())}
    if len(rows) > 1:
        found |= {
            "sharpness_ratio": _end_over_start(sharp_T),
            "contrast_ratio": _end_over_start(contrast_T),
            "colour_drift": float(_change(colour_T3).square().mean().sqrt()),
            "frame_difference": 255 * float(np.mean(differences)),
        }
    if len(rows) > 2:
        level_T = colour_T3 @ _LUMA.double()
        between = (level_T[:-2] + level_T[2:]) / 2
        found["flicker"] = float((level_T[1:-1] - between).abs().mean())
    return found


def likeness_of_frames(made_THWC: np.ndarray, other_THWC: np.ndarray) -> dict[str, list[float]]:
    """Return `psnr` in dB and `ssim` between each frame and the corresponding frame of another
    video.

    Args:
        made_THWC: Frames, uint8 RGB.
        other_THWC: Frames of the other video. Both videos must have the same number of frames and
            the same frame size.
    """
    found: dict[str, list[float]] = {"psnr": [], "ssim": []}
    for made_HWC, other_HWC in zip(made_THWC, other_THWC, strict=True):
        made, other = (
            unit(torch.from_numpy(np.ascontiguousarray(frame)))[None, None]
            for frame in (made_HWC, other_HWC)
        )
        found["psnr"].append(float(decibels(squared_error(made, other))))
        found["ssim"].append(float(ssim(made, other)))
    return found


def view_return(frames_THWC: np.ndarray, away: int) -> Mapping[str, float]:
    """Compare the last frame with the first frame of a video whose camera should have returned to
    its start.

    Args:
        frames_THWC: Frames, uint8 RGB.
        away: Index of the frame whose view should differ most from the first frame's view.

    Returns:
        `return_psnr` in dB and `return_ssim`, which compare the last frame with the first, and
        `return_gain`, the last frame's PSNR minus the PSNR of the frame `away`. A high
        `return_psnr` means little without a gain, because a video without motion also ends with the
        view that it started with.
    """
    first_THWC = frames_THWC[[0, 0]]
    found = likeness_of_frames(frames_THWC[[-1, away]], first_THWC)
    return {
        "return_psnr": found["psnr"][0],
        "return_ssim": found["ssim"][0],
        "return_gain": found["psnr"][0] - found["psnr"][1],
    }


def _change(values_TN: torch.Tensor) -> torch.Tensor:
    """Return the mean of the last tenth of the values minus the mean of the first tenth."""
    count = max(1, len(values_TN) // 10)
    return values_TN[-count:].mean(dim=0) - values_TN[:count].mean(dim=0)


def _end_over_start(values_TN: torch.Tensor) -> float:
    start = float(values_TN[: max(1, len(values_TN) // 10)].mean())
    return (start + float(_change(values_TN))) / max(start, 1e-6)
