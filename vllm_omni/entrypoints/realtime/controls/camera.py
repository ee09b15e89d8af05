# SPDX-License-Identifier: Apache-2.0
"""Check camera paths from clients, and convert them to float32 arrays with exact rotations.

Poses are camera-to-world matrices with OpenCV axes (x right, y down, z forward), one for each pixel
frame. Intrinsics are fx, fy, cx, cy in pixels of the model's reference size.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo

# N pixel frames

PosePolicy = Literal["error", "trim", "hold_last"]

# A matrix that deviates more than this from a rotation is rejected. A smaller deviation is assumed
# to be a rounding error.
_ROTATION_TOLERANCE: Final = 1e-2
_LAST_ROW_TOLERANCE: Final = 1e-3
_LARGEST: Final = 1e6  # float32 positions above this have no useful precision


@dataclass(frozen=True)
class CameraPath:
    """Poses and intrinsics for consecutive pixel frames. The arrays are C-contiguous and contain
    finite values.
    """

    poses_N44: np.ndarray
    """Camera-to-world matrices, float32."""
    intrinsics_N4: np.ndarray
    """Intrinsics fx, fy, cx, cy in pixels of the reference size, float32."""

    def __len__(self) -> int:
        return len(self.poses_N44)

    @classmethod
    def parse(
        cls,
        poses: Any,
        intrinsics: Any,
        max_poses: int,
        size: tuple[int, int],
        own_size: tuple[int, int] | None = None,
    ) -> "CameraPath":
        """Check arrays or nested lists from a client, and convert them to a camera path.

        Each rotation is replaced with the nearest orthonormal matrix.

        Args:
            poses: Camera-to-world matrices `[N, 4, 4]`.
            intrinsics: Intrinsics `[N, 4]`, `[N, 3, 3]` or `[N, 4, 4]`. N may be 1, or absent, for
                one vector or matrix for all poses.
            max_poses: Maximum number of poses.
            size: Width and height of the image that the server's intrinsics refer to.
            own_size: Width and height of the image that the client's intrinsics refer to.
                Intrinsics are scaled from this size to `size`. Default: `size`, that is, no
                scaling.

        Raises:
            EndpointError: `non_finite_pose` if a value is NaN or infinite, or `invalid_camera` if
                the path is invalid in any other way.
        """
        poses_N44 = _numbers(poses, "poses")
        if poses_N44.ndim != 3 or poses_N44.shape[1:] != (4, 4) or len(poses_N44) == 0:
            raise EndpointError(
                "invalid_camera",
                f"poses must have shape [N, 4, 4], got {list(poses_N44.shape)}",
                param="poses",
            )
        if len(poses_N44) > max_poses:
            raise EndpointError(
                "invalid_camera",
                f"{len(poses_N44)} poses arrived; at most {max_poses} are allowed",
                param="poses",
            )
        intrinsics_N4 = _per_frame(_numbers(intrinsics, "intrinsics"), len(poses_N44))
        for name, array in (("poses", poses_N44), ("intrinsics", intrinsics_N4)):
            if not np.isfinite(array).all():
                raise EndpointError(
                    "non_finite_pose", f"{name} must be finite, got NaN or Inf", param=name
                )
            if np.abs(array).max() > _LARGEST:
                raise EndpointError(
                    "invalid_camera", f"{name} must lie within +-{_LARGEST:g}", param=name
                )
        if (intrinsics_N4[:, :2] <= 0).any():
            raise EndpointError(
                "invalid_camera", "focal lengths fx and fy must be > 0", param="intrinsics"
            )
        given = size if own_size is None else own_size
        centres_N2 = intrinsics_N4[:, 2:]
        if (centres_N2 < 0).any() or (centres_N2 > given).any():
            x, y = centres_N2[((centres_N2 < 0) | (centres_N2 > given)).any(axis=1)][0]
            raise EndpointError(
                "invalid_camera",
                f"the principal point ({x:g}, {y:g}) is outside an image of {given[0]}x{given[1]}. "
                f"If the intrinsics are for an image of about {2 * x:g}x{2 * y:g}, scale them to "
                f"{size[0]}x{size[1]} or send [width, height] as camera.intrinsics_size",
                param="intrinsics",
            )
        scale_2 = np.array(size) / given
        intrinsics_N4 = intrinsics_N4 * np.tile(scale_2, 2)
        return cls(
            np.ascontiguousarray(_with_exact_rotations(poses_N44), dtype=np.float32),
            np.ascontiguousarray(intrinsics_N4, dtype=np.float32),
        )

    def slice(self, start: int, stop: int) -> "CameraPath":
        return CameraPath(self.poses_N44[start:stop], self.intrinsics_N4[start:stop])

    def resized(self, num_frames: int) -> "CameraPath":
        """Truncate the path to `num_frames`, or extend it by repeating the last pose."""
        index = np.minimum(np.arange(num_frames), len(self) - 1)
        return CameraPath(self.poses_N44[index], self.intrinsics_N4[index])


def plan_frames(
    num_poses: int,
    num_frames: int | None,
    policy: PosePolicy,
    info: StreamInfo,
    first: bool,
    num_actions: int | None = None,
) -> list[int]:
    """Return the number of pixel frames in each chunk of a request.

    Args:
        num_poses: Number of poses that the client sent, or of pixel frames for which it sent
            actions.
        num_frames: Number of pixel frames that the client requested. None: one frame per pose.
        policy: `error` requires complete chunks and equal numbers of frames and poses. `trim` drops
            frames that do not fill a chunk. `hold_last` repeats the last pose to fill a chunk.
        info: The model's chunk sizes.
        first: Whether this is the session's first request.
        num_actions: Number of latent frames for which the client sent actions. None: the client
            sent poses.

    Raises:
        EndpointError: `invalid_camera` if the numbers of poses and frames do not match the policy,
            or `invalid_action` if the client sent actions.
    """
    grid = f"{info.first_chunk_frames} + {info.chunk_frames}k" if first else f"{info.chunk_frames}k"
    where = "a session's first request" if first else "a later request"
    if policy == "error" and num_frames not in (None, num_poses):
        if num_actions is not None:
            raise EndpointError(
                "invalid_action",
                f"num_frames is {num_frames} but actions has {num_actions} entries, for "
                f"{num_poses} frames; send one entry per latent frame",
                param="actions",
            )
        raise EndpointError(
            "invalid_camera",
            f"num_frames is {num_frames} but {num_poses} poses arrived; send one pose per frame",
            param="poses",
        )
    wanted = num_poses if num_frames is None else num_frames
    if policy == "trim":
        wanted = min(wanted, num_poses)
    sizes, rest = info.split(wanted, first)
    if rest and policy == "hold_last":
        sizes.append(next(info.chunk_sizes(first and not sizes)))
    elif (rest and policy == "error") or not sizes:
        if num_actions is not None:
            sent = "" if num_frames is None else f" and num_frames is {num_frames}"
            later_latents = info.latent_frames_per_chunk
            latents = f"{later_latents}k"
            if first:
                latents = f"{info.first_chunk_latent_frames or later_latents} + {latents}"
            raise EndpointError(
                "invalid_action",
                f"actions has {num_actions} entries{sent}; {where} takes {latents} entries, one "
                f"per latent frame ({grid} frames)",
                param="actions",
            )
        raise EndpointError(
            "invalid_camera",
            f"{wanted} frames arrived; {where} generates {grid} frames: send as many poses, or set "
            "extra_body.pose_policy to 'trim' or 'hold_last'",
            param="poses",
        )
    return sizes


def _numbers(value: Any, name: str) -> np.ndarray:
    """Return an array or nested list of numbers as float64.

    Raises:
        EndpointError: The value contains booleans or text, or its lists differ in length.
    """
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "iuf":
            raise EndpointError(
                "invalid_camera",
                f"{name} must contain numbers, got dtype {value.dtype}",
                param=name,
            )
        with np.errstate(invalid="ignore"):  # NaN is refused later with a separate error
            return value.astype(np.float64)
    if not isinstance(value, list) or not _check_numeric(value):
        raise EndpointError(
            "invalid_camera", f"{name} must be an array or nested lists of numbers", param=name
        )
    try:
        return np.array(value, dtype=np.float64)
    except (ValueError, OverflowError):
        raise EndpointError(
            "invalid_camera",
            f"{name} must be a regular array; its lists differ in length",
            param=name,
        ) from None


def _check_numeric(value: list[Any]) -> bool:
    return all(
        _check_numeric(item) if isinstance(item, list) else type(item) in (int, float)
        for item in value
    )


def _per_frame(intrinsics: np.ndarray, count: int) -> np.ndarray:
    """Return fx, fy, cx, cy for each frame. One vector of four values or one matrix applies to all
    frames, whether or not it is in a list of its own.
    """
    shape = intrinsics.shape
    if shape in ((1, 4), (1, 3, 3), (1, 4, 4)):
        intrinsics = np.broadcast_to(intrinsics, (count, *shape[1:]))
        shape = intrinsics.shape
    elif shape in ((4,), (3, 3)) or (shape == (4, 4) and count != 4):
        intrinsics = np.broadcast_to(intrinsics, (count, *shape))
        shape = intrinsics.shape
    if shape[1:] in ((3, 3), (4, 4)):
        intrinsics = np.stack(
            [intrinsics[:, 0, 0], intrinsics[:, 1, 1], intrinsics[:, 0, 2], intrinsics[:, 1, 2]],
            axis=1,
        )
    if intrinsics.shape != (count, 4):
        raise EndpointError(
            "invalid_camera",
            f"intrinsics must have shape [N, 4], [N, 3, 3] or [N, 4, 4] with N = {count} poses, or "
            f"be one for all; got {list(shape)}",
            param="intrinsics",
        )
    return intrinsics


def _with_exact_rotations(poses_N44: np.ndarray) -> np.ndarray:
    """Replace each rotation with the nearest orthonormal matrix (SVD).

    Raises:
        EndpointError: A pose is not a rigid transform.
    """
    if np.abs(poses_N44[:, 3] - np.array([0.0, 0.0, 0.0, 1.0])).max() > _LAST_ROW_TOLERANCE:
        raise EndpointError(
            "invalid_camera", "the last row of every pose must be [0, 0, 0, 1]", param="poses"
        )
    rotation_N33 = poses_N44[:, :3, :3]
    error = np.abs(rotation_N33.transpose(0, 2, 1) @ rotation_N33 - np.eye(3)).max(axis=(1, 2))
    bad = (error > _ROTATION_TOLERANCE) | (np.linalg.det(rotation_N33) <= 0)
    if bad.any():
        raise EndpointError(
            "invalid_camera",
            f"pose {int(np.argmax(bad))} is not rigid: its 3x3 part must be a rotation "
            f"(orthonormal within {_ROTATION_TOLERANCE:g}, determinant +1)",
            param="poses",
        )
    left, _, right = np.linalg.svd(rotation_N33)
    exact_N44 = poses_N44.copy()
    exact_N44[:, :3, :3] = left @ right
    exact_N44[:, 3] = (0.0, 0.0, 0.0, 1.0)
    return exact_N44
