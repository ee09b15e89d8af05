# SPDX-License-Identifier: Apache-2.0
"""Keys and poses are converted to the camera branch's matrices across several chunks, and invalid
poses are refused.
"""

import math
from typing import Any, Literal

import pytest
import torch

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import DiffusionRequest
from vllm_omni.model_executor.models.dreamx_world.camera import (
    CameraState,
    ChunkCamera,
    read_camera,
    trained_focal,
)
from vllm_omni.model_executor.models.dreamx_world.config import DreamXOptions
from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan
from vllm_omni.outputs import RequestFailed
from vllm_omni.worlds.movement import inverse_poses, rotation

PLAN = ChunkPlan(3, 3, 12, 3)
FX, FY = 969.6969696969696 / 1920, 969.6969696969696 / 1080


def read(
    index: int,
    before: CameraState | None,
    tensors: dict[str, torch.Tensor] | None = None,
    options: DreamXOptions | None = None,
    **params: Any,
) -> ChunkCamera:
    request: Any = DiffusionRequest(
        "request", DiffusionParams(session_id="a", **params), tensors or {}, None
    )
    return read_camera(request, index, before, PLAN, options or DreamXOptions())


def path(num_frames: int, turn: float = 2.0) -> torch.Tensor:
    """Return the poses of a camera that turns and moves. There is one pose per video frame."""
    poses = torch.eye(4, dtype=torch.float64).repeat(num_frames, 1, 1)
    poses[:, :3, :3] = rotation(1, turn * torch.arange(num_frames).double())
    poses[:, 2, 3] = 0.1 * torch.arange(num_frames).double()
    return poses


def test_a_held_key_moves_the_camera_in_every_video_frame() -> None:
    """A held key moves the camera from the first frame on. The first chunk's latent frames
    correspond to video frames 0, 1 and 5.
    """
    camera = read(0, None, actions=[["w"]] * 3)
    views = inverse_projection(camera)
    assert torch.allclose(views[0], torch.eye(4), atol=1e-6)
    assert views[:, 2, 3].tolist() == pytest.approx([0.0, -0.075, -0.375], abs=1e-6)
    assert float(camera.after.pose_44[2, 3]) == pytest.approx(9 * 0.075)
    later = read(1, camera.after, actions=[["w"]] * 3)
    assert inverse_projection(later)[:, 2, 3].tolist() == pytest.approx(
        [-0.3, -0.6, -0.9], abs=1e-6
    )


def inverse_projection(camera: ChunkCamera) -> torch.Tensor:
    """Return a chunk's view matrices, which are its projections without the focal lengths."""
    scale = torch.tensor([FX, FY, 1.0, 1.0])
    return camera.matrices_2F44[0] / scale[:, None]


def test_a_new_key_shows_in_the_next_chunks_first_latent() -> None:
    """The next chunk's first latent frame includes four camera updates: three with the old keys and
    one with the new key.
    """
    first = read(0, None, actions=[["l"]] * 3)
    second = read(1, first.after, actions=[["j"]] * 3)
    angle = -torch.atan2(*inverse_projection(second)[0, [0, 2], [2, 2]].double())
    assert math.degrees(float(angle)) == pytest.approx(3 * 1.5 - 1.5, abs=1e-3)


def test_projections_are_inverse_to_each_other() -> None:
    matrices = read(0, None, actions=[["w", "i", "l"]] * 3).matrices_2F44
    assert torch.allclose(matrices[0] @ matrices[1], torch.eye(4).expand(3, 4, 4), atol=1e-6)


@pytest.mark.parametrize("reference", ["chunk", "start"])
def test_poses_of_video_frames_and_of_latent_frames_agree(
    reference: Literal["chunk", "start"],
) -> None:
    options = DreamXOptions(camera_reference=reference)
    whole = path(21)
    states: list[CameraState | None] = [None, None]
    for index, (pixels, latents) in enumerate([(range(9), [0, 1, 5]), (range(9, 21), [9, 13, 17])]):
        dense = read(index, states[0], {"poses": whole[list(pixels)]}, options)
        sparse = read(index, states[1], {"poses": whole[latents]}, options)
        assert torch.equal(dense.matrices_2F44, sparse.matrices_2F44)
        states = [dense.after, sparse.after]
        origin = whole[0] if reference == "start" or index == 0 else whole[5]
        expected = (inverse_poses(whole[latents]) @ origin).float()
        assert torch.allclose(inverse_projection(dense), expected, atol=1e-6)


def test_keys_continue_from_uploaded_poses() -> None:
    uploaded = read(0, None, {"poses": path(9)})
    assert torch.allclose(uploaded.after.pose_44, path(9)[-1])
    walked = read(1, uploaded.after, actions=[])
    assert torch.allclose(walked.after.pose_44, path(9)[-1])


def test_intrinsics_replace_the_trained_focal_lengths() -> None:
    intrinsics = torch.tensor([[960.0, 540.0, 0.0, 0.0]])
    given = read(0, None, {"poses": path(9), "intrinsics": intrinsics}).matrices_2F44
    trained = read(0, None, {"poses": path(9)}).matrices_2F44
    ratio = torch.tensor([0.5, 0.5]) / trained_focal(1)[0]
    assert torch.allclose(given[0, :, :2], trained[0, :, :2] * ratio[:, None].float(), atol=1e-6)


def test_the_camera_of_a_long_session_stays_a_rotation() -> None:
    """After two thousand chunks with held keys, the camera is far from the origin, but its rotation
    matrix is still valid. Relative matrices keep their precision, because they relate neighbouring
    poses.
    """
    state = read(0, None, actions=[["w", "l", "i"]] * 3).after
    first = None
    for index in range(1, 2000):
        camera = read(index, state, actions=[["w", "l"]] * 3)
        state, first = camera.after, camera.matrices_2F44 if first is None else first
    turned = state.pose_44[:3, :3]
    assert torch.allclose(turned @ turned.mT, torch.eye(3).double(), atol=1e-9)
    again = read(2000, state, actions=[["w", "l"]] * 3).matrices_2F44
    assert torch.allclose(again, camera.matrices_2F44, atol=1e-5)


def bad(change: Any) -> torch.Tensor:
    poses = path(9)
    change(poses)
    return poses


@pytest.mark.parametrize(
    ("poses", "code", "reason"),
    [
        (bad(lambda p: p[4, :3, :3].mul_(1.1)), "invalid_camera", r"poses\[4\].*is not a rotation"),
        (bad(lambda p: p[2, 0].neg_()), "invalid_camera", r"poses\[2\].*det R = \+1"),
        (bad(lambda p: p[1, 3].fill_(1)), "invalid_camera", "last row"),
        (bad(lambda p: p[0, 0, 3].fill_(math.nan)), "non_finite_pose", "must be finite"),
        (bad(lambda p: p[0, 0, 3].fill_(1e7)), "invalid_camera", "within"),
        (path(8), "invalid_camera", r"shape \[9, 4, 4\]"),
        (path(9)[:, :3], "invalid_camera", r"shape \[9, 4, 4\]"),
        (path(9).long(), "invalid_camera", "must be floats"),
    ],
)
def test_invalid_poses_are_refused(poses: torch.Tensor, code: str, reason: str) -> None:
    with pytest.raises(RequestFailed, match=reason) as refused:
        read(0, None, {"poses": poses})
    assert refused.value.code == code


def test_keys_and_poses_exclude_each_other() -> None:
    with pytest.raises(RequestFailed, match="one of the two"):
        read(0, None, {"poses": path(9)}, actions=[["w"]])
    with pytest.raises(RequestFailed, match="intrinsics belong to"):
        read(0, None, {"intrinsics": torch.ones(1, 4)}, actions=[["w"]])
