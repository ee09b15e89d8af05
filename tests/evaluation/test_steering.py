# SPDX-License-Identifier: Apache-2.0
"""Tests of the turns, steps and returns measured in synthetic videos with a known camera path and
in broken videos.
"""

import msgspec
import numpy as np
import pytest
import torch
from torch.nn import functional

from vllm_omni.evaluation.steering import (
    PROGRAMS,
    Controls,
    farthest_if_returned,
    program_keys,
    steering,
)

FOCAL, HEIGHT, WIDTH = 0.65, 48, 64
TURN = 6.0
GROWTH = 1.05
TURN_LATENTS = 4


def panorama() -> torch.Tensor:
    """Return a smooth random panorama that spans 360 degrees. Shape: [1, 3, 64, 512]."""
    noise = torch.rand(1, 3, 16, 128, generator=torch.Generator().manual_seed(3))
    return functional.interpolate(noise, size=(64, 512), mode="bicubic").clamp(0, 1)


def seen(heading_degrees: float, zoom: float = 1.0) -> np.ndarray:
    """Return what a camera sees in direction `heading_degrees`. Shape: [H, W, 3], uint8."""
    x = (torch.arange(WIDTH) + 0.5 - WIDTH / 2) / (FOCAL * WIDTH * zoom)
    y = (torch.arange(HEIGHT) + 0.5 - HEIGHT / 2) / (FOCAL * WIDTH * zoom)
    azimuth = torch.rad2deg(torch.atan(x)) + heading_degrees
    u = (azimuth / 180).expand(HEIGHT, WIDTH)
    v = y[:, None] / torch.sqrt(1 + x**2)
    grid = torch.stack((u, v), dim=-1)[None]
    frame = functional.grid_sample(panorama(), grid, mode="bilinear", align_corners=False)
    return (frame[0].permute(1, 2, 0) * 255).round().byte().numpy()


def film(program: str, turn: float = TURN, growth: float = GROWTH) -> np.ndarray:
    """Return the video for a key program: one start frame, then two frames per latent frame."""
    heading, zoom = 0.0, 1.0
    frames = []
    for key in program_keys(program, TURN_LATENTS):
        heading += turn * {"l": 1, "j": -1}.get(key, 0)
        zoom *= growth ** {"w": 1, "s": -1}.get(key, 0)
        frames += [seen(heading, zoom)] * (2 if frames else 1)
    return np.stack(frames)


def controls(program: str) -> Controls:
    return Controls(
        keys=program_keys(program, TURN_LATENTS),
        first_frames=1,
        later_frames=2,
        focal=FOCAL,
        turn_degrees=TURN,
    )


@pytest.mark.parametrize("program", ["left_and_back", "right_and_back"])
def test_turns_are_those_of_the_camera(program: str) -> None:
    found = steering(film(program), controls(program))
    assert found["turn_degrees"] == pytest.approx(TURN, rel=0.03)
    assert found["turn_ratio"] == pytest.approx(1, rel=0.03)
    assert found["turn_missed"] == 0
    assert found["return_psnr"] == 100 and found["return_gain"] > 50


def test_steps_enlarge_the_picture() -> None:
    found = steering(film("walk_and_back"), controls("walk_and_back"))
    assert found["step_growth"] == pytest.approx(GROWTH, abs=0.01)
    assert found["step_missed"] == 0 and found["return_gain"] > 20
    assert "turn_degrees" not in found


@pytest.mark.parametrize("degrees", [3.0, 9.0])
def test_a_turn_that_differs_from_the_command_is_detected(degrees: float) -> None:
    found = steering(film("left_and_back", turn=degrees), controls("left_and_back"))
    assert found["turn_ratio"] == pytest.approx(degrees / TURN, rel=0.04)


def test_a_video_that_turns_the_wrong_way_misses_every_turn() -> None:
    found = steering(film("right_and_back"), controls("left_and_back"))
    assert found["turn_ratio"] == pytest.approx(-1, rel=0.03) and found["turn_missed"] == 1


@pytest.mark.parametrize("program", ["left_and_back", "walk_and_back"])
def test_a_video_that_stands_still_misses_everything(program: str) -> None:
    frames = np.repeat(film("rest")[:1], controls(program).num_frames, axis=0)
    found = steering(frames, controls(program))
    assert found["return_gain"] == 0
    assert {v for k, v in found.items() if k.endswith("missed")} == {1.0}


def test_a_walk_in_the_wrong_direction_misses_every_step() -> None:
    found = steering(film("walk_and_back", growth=1 / GROWTH), controls("walk_and_back"))
    assert found["step_missed"] == 1 and found["step_growth"] < 1


def test_a_camera_that_does_not_come_back_gains_nothing() -> None:
    frames = film("left_and_back")
    frames[-1] = frames[len(frames) // 2]
    assert steering(frames, controls("left_and_back"))["return_gain"] < 1


def test_a_large_video_is_measured_as_a_small_one() -> None:
    """A large video is downscaled before it is measured, so it has the same metrics as the same
    video in a small size.

    The large video is the small video enlarged ten times, to a width of 640 pixels.
    """
    large = film("left_and_back").repeat(10, axis=1).repeat(10, axis=2)
    found = steering(large, controls("left_and_back"))
    assert found["turn_ratio"] == pytest.approx(1, rel=0.03)


@pytest.mark.parametrize(
    ("program", "away"), [("rest", None), ("left_and_back", 4), ("loop", 8), ("walk_and_back", 4)]
)
def test_a_program_returns_from_its_farthest_point(program: str, away: int | None) -> None:
    assert farthest_if_returned(controls(program)) == away


def test_known_poses_decide_whether_the_camera_returned() -> None:
    """If the poses are known, they determine whether the camera has returned. In this test, a wall
    stops the walk, so the camera ends up behind its start position.
    """
    stopped = [[0.0, min(n, 2) if n < 5 else 6.0 - n, 0.0, 0.0] for n in range(9)]
    walk = msgspec.structs.replace(controls("walk_and_back"), world_poses=stopped)
    assert farthest_if_returned(walk) is None
    assert farthest_if_returned(controls("walk_and_back")) == 4


def test_a_video_shorter_than_its_keys_is_refused() -> None:
    with pytest.raises(ValueError, match="the video has 5 frames, its keys are for 17"):
        steering(film("loop")[:5], controls("rest"))


def test_every_program_but_rest_returns() -> None:
    assert [name for name in PROGRAMS if farthest_if_returned(controls(name)) is None] == ["rest"]
