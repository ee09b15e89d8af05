# SPDX-License-Identifier: Apache-2.0
"""`PoseTrack`: camera commands ("go there", "keep moving so") turned into one pose per pixel frame.

Commands use x right, y up, z forward, relative to where the session began; poses come out camera-to-world with OpenCV
axes (y down), as `CameraPath` has them. A `target` is approached over some chunks: positions linearly, rotations along
the shortest arc at constant speed. A `velocity` is a step repeated once per latent frame until another command comes.
Between latent frames, pixel frames are interpolated the same way. Where the model takes axes that walk (`WALK_AXES`), a
velocity becomes their values (`walk_axes`): the model then moves the camera by the package's only integrator, so that
the world's walls stop it. Pure data. Held by tests/entrypoints/realtime/test_pose_track.py.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import torch

from vllm_omni.actions import ActionSpace
from vllm_omni.worlds.movement import Motion, move_cameras, pitch_of

# N pixel frames

MAX_PENDING: Final = 32
"""Commands that may wait for the next chunk; a command replaces the one before it, so more would never act."""

WALK_AXES: Final = ("forward", "right", "up", "yaw", "pitch")
"""Rates of a camera that walks: steps per latent frame, then degrees per latent frame."""

_UP_TO_DOWN_44: Final = np.diag([1.0, -1.0, 1.0, 1.0])


@dataclass(frozen=True)
class Command:
    """rotation_4: a unit quaternion x, y, z, w. transition_chunks: how long a target takes; >= 0."""

    event_id: str
    mode: Literal["target", "velocity"]
    translation_3: np.ndarray
    rotation_4: np.ndarray
    transition_chunks: int = 1

    @property
    def yaw_degrees(self) -> float:
        forward_3 = _rotation(self.rotation_4)[:, 2]
        return math.degrees(math.atan2(forward_3[0], forward_3[2]))

    @property
    def pitch_degrees(self) -> float:
        return math.degrees(math.asin(min(1.0, max(-1.0, float(_rotation(self.rotation_4)[1, 2])))))

    def walk_axes(self, step: float) -> dict[str, float]:
        """Return a velocity as values of `WALK_AXES`; it has no roll. step: length of a step, in units."""
        right, up, forward = (self.translation_3 / step).tolist()
        values = (forward, right, up, self.yaw_degrees, self.pitch_degrees)
        return dict(zip(WALK_AXES, values, strict=True))


def walks(space: ActionSpace) -> bool:
    """Whether a model takes the axes of a camera that walks."""
    return set(WALK_AXES) <= set(space.axis_names)


@dataclass(frozen=True)
class Progress:
    """Ids of commands that began in a chunk, act at its end, ended in it (arrived, or were replaced)."""

    started: tuple[str, ...] = ()
    active: tuple[str, ...] = ()
    completed: tuple[str, ...] = ()


_Pose = tuple[np.ndarray, np.ndarray]
"""(translation_3, rotation_4), with the commands' axes."""


@dataclass
class PoseTrack:
    """The camera of one session, from the identity on. walks: velocities move it as `WALK_AXES` do."""

    walks: bool = False
    _pending: deque[Command] = field(default_factory=lambda: deque(maxlen=MAX_PENDING))
    _active: Command | None = None
    _source: _Pose = field(default_factory=lambda: _identity())
    _pose: _Pose = field(default_factory=lambda: _identity())
    _steps: int = 0

    def push(self, command: Command) -> None:
        self._pending.append(command)

    @property
    def velocity(self) -> Command | None:
        """The velocity that acts in the next chunk, if one does."""
        command = self._pending[-1] if self._pending else self._active
        return command if command is not None and command.mode == "velocity" else None

    @property
    def position_3(self) -> np.ndarray:
        """Where the camera is, with OpenCV axes."""
        return _matrix(self._pose)[:3, 3]

    def shift(self, by_3: np.ndarray) -> None:
        """Move the camera, OpenCV axes: something was in its way."""
        self._pose = (self._pose[0] + _UP_TO_DOWN_44[:3, :3] @ by_3, self._pose[1])

    def sample(self, pixel_frames: int, latent_frames: int) -> tuple[np.ndarray, Progress]:
        """Return float32 poses `[pixel_frames, 4, 4]` of the next chunk and the commands' progress."""
        started = [command.event_id for command in self._pending]
        completed = []
        while self._pending:
            if self._active is not None:
                completed.append(self._active.event_id)
            self._active, self._source, self._steps = self._pending.popleft(), self._pose, 0
        knots = [self._pose]
        for _ in range(latent_frames):
            self._step(latent_frames, completed)
            knots.append(self._pose)
        # Pixel frames lie between two latent ones; the last of each group shows the latent frame itself.
        ahead = np.arange(1, pixel_frames + 1) * latent_frames / pixel_frames
        if pixel_frames % latent_frames:  # a session's first latent frame is a single pixel frame
            rest = (pixel_frames - 1) // max(1, latent_frames - 1)
            ahead = np.concatenate([[1.0], 1 + np.arange(1, pixel_frames) / max(1, rest)])
        poses_N44 = np.stack([_matrix(_between(knots, float(place))) for place in ahead])
        active = () if self._active is None else (self._active.event_id,)
        return poses_N44.astype(np.float32), Progress(tuple(started), active, tuple(completed))

    def _step(self, latent_frames: int, completed: list[str]) -> None:
        command = self._active
        if command is None:
            return
        if command.mode == "velocity" and self.walks:
            self._pose = _walked(self._pose, command)
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
    """Raises ValueError unless it has a direction."""
    rotation_4 = np.array(values, dtype=np.float64)
    length = float(np.linalg.norm(rotation_4))
    if not math.isfinite(length) or length < 1e-6:
        raise ValueError("a rotation must be a quaternion x, y, z, w that is not zero")
    return rotation_4 / length


def _walked(pose: _Pose, velocity: Command) -> _Pose:
    """The pose after one latent frame of a velocity, with nothing in the way."""
    right, up, forward, yaw, pitch = (
        torch.tensor([value], dtype=torch.float64)
        for value in (*velocity.translation_3.tolist(), velocity.yaw_degrees, velocity.pitch_degrees)
    )
    pose_144 = torch.from_numpy(_matrix(pose))[None]
    pitch_1 = torch.tensor([pitch_of(pose_144[0])], dtype=torch.float64)
    moved_144, _ = move_cameras(pose_144, pitch_1, Motion(forward, right, up, yaw, pitch), step=1.0)
    matrix_44 = _UP_TO_DOWN_44 @ moved_144[0].numpy() @ _UP_TO_DOWN_44
    return matrix_44[:3, 3], _quaternion(matrix_44[:3, :3])


def _quaternion(rotation_33: np.ndarray) -> np.ndarray:
    """x, y, z, w of a rotation, by its largest component."""
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


def _between(knots: list[_Pose], place: float) -> _Pose:
    index = min(int(place), len(knots) - 1)
    part = place - index
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
    return _normal((math.sin((1 - part) * angle) * a_4 + math.sin(part * angle) * b_4) / math.sin(angle))


def _normal(rotation_4: np.ndarray) -> np.ndarray:
    return rotation_4 / np.linalg.norm(rotation_4)


def _product(a_4: np.ndarray, b_4: np.ndarray) -> np.ndarray:
    """Hamilton product: first b, then a."""
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
    """Camera-to-world with OpenCV axes."""
    matrix_44 = np.eye(4)
    matrix_44[:3, :3], matrix_44[:3, 3] = _rotation(pose[1]), pose[0]
    return _UP_TO_DOWN_44 @ matrix_44 @ _UP_TO_DOWN_44
