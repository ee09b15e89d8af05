# SPDX-License-Identifier: Apache-2.0
"""Checks whether a video follows the keys held during generation: whether its camera turns, walks
and returns as commanded.

A key program consists of phases of equal length, called turns, as in WBench. In each turn, at most
one key is held.
"""

# T frames, L latent frames, H height, W width

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import torch
from torch.nn import functional

from vllm_omni.evaluation.camera_motion import growths, turns
from vllm_omni.evaluation.measures import view_return
from vllm_omni.worlds.movement import CameraMotion, heading_of, move_cameras, pitch_of

PROGRAMS: Final[Mapping[str, tuple[str, ...]]] = {
    "rest": ("", ""),
    "walk_and_back": ("w", "s"),
    "left_and_back": ("j", "l"),
    "right_and_back": ("l", "j"),
    "loop": ("l", "w", "s", "j"),
}
"""Key held in each turn of each program. `w` and `s` walk forward and back; `j` and `l` turn left
and right. An empty string means that no key is held.
"""
_NOT_TURNED_DEGREES: Final = 0.1
_NOT_GROWN: Final = 1.001
"""Largest enlargement of the image centre per latent frame that still counts as standing still."""
_WIDTH: Final = 320
"""Larger frames are downscaled to this width in pixels to save time. This width is sufficient for
accurate results.
"""
_SAME_PLACE: Final = 0.05
"""Maximum distance at which two poses count as the same view, in the unit of `_distance`."""
_WHOLE_STEP: Final = 0.7


class Controls(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Keys held while a video was generated."""

    keys: list[str]
    """Letters of the camera keys held in each latent frame. The first entry belongs to the start
    image.
    """
    first_frames: int
    """Number of video frames in the first latent frame."""
    later_frames: int
    """Number of video frames in each later latent frame."""
    focal: float
    """Focal length of the camera, divided by the image width."""
    turn_degrees: float | None = None
    """Angle in degrees by which a look key turns the camera in one latent frame, or None if the
    model does not define this angle.
    """
    world_poses: list[list[float]] | None = None
    """World pose of each latent frame (x_m, z_m, heading_degrees and pitch_degrees), or None if the
    poses are unknown."""

    @property
    def num_frames(self) -> int:
        return self.first_frames + self.later_frames * (len(self.keys) - 1)


def program_keys(program: str, turn: int) -> list[str]:
    """Return the key that a program holds in each latent frame.

    No key is held in the first latent frame. Each turn of the program lasts `turn` latent frames.
    """
    return ["", *(key for key in PROGRAMS[program] for _ in range(turn))]


def steering(frames_THWC: np.ndarray, controls: Controls) -> dict[str, float]:
    """Compare a video's motion with the keys that were held.

    A latent frame in which only `j` or only `l` is held counts as a turn, and a latent frame in
    which only `w` or only `s` is held counts as a step. All other latent frames are ignored, as are
    steps that were stopped by a wall according to the world poses.

    Args:
        frames_THWC: At least `controls.num_frames` frames, uint8 RGB.
        controls: Keys held while the video was generated.

    Returns:
        The measured values by name. Values for turns are present only if there are turns.
        `turn_degrees` is the median turn per latent frame in the commanded direction. `turn_ratio`
        is the median turn divided by the commanded turn, if the model defines one. `turn_missed` is
        the share of turns in which the camera did not turn in the commanded direction. Values for
        steps are present only if there are steps. `step_growth` is the median enlargement of the
        centre (for a step back, from the later to the earlier frame). `step_missed` is the share of
        steps without an enlargement. If the camera should have left its start and returned, the
        result also contains the values of `view_return`.

    Raises:
        ValueError: The video has fewer frames than `controls` describes.
    """
    if len(frames_THWC) < controls.num_frames:
        raise ValueError(
            f"the video has {len(frames_THWC)} frames, its keys are for {controls.num_frames}"
        )
    frames_THWC = frames_THWC[: controls.num_frames]
    ends_LHWC = _reduced(frames_THWC[controls.first_frames - 1 :: controls.later_frames])
    angles, steps = [], []
    stopped = _stopped_steps(controls)
    for latent, keys in enumerate(controls.keys[1:], start=1):
        pair_2HWC = ends_LHWC[latent - 1 : latent + 1]
        if keys in ("j", "l"):
            direction = 1 if keys == "l" else -1
            angles.append(direction * float(turns(pair_2HWC, controls.focal)[0]))
        elif keys in ("w", "s") and latent not in stopped:
            steps.append(float(growths(pair_2HWC if keys == "w" else pair_2HWC.flip(0))[0]))
    found: dict[str, float] = {}
    if angles:
        found["turn_degrees"] = float(np.median(angles))
        if controls.turn_degrees is not None:
            found["turn_ratio"] = found["turn_degrees"] / controls.turn_degrees
        found["turn_missed"] = float(np.mean(np.array(angles) <= _NOT_TURNED_DEGREES))
    if steps:
        found["step_growth"] = float(np.median(steps))
        found["step_missed"] = float(np.mean(np.array(steps) <= _NOT_GROWN))
    away = farthest_if_returned(controls)
    if away is not None:
        at = controls.first_frames - 1 + controls.later_frames * away
        found |= view_return(frames_THWC, at)
    return found


def _stopped_steps(controls: Controls) -> set[int]:
    """Return the latent frames in which a wall stopped the camera.

    The camera counts as stopped if its step, projected onto the viewing direction, is shorter than
    `_WHOLE_STEP` times the longest step.
    """
    poses = controls.world_poses or []
    ahead = {}
    for latent, (before, after) in enumerate(itertools.pairwise(poses), start=1):
        heading = math.radians(after[2])
        way = (after[0] - before[0]) * math.sin(heading) + (after[1] - before[1]) * math.cos(
            heading
        )
        ahead[latent] = abs(way)
    longest = max(ahead.values(), default=0.0)
    return {latent for latent, way in ahead.items() if way < _WHOLE_STEP * longest}


def farthest_if_returned(controls: Controls) -> int | None:
    """Find the latent frame at which the camera is farthest from its start.

    If the world poses are known, the camera's path is taken from them, because walls may have
    stopped the camera.

    Returns:
        Index of the latent frame, or None if the camera does not leave its start or does not return
        to it.
    """
    poses = controls.world_poses or _poses_of(controls.keys)
    if len(poses) < len(controls.keys):
        return None
    away = [_distance(pose, poses[0]) for pose in poses[: len(controls.keys)]]
    if away[-1] > _SAME_PLACE or max(away) <= _SAME_PLACE:
        return None
    return int(np.argmax(away))


def _distance(pose: Sequence[float], start: Sequence[float]) -> float:
    """Return the distance between two poses. A rotation by 10 degrees counts as one unit of
    length.
    """
    turned = [abs((a - b + 180) % 360 - 180) for a, b in zip(pose[2:], start[2:], strict=True)]
    return math.hypot(pose[0] - start[0], pose[1] - start[1]) + max(turned) / 10


def _poses_of(keys: Sequence[str]) -> list[list[float]]:
    """Return x, z, heading and pitch after each latent frame, computed from the keys for a world
    without walls.
    """
    pose_144 = torch.eye(4, dtype=torch.float64)[None]
    pitch_1 = torch.zeros(1, dtype=torch.float64)
    poses = []
    for held in keys:
        pose_144, pitch_1 = move_cameras(pose_144, pitch_1, CameraMotion.of_keys([held]), 1.0)
        x, z = pose_144[0, 0, 3], pose_144[0, 2, 3]
        poses.append([float(x), float(z), heading_of(pose_144[0]), pitch_of(pose_144[0])])
    return poses


def _reduced(frames_LHWC: np.ndarray) -> torch.Tensor:
    """Return the frames as fp32, downscaled to a width of at most `_WIDTH`."""
    images = torch.from_numpy(np.ascontiguousarray(frames_LHWC)).permute(0, 3, 1, 2).float()
    height, width = images.shape[2:]
    if width > _WIDTH:
        images = functional.interpolate(
            images, (max(2, round(height * _WIDTH / width)), _WIDTH), mode="area"
        )
    return images.permute(0, 2, 3, 1)
