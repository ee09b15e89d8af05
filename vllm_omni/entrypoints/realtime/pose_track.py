# SPDX-License-Identifier: Apache-2.0
"""`PoseTrack`: camera commands ("go there", "keep moving so") turned into one pose per pixel frame.

Commands use x right, y up, z forward, relative to where the session began; poses come out camera-to-world with OpenCV
axes (y down), as `CameraPath` has them. A `target` is approached over some chunks: positions linearly, rotations along
the shortest arc at constant speed. A `velocity` is a step repeated once per latent frame until another command comes.
Between latent frames, pixel frames are interpolated the same way. Pure data. Held by
tests/entrypoints/realtime/test_pose_track.py.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

# N pixel frames

MAX_PENDING: Final = 32
"""Commands that may wait for the next chunk; a command replaces the one before it, so more would never act."""

_UP_TO_DOWN_44: Final = np.diag([1.0, -1.0, 1.0, 1.0])


@dataclass(frozen=True)
class Command:
    """rotation_4: a unit quaternion x, y, z, w. transition_chunks: how long a target takes; >= 0."""

    event_id: str
    mode: Literal["target", "velocity"]
    translation_3: np.ndarray
    rotation_4: np.ndarray
    transition_chunks: int = 1


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
    """The camera of one session, from the identity on."""

    _pending: deque[Command] = field(default_factory=lambda: deque(maxlen=MAX_PENDING))
    _active: Command | None = None
    _source: _Pose = field(default_factory=lambda: _identity())
    _pose: _Pose = field(default_factory=lambda: _identity())
    _steps: int = 0

    def push(self, command: Command) -> None:
        self._pending.append(command)

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
