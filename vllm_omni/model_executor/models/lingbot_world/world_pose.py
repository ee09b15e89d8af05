# SPDX-License-Identifier: Apache-2.0
"""Compute features of the camera's world pose, which a transformer with control type `world`
receives in addition to the camera's motion.

A token's features are the directions, in world axes, of the rays through 4 x 4 points of its 16 x
16 pixels. A latent frame's features are the sines and cosines of the position at the first eight
harmonics of the world's period, and a flag that is set if the pose is known. If the pose is
unknown, all features are zero. This module depends only on torch, because the training code also
uses it.
"""

# F latent frames, P tokens of a frame

import math
from typing import Final

import torch

HARMONICS: Final = 8
_POINTS: Final = 4
_TOKEN_PIXELS: Final = 16
RAY_FEATURES: Final = 3 * _POINTS * _POINTS
FRAME_FEATURES: Final = 4 * HARMONICS + 1
WORLD_FEATURES: Final = RAY_FEATURES + FRAME_FEATURES


def token_rays(intrinsics_F4: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return the unit directions, in camera axes, of the rays through the 4 x 4 points of each
    token.

    Args:
        intrinsics_F4: Camera intrinsics fx, fy, cx, cy in output pixels.
        height, width: Size of the output in pixels.

    Returns:
        A tensor [F, P, 16, 3] in the dtype of `intrinsics_F4`.
    """
    dtype, device = intrinsics_F4.dtype, intrinsics_F4.device
    rows, columns = height // _TOKEN_PIXELS, width // _TOKEN_PIXELS
    spacing = _TOKEN_PIXELS / _POINTS
    fx, fy, cx, cy = (value.view(-1, 1) for value in intrinsics_F4.unbind(1))
    x_FU = ((torch.arange(columns * _POINTS, dtype=dtype, device=device) + 0.5) * spacing - cx) / fx
    y_FV = ((torch.arange(rows * _POINTS, dtype=dtype, device=device) + 0.5) * spacing - cy) / fy
    frames = len(intrinsics_F4)
    shape = (frames, rows, columns, _POINTS, _POINTS)
    x = x_FU.view(frames, 1, columns, 1, _POINTS).expand(shape)
    y = y_FV.view(frames, rows, 1, _POINTS, 1).expand(shape)
    rays = torch.stack((x, y, torch.ones_like(x)), dim=-1)
    return (rays / rays.norm(dim=-1, keepdim=True)).view(
        frames, rows * columns, _POINTS * _POINTS, 3
    )


def frame_features(positions_F2: torch.Tensor, period_m: float) -> torch.Tensor:
    """Return the features of latent frames whose positions are known, [F, FRAME_FEATURES].

    Args:
        positions_F2: Positions x, z in metres, fp64.
        period_m: Distance in metres after which the world repeats.
    """
    share = torch.remainder(positions_F2, period_m) / period_m
    k = torch.arange(1, HARMONICS + 1, dtype=positions_F2.dtype, device=positions_F2.device)
    angles_F2K = 2 * math.pi * share.unsqueeze(-1) * k
    parts = (
        angles_F2K.sin().flatten(1),
        angles_F2K.cos().flatten(1),
        torch.ones_like(share[:, :1]),
    )
    return torch.cat(parts, dim=1)


def world_features(
    world_F44: torch.Tensor | None,
    intrinsics_F4: torch.Tensor,
    height: int,
    width: int,
    period_m: float,
) -> torch.Tensor:
    """Return the world-pose features of all tokens in a chunk.

    Args:
        world_F44: World pose of each latent frame, fp64, in metres. None if the poses are unknown.
        intrinsics_F4: Camera intrinsics fx, fy, cx, cy in output pixels, fp64.
        height, width: Size of the output in pixels.
        period_m: Distance in metres after which the world repeats.

    Returns:
        An fp32 tensor [F P, WORLD_FEATURES] in frame-major order.
    """
    rays_FPN3 = token_rays(intrinsics_F4, height, width)
    frames, tokens = rays_FPN3.shape[:2]
    if world_F44 is None:
        return torch.zeros(frames * tokens, WORLD_FEATURES)
    directions = torch.einsum("fij,fpnj->fpni", world_F44[:, :3, :3], rays_FPN3).flatten(2)
    of_frames = frame_features(world_F44[:, 0:3:2, 3], period_m)
    together = torch.cat((directions, of_frames.unsqueeze(1).expand(-1, tokens, -1)), dim=2)
    return together.flatten(0, 1).float()
