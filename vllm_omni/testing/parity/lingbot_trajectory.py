# SPDX-License-Identifier: Apache-2.0
"""Prepares a complete uploaded camera path as the original LingBot World does."""

# N frames; poses_N44 camera-to-world; intrinsics_N4 = fx, fy, cx, cy in pixels

from dataclasses import dataclass

import torch

from vllm_omni.model_executor.models.lingbot_world.camera import (
    inverse_poses,
    relative_poses,
    scale_intrinsics,
    scaled_translations,
)
from vllm_omni.model_executor.models.wan.vae.latents import VAE_TEMPORAL


@dataclass(frozen=True)
class CameraTrajectory:
    """The prepared camera path of a clip, with one entry per latent frame."""

    poses_N44: torch.Tensor
    """Resampled camera-to-world poses, fp32."""
    relative_N44: torch.Tensor
    """Relative poses, scaled by the largest step of the path."""
    intrinsics_N4: torch.Tensor
    """Camera intrinsics at the output size."""

    @property
    def pixel_frames(self) -> int:
        """Number of video frames in the clip: one for the first latent frame and four for each
        later latent frame.
        """
        return VAE_TEMPORAL * (len(self.poses_N44) - 1) + 1


def prepare_trajectory(
    poses_N44: torch.Tensor,
    intrinsics_N4: torch.Tensor,
    height: int,
    width: int,
    *,
    num_frames: int | None = None,
    chunk_frames: int = 3,
) -> CameraTrajectory:
    """Prepare a camera path that has one pose per video frame, and scale it by its largest step.

    The path is truncated to 4 n + 1 frames. The number of latent frames is rounded down to whole
    chunks, and the truncated path is resampled to this number of poses. For example, 25 poses are
    resampled to 6 latent frames. The intrinsics of the first frame apply to the whole clip.
    As in the original, relative poses are computed in fp32, so they are less accurate far from the
    origin (7e-5 of the scale at 130 units).

    Args:
        poses_N44: Camera-to-world poses, one per video frame.
        intrinsics_N4: fx, fy, cx, cy in pixels at the native size.
        height: Height of the output in pixels.
        width: Width of the output in pixels.
        num_frames: Maximum number of poses to use. Default: all.
        chunk_frames: Number of latent frames per chunk.

    Raises:
        ValueError: There are too few poses for one chunk.
    """
    longest = min(len(poses_N44), num_frames if num_frames is not None else len(poses_N44))
    used = VAE_TEMPORAL * ((longest - 1) // VAE_TEMPORAL) + 1
    latents = ((used - 1) // VAE_TEMPORAL + 1) // chunk_frames * chunk_frames
    if latents < 1:
        needed = VAE_TEMPORAL * (chunk_frames - 1) + 1
        raise ValueError(
            f"{longest} poses arrived; one chunk of {chunk_frames} latent frames needs {needed}"
        )
    times = torch.linspace(0, used - 1, latents, dtype=torch.float64)
    poses = resample_poses(poses_N44[:used].double(), times).float()
    anchored = inverse_poses(poses[:1]) @ poses
    anchored[0] = torch.eye(4)
    relative = scaled_translations(relative_poses(anchored))
    intrinsics = scale_intrinsics(intrinsics_N4[:1].double(), height, width).expand(latents, 4)
    return CameraTrajectory(poses, relative, intrinsics)


def resample_poses(poses_N44: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """Interpolate poses at fractional frame indices.

    Translations are interpolated linearly, and rotations along the shorter great arc.
    """
    times = times.clamp(0, len(poses_N44) - 1)
    low = times.floor().long().clamp(max=max(len(poses_N44) - 2, 0))
    high = (low + 1).clamp(max=len(poses_N44) - 1)
    weight = (times - low).unsqueeze(1)
    out = torch.eye(4, dtype=torch.float64).repeat(len(times), 1, 1)
    out[:, :3, 3] = torch.lerp(poses_N44[low, :3, 3], poses_N44[high, :3, 3], weight)
    # R_low^T R_high turns by `angle` around `axis`. Rodrigues' formula gives the rotation by a
    # fraction of this angle.
    step = poses_N44[low, :3, :3].mT @ poses_N44[high, :3, :3]
    axis_angle = _log_rotation(step)
    out[:, :3, :3] = poses_N44[low, :3, :3] @ torch.linalg.matrix_exp(
        _cross_matrix(axis_angle * weight)
    )
    return out


def _log_rotation(rotation_N33: torch.Tensor) -> torch.Tensor:
    """Return the axis multiplied by the angle, [N, 3], for rotations by less than 180 degrees."""
    skew = rotation_N33 - rotation_N33.mT
    # axis * sin(angle)
    vector = torch.stack((skew[:, 2, 1], skew[:, 0, 2], skew[:, 1, 0]), dim=1) / 2
    sine = vector.norm(dim=1, keepdim=True)
    cosine = ((rotation_N33.diagonal(dim1=1, dim2=2).sum(1) - 1) / 2).unsqueeze(1)
    angle = torch.atan2(sine, cosine)
    return vector * torch.where(sine > 1e-12, angle / sine.clamp_min(1e-12), torch.ones_like(sine))


def _cross_matrix(vector_N3: torch.Tensor) -> torch.Tensor:
    x, y, z = vector_N3.unbind(1)
    zero = torch.zeros_like(x)
    return torch.stack((zero, -z, y, z, zero, -x, -y, x, zero), dim=1).view(-1, 3, 3)
