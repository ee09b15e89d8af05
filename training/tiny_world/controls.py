# SPDX-License-Identifier: Apache-2.0
"""Estimates how far a video's camera has walked by comparing frames with rendered views.

All frames are [N, H, W, 3], uint8 or float. Tested by
tests/training/tiny_world/test_score_controls.py.
"""

import torch
from torch.nn import functional

from vllm_omni.evaluation.camera_motion import channels_first, peak


def distances_walked(
    frames_NHW3: torch.Tensor, rendered_DHW3: torch.Tensor, distances_D: torch.Tensor
) -> torch.Tensor:
    """Return the distance in metres that the camera has walked by each frame, [N]. The estimate is
    the distance of the most similar rendered view.

    The frames and the rendered views are blurred slightly to reduce the effect of noise.

    Args:
        distances_D: Distances of the rendered views in metres, evenly spaced and increasing.
    """
    made, along = (_standardised(channels_first(frames)) for frames in (frames_NHW3, rendered_DHW3))
    alike = made @ along.mT
    return torch.tensor([peak(distances_D, row) for row in alike])


def _standardised(images_NCHW: torch.Tensor) -> torch.Tensor:
    soft = functional.avg_pool2d(images_NCHW, 3, stride=1)
    flat = (soft - soft.mean(dim=(2, 3), keepdim=True)).flatten(1)
    return flat / flat.norm(dim=1, keepdim=True).clamp(min=1e-6)
