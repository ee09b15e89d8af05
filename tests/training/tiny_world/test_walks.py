# SPDX-License-Identifier: Apache-2.0
"""Walks lead where the package's camera goes and stop at walls; the network hears of them what the package says."""

import math

import pytest
import torch

from training.tiny_world.village import PERIOD, Village
from training.tiny_world.walks import (
    KEYS,
    STEP_M,
    Walks,
    _blocked,
    free_places,
    key_bits,
    random_walks,
    scripted_walks,
)
from vllm_omni.model_executor.models.lingbot_world.camera import (
    MOVE_UNIT,
    CameraTail,
    integrate_actions,
    relative_poses,
    scaled_translations,
)

LENGTH = 30


@pytest.fixture(scope="module")
def walks() -> Walks:
    return random_walks(64, LENGTH, 77)


def test_the_command_is_the_packages_camera(walks: Walks) -> None:
    """`relative` is what `camera.py` makes of the same keys, from the origin on, in units of a step."""
    for index in range(0, len(walks), 4):
        poses, _ = integrate_actions(walks.held(index), CameraTail.origin())
        relative = scaled_translations(relative_poses(poses, torch.eye(4, dtype=torch.float64)), MOVE_UNIT)
        assert float((walks.relative[index] - relative[:, :3].float()).abs().max()) < 1e-5


def test_a_free_walk_goes_where_the_packages_camera_goes() -> None:
    """Where nothing is in the way, positions and headings are the integrated poses, a step being half a metre; the
    first latent frame turns but does not move.
    """
    held = ["w", "wl", "wl", "d", "s", "ij", "wi", "k", "wa", ""]
    bits = torch.tensor([[key_bits(keys) for keys in held]], dtype=torch.uint8)
    start = torch.tensor([[1.2, -4.0]])
    walk = scripted_walks(start, torch.zeros(1), bits)
    poses, _ = integrate_actions(held, CameraTail.origin())
    moved = (poses[:, [0, 2], 3] - poses[0, [0, 2], 3]) / MOVE_UNIT * STEP_M
    assert float((walk.positions[0] - start - moved).abs().max()) < 1e-4
    assert walk.yaw[0].tolist() == pytest.approx(
        torch.atan2(poses[:, 0, 0] * 0 - poses[:, 2, 0], poses[:, 0, 0]).tolist(), abs=1e-5
    )
    assert walk.pitch[0].tolist() == pytest.approx([-math.asin(float(p[1, 2])) for p in poses], abs=1e-5)


def test_nobody_ever_stands_in_an_obstacle(walks: Walks) -> None:
    """Nor between latent frames by more than the walker's clearance leaves: a wall's middle is never reached."""
    obstacles = Village.build().obstacles_N6
    assert not bool(_blocked(walks.positions, obstacles, -1e-3).any())
    free, _ = free_places(200, torch.Generator().manual_seed(1))
    assert not bool(_blocked(free, obstacles).any())
    assert bool(_blocked((torch.rand(200, 2) - 0.5) * PERIOD, obstacles).any())


def test_a_wall_stops_a_walker_but_not_the_command() -> None:
    """Straight at a house: the walk ends before it, the network goes on hearing `w`."""
    bits = torch.full((1, 24), key_bits("w"), dtype=torch.uint8)
    walk = scripted_walks(torch.tensor([[0.5, 2.6]]), torch.tensor([0.0]), bits)
    steps = walk.positions[0].diff(dim=0).norm(dim=1)
    assert float(steps[0]) == pytest.approx(STEP_M, abs=1e-5) and float(steps[-1]) < 1e-6
    assert walk.relative[0, 1:, 2, 3].tolist() == pytest.approx([1.0] * 23)


def test_frames_lie_evenly_between_latent_frames(walks: Walks) -> None:
    positions, yaw, pitch = walks.frames()
    count = 4 * (LENGTH - 1) + 1
    assert positions.shape == (64, count, 2) and yaw.shape == pitch.shape == (64, count)
    assert torch.equal(positions[:, ::4], walks.positions) and torch.equal(yaw[:, ::4], walks.yaw)
    assert torch.equal(pitch[:, ::4], walks.pitch)
    for quarter in (1, 2, 3):
        expected = torch.lerp(walks.yaw[:, :-1], walks.yaw[:, 1:], quarter / 4)
        assert float((yaw[:, quarter::4] - expected).abs().max()) < 1e-6
    between = (walks.positions[:, :-1] + walks.positions[:, 1:]) / 2
    assert float((positions[:, 2::4] - between).abs().max()) < 1e-5


def test_walks_come_from_the_seed_alone(walks: Walks) -> None:
    again, other = random_walks(64, LENGTH, 77), random_walks(64, LENGTH, 78)
    assert torch.equal(walks.keys, again.keys) and torch.equal(walks.positions, again.positions)
    assert not torch.equal(walks.keys, other.keys)


def test_walks_are_worth_learning_from(walks: Walks) -> None:
    """Every key is held, most walkers move, some turn away and back, nobody looks higher than 33 degrees."""
    held = {key for index in range(len(walks)) for keys in walks.held(index) for key in keys}
    assert held == set(KEYS)
    moved = (walks.positions[:, -1] - walks.positions[:, 0]).norm(dim=1)
    assert float((moved > 1).float().mean()) > 0.5
    assert float(walks.pitch.abs().max()) <= math.radians(33)
    still = moved < 1e-6
    back = still & (walks.yaw.amax(1) - walks.yaw.amin(1) > 0.3) & ((walks.yaw[:, -1] - walks.yaw[:, 0]).abs() < 0.7)
    assert int(back.sum()) >= 3


def test_a_part_and_held_keys(walks: Walks) -> None:
    part = walks.part(3, 5)
    assert len(part) == 2 and part.held(0) == walks.held(3)
    assert [key_bits(keys) for keys in part.held(1)] == walks.keys[4].tolist()
