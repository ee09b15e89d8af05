# SPDX-License-Identifier: Apache-2.0
"""The motion-aware noise controller for video-to-video streams: the faster the motion, the less
noise is added.

    m = clip(max over frames of sqrt(mean (v_i - v_{i-1})^2) / 0.2, 0, 1)          pixels in [-1, 1]
    s = 0.9 (s_0 - 0.1 m) + 0.1 s_before
    t = floor(1000 s) - 100

s scales the noise added to a chunk, and t is the timestep of its first denoise step. For the first
chunk of a stream, s = s_0. The formulas come from StreamDiffusionV2's streamv2v noise controller.
"""

# T frames of a chunk

import math

import torch

_FULL_MOTION = 0.2
_RANGE = 0.1
_KEPT = 0.1
_BELOW_NOISE = 100


def motion(frames_THWC: torch.Tensor, before_HWC: torch.Tensor) -> float:
    """Return the motion m, in [0, 1], of the uint8 frames that follow `before_HWC`.

    The call synchronises the host with the device once.
    """
    clip = torch.cat((before_HWC.unsqueeze(0), frames_THWC)).float() / 127.5
    steps = (clip[1:] - clip[:-1]).square().mean(dim=(1, 2, 3)).sqrt()
    return min(1.0, float(steps.max()) / _FULL_MOTION)


def next_noise_scale(initial: float, before: float, motion_level: float) -> float:
    """Return a chunk's s, computed from s_0 (`initial`), the previous chunk's s (`before`) and the
    motion m (`motion_level`).
    """
    return (1 - _KEPT) * (initial - _RANGE * motion_level) + _KEPT * before


def first_timestep(noise_scale: float) -> int:
    """Return t for a chunk with noise scale s."""
    return math.floor(1000 * noise_scale) - _BELOW_NOISE


def lowest_first_timestep(initial: float) -> int:
    """Return the smallest t that a stream with s_0 = `initial` can reach."""
    return first_timestep(initial - _RANGE)
