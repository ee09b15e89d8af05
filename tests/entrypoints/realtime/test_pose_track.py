# SPDX-License-Identifier: Apache-2.0
"""`PoseTrack`: camera commands become poses."""

import math

import numpy as np
import pytest

from vllm_omni.entrypoints.realtime.controls.camera import CameraPath
from vllm_omni.entrypoints.realtime.controls.pose_track import Command, PoseTrack, unit_quaternion

INTRINSICS = [40.0, 40.0, 24.0, 16.0]


def command(
    event_id: str,
    mode: str = "target",
    move: tuple = (0, 0, 0),
    turn: tuple = (0, 0, 0, 1),
    chunks: int = 1,
):
    return Command(event_id, mode, np.array(move, float), unit_quaternion(turn), chunks)


def about_y(degrees: float) -> tuple[float, float, float, float]:
    half = math.radians(degrees) / 2
    return (0.0, math.sin(half), 0.0, math.cos(half))


def test_without_a_command_the_camera_rests() -> None:
    """One identity pose per pixel frame."""
    poses_N44, progress = PoseTrack().sample(9, 3)
    np.testing.assert_array_equal(poses_N44, np.tile(np.eye(4, dtype=np.float32), (9, 1, 1)))
    assert (progress.started, progress.active, progress.completed) == ((), (), ())


def test_a_target_is_reached_evenly() -> None:
    """The last pose of the chunk is the target, and the steps between pixel frames are equal. The y
    axis is inverted.
    """
    track = PoseTrack()
    track.sample(9, 3)
    track.push(command("t", move=(0, 1.2, 2.4)))
    poses_N44, progress = track.sample(12, 3)
    np.testing.assert_allclose(poses_N44[-1, :3, 3], [0, -1.2, 2.4], atol=1e-6)
    np.testing.assert_allclose(np.diff(poses_N44[:, 2, 3]), 0.2, atol=1e-6)
    assert (progress.started, progress.active, progress.completed) == (("t",), (), ("t",))


def test_a_target_may_take_several_chunks() -> None:
    """The command is active until the target is reached."""
    track = PoseTrack()
    track.push(command("t", turn=about_y(90), chunks=2))
    first, started = track.sample(9, 3)
    second, ended = track.sample(12, 3)
    assert (started.active, started.completed, ended.active, ended.completed) == (
        ("t",),
        (),
        (),
        ("t",),
    )
    angle = np.degrees(np.arctan2(second[-1, 0, 2], second[-1, 2, 2]))
    assert angle == pytest.approx(90, abs=1e-4)
    assert np.degrees(np.arctan2(first[-1, 0, 2], first[-1, 2, 2])) == pytest.approx(45, abs=1e-4)


def test_a_velocity_is_a_step_per_latent_frame_until_replaced() -> None:
    """Three latent frames of 0.05 are 0.15 per chunk until another command replaces it."""
    track = PoseTrack()
    track.push(command("v", "velocity", move=(0, 0, 0.05)))
    assert track.sample(9, 3)[0][-1, 2, 3] == pytest.approx(0.15)
    assert track.sample(12, 3)[0][-1, 2, 3] == pytest.approx(0.30)
    track.push(command("stop", "velocity"))
    poses_N44, progress = track.sample(12, 3)
    assert (progress.started, progress.active, progress.completed) == (("stop",), ("stop",), ("v",))
    np.testing.assert_allclose(poses_N44[:, 2, 3], 0.30, atol=1e-6)


def test_sixty_small_turns_make_a_circle() -> None:
    """Sixty turns of 6 degrees give the identity within 1e-3, and each pose passes the check of
    client poses.
    """
    track = PoseTrack()
    track.push(command("v", "velocity", turn=about_y(6)))
    for number in range(20):
        poses_N44, _ = track.sample(9 if number == 0 else 12, 3)
        CameraPath.parse(poses_N44, INTRINSICS, max_poses=100, size=(832, 480))
    np.testing.assert_allclose(poses_N44[-1], np.eye(4), atol=1e-3)


def test_only_the_last_of_many_commands_acts() -> None:
    """The others start and end in the same chunk, and the queue is bounded."""
    track = PoseTrack()
    for number in range(100):
        track.push(command(f"t{number}", move=(number, 0, 0), chunks=0))
    poses_N44, progress = track.sample(9, 3)
    assert poses_N44[-1, 0, 3] == 99
    assert len(progress.started) == 32
    assert progress.completed == progress.started


@pytest.mark.parametrize(
    "values", [(0, 0, 0, 0), (1e-9, 0, 0, 0), (math.nan, 0, 0, 1), (math.inf, 0, 0, 1)]
)
def test_a_rotation_needs_a_direction(values: tuple[float, ...]) -> None:
    """Zero, infinite and NaN quaternions are refused."""
    with pytest.raises(ValueError, match="quaternion"):
        unit_quaternion(values)
