# SPDX-License-Identifier: Apache-2.0
"""Convert held keys or a client's poses to the matrices for the camera branch.

A pose is a 4x4 camera-to-world matrix with OpenCV axes (x right, y down, z forward). The pose of a
latent frame is the pose of its first video frame. For each latent frame, the network receives the
view matrix (world to camera), relative to a reference pose and multiplied by the focal lengths, and
the inverse of this product. All matrices are computed in fp64 and rounded once to fp32.
"""

# P video frames of a chunk, F latent frames of a chunk

from dataclasses import dataclass

import torch

from vllm_omni.actions import CAMERA_SPACE, ActionFrames
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import DiffusionRequest
from vllm_omni.model_executor.models.dreamx_world.config import (
    FOCAL_PIXELS,
    REFERENCE_SIZE,
    DreamXOptions,
)
from vllm_omni.model_executor.models.wan.camera_inputs import read_intrinsics, read_poses
from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan
from vllm_omni.model_executor.streaming.request import read_action_frames
from vllm_omni.outputs import RequestFailed
from vllm_omni.worlds.movement import inverse_poses, rotation


@dataclass(frozen=True, eq=False)
class CameraState:
    """Immutable camera state of a session between two chunks, fp64 on the host."""

    pose_44: torch.Tensor
    """Pose of the last video frame. Held keys move the camera from this pose."""
    reference_44: torch.Tensor
    """Reference pose for the next chunk, whose poses are relative to it."""

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"camera.pose": self.pose_44, "camera.reference": self.reference_44}

    def to(self, device: torch.device | str) -> "CameraState":
        """Return this state unchanged, because it remains on the host."""
        return self


@dataclass(frozen=True, eq=False)
class ChunkCamera:
    """The camera input for one chunk."""

    matrices_2F44: torch.Tensor
    """Each latent frame's projection P and its inverse, fp32."""
    after: CameraState
    """Camera state after the chunk."""


def read_camera(
    request: DiffusionRequest,
    chunk_index: int,
    before: CameraState | None,
    plan: ChunkPlan,
    options: DreamXOptions,
) -> ChunkCamera:
    """Read the keys or poses of a chunk.

    Args:
        request: The chunk request.
        chunk_index: Index of the chunk.
        before: Camera state before the chunk. None: the session starts with this chunk.
        plan: Chunk plan of the session.
        options: The model's serving options.

    Raises:
        RequestFailed: The request's camera input is invalid. The code is `invalid_camera`,
            `non_finite_pose` or `invalid_action`.
    """
    frames, pixels = plan.frames(chunk_index), plan.pixel_frames(chunk_index)
    firsts = [plan.rate.first_frame(frame) - pixels.start for frame in frames]
    poses, params = request.tensors.get("poses"), request.params
    if poses is None:
        if "intrinsics" in request.tensors:
            raise RequestFailed(
                "invalid_camera", "intrinsics belong to the tensor `poses`; keys take none"
            )
        keys = read_action_frames(params, request.tensors, CAMERA_SPACE, plan, chunk_index)
        start = torch.eye(4, dtype=torch.float64) if before is None else before.pose_44
        path_P44 = walk(keys, start, options.key_step, options.key_degrees)
    else:
        _refuse_keys(params, request)
        path_P44 = _read_path(poses, len(pixels), len(frames))
    focal_F2 = _focal_lengths(request.tensors.get("intrinsics"), path_P44, firsts)
    poses_F44 = path_P44 if len(path_P44) == len(frames) else path_P44[firsts]
    reference_44 = poses_F44[0] if before is None else before.reference_44
    views_F44 = inverse_poses(poses_F44) @ reference_44
    after = CameraState(
        path_P44[-1].clone(),
        reference_44.clone() if options.camera_reference == "start" else poses_F44[-1].clone(),
    )
    return ChunkCamera(projections(views_F44, focal_F2), after)


def walk(keys: ActionFrames, start_44: torch.Tensor, step: float, degrees: float) -> torch.Tensor:
    """Move the camera according to the keys held in each video frame. In each frame, the camera
    rotates first, then moves along its own axes.

    Args:
        keys: Keys held in each video frame.
        start_44: Pose of the video frame before the chunk.
        step: Distance that the camera moves per video frame while a movement key is held, in pose
            units.
        degrees: Angle by which the camera rotates per video frame while a look key is held, in
            degrees.

    Returns:
        Poses [P, 4, 4].
    """
    held = dict(zip(CAMERA_SPACE.button_names, keys.buttons_NB.double().unbind(1), strict=True))
    turns_P33 = rotation(1, degrees * (held["l"] - held["j"])) @ rotation(
        0, degrees * (held["i"] - held["k"])
    )
    still = torch.zeros_like(held["w"])
    moves_P3 = step * torch.stack((held["d"] - held["a"], still, held["w"] - held["s"]), dim=1)
    pose_44, path = start_44, []
    for turn_33, move_3 in zip(turns_P33, moves_P3, strict=True):
        pose_44 = pose_44.clone()
        pose_44[:3, :3] = pose_44[:3, :3] @ turn_33
        pose_44[:3, 3] += pose_44[:3, :3] @ move_3
        path.append(pose_44)
    return torch.stack(path)


def trained_focal(num_frames: int) -> torch.Tensor:
    """Return the training videos' focal lengths, divided by the width and the height, fp64
    [F, 2].
    """
    width, height = REFERENCE_SIZE
    row = torch.tensor([FOCAL_PIXELS / width, FOCAL_PIXELS / height], dtype=torch.float64)
    return row.expand(num_frames, 2)


def projections(views_F44: torch.Tensor, focal_F2: torch.Tensor) -> torch.Tensor:
    """Return P = diag(fx, fy, 1, 1) V and its inverse, fp32 [2, F, 4, 4].

    Args:
        views_F44: View matrices V relative to the reference, fp64.
        focal_F2: Focal lengths fx and fy, divided by the width and the height.
    """
    scale_F4 = torch.cat((focal_F2, torch.ones_like(focal_F2)), dim=1)
    inverses_F44 = inverse_poses(views_F44) / scale_F4.unsqueeze(1)
    return torch.stack((scale_F4.unsqueeze(2) * views_F44, inverses_F44)).float()


def _refuse_keys(params: DiffusionParams, request: DiffusionRequest) -> None:
    if params.actions is not None or "buttons" in request.tensors:
        raise RequestFailed(
            "invalid_camera", "send the tensor `poses` or `actions` (keys): one of the two"
        )


def _read_path(poses: torch.Tensor, num_pixels: int, num_frames: int) -> torch.Tensor:
    """Validate a chunk's poses and return them. There is one pose per video frame or one per latent
    frame.
    """
    of_latents = poses.dim() == 3 and len(poses) == num_frames
    path_P44 = read_poses(poses, num_frames if of_latents else num_pixels).clone()
    # The client's matrix is only approximately a rotation. Make it exact, so that its inverse is
    # its transpose.
    left, _, right = torch.linalg.svd(path_P44[:, :3, :3])
    path_P44[:, :3, :3] = left @ right
    path_P44[:, 3] = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    return path_P44


def _focal_lengths(
    intrinsics: torch.Tensor | None, path_P44: torch.Tensor, firsts: list[int]
) -> torch.Tensor:
    """Return each latent frame's fx and fy, divided by the width and the height. Without
    `intrinsics`, return the training videos' focal lengths.
    """
    if intrinsics is None:
        return trained_focal(len(firsts))
    values_P4 = read_intrinsics(intrinsics, len(path_P44))
    size = torch.tensor(REFERENCE_SIZE, dtype=torch.float64)
    focal_P2 = values_P4[:, :2] / size
    return focal_P2 if len(path_P44) == len(firsts) else focal_P2[firsts]
