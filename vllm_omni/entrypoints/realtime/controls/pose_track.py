# SPDX-License-Identifier: Apache-2.0
"""`PoseTrack`: converts camera commands to one pose per pixel frame.

Commands use the axes x right, y up and z forward, relative to the session's start pose. Poses are
camera-to-world matrices with OpenCV axes (y down), as in `CameraPath`. The camera reaches a
`target` after a given number of chunks. Until then, the camera's position changes linearly, and its
rotation follows the shortest arc at constant speed. A `velocity` is a step that the camera repeats
in every latent frame until the next command. Poses of pixel frames between latent frames are
interpolated in the same way.

If the model has the `WALK_AXES`, a velocity is converted to values of these axes instead
(`walk_axes`). The model then moves the camera itself, using the package's only camera-motion
integrator, which respects walls. This module contains only data, which `stream_state.py`
serializes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
import numpy as np
import torch

from vllm_omni.actions import ActionSpace
from vllm_omni.worlds.movement import (
    PITCH_LIMIT_DEGREES,
    CameraMotion,
    move_cameras,
    pitch_of,
)

# N pixel frames

MAX_PENDING: Final = 32
"""Maximum number of commands that may wait for the next chunk. Each command replaces the one before
it.
"""

WALK_AXES: Final = ("forward", "right", "up", "yaw", "pitch")
"""Rate axes of a walking camera. `forward`, `right` and `up` are in steps per latent frame, `yaw`
and `pitch` in degrees per latent frame.
"""

_UP_TO_DOWN_44: Final = np.diag([1.0, -1.0, 1.0, 1.0])


@dataclass(frozen=True)
class CameraCommand:
    """A client's camera command."""

    event_id: str
    """The client's id for the command."""
    mode: Literal["target", "velocity"]
    """Whether to move to a pose (`target`) or to keep moving (`velocity`)."""
    translation_3: np.ndarray
    """Target position, or a velocity's translation per latent frame."""
    rotation_4: np.ndarray
    """Target rotation, or a velocity's rotation per latent frame, as a unit quaternion (x, y, z,
    w).
    """
    transition_chunks: int = 1
    """Number of chunks until a target is reached, at least 0. Default: 1."""

    @property
    def yaw_degrees(self) -> float:
        forward_3 = _rotation(self.rotation_4)[:, 2]
        return math.degrees(math.atan2(forward_3[0], forward_3[2]))

    @property
    def pitch_degrees(self) -> float:
        return math.degrees(math.asin(min(1.0, max(-1.0, float(_rotation(self.rotation_4)[1, 2])))))

    def walk_axes(self, step: float) -> dict[str, float]:
        """Convert a velocity to `WALK_AXES` values. Roll is ignored.

        Args:
            step: Length of a step in pose units.
        """
        right, up, forward = (self.translation_3 / step).tolist()
        values = (forward, right, up, self.yaw_degrees, self.pitch_degrees)
        return dict(zip(WALK_AXES, values, strict=True))


def walks(space: ActionSpace) -> bool:
    """Return whether a model has the axes of a walking camera."""
    return set(WALK_AXES) <= set(space.axis_names)


@dataclass(frozen=True)
class CommandProgress:
    """Progress of the commands during one chunk."""

    started: tuple[str, ...] = ()
    """Ids of the commands that started in the chunk."""
    active: tuple[str, ...] = ()
    """Ids of the commands that are active when the chunk ends."""
    completed: tuple[str, ...] = ()
    """Ids of the commands that ended in the chunk because they reached their target or were
    replaced.
    """


_Pose = tuple[np.ndarray, np.ndarray]
"""A pose `(translation_3, rotation_4)` in the axes that commands use."""


class PoseTrack(msgspec.Struct):
    """State of a session's camera, which starts at the identity pose."""

    walks: bool = False
    """Whether velocities are converted to `WALK_AXES`. Default: False."""
    pitch_limit_degrees: float = PITCH_LIMIT_DEGREES
    """Largest angle in degrees above or below the horizon to which velocities can turn the view."""
    _pending: list[CameraCommand] = []
    """Commands that take effect with the next chunk."""
    _active: CameraCommand | None = None
    """Command that currently moves the camera."""
    _source: _Pose = msgspec.field(default_factory=lambda: _identity())
    """Pose at the start of the active command."""
    _pose: _Pose = msgspec.field(default_factory=lambda: _identity())
    """The camera's current pose."""
    _steps: int = 0
    """Number of latent frames since the active target command started."""

    def push(self, command: CameraCommand) -> None:
        self._pending.append(command)
        del self._pending[:-MAX_PENDING]

    @property
    def velocity(self) -> CameraCommand | None:
        """Return the velocity command that applies to the next chunk, or None if there is none."""
        command = self._pending[-1] if self._pending else self._active
        return command if command is not None and command.mode == "velocity" else None

    @property
    def position_3(self) -> np.ndarray:
        """The camera's position, in OpenCV axes."""
        return _matrix(self._pose)[:3, 3]

    def shift(self, by_3: np.ndarray) -> None:
        """Correct the camera's position by `by_3`, in OpenCV axes, after an obstacle has stopped
        it.
        """
        self._pose = (self._pose[0] + _UP_TO_DOWN_44[:3, :3] @ by_3, self._pose[1])

    def sample(self, pixel_frames: int, latent_frames: int) -> tuple[np.ndarray, CommandProgress]:
        """Return the poses for the next chunk.

        Args:
            pixel_frames: Number of pixel frames in the chunk.
            latent_frames: Number of latent frames in the chunk.

        Returns:
            `(poses, progress)`: float32 poses `[pixel_frames, 4, 4]`, and the commands' progress.
        """
        started = [command.event_id for command in self._pending]
        completed = []
        while self._pending:
            if self._active is not None:
                completed.append(self._active.event_id)
            self._active, self._source, self._steps = self._pending.pop(0), self._pose, 0
        knots = [self._pose]
        for _ in range(latent_frames):
            self._step(latent_frames, completed)
            knots.append(self._pose)
        # Pixel frames are interpolated between latent frames. The last pixel frame of each group
        # shows the latent frame itself.
        ahead = np.arange(1, pixel_frames + 1) * latent_frames / pixel_frames
        if pixel_frames % latent_frames:  # a session's first latent frame is a single pixel frame
            rest = (pixel_frames - 1) // max(1, latent_frames - 1)
            ahead = np.concatenate([[1.0], 1 + np.arange(1, pixel_frames) / max(1, rest)])
        poses_N44 = np.stack([_matrix(_between(knots, float(position))) for position in ahead])
        active = () if self._active is None else (self._active.event_id,)
        return poses_N44.astype(np.float32), CommandProgress(
            tuple(started), active, tuple(completed)
        )

    def _step(self, latent_frames: int, completed: list[str]) -> None:
        command = self._active
        if command is None:
            return
        if command.mode == "velocity" and self.walks:
            self._pose = _walked(self._pose, command, self.pitch_limit_degrees)
            return
        if command.mode == "velocity":
            translation_3, rotation_4 = self._pose
            moved_3 = translation_3 + _rotation(rotation_4) @ command.translation_3
            self._pose = (moved_3, _normal(_product(rotation_4, command.rotation_4)))
            return
        self._steps += 1
        total = command.transition_chunks * latent_frames
        target = (command.translation_3, command.rotation_4)
        if self._steps >= total:
            self._pose, self._active = target, None
            completed.append(command.event_id)
        else:
            self._pose = _interpolate(self._source, target, self._steps / total)


def unit_quaternion(values: Sequence[float]) -> np.ndarray:
    """Normalize the quaternion x, y, z, w to unit length.

    Raises:
        ValueError: The quaternion is zero or not finite.
    """
    rotation_4 = np.array(values, dtype=np.float64)
    length = float(np.linalg.norm(rotation_4))
    if not math.isfinite(length) or length < 1e-6:
        raise ValueError("a rotation must be a quaternion x, y, z, w that is not zero")
    return rotation_4 / length


def _walked(pose: _Pose, velocity: CameraCommand, pitch_limit_degrees: float) -> _Pose:
    """Return the pose after one latent frame of motion at a velocity, ignoring obstacles."""
    right, up, forward, yaw, pitch = (
        torch.tensor([value], dtype=torch.float64)
        for value in (
            *velocity.translation_3.tolist(),
            velocity.yaw_degrees,
            velocity.pitch_degrees,
        )
    )
    pose_144 = torch.from_numpy(_matrix(pose))[None]
    pitch_1 = torch.tensor([pitch_of(pose_144[0])], dtype=torch.float64)
    moved_144, _ = move_cameras(
        pose_144,
        pitch_1,
        CameraMotion(forward, right, up, yaw, pitch),
        step=1.0,
        pitch_limit_degrees=pitch_limit_degrees,
    )
    matrix_44 = _UP_TO_DOWN_44 @ moved_144[0].numpy() @ _UP_TO_DOWN_44
    return matrix_44[:3, 3], _quaternion(matrix_44[:3, :3])


def _quaternion(rotation_33: np.ndarray) -> np.ndarray:
    """Convert a rotation matrix to a quaternion. For accuracy, the largest component is computed
    first.
    """
    r = rotation_33
    squares_4 = 1.0 + np.array([[1, -1, -1], [-1, 1, -1], [-1, -1, 1], [1, 1, 1]]) @ np.diag(r)
    rows_44 = np.array(
        [
            [squares_4[0], r[1, 0] + r[0, 1], r[0, 2] + r[2, 0], r[2, 1] - r[1, 2]],
            [r[1, 0] + r[0, 1], squares_4[1], r[2, 1] + r[1, 2], r[0, 2] - r[2, 0]],
            [r[0, 2] + r[2, 0], r[2, 1] + r[1, 2], squares_4[2], r[1, 0] - r[0, 1]],
            [r[2, 1] - r[1, 2], r[0, 2] - r[2, 0], r[1, 0] - r[0, 1], squares_4[3]],
        ]
    )
    return _normal(rows_44[int(squares_4.argmax())])


def _identity() -> _Pose:
    return np.zeros(3), np.array([0.0, 0.0, 0.0, 1.0])


def _between(knots: list[_Pose], position: float) -> _Pose:
    index = min(int(position), len(knots) - 1)
    part = position - index
    return knots[index] if part < 1e-9 else _interpolate(knots[index], knots[index + 1], part)


def _interpolate(source: _Pose, target: _Pose, part: float) -> _Pose:
    return source[0] + part * (target[0] - source[0]), _slerp(source[1], target[1], part)


def _slerp(a_4: np.ndarray, b_4: np.ndarray, part: float) -> np.ndarray:
    cosine = float(a_4 @ b_4)
    if cosine < 0:
        b_4, cosine = -b_4, -cosine
    angle = math.acos(min(1.0, cosine))
    if angle < 1e-6:
        return _normal(a_4 + part * (b_4 - a_4))
    return _normal(
        (math.sin((1 - part) * angle) * a_4 + math.sin(part * angle) * b_4) / math.sin(angle)
    )


def _normal(rotation_4: np.ndarray) -> np.ndarray:
    return rotation_4 / np.linalg.norm(rotation_4)


def _product(a_4: np.ndarray, b_4: np.ndarray) -> np.ndarray:
    """Return the Hamilton product of two quaternions, which applies rotation b and then rotation
    a.
    """
    vector_3 = a_4[3] * b_4[:3] + b_4[3] * a_4[:3] + np.cross(a_4[:3], b_4[:3])
    return np.append(vector_3, a_4[3] * b_4[3] - a_4[:3] @ b_4[:3])


def _rotation(rotation_4: np.ndarray) -> np.ndarray:
    x, y, z, w = rotation_4
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )


def _matrix(pose: _Pose) -> np.ndarray:
    """Return the camera-to-world matrix of a pose, with OpenCV axes."""
    matrix_44 = np.eye(4)
    matrix_44[:3, :3], matrix_44[:3, 3] = _rotation(pose[1]), pose[0]
    return _UP_TO_DOWN_44 @ matrix_44 @ _UP_TO_DOWN_44
