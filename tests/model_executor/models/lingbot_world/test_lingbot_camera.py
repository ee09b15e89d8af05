# SPDX-License-Identifier: Apache-2.0
"""Tests of camera maths that the recorded tensors do not cover: the meaning of each convention, and
invalid input.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni.model_executor.models.lingbot_world import camera as cam
from vllm_omni.model_executor.models.wan.camera_inputs import read_intrinsics, read_poses
from vllm_omni.outputs import RequestFailed
from vllm_omni.testing.parity.lingbot_trajectory import prepare_trajectory

EYE = torch.eye(4, dtype=torch.float64)


def pose(x: float = 0.0, y: float = 0.0, z: float = 0.0, yaw: float = 0.0) -> torch.Tensor:
    angle = math.radians(yaw)
    out = EYE.clone()
    out[0, 0] = out[2, 2] = math.cos(angle)
    out[0, 2], out[2, 0] = math.sin(angle), -math.sin(angle)
    out[:3, 3] = torch.tensor([x, y, z])
    return out


# -- rays ------------------------------------------------------------------------------------------


def test_a_ray_leaves_through_its_pixel_centre() -> None:
    """A ray passes through the centre of its pixel. For pixel (u, v) = (5, 9), component c is in
    channel c * 64 + (v mod 8) * 8 + (u mod 8) at row 1, column 0 of the map.
    """
    intrinsics = torch.tensor([[20.0, 30.0, 8.0, 8.0]])
    maps = cam.camera_map(pose(1, 2, 3, yaw=90).unsqueeze(0), intrinsics, 16, 16)
    assert maps.shape == (384, 1, 2, 2)
    values = [float(maps[c * 64 + 1 * 8 + 5, 0, 1, 0]) for c in range(6)]
    x, y = (5.5 - 8) / 20, (9.5 - 8) / 30
    length = math.sqrt(x * x + y * y + 1)
    # A quarter turn to the right maps forward to +x.
    turned = [1 / length, y / length, -x / length]
    assert values == pytest.approx([1, 2, 3, *turned], abs=1e-6)


# -- relative poses --------------------------------------------------------------------------------


def test_the_first_frame_moves_relative_to_the_previous_chunk() -> None:
    path = torch.stack([pose(z=1.0), pose(z=3.0)])
    assert cam.relative_poses(path, pose(z=0.5))[:, 2, 3].tolist() == [0.5, 2.0]
    assert cam.relative_poses(path)[:, 2, 3].tolist() == [0.0, 2.0]


def test_relative_motion_does_not_depend_on_the_origin() -> None:
    torch.manual_seed(0)
    path = torch.stack([pose(x=i * 0.1, z=i * 0.3, yaw=7 * i) for i in range(4)])
    moved = pose(x=50, y=-3, z=9, yaw=123) @ path
    torch.testing.assert_close(
        cam.relative_poses(moved), cam.relative_poses(path), atol=1e-12, rtol=0
    )


@pytest.mark.parametrize(("scale", "expected"), [(0.05, [0.0, 2.0, 1.0]), (None, [0.0, 1.0, 0.5])])
def test_translations_are_divided_by_a_constant_or_the_largest(
    scale: float | None, expected: list[float]
) -> None:
    """Translations are divided by a constant or by the largest translation. Scaling does not change
    a path without translation.
    """
    relative = torch.stack([pose(), pose(z=0.1), pose(x=0.05)])
    out = cam.scaled_translations(relative, scale)
    assert out[:, :3, 3].norm(dim=1).tolist() == pytest.approx(expected)
    still = EYE.repeat(3, 1, 1)
    assert torch.equal(cam.scaled_translations(still, scale), still)


def test_latent_frames_take_every_fourth_pixel_frame() -> None:
    """A first chunk uses pixel frames 0, 4 and 8 of its 9 frames. A later chunk uses pixel frames
    3, 7 and 11 of its 12 frames.
    """
    assert cam.per_latent(torch.arange(9), range(3)).tolist() == [0, 4, 8]
    assert cam.per_latent(torch.arange(12), range(3, 6)).tolist() == [3, 7, 11]


# -- actions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "position"),
    [
        ("w", (0, 0, 0.05)),
        ("s", (0, 0, -0.05)),
        ("d", (0.05, 0, 0)),
        ("a", (-0.05, 0, 0)),
        ("", (0, 0, 0)),
    ],
)
def test_movement_keys_move_one_unit(keys: str, position: tuple[float, float, float]) -> None:
    poses, _ = cam.integrate_actions([keys], cam.CameraTail.origin())
    assert poses[0, :3, 3].tolist() == pytest.approx(position, abs=1e-6)


def test_opposite_keys_cancel() -> None:
    poses, tail = cam.integrate_actions(["adijklsw"], cam.CameraTail.origin())
    torch.testing.assert_close(poses[0], EYE, atol=1e-12, rtol=0)
    assert tail.pitch_degrees == 0


def test_walking_while_looking_up_stays_on_the_ground() -> None:
    poses, _ = cam.integrate_actions(["i"] * 10 + ["w"] * 5, cam.CameraTail.origin())
    assert poses[-1, 1, 3] == 0
    assert float(poses[-1, 2, 3]) == pytest.approx(0.25, abs=1e-5)


def test_a_step_beyond_85_degrees_of_pitch_is_ignored() -> None:
    """The camera pitches up in 21 steps of 4 degrees to 84 degrees. It ignores the next step, which
    would exceed 85 degrees.
    """
    _, tail = cam.integrate_actions(["i"] * 40, cam.CameraTail.origin())
    assert tail.pitch_degrees == 84
    _, tail = cam.integrate_actions(["k"] * 42, tail)
    assert tail.pitch_degrees == -84


@given(
    st.lists(
        st.sets(st.sampled_from(list(cam.ACTION_SPACE.button_names))), min_size=2, max_size=12
    ),
    st.integers(1, 11),
)
@settings(max_examples=50, deadline=None)
def test_a_walk_in_chunks_equals_the_whole_walk(script: list[set[str]], cut: int) -> None:
    held = cam.read_keys([sorted(keys) for keys in script], len(script))
    whole, _ = cam.integrate_actions(held, cam.CameraTail.origin())
    cut = min(cut, len(held) - 1)
    first, tail = cam.integrate_actions(held[:cut], cam.CameraTail.origin())
    second, _ = cam.integrate_actions(held[cut:], tail)
    assert torch.equal(torch.cat((first, second)), whole)


@given(st.lists(st.sampled_from(list("jlik")), max_size=300))
@settings(max_examples=20, deadline=None)
def test_poses_of_long_walks_stay_rotations(keys: list[str]) -> None:
    """After 300 turns, the rotation matrix R is still valid: R R^T differs from the identity only
    by rounding (1e-12 in fp64).
    """
    poses, tail = cam.integrate_actions([*keys, "w"], cam.CameraTail.origin())
    rotation = tail.pose_44[:3, :3]
    torch.testing.assert_close(rotation @ rotation.mT, EYE[:3, :3], atol=1e-12, rtol=0)
    assert cam.CameraTail.at(poses[-1]).pitch_degrees == pytest.approx(tail.pitch_degrees, abs=1e-6)


def test_missing_actions_are_idle_and_too_many_refused() -> None:
    assert cam.read_keys([["w"]], 3) == ["w", "", ""]
    with pytest.raises(RequestFailed, match="at most 3 entries"):
        cam.read_keys([["w"]] * 4, 3)


@pytest.mark.parametrize("key", ["q", "W", "wd", ""])
def test_unknown_keys_are_refused(key: str) -> None:
    with pytest.raises(RequestFailed, match=r"invalid_action: actions\[0\]"):
        cam.read_keys([[key]], 3)


# -- client input ----------------------------------------------------------------------------------


def poses_with(index: tuple[int, ...], value: float) -> torch.Tensor:
    poses = torch.eye(4).repeat(9, 1, 1)
    poses[index] = value
    return poses


@pytest.mark.parametrize(
    ("poses", "code", "message"),
    [
        (
            torch.eye(4).repeat(8, 1, 1),
            "invalid_camera",
            r"shape \[9, 4, 4\].*got torch.float32 \[8, 4, 4\]",
        ),
        (torch.eye(4, dtype=torch.int64).repeat(9, 1, 1), "invalid_camera", "torch.int64"),
        (torch.zeros(0, 4, 4), "invalid_camera", r"\[0, 4, 4\]"),
        (torch.zeros(9, 4, 4).to_sparse(), "invalid_camera", "poses must be floats"),
        (poses_with((2, 0, 3), math.nan), "non_finite_pose", "poses must be finite"),
        (poses_with((2, 0, 3), -math.inf), "non_finite_pose", "poses must be finite"),
        (poses_with((2, 0, 3), 1e30), "invalid_camera", r"within \+-1e\+06"),
        (poses_with((3, 0, 0), 1.1), "invalid_camera", r"poses\[3\]\[:3, :3\] is not a rotation"),
        (poses_with((3, 0, 0), -1.0), "invalid_camera", r"poses\[3\]\[:3, :3\] is not a rotation"),
        (torch.zeros(9, 4, 4), "invalid_camera", r"poses\[0\]"),
        (poses_with((8, 3, 3), 2.0), "invalid_camera", "last row"),
    ],
)
def test_bad_poses_are_named(poses: torch.Tensor, code: str, message: str) -> None:
    with pytest.raises(RequestFailed, match=message) as failure:
        read_poses(poses, 9)
    assert failure.value.code == code


def test_poses_of_any_layout_and_float_type_are_read() -> None:
    wanted = torch.stack([pose(x=i) for i in range(9)])
    assert torch.equal(read_poses(wanted.mT.contiguous().mT, 9), wanted)
    assert torch.equal(read_poses(wanted.half(), 9), wanted)
    assert read_poses(poses_with((0, 0, 3), -0.0), 9).dtype == torch.float64


@pytest.mark.parametrize(
    "intrinsics",
    [
        torch.tensor([416.0, 417.0, 418.0, 240.0]),
        torch.tensor([416.0, 417.0, 418.0, 240.0]).repeat(9, 1),
        torch.tensor([[416.0, 0, 418], [0, 417, 240], [0, 0, 1]]),
        torch.tensor([[416.0, 0, 418], [0, 417, 240], [0, 0, 1]]).repeat(9, 1, 1),
        torch.tensor([[416.0, 0, 418, 0], [0, 417, 240, 0], [0, 0, 1, 0], [0, 0, 0, 1]]).repeat(
            9, 1, 1
        ),
        torch.tensor([[416.0, 417.0, 418.0, 240.0]]),
    ],
    ids=["[4]", "[N,4]", "[3,3]", "[N,3,3]", "[N,4,4]", "[1,4]"],
)
def test_intrinsics_come_in_several_shapes(intrinsics: torch.Tensor) -> None:
    assert read_intrinsics(intrinsics, 9).tolist() == [[416.0, 417.0, 418.0, 240.0]] * 9


@pytest.mark.parametrize(
    ("intrinsics", "code", "message"),
    [
        (torch.ones(9, 5), "invalid_camera", r"intrinsics must be floats \[9, 4\]"),
        (torch.ones(8, 4), "invalid_camera", r"\[8, 4\]"),
        (torch.tensor(1.0), "invalid_camera", "intrinsics must be floats"),
        (
            torch.tensor([0.0, 417, 418, 240]),
            "invalid_camera",
            r"focal lengths fx and fy must lie in \[1, 1e\+06\]",
        ),
        (torch.tensor([416, -417.0, 418, 240]), "invalid_camera", "focal lengths"),
        (torch.tensor([1e-40, 417, 418, 240]), "invalid_camera", "focal lengths"),
        (torch.tensor([416, 417, math.nan, 240]), "non_finite_pose", "intrinsics must be finite"),
    ],
)
def test_bad_intrinsics_are_named(intrinsics: torch.Tensor, code: str, message: str) -> None:
    with pytest.raises(RequestFailed, match=message) as failure:
        read_intrinsics(intrinsics, 9)
    assert failure.value.code == code


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_fuzzed_poses_are_read_or_refused(data: Any) -> None:
    """If an element of the first pose is replaced with an arbitrary float, the result is either
    finite rays or a `RequestFailed` error.
    """
    poses = torch.eye(4, dtype=torch.float64).repeat(9, 1, 1)
    row, column = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    poses[0, row, column] = data.draw(st.floats(allow_nan=True, allow_infinity=True))
    intrinsics = torch.tensor([data.draw(st.floats(width=32)), 417.0, 418.0, 240.0])
    try:
        path = read_poses(poses, 9)
        scaled = cam.scale_intrinsics(read_intrinsics(intrinsics, 9), 16, 16)
    except RequestFailed:
        return
    rays = cam.camera_map(cam.relative_poses(path)[:2], scaled[:2], 16, 16)
    assert bool(torch.isfinite(rays).all())


def test_a_path_in_chunks_equals_the_originals_whole_path() -> None:
    """If `camera_scale` is a path's largest step, processing the path in chunks produces the same
    relative poses as processing it at once. The tolerance of 1e-5 is well above the fp32 rounding
    error of 3e-7.
    """
    clip = torch.stack([pose(x=0.02 * i, z=0.05 * i, yaw=0.7 * i) for i in range(33)])
    whole = prepare_trajectory(clip, torch.tensor([[416.0, 416.0, 416.0, 240.0]]), 32, 48)
    scale = float(cam.relative_poses(whole.poses_N44.double())[:, :3, 3].norm(dim=1).max())
    before, parts = None, []
    for frames, pixels in (
        (range(3), slice(0, 9)),
        (range(3, 6), slice(9, 21)),
        (range(6, 9), slice(21, 33)),
    ):
        path = cam.per_latent(read_poses(clip[pixels], len(clip[pixels])), frames)
        parts.append(cam.scaled_translations(cam.relative_poses(path, before), scale))
        before = path[-1]
    torch.testing.assert_close(torch.cat(parts), whole.relative_N44.double(), atol=1e-5, rtol=0)
