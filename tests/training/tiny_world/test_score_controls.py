# SPDX-License-Identifier: Apache-2.0
"""Tests of the measurement of a camera's turn angles and distances, on rendered videos with a known
camera path and on broken videos.
"""

import math

import pytest
import torch

from training.tiny_world.controls import distances_walked
from training.tiny_world.render import FOCAL, Renderer
from training.tiny_world.walks import STEP_M
from vllm_omni.evaluation.camera_motion import turns

PLACE, YAW = (1.2, -4.0), 0.3


@pytest.fixture(scope="module")
def turning(renderer: Renderer) -> torch.Tensor:
    """Return a video in which the camera turns six degrees to the right per frame."""
    yaw = YAW + torch.deg2rad(6.0 * torch.arange(6))
    return renderer.render(torch.tensor([PLACE]).expand(6, 2), yaw, torch.zeros(6), torch.zeros(6))


@pytest.fixture(scope="module")
def along(renderer: Renderer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return frames at intervals of 0.125 m along a straight line, and each frame's distance."""
    distances = torch.arange(0, 3.01, 0.125)
    positions = torch.tensor(PLACE) + distances[:, None] * torch.tensor(
        [math.sin(YAW), math.cos(YAW)]
    )
    yaw = torch.full((len(positions),), YAW)
    return renderer.render(
        positions, yaw, torch.zeros_like(yaw), torch.ones(len(positions))
    ), distances


def test_the_truth_turns_as_commanded(turning: torch.Tensor) -> None:
    """Turn angles measured on the ground truth equal the commanded angles within one percent."""
    assert float(turns(turning, FOCAL).median()) == pytest.approx(6.0, rel=0.01)
    assert bool(((turns(turning, FOCAL) - 6).abs() < 0.2).all())


def test_a_video_that_stands_still_or_turns_twice_as_far_is_detected(turning: torch.Tensor) -> None:
    assert turns(turning[[0, 0, 0]], FOCAL).tolist() == pytest.approx([0.0, 0.0], abs=1e-3)
    assert turns(turning[::2], FOCAL).tolist() == pytest.approx([12.0, 12.0], rel=0.02)


def test_the_truth_walks_as_commanded(along: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Distances measured on the ground truth are within 5 cm of half a metre per latent frame.

    The distances are measured by comparing the frames with views from nearby positions.
    """
    frames, distances = along
    latents = frames[4:-4:4]
    # None of these views has the position of a frame.
    others = [index for index in range(len(frames)) if index % 2]
    found = distances_walked(latents, frames[others], distances[others])
    assert found.tolist() == pytest.approx(
        [STEP_M * (1 + index) for index in range(len(latents))], abs=0.05
    )


def test_a_delayed_or_standing_video_walks_less(along: tuple[torch.Tensor, torch.Tensor]) -> None:
    frames, distances = along
    latents = frames[4::4]
    delayed = torch.cat((frames[:1], latents[:-1]))
    assert distances_walked(delayed, frames, distances).tolist() == pytest.approx(
        [STEP_M * index for index in range(len(latents))], abs=0.02
    )
    assert distances_walked(frames[[0, 0]], frames, distances).tolist() == [0.0, 0.0]
