# SPDX-License-Identifier: Apache-2.0
"""Tests of camera conventions of public implementations, which are selected by name. Each
convention is compared with recordings or with an independent computation.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.golden import golden_folder
from lingbot_world_driver import HEIGHT, WIDTH, choosing, load_world, make_request, open_session
from safetensors.torch import load_file

from vllm_omni.model_executor.models.lingbot_world.camera import action_intrinsics, camera_map
from vllm_omni.model_executor.models.lingbot_world.pipeline import LingBotWorld
from vllm_omni.model_executor.models.lingbot_world.request import read_chunk
from vllm_omni.model_executor.models.lingbot_world.state import LingBotSession, WorldCoordinates

GOLDEN = golden_folder("lingbot")


@pytest.fixture(scope="module")
def world(lingbot_world: Path) -> LingBotWorld:
    return load_world(lingbot_world, window_frames=7, sink_frames=2)


def new_session(world: LingBotWorld) -> LingBotSession:
    session = open_session(world)
    assert isinstance(session, LingBotSession)
    return session


def ray_maps(
    world: LingBotWorld, session: LingBotSession, chunks: list[dict[str, Any]], **choices: Any
) -> list[Any]:
    """Return (relative poses, ray map) for each chunk with the given choices. Only the camera code
    runs.
    """
    maps = []
    with choosing(**choices) as served:
        dtype = served.choices.camera_torch_dtype
        for fields in chunks:
            inputs = read_chunk(
                make_request(world, session, prompt="a beach", **fields), session, served
            )
            rays = camera_map(
                inputs.relative_F44, inputs.intrinsics_F4, HEIGHT, WIDTH, dtype=dtype
            ).unsqueeze(0)
            maps.append((inputs.relative_F44, rays))
            session.own = WorldCoordinates(condition=None, tail=inputs.tail)
            session.chunk_index += 1
    return maps


@pytest.mark.parametrize(
    ("recording", "options"),
    [
        ("sglang", {"camera_first_frame": "stands", "camera_scale": "session_max"}),
        ("vllm_action", {"camera_scale": "chunk_max"}),
        ("vllm_realtime", {}),
    ],
)
def test_held_keys_give_the_ray_maps_of_each_implementation(
    world: LingBotWorld, recording: str, options: dict[str, Any]
) -> None:
    """Over three chunks, held keys produce the ray maps recorded from each implementation
    (tests/golden/lingbot, tolerance 1e-5).
    """
    golden = load_file(GOLDEN / "camera.safetensors")
    keys = [
        ["w"],
        ["w", "j"],
        ["w", "l", "i"],
        [],
        ["a", "k"],
        ["s"],
        ["d", "i"],
        ["w", "a"],
        ["l"],
    ]
    session = new_session(world)
    chunks = [{"actions": keys[start : start + 3]} for start in (0, 3, 6)]
    for index, (_, rays) in enumerate(ray_maps(world, session, chunks, **options)):
        torch.testing.assert_close(rays, golden[f"act.{recording}_chunk{index}"], atol=1e-5, rtol=0)


def test_chunks_may_be_relative_to_their_first_pose(world: LingBotWorld) -> None:
    """In PR 3701's extension, poses are relative to the first frame of their chunk, and
    translations are divided by the chunk's largest translation.
    """
    generator = torch.Generator().manual_seed(4)
    chunks = []
    for pixel_frames in (9, 12, 12):
        poses = torch.eye(4, dtype=torch.float64).repeat(pixel_frames, 1, 1)
        turns = 0.2 * torch.randn(pixel_frames, 3, 3, generator=generator, dtype=torch.float64)
        poses[:, :3, :3] = torch.linalg.matrix_exp(turns - turns.mT)
        poses[:, :3, 3] = torch.randn(pixel_frames, 3, generator=generator, dtype=torch.float64)
        chunks.append(
            {"tensors": {"poses": poses, "intrinsics": torch.tensor([416.0, 416.0, 416.0, 240.0])}}
        )
    session = new_session(world)
    maps = ray_maps(
        world, session, chunks, camera_first_frame="stands_each_chunk", camera_scale="chunk_max"
    )
    for index, (relative, _) in enumerate(maps):
        path = chunks[index]["tensors"]["poses"][[0, 4, 8] if index == 0 else [3, 7, 11]]
        anchored = torch.linalg.inv(path[0]) @ path
        expected = torch.stack(
            [
                torch.eye(4, dtype=torch.float64),
                *(torch.linalg.inv(a) @ b for a, b in itertools.pairwise(anchored)),
            ]
        )
        expected[:, :3, 3] /= expected[:, :3, 3].norm(dim=1).max()
        torch.testing.assert_close(relative, expected, atol=1e-9, rtol=0)


def test_session_max_is_the_longest_step_so_far(world: LingBotWorld) -> None:
    """With `session_max`, steps are divided by the longest step so far. After a diagonal step of
    sqrt(2) units, all later steps are divided by sqrt(2), even in later chunks. A scale in the
    request takes precedence.
    """
    session = new_session(world)
    chunks: list[dict[str, Any]] = [
        {"actions": [[], [], []]},
        {"actions": [["w"], ["w"], ["w"]]},
        {"actions": [["w", "d"], ["w"], []]},
        {"actions": [["w"], ["w"], ["w"]]},
        {"actions": [["w"], ["w"], ["w"]], "options": {"camera_scale": 0.5}},
    ]
    lengths = [
        [round(float(length), 4) for length in relative[:, :3, 3].norm(dim=1)]
        for relative, _ in ray_maps(world, session, chunks, camera_scale="session_max")
    ]
    assert lengths == [[0, 0, 0], [1, 1, 1], [1, 0.7071, 0], [0.7071] * 3, [0.1, 0.1, 0.1]]


def test_bf16_rays_round_every_operation() -> None:
    """A static camera's rays equal the result of a computation that rounds every operation to bf16.
    In bf16, pixel coordinates above 256 are rounded even before the first operation.
    """
    height, width = 480, 832
    ours = camera_map(
        torch.eye(4)[None], action_intrinsics(1, height, width), height, width, dtype=torch.bfloat16
    )
    u = (torch.arange(width).bfloat16() + 0.5 - width / 2) / 500
    v = (torch.arange(height).bfloat16() + 0.5 - height / 2) / 500
    x, y = u[None, :].expand(height, width), v[:, None].expand(height, width)
    rays = torch.stack((x, y, torch.ones_like(x)))
    rays = rays / rays.float().square().sum(0).sqrt().bfloat16()
    planes = torch.cat((torch.zeros_like(rays), rays)).float()
    expected = (
        planes.view(6, height // 8, 8, width // 8, 8)
        .permute(0, 2, 4, 1, 3)
        .reshape(384, height // 8, width // 8)
    )
    assert torch.equal(ours[:, 0], expected)
    exact = camera_map(torch.eye(4)[None], action_intrinsics(1, height, width), height, width)
    assert 1e-3 < float((ours - exact).abs().max()) < 2e-2


def test_a_bf16_camera_loses_small_steps_far_from_the_origin(world: LingBotWorld) -> None:
    """A bf16 camera rounds poses before it computes the steps between them. After thirty frames,
    steps are therefore off by up to 20 % of their length.
    """
    keys = [["w", "l"] if index % 3 else ["w"] for index in range(30)]
    chunks = [{"actions": keys[start : start + 3]} for start in range(0, 30, 3)]
    found = {
        dtype: torch.cat(
            [
                relative
                for relative, _ in ray_maps(world, new_session(world), chunks, camera_dtype=dtype)
            ]
        )
        for dtype in ("fp32", "bf16")
    }
    off = (found["bf16"] - found["fp32"]).abs()
    assert 0.02 < float(off[:, :3, 3].max()) < 0.3
    assert 1e-4 < float(off[:, :3, :3].max()) < 2e-2
