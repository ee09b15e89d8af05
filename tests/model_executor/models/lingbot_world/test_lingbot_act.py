# SPDX-License-Identifier: Apache-2.0
"""Tests of world models that take action flags in addition to ray directions (`act`): the sources
of flags, and invalid flags.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lingbot_world_driver import load_world, make_request, open_session

from vllm_omni.model_executor.models.lingbot_world.pipeline import LingBotWorld
from vllm_omni.multimodal import NamedTensorsParser
from vllm_omni.outputs import RequestFailed

FIRST = 9
"""Number of video frames in a first chunk. The latent frames of that chunk correspond to video
frames 0, 4 and 8.
"""


@pytest.fixture(scope="module")
def world(tiny_checkpoint: Callable[..., Path]) -> LingBotWorld:
    return load_world(tiny_checkpoint("lingbot_world", "act"))


def path(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "poses": torch.eye(4).repeat(FIRST, 1, 1),
        "intrinsics": torch.tensor([[660.0, 660.0, 416.0, 240.0]]),
        **tensors,
    }


def planes(
    world: LingBotWorld, tensors: dict[str, torch.Tensor] | None = None, **params: Any
) -> torch.Tensor:
    """Return the seven control channels of a first chunk. Shape: [7, F, 64, h, w]."""
    request = make_request(world, open_session(world), tensors, prompt="a beach", **params)
    world.prepare_encode(request)
    assert request.work.camera_map is not None
    return request.work.camera_map.unflatten(0, (7, 64)).transpose(1, 2)


def flags(
    world: LingBotWorld, tensors: dict[str, torch.Tensor] | None = None, **params: Any
) -> list[list[float]]:
    """Check that the flags for the keys w, a, s and d are the same at every pixel, and return them
    for each latent frame.
    """
    of_pixels = planes(world, tensors, **params)[3:]
    assert bool((of_pixels == of_pixels[:, :, :1, :1, :1]).all())
    return of_pixels[:, :, 0, 0, 0].T.tolist()


def test_held_keys_become_flags(world: LingBotWorld) -> None:
    """The held keys w, a, s and d set the model's flags. The keys i, j, k and l only turn the
    camera.
    """
    assert flags(world, actions=[["w", "d"], ["l"], ["s", "a"]]) == [
        [1, 0, 0, 1],
        [0, 0, 0, 0],
        [0, 1, 1, 0],
    ]


def test_flags_sent_with_poses_are_read_at_the_frames_of_the_poses(world: LingBotWorld) -> None:
    """Flags sent with poses have one entry per video frame. Both flags and poses are read only at
    frames 0, 4 and 8. If poses are sent without flags, no key counts as held.
    """
    action = torch.zeros(FIRST, 4, dtype=torch.int64)
    action[4, 1] = action[8, 3] = action[5] = 1
    assert flags(world, path(action=action)) == [[0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]]
    assert flags(world, path(action=action.bool())) == flags(world, path(action=action.float()))
    assert flags(world, path()) == [[0, 0, 0, 0]] * 3


def test_movement_changes_no_direction(world: LingBotWorld) -> None:
    """Movement does not change the ray directions, because only the action flags encode
    translation.
    """
    moved = path()
    moved["poses"][:, 2, 3] = torch.arange(FIRST)
    assert torch.equal(planes(world, path()), planes(world, moved))
    turned = path()
    turned["poses"][4:, :3, :3] = torch.tensor([[0.8, 0.0, 0.6], [0.0, 1.0, 0.0], [-0.6, 0.0, 0.8]])
    assert not torch.equal(planes(world, path())[:3], planes(world, turned)[:3])


def test_flags_are_part_of_the_camera_input() -> None:
    """Flags can be sent through stock vLLM as `multi_modal_data={"camera": {"poses": ...,
    "intrinsics": ..., "action": ...}}`.
    """
    parsed = NamedTensorsParser().parse_mm_data({"camera": dict(path(action=torch.ones(FIRST, 4)))})
    assert set(parsed["camera"].get(0)) == {"poses", "intrinsics", "action"}


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (
            torch.zeros(8, 4),
            r"action must be numbers of shape \[9, 4\].* got torch.float32 \[8, 4\]",
        ),
        (torch.zeros(9, 8), r"shape \[9, 4\]"),
        (torch.full((9, 4), 0.5), "zeros and ones only"),
        (torch.full((9, 4), float("nan")), "zeros and ones only"),
        (torch.zeros(9, 4, dtype=torch.complex64), "must be numbers"),
    ],
)
def test_invalid_flags_are_refused(world: LingBotWorld, action: torch.Tensor, message: str) -> None:
    with pytest.raises(RequestFailed, match=message) as refused:
        flags(world, path(action=action))
    assert refused.value.code == "invalid_camera"


def test_flags_sent_with_keys_are_refused(world: LingBotWorld) -> None:
    with pytest.raises(RequestFailed, match="`action` with poses, or `actions`: one of the two"):
        flags(world, {"action": torch.zeros(FIRST, 4)}, actions=[["w"]])


def test_a_model_without_flags_names_its_inputs(lingbot_world: Path) -> None:
    world = load_world(lingbot_world)
    with pytest.raises(
        RequestFailed,
        match=r"unknown tensors \['action'\]; this model takes image, poses, intrinsics$",
    ):
        world.prepare_encode(
            make_request(world, open_session(world), path(action=torch.zeros(FIRST, 4)))
        )
