# SPDX-License-Identifier: Apache-2.0
"""How held keys, analog controls and velocities move cameras: the only integrator of the package.

A camera looks first, then moves in the horizontal plane along its new view. Where the world has an occupancy grid,
movement stops at what is in the way and slides along it. The server, the training data and the truth that scores
compare with all use these functions, so they agree.

A pose is camera-to-world, 4x4, OpenCV axes (x right, y down, z forward). Needs torch alone.
Held by tests/worlds/test_movement.py.
"""

# N cameras, K candidate directions

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from vllm_omni.worlds.grid import OccupancyGrid

YAW_DEGREES: Final = 6.0
PITCH_DEGREES: Final = 4.0
"""Rotation of one latent frame with a look key held."""
PITCH_LIMIT_DEGREES: Final = 85.0

_SUBSTEPS: Final = 8
"""Parts of one latent frame's movement, each shorter than a cell of a grid, so that nothing is jumped over."""
_SLIDES_DEGREES: Final = (0, 15, -15, 30, -30, 45, -45, 60, -60, 75, -75)
"""Directions that a part of a movement tries, relative to its own; the first free one is taken."""


@dataclass(frozen=True)
class Motion:
    """What is held during one latent frame, fp64 [N] each.

    ahead, aside, up: steps forward, to the right, upwards; 1 is a movement key.
    yaw_degrees, pitch_degrees: rotation to the right and upwards.
    """

    ahead: torch.Tensor
    aside: torch.Tensor
    up: torch.Tensor
    yaw_degrees: torch.Tensor
    pitch_degrees: torch.Tensor

    @classmethod
    def of_keys(
        cls, held: Sequence[str], *, yaw_degrees: float = YAW_DEGREES, pitch_degrees: float = PITCH_DEGREES
    ) -> "Motion":
        """The motion of one set of held keys for each camera; opposite keys cancel."""

        def difference(plus: str, minus: str) -> torch.Tensor:
            return torch.tensor([float(plus in k) - float(minus in k) for k in held], dtype=torch.float64)

        return cls(
            ahead=difference("w", "s"),
            aside=difference("d", "a"),
            up=torch.zeros(len(held), dtype=torch.float64),
            yaw_degrees=yaw_degrees * difference("l", "j"),
            pitch_degrees=pitch_degrees * difference("i", "k"),
        )


def move_cameras(
    poses_N44: torch.Tensor,
    pitch_N: torch.Tensor,
    motion: Motion,
    step: float,
    grid: OccupancyGrid | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Move cameras by one latent frame.

    A rotation beyond the limit of the pitch is dropped whole. Diagonal movement is not normalised.

    Args:
        poses_N44: fp64; with a grid, positions are metres in the world's coordinates.
        pitch_N: fp64, degrees above the horizon that the cameras have accumulated.
        motion: What is held.
        step: Length of one step, in the unit of the positions.
        grid: What cannot be entered. Cameras then also keep their height. None: nothing is in the way.

    Returns:
        The new poses and pitches, new tensors.
    """
    look_N = torch.where((pitch_N + motion.pitch_degrees).abs() > PITCH_LIMIT_DEGREES, 0.0, motion.pitch_degrees)
    poses = poses_N44.clone()
    poses[:, :3, :3] = rotation(1, motion.yaw_degrees) @ poses_N44[:, :3, :3] @ rotation(0, look_N)
    ahead_N3, aside_N3 = _horizontal(poses[:, :3, 2]), _horizontal(poses[:, :3, 0])
    move_N3 = step * (motion.ahead[:, None] * ahead_N3 + motion.aside[:, None] * aside_N3)
    if grid is None:
        poses[:, :3, 3] += move_N3
        poses[:, 1, 3] -= step * motion.up
    else:
        poses[:, 0:3:2, 3] = _walk(poses[:, 0:3:2, 3], move_N3[:, 0::2], grid)
    return poses, pitch_N + look_N


def rotation(axis: int, degrees_N: torch.Tensor) -> torch.Tensor:
    """Return rotations [N, 3, 3] about the x axis (0) or the y axis (1), fp64."""
    angle = torch.deg2rad(degrees_N.double())
    cos, sin, one, zero = angle.cos(), angle.sin(), torch.ones_like(angle), torch.zeros_like(angle)
    rows = {
        0: (one, zero, zero, zero, cos, -sin, zero, sin, cos),
        1: (cos, zero, sin, zero, one, zero, -sin, zero, cos),
    }
    return torch.stack(rows[axis], dim=-1).view(-1, 3, 3)


def world_pose(x_m: float, z_m: float, heading_degrees: float, pitch_degrees: float = 0.0) -> torch.Tensor:
    """Return the pose [4, 4], fp64 metres, of a camera at eye height that looks at a heading (north to east)."""
    pose_44 = torch.eye(4, dtype=torch.float64)
    yaw, pitch = (torch.tensor([angle], dtype=torch.float64) for angle in (heading_degrees, pitch_degrees))
    pose_44[:3, :3] = (rotation(1, yaw) @ rotation(0, pitch))[0]
    pose_44[0, 3], pose_44[2, 3] = x_m, z_m
    return pose_44


def pitch_of(pose_44: torch.Tensor) -> float:
    """Degrees that a pose looks above the horizon."""
    return math.degrees(math.asin(-min(1.0, max(-1.0, float(pose_44[1, 2])))))


def heading_of(pose_44: torch.Tensor) -> float:
    """Degrees from north to east that a pose looks at, in [0, 360)."""
    return math.degrees(math.atan2(float(pose_44[0, 2]), float(pose_44[2, 2]))) % 360.0


def inverse_poses(poses_N44: torch.Tensor) -> torch.Tensor:
    """Invert rigid motions: (R, t) -> (R^T, -R^T t)."""
    inverse = torch.eye(4, dtype=poses_N44.dtype).repeat(len(poses_N44), 1, 1)
    inverse[:, :3, :3] = poses_N44[:, :3, :3].mT
    inverse[:, :3, 3:] = -inverse[:, :3, :3] @ poses_N44[:, :3, 3:]
    return inverse


def _horizontal(direction_N3: torch.Tensor) -> torch.Tensor:
    flat = direction_N3 * torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    return flat / (flat.norm(dim=-1, keepdim=True) + 1e-6)


def _walk(position_N2: torch.Tensor, move_N2: torch.Tensor, grid: OccupancyGrid) -> torch.Tensor:
    """Where cameras at x and z arrive; a camera that is inside something may leave it in any direction."""
    share_S = torch.arange(_SUBSTEPS + 1, dtype=torch.float64) / _SUBSTEPS
    straight_NS = grid.blocked(position_N2[:, None] + share_S[:, None] * move_N2[:, None])
    arrived_N2 = position_N2 + move_N2
    stopped = (straight_NS[:, 1:].any(dim=1) & ~straight_NS[:, 0]).nonzero()[:, 0]
    if len(stopped):
        arrived_N2[stopped] = _slide(position_N2[stopped], move_N2[stopped] / _SUBSTEPS, grid)
    return arrived_N2


def _slide(position_N2: torch.Tensor, part_N2: torch.Tensor, grid: OccupancyGrid) -> torch.Tensor:
    """Move by parts of a step, each in the direction nearest to its own that is free; else the camera stays."""
    slides = torch.deg2rad(torch.tensor(_SLIDES_DEGREES, dtype=torch.float64))
    cos_K, sin_K = slides.cos(), slides.sin()
    x, z = part_N2[:, :1], part_N2[:, 1:]
    moves_NK2 = torch.stack((cos_K * (cos_K * x + sin_K * z), cos_K * (cos_K * z - sin_K * x)), dim=-1)
    moves_NK2 = torch.cat((moves_NK2, torch.zeros_like(moves_NK2[:, :1])), dim=1)
    each = torch.arange(len(position_N2))
    for _ in range(_SUBSTEPS):
        goals_NK2 = position_N2[:, None] + moves_NK2
        free_NK = ~grid.blocked(goals_NK2)
        position_N2 = goals_NK2[each, free_NK.byte().argmax(dim=1)]
    return position_N2
