# SPDX-License-Identifier: Apache-2.0
"""Controls first turn a camera and then move it. A wall stops the camera or makes it slide along
the wall.
"""

from pathlib import Path

import pytest
import torch

from vllm_omni.worlds.description import read_description
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


def _move(start: torch.Tensor, steps: tuple[float, float], grid: OccupancyGrid) -> torch.Tensor:
    """Move a camera by a number of steps forward and to the right in one latent frame."""
    ahead, aside, zero = (torch.tensor([v], dtype=torch.float64) for v in (*steps, 0.0))
    motion = CameraMotion(ahead, aside, zero, zero, zero)
    return move_cameras(start[None], zero, motion, STEP, grid)[0][0]


@pytest.mark.parametrize("aside", [0.0, 8.0])
@pytest.mark.parametrize("ahead", [1.0, 2.0, 4.0, 8.0])
def test_a_wall_of_one_cell_stops_every_speed(ahead: float, aside: float) -> None:
    """A substep is never longer than a cell, so a camera cannot pass through a wall that is 10 cm
    thick, at any speed and from any distance.
    """
    cells = torch.zeros(200, 200, dtype=torch.bool)
    cells[89] = True  # the wall is from z = 1.0 to 1.1
    grid = OccupancyGrid(cells, 20.0)
    for distance in range(40):
        pose = world_pose(0, 0.99 - 0.023 * distance, 0)
        for _ in range(3):
            pose = _move(pose, (ahead, aside), grid)
        assert float(pose[2, 3]) < 1.0


def test_a_huge_move_ends_early_in_a_world_with_walls() -> None:
    """A camera moves by at most 1024 cells in one latent frame, because each cell takes time."""
    grid = OccupancyGrid(torch.zeros(200, 200, dtype=torch.bool), 20.0)
    assert float(_move(world_pose(0, 0, 0), (1e9, 0.0), grid)[2, 3]) == pytest.approx(102.4)


def test_a_walker_inside_an_obstacle_can_leave_it() -> None:
    """A camera inside an obstacle can leave it, because a start image's pose or a client's pose may
    be in a blocked cell.
    """
    pose = _walk(world_pose(0, 6, 180), "w", 4, _grid())
    assert float(pose[2, 3]) == pytest.approx(4.0, abs=1e-3)


@pytest.mark.parametrize("heading", range(0, 360, 20))
def test_a_walker_inside_an_obstacle_cannot_go_deeper(heading: int) -> None:
    """A camera in a blocked cell never gets farther away from the nearest free cell, in whatever
    direction it walks. It leaves the wall within a few seconds, unless it walks away from the free
    ground.
    """
    pose = world_pose(0, 5.25, heading)
    for _ in range(12):
        before, pose = pose, _walk(pose, "w", 1, _grid())
        assert float(pose[2, 3]) <= max(5.0, float(before[2, 3]))
    assert float(pose[2, 3]) < 5.0 or heading in (0, 20, 340)


def test_a_walker_cannot_cross_a_wall_from_within() -> None:
    """A camera 30 cm inside a wall that is 2 m thick leaves it on the near side only."""
    cells = torch.zeros(200, 200, dtype=torch.bool)
    cells[30:50] = True  # from z = 5 to z = 7
    grid = OccupancyGrid(cells, 20.0)
    for speed in (1.0, 8.0):
        inside = world_pose(0, 5.3, 0)
        for _ in range(10):
            inside = _move(inside, (speed, 0.0), grid)
        assert inside[:3, 3].tolist() == pytest.approx([0, 0, 5.3])
        assert float(_move(inside, (-8.0, 0.0), grid)[2, 3]) == pytest.approx(1.3, abs=1e-3)


def test_a_camera_deep_in_a_wall_moves_freely() -> None:
    """A camera more than 64 cells deep in a wall moves as in a world without walls, because the
    search for the nearest free cell would take long. So does a camera if every cell is blocked.
    """
    cells = torch.ones(2000, 2000, dtype=torch.bool)
    pose = world_pose(1, 2, 30)
    free = _walk(pose, "w", 3, None)
    torch.testing.assert_close(_walk(pose, "w", 3, OccupancyGrid(cells, 200.0)), free)
    cells[:, 1070:] = False  # from x = 7
    deep = _walk(world_pose(0.4, 0, 270), "w", 3, OccupancyGrid(cells, 200.0))
    torch.testing.assert_close(deep, _walk(world_pose(0.4, 0, 270), "w", 3, None))
    led_out = _walk(world_pose(0.7, 0, 270), "w", 3, OccupancyGrid(cells, 200.0))
    assert float(led_out[0, 3]) == pytest.approx(0.7)


def test_the_distance_to_free_ground_is_exact() -> None:
    """The distance is that to the nearest edge of a free cell, also across the edge of the grid,
    where the world repeats.
    """
    cells = torch.rand(24, 30, generator=torch.Generator().manual_seed(1)) < 0.97
    grid = OccupancyGrid(cells, 12.0)
    draws = torch.rand(200, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    positions = (draws - 0.5) * 12
    rows, columns = (~cells).nonzero().double().unbind(1)
    middle_M2 = torch.stack(((columns + 0.5) * 0.4 - 6, 6 - (rows + 0.5) * 0.5), dim=1)
    apart_NM2 = torch.remainder(positions[:, None] - middle_M2 + 6, 12) - 6
    half_2 = torch.tensor([0.2, 0.25], dtype=torch.float64)
    expected_N = (apart_NM2.abs() - half_2).clamp(min=0).norm(dim=-1).amin(dim=1)
    assert torch.allclose(grid.distance_to_free(positions, 30), expected_N, rtol=0, atol=1e-9)
    assert bool((grid.distance_to_free(positions, 30) == 0).eq(~grid.blocked(positions)).all())


@pytest.fixture(scope="module")
def village_grid(village: Path) -> OccupancyGrid:
    description = read_description(village)
    assert description is not None
    assert description.grid is not None
    return OccupancyGrid.read_image(village / description.grid.file, description.grid.side_m)


VILLAGE_STARTS = [(1.2, -4.0, 0.0), (2.6, 7.4, 195.0), (7.4, -5.6, 290.0)]


def test_the_village_starts_are_those_of_its_description(village: Path) -> None:
    description = read_description(village)
    assert description is not None
    starts = {(start.x_m, start.z_m, start.heading_degrees) for start in description.starts}
    assert starts == set(VILLAGE_STARTS)


@pytest.mark.parametrize("keys", ["w", "a", "s", "d", "wa", "wd", "sa", "sd"])
@pytest.mark.parametrize("start", VILLAGE_STARTS)
def test_every_start_pose_of_the_village_leads_to_open_ground(
    start: tuple[float, float, float], keys: str, village_grid: OccupancyGrid
) -> None:
    """A start pose may be at the edge of a wall, as that of the street is. The camera can walk in
    every free direction from there and does not enter the wall.
    """
    pose = world_pose(*start)
    free = _walk(pose, keys, 1, None)
    moved = _walk(pose, keys, 1, village_grid)
    if not village_grid.blocked(torch.lerp(pose, free, 0.25)[0:3:2, 3]):
        assert (moved - pose)[:3, 3].norm() > 0.1
    for _ in range(20):
        at_start = torch.equal(moved, pose)
        assert at_start or not village_grid.blocked(moved[0:3:2, 3])
        moved = _walk(moved, keys, 1, village_grid)


@pytest.mark.parametrize("steps", [1.0, 2.0, 4.0, 8.0])
def test_the_walls_of_the_village_stop_every_speed(
    steps: float, village_grid: OccupancyGrid
) -> None:
    """From the street, a camera stops in front of the same wall at every speed."""
    pose = world_pose(2.6, 7.4, 195)
    for _ in range(40):
        pose = _move(pose, (steps, 0.0), village_grid)
        assert not village_grid.blocked(pose[0:3:2, 3])
    assert pose[0:3:2, 3].tolist() == pytest.approx([1.2, 2.1], abs=0.1)


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
