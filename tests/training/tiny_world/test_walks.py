# SPDX-License-Identifier: Apache-2.0
"""Walks follow the same path as the package's camera and stop at walls, and the network receives
the actual motion.
"""

from pathlib import Path

import pytest
import torch

from training.tiny_world.village import PERIOD, Village
from training.tiny_world.walks import (
    STEP_M,
    Walks,
    _obstructed,
    free_places,
    key_bits,
    random_walks,
    scripted_walks,
    village_grid,
)
from vllm_omni.model_executor.models.lingbot_world.camera import CameraTail, integrate_motions
from vllm_omni.worlds.description import read_description
from vllm_omni.worlds.movement import CameraMotion

LENGTH = 60
VILLAGE = Path(__file__).parents[3] / "vllm_omni" / "worlds" / "village"


@pytest.fixture(scope="module")
def walks() -> Walks:
    return random_walks(64, LENGTH, 77)


def test_a_walk_goes_where_the_packages_camera_goes() -> None:
    """A walk's positions and headings equal the integrated poses of the package's camera.

    Both respect the served world's walls and pitch limit. The first latent frame is the start
    image, whatever keys are held.
    """
    served = read_description(VILLAGE)
    assert served is not None
    held = ["w", "wl", "wl", "d", "s", "ij", "wi", "k", "wa", "", *["w"] * 20, *["wi"] * 12]
    bits = torch.tensor([[key_bits(keys) for keys in held]], dtype=torch.uint8)
    walk = scripted_walks(torch.tensor([[1.2, -4.0]]), torch.tensor([0.4]), bits)
    start = CameraTail(walk.world_poses()[0, 0], 0.0)
    poses, _ = integrate_motions(
        [CameraMotion.of_keys([keys]) for keys in held[1:]],
        start,
        move=STEP_M,
        grid=village_grid(),
        pitch_limit_degrees=served.pitch_limit_degrees,
    )
    poses = torch.cat((start.pose_44[None], poses))
    assert torch.allclose(walk.positions[0].double(), poses[:, [0, 2], 3], atol=1e-4)
    assert torch.allclose(walk.world_poses()[0], poses, atol=1e-4)
    relative = torch.linalg.inv(poses[:-1]) @ poses[1:]
    relative[:, :3, 3] /= STEP_M
    assert torch.allclose(walk.relative[0, 1:].double(), relative[:, :3], atol=1e-4)
    assert torch.equal(walk.relative[0, 0], torch.eye(3, 4))


def test_no_one_ever_stands_in_an_obstacle(walks: Walks) -> None:
    """No walker is ever inside an obstacle. At more than 98 % of random positions, the occupancy
    grid agrees with the obstacles.
    """
    obstacles = Village.build().obstacles_N6
    assert not bool(village_grid().blocked(walks.positions.double()).any())
    draws = (torch.rand(2000, 2, generator=torch.Generator().manual_seed(1)) - 0.5) * PERIOD
    same = _obstructed(draws, obstacles) == village_grid().blocked(draws.double())
    assert float(same.float().mean()) > 0.98
    free, _ = free_places(200, torch.Generator().manual_seed(1))
    assert not bool(village_grid().blocked(free.double()).any())


def test_the_network_is_given_what_a_wall_leaves_of_a_step() -> None:
    """A walk straight towards a house ends in front of the house, and the motion that the network
    receives also becomes zero.
    """
    bits = torch.full((1, 24), key_bits("w"), dtype=torch.uint8)
    walk = scripted_walks(torch.tensor([[0.5, 2.6]]), torch.tensor([0.0]), bits)
    steps = walk.positions[0].diff(dim=0).norm(dim=1)
    assert float(steps[0]) == pytest.approx(STEP_M, abs=1e-5) and float(steps[-1]) < 1e-6
    assert (
        walk.relative[0, 1, 2, 3] == pytest.approx(1.0, abs=1e-4)
        and float(walk.relative[0, -1, 2, 3]) < 1e-6
    )


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


def test_walkers_look_up_and_down_as_often_as_players() -> None:
    """Walkers look more than 20 degrees up or down for a third of the time, as players do."""
    pitch = random_walks(300, 132, 7).pitch.abs().rad2deg()
    assert 0.25 < float((pitch > 20).float().mean()) < 0.45
