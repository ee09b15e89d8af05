# SPDX-License-Identifier: Apache-2.0
"""Validate camera poses and intrinsics from clients, for all models that use them.

A pose is a 4x4 camera-to-world matrix with OpenCV axes (x right, y down, z forward).
"""

# N frames; intrinsics_N4 = fx, fy, cx, cy in pixels

import torch

from vllm_omni.outputs import RequestFailed

_LARGEST = 1e6
_FOCAL_RANGE = (1.0, 1e6)
_ROTATION_TOLERANCE = 1e-2
_LAST_ROW_TOLERANCE = 1e-3


def read_poses(poses: torch.Tensor, num_frames: int) -> torch.Tensor:
    """Validate poses of shape `[num_frames, 4, 4]` and return them in fp64.

    Raises:
        RequestFailed: The poses have the wrong shape, or a pose is out of range or contains a
            matrix that is not a rotation (`invalid_camera`), or a pose is not finite
            (`non_finite_pose`).
    """
    if tuple(poses.shape) != (num_frames, 4, 4) or not _is_real(poses):
        raise RequestFailed(
            "invalid_camera",
            f"poses must be floats of shape [{num_frames}, 4, 4], one per pixel frame of "
            "this chunk; "
            f"got {poses.dtype} {list(poses.shape)}",
        )
    poses_N44 = _finite(poses, "poses")
    rotation = poses_N44[:, :3, :3]
    skew = (rotation @ rotation.mT - torch.eye(3, dtype=torch.float64)).abs().amax(dim=(1, 2))
    proper = (skew <= _ROTATION_TOLERANCE) & (torch.linalg.det(rotation) > 0)
    if not bool(proper.all()):
        index = int((~proper).nonzero()[0])
        raise RequestFailed(
            "invalid_camera",
            f"poses[{index}][:3, :3] is not a rotation: R R^T must be within "
            f"{_ROTATION_TOLERANCE:g} of the identity "
            f"and det R = +1",
        )
    last_row = poses_N44[:, 3] - torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    if bool((last_row.abs() > _LAST_ROW_TOLERANCE).any()):
        raise RequestFailed("invalid_camera", "the last row of every pose must be [0, 0, 0, 1]")
    return poses_N44


def read_intrinsics(intrinsics: torch.Tensor, num_frames: int) -> torch.Tensor:
    """Validate intrinsics and return each frame's fx, fy, cx, cy, fp64 `[num_frames, 4]`.

    Separate intrinsics for each frame have shape `[N, 4]`, `[N, 3, 3]` or `[N, 4, 4]`. Intrinsics
    with N = 1, or of shape `[4]` or `[3, 3]`, apply to all frames. Raises `RequestFailed` under the
    same conditions as `read_poses`.
    """
    shape = tuple(intrinsics.shape)
    batched = intrinsics.unsqueeze(0) if shape in ((4,), (3, 3)) else intrinsics
    if (
        batched.shape[1:] not in ((4,), (3, 3), (4, 4))
        or len(batched) not in (1, num_frames)
        or not _is_real(batched)
    ):
        raise RequestFailed(
            "invalid_camera",
            f"intrinsics must be floats [{num_frames}, 4] (fx, fy, cx, cy), [{num_frames}, "
            "3, 3] or "
            f"[{num_frames}, 4, 4], or one row for all frames; got {intrinsics.dtype} "
            f"{list(shape)}",
        )
    values = _finite(batched, "intrinsics")
    if values.dim() == 3:
        values = torch.stack(
            (values[:, 0, 0], values[:, 1, 1], values[:, 0, 2], values[:, 1, 2]), dim=1
        )
    low, high = _FOCAL_RANGE
    if bool(((values[:, :2] < low) | (values[:, :2] > high)).any()):
        raise RequestFailed(
            "invalid_camera", f"focal lengths fx and fy must lie in [{low:g}, {high:g}] pixels"
        )
    return values.expand(num_frames, 4)


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.dtype.is_floating_point


def _finite(tensor: torch.Tensor, name: str) -> torch.Tensor:
    values = tensor.to("cpu", torch.float64)
    if not bool(torch.isfinite(values).all()):
        raise RequestFailed("non_finite_pose", f"{name} must be finite, got NaN or Inf")
    if bool((values.abs() > _LARGEST).any()):
        raise RequestFailed("invalid_camera", f"{name} must lie within +-{_LARGEST:g}")
    return values
