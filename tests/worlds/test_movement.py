# SPDX-License-Identifier: Apache-2.0
"""Controls first turn a camera and then move it. A wall stops the camera or makes it slide along
the wall.
"""

from pathlib import Path

import pytest
import torch

from vllm_omni.worlds.grid import OccupancyGrid
from vllm_omni.worlds.movement import (
    CameraMotion,
    heading_of,
    move_cameras,
    pitch_of,
    world_pose,
)

STEP = 0.5


def _grid() -> OccupancyGrid:
    """Return a 20 m grid with 10 cm cells that is free except for a wall everywhere north of
    z = 5.
    """
    cells = torch.zeros(200, 200, dtype=torch.bool)
    cells[:50] = True
    return OccupancyGrid(cells, 20.0)


def _walk(pose: torch.Tensor, keys: str, count: int, grid: OccupancyGrid | None) -> torch.Tensor:
    poses, pitch = pose[None], torch.tensor([pitch_of(pose)], dtype=torch.float64)
    for _ in range(count):
        poses, pitch = move_cameras(poses, pitch, CameraMotion.of_keys([keys]), STEP, grid)
    return poses[0]


@pytest.mark.parametrize(
    ("keys", "x", "z"),
    [
        ("w", 0.0, 0.5),
        ("s", 0.0, -0.5),
        ("d", 0.5, 0.0),
        ("a", -0.5, 0.0),
        ("wd", 0.5, 0.5),
        ("ws", 0.0, 0.0),
    ],
)
def test_movement_keys_walk_along_the_view(keys: str, x: float, z: float) -> None:
    """Movement keys walk along the view: facing north, forward adds to z and right adds to x.
    Opposite keys cancel out.
    """
    pose = _walk(world_pose(0, 0, 0), keys, 1, None)
    assert pose[:3, 3].tolist() == pytest.approx([x, 0.0, z], abs=1e-5)


def test_a_camera_looks_before_it_walks() -> None:
    pose = _walk(world_pose(0, 0, 84), "wl", 1, None)
    assert heading_of(pose) == pytest.approx(90) and pose[:3, 3].tolist() == pytest.approx(
        [0.5, 0, 0], abs=1e-5
    )


def test_looking_up_neither_slows_nor_lifts_a_walker() -> None:
    pose = _walk(world_pose(0, 0, 0, pitch_degrees=60), "w", 2, None)
    assert pose[:3, 3].tolist() == pytest.approx([0, 0, 1], abs=1e-5) and pitch_of(
        pose
    ) == pytest.approx(60)


@pytest.mark.parametrize(("start", "end"), [(0, 40), (38, 38), (60, 60)])
def test_a_world_limits_how_far_a_camera_looks_up(start: float, end: float) -> None:
    """The look-up key has no effect beyond the world's pitch limit. A camera that starts beyond the
    limit can still look back down.
    """
    poses, pitch = world_pose(0, 0, 0, start)[None], torch.tensor([start], dtype=torch.float64)
    for _ in range(20):
        motion = CameraMotion.of_keys(["i"])
        poses, pitch = move_cameras(poses, pitch, motion, STEP, pitch_limit_degrees=40)
    assert pitch_of(poses[0]) == pytest.approx(end)
    poses, _ = move_cameras(poses, pitch, CameraMotion.of_keys(["k"]), STEP, pitch_limit_degrees=40)
    assert pitch_of(poses[0]) == pytest.approx(end - 4)


def test_a_wall_ends_a_straight_walk() -> None:
    """A camera that walks straight into a wall stays in the last free cell in front of it."""
    pose = _walk(world_pose(0.03, 0, 0), "w", 40, _grid())
    assert 4.9 < float(pose[2, 3]) < 5.0 and abs(float(pose[0, 3]) - 0.03) < 0.2
    again = _walk(pose, "w", 40, _grid())
    assert torch.allclose(pose[:3, 3], again[:3, 3], atol=0.05)


def test_a_walker_slides_along_a_wall() -> None:
    """A camera that walks into a wall at 45 degrees keeps the component of its step that runs along
    the wall.
    """
    pose = _walk(world_pose(0, 4.9, 45), "w", 8, _grid())
    assert float(pose[2, 3]) < 5.0
    assert float(pose[0, 3]) == pytest.approx(8 * STEP * 0.5**0.5, rel=0.3)


def test_nothing_is_jumped_over_at_the_largest_speed() -> None:
    """Even at the highest speed, at which the camera moves 4 m (eight steps) per latent frame, a
    wall 60 cm thick stops it.
    """
    cells = torch.zeros(200, 200, dtype=torch.bool)
    cells[60:66] = True
    motion = CameraMotion.of_keys(["w"])
    fast = CameraMotion(
        8 * motion.ahead, motion.aside, motion.up, motion.yaw_degrees, motion.pitch_degrees
    )
    start = world_pose(0, 0, 0)
    poses, _ = move_cameras(
        start[None], torch.zeros(1, dtype=torch.float64), fast, STEP, OccupancyGrid(cells, 20.0)
    )
    assert float(poses[0, 2, 3]) < 3.4


def test_a_walker_inside_an_obstacle_can_leave_it() -> None:
    """A camera inside an obstacle can leave it, because a start image's pose or a client's pose may
    be in a blocked cell.
    """
    pose = _walk(world_pose(0, 6, 180), "w", 4, _grid())
    assert float(pose[2, 3]) == pytest.approx(4.0, abs=1e-3)


def test_the_world_repeats_after_its_side() -> None:
    grid = _grid()
    positions = torch.tensor(
        [[0.0, 6.0], [0.0, -14.0], [20.0, 26.0], [0.0, 0.0], [-20.0, 20.0]], dtype=torch.float64
    )
    assert grid.blocked(positions).tolist() == [True, True, True, False, False]
    # The next wall to the south belongs to the next period of the world.
    south = _walk(world_pose(0, -15.5, 0), "s", 60, grid)
    assert -30.0 <= float(south[2, 3]) < -29.9


def test_cameras_move_independently_of_each_other() -> None:
    grid, keys = _grid(), ["w", "wl", "sd", ""]
    starts = torch.stack([world_pose(x, 4.6, 20 * x) for x in range(4)])
    together, _ = move_cameras(
        starts, torch.zeros(4, dtype=torch.float64), CameraMotion.of_keys(keys), STEP, grid
    )
    alone = [_walk(start, held, 1, grid) for start, held in zip(starts, keys, strict=True)]
    assert torch.allclose(together, torch.stack(alone), atol=1e-12)


def test_a_grid_survives_its_file(tmp_path: Path) -> None:
    """A grid written to an image file is unchanged when it is read back. The first row of the image
    is the northernmost one, and black cells are blocked.
    """
    cells = torch.rand(30, 40, generator=torch.Generator().manual_seed(3)) < 0.4
    OccupancyGrid(cells, 12.0).write(tmp_path / "grid.png")
    read = OccupancyGrid.read_image(tmp_path / "grid.png", 12.0)
    assert torch.equal(read.cells, cells) and read.side_m == 12.0


def test_a_file_that_is_no_image_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "grid.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="cannot be read as an occupancy grid") as caught:
        OccupancyGrid.read_image(tmp_path / "grid.png", 12.0)
    assert "\n" not in str(caught.value)
