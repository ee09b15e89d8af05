# SPDX-License-Identifier: Apache-2.0
"""Camera movement by held keys, analog controls and velocities. All code in the package that moves
cameras uses this module.

A camera first rotates and then moves in the horizontal plane along its new view. In a world with an
occupancy grid, cameras stop at blocked cells and slide along them. A camera in a blocked cell can
leave it, but only towards the nearest free cell. The server, the training data and the ground truth
for evaluation use the same functions, so their poses agree.

A pose is a 4x4 camera-to-world matrix with OpenCV axes (x right, y down, z forward). This module
needs only torch.
"""

# N cameras, K candidate directions, S substeps

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from vllm_omni.worlds.grid import OccupancyGrid

YAW_DEGREES: Final = 6.0
PITCH_DEGREES: Final = 4.0
"""Rotation of a view up or down, in degrees per latent frame, while a look key is held."""
PITCH_LIMIT_DEGREES: Final = 85.0
"""Largest view angle above or below the horizon, in degrees. A world can have a smaller limit."""

_SUBSTEPS: Final = 8
"""Smallest number of substeps per latent frame of movement. A longer movement has more substeps, so
that no substep is longer than a cell.
"""
_MOST_SUBSTEPS: Final = 1024
"""Largest number of substeps per latent frame of movement, because each one takes time. In a world
with a grid, a longer movement ends after this number of cells.
"""
_CLOSER_M: Final = 1e-9
"""Smallest reduction of the distance to the nearest free cell that counts, in metres. Rounding
errors are far smaller.
"""
_DEEPEST_CELLS: Final = 64
"""Largest depth of a camera in a wall, in cells, at which it is led out of the wall. Deeper cameras
move freely, because the search for free ground takes time.
"""
_SLIDES_DEGREES: Final = (0, 15, -15, 30, -30, 45, -45, 60, -60, 75, -75)
"""Directions in which a camera may slide if a substep is blocked, in degrees relative to the
movement. The first free direction is used.
"""


@dataclass(frozen=True)
class CameraMotion:
    """Movement of cameras during one latent frame. All fields are fp64 [N]."""

    ahead: torch.Tensor
    """Number of steps forward. A held key moves the camera by 1 step."""
    aside: torch.Tensor
    """Number of steps to the right."""
    up: torch.Tensor
    """Number of steps upwards."""
    yaw_degrees: torch.Tensor
    """Rotation of the view to the right, in degrees."""
    pitch_degrees: torch.Tensor
    """Upward rotation of the view, in degrees."""

    @classmethod
    def of_keys(
        cls,
        held: Sequence[str],
        *,
        yaw_degrees: float = YAW_DEGREES,
        pitch_degrees: float = PITCH_DEGREES,
    ) -> "CameraMotion":
        """Return the motion of cameras while keys are held. Opposite keys cancel each other.

        Args:
            held: Letters of the held keys, one string per camera.
            yaw_degrees: Sideways rotation of the view by a look key, in degrees.
            pitch_degrees: Upward or downward rotation of the view by a look key, in degrees.
        """

        def difference(plus: str, minus: str) -> torch.Tensor:
            return torch.tensor(
                [float(plus in k) - float(minus in k) for k in held], dtype=torch.float64
            )

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
    motion: CameraMotion,
    step: float,
    grid: OccupancyGrid | None = None,
    pitch_limit_degrees: float = PITCH_LIMIT_DEGREES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Move cameras by one latent frame.

    A pitch rotation that would exceed the limit is ignored entirely, unless it moves the view back
    from beyond the limit. Diagonal movement is not normalised.

    Args:
        poses_N44: Poses of the cameras, fp64. With a grid, positions are in metres in world
            coordinates.
        pitch_N: Accumulated pitch of the cameras above the horizon in degrees, fp64.
        motion: Movement of the cameras.
        step: Length of one step in the unit of the positions.
        grid: Grid of blocked cells, or None if no cells are blocked. If a grid is given, cameras
            also keep their height.
        pitch_limit_degrees: Largest view angle above or below the horizon, in degrees.

    Returns:
        The new poses and pitches, as new tensors.
    """
    after_N = (pitch_N + motion.pitch_degrees).abs()
    look_N = torch.where(
        (after_N > pitch_limit_degrees) & (after_N >= pitch_N.abs()), 0.0, motion.pitch_degrees
    )
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
    """Return fp64 rotation matrices [N, 3, 3] about the x axis (`axis` 0) or the y axis (`axis`
    1).
    """
    angle = torch.deg2rad(degrees_N.double())
    cos, sin, one, zero = angle.cos(), angle.sin(), torch.ones_like(angle), torch.zeros_like(angle)
    rows = {
        0: (one, zero, zero, zero, cos, -sin, zero, sin, cos),
        1: (cos, zero, sin, zero, one, zero, -sin, zero, cos),
    }
    return torch.stack(rows[axis], dim=-1).view(-1, 3, 3)


def world_pose(
    x_m: float, z_m: float, heading_degrees: float, pitch_degrees: float = 0.0
) -> torch.Tensor:
    """Return the pose of a camera at eye height, fp64 [4, 4], with positions in metres.

    Args:
        x_m: East coordinate in metres.
        z_m: North coordinate in metres.
        heading_degrees: View direction in degrees, clockwise from north.
        pitch_degrees: View angle above the horizon, in degrees.
    """
    pose_44 = torch.eye(4, dtype=torch.float64)
    yaw, pitch = (
        torch.tensor([angle], dtype=torch.float64) for angle in (heading_degrees, pitch_degrees)
    )
    pose_44[:3, :3] = (rotation(1, yaw) @ rotation(0, pitch))[0]
    pose_44[0, 3], pose_44[2, 3] = x_m, z_m
    return pose_44


def pitch_of(pose_44: torch.Tensor) -> float:
    """Return a pose's view angle above the horizon, in degrees."""
    return math.degrees(math.asin(-min(1.0, max(-1.0, float(pose_44[1, 2])))))


def heading_of(pose_44: torch.Tensor) -> float:
    """Return a pose's view direction in degrees, clockwise from north, in [0, 360)."""
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
    """Return the x and z positions of cameras after a movement.

    The result of a camera does not depend on the other cameras. Cameras with the same number of
    substeps are moved together.
    """
    needed_N = (move_N2.norm(dim=1) / grid.cell_m).ceil().clamp(min=_SUBSTEPS)
    count_N = needed_N.clamp(max=_MOST_SUBSTEPS)
    move_N2 = move_N2 * (count_N / needed_N)[:, None]
    arrived_N2 = position_N2 + move_N2
    for count in count_N.unique().int().tolist():
        same = (count_N == count).nonzero()[:, 0]
        share_S = torch.arange(1, count + 1, dtype=torch.float64) / count
        straight_NS2 = position_N2[same, None] + share_S[:, None] * move_N2[same, None]
        stopped = same[grid.blocked(straight_NS2).any(dim=1)]
        if len(stopped):
            part_N2 = move_N2[stopped] / count
            arrived_N2[stopped] = _slide(position_N2[stopped], part_N2, count, grid)
    return arrived_N2


def _slide(
    position_N2: torch.Tensor, part_N2: torch.Tensor, count: int, grid: OccupancyGrid
) -> torch.Tensor:
    """Move cameras by `count` substeps and return their positions.

    In each substep, a camera moves in the allowed direction that is closest to its intended
    direction. If no direction is allowed, the camera stays where it is.

    A substep may end in a free cell. A camera in a blocked cell, for example after a camera path or
    at a client's start pose, may also move within the wall if the substep brings it closer to the
    nearest free cell. Such a camera can always leave the wall, but cannot cross it. A camera that
    is more than `_DEEPEST_CELLS` deep in a wall moves freely.
    """
    slides = torch.deg2rad(torch.tensor(_SLIDES_DEGREES, dtype=torch.float64))
    cos_K, sin_K = slides.cos(), slides.sin()
    x, z = part_N2[:, :1], part_N2[:, 1:]
    moves_NK2 = torch.stack(
        (cos_K * (cos_K * x + sin_K * z), cos_K * (cos_K * z - sin_K * x)), dim=-1
    )
    moves_NK2 = torch.cat((moves_NK2, torch.zeros_like(moves_NK2[:, :1])), dim=1)
    each = torch.arange(len(position_N2))
    for _ in range(count):
        goals_NK2 = position_N2[:, None] + moves_NK2
        allowed_NK = ~grid.blocked(goals_NK2)
        inside_N = ~allowed_NK[:, -1]  # the last goal is the camera's present position
        if inside_N.any():
            distance_NK = grid.distance_to_free(goals_NK2[inside_N], _DEEPEST_CELLS)
            present_N1 = distance_NK[:, -1:]
            allowed_NK[inside_N] |= (distance_NK < present_N1 - _CLOSER_M) | present_N1.isinf()
            allowed_NK[inside_N, -1] = True
        before_N2, position_N2 = position_N2, goals_NK2[each, allowed_NK.byte().argmax(dim=1)]
        if torch.equal(position_N2, before_N2):
            break  # the remaining substeps would find the same goals
    return position_N2
