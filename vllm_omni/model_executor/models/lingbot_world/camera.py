# SPDX-License-Identifier: Apache-2.0
"""From poses or held keys to the camera map the transformer is conditioned on.

A pose is camera-to-world, 4x4, OpenCV axes (x right, y down, z forward). The network is told how the camera moved
from one latent frame to the next: frame-to-frame poses, translations divided by a scale, turned into a ray per pixel
(origin and unit direction). Chunks are computed in fp64 and rounded once to fp32. Maths: Robbyant/lingbot-world
@ a43bec7, wan/utils/cam_utils.py and wasd_ijkl_to_c2ws.py.

Two conventions differ in the reference of a chunk's first frame and in the scale:

- interactive: the previous chunk's last pose, so every frame's action takes effect; a constant unit of translation;
- trajectory: nothing (the clip's first frame stands still); the clip's largest translation.

`request.py` puts them together as the server's options say.

Held by tests/model_executor/models/lingbot_world/test_lingbot_camera.py and test_lingbot_camera_choices.py.
"""

# N frames; poses_N44 camera-to-world; intrinsics_N4 = fx, fy, cx, cy in pixels

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from vllm_omni.actions import CAMERA_SPACE, ActionEntry, read_actions
from vllm_omni.model_executor.host_copies import to_device
from vllm_omni.model_executor.models.lingbot_world.config import ACTION_FOCAL, NATIVE_HEIGHT, NATIVE_WIDTH
from vllm_omni.model_executor.models.wan.latents import VAE_SPATIAL, VAE_TEMPORAL
from vllm_omni.model_executor.streaming.chunk_plan import first_pixel_frame
from vllm_omni.outputs import RequestFailed

MOVE_UNIT = 0.05
"""Translation of one latent frame with a movement key held."""
YAW_DEGREES, PITCH_DEGREES = 6.0, 4.0
"""Rotation of one latent frame with a look key held."""
PITCH_LIMIT_DEGREES = 85.0
ACTION_SPACE = CAMERA_SPACE
FLAG_KEYS = "wasd"
"""The keys that an `act` model is told, in the order of its channels."""

_LARGEST = 1e6
_FOCAL_RANGE = (1.0, 1e6)
_ROTATION_TOLERANCE = 1e-2
_LAST_ROW_TOLERANCE = 1e-3


@dataclass(frozen=True)
class CameraTail:
    """Where the camera is: the last pose of a session, and the pitch that look keys have accumulated.

    largest_step: the longest way from one latent frame to the next so far.
    """

    pose_44: torch.Tensor
    pitch_degrees: float
    largest_step: float = 0.0

    def after(self, relative_F44: torch.Tensor, before: "CameraTail | None") -> "CameraTail":
        """Return this tail with the longest way of `before` and of a chunk's poses, not yet scaled."""
        sofar = 0.0 if before is None else before.largest_step
        return replace(self, largest_step=max(sofar, _largest_step(relative_F44)))

    @classmethod
    def origin(cls) -> "CameraTail":
        return cls(torch.eye(4, dtype=torch.float64), 0.0)

    @classmethod
    def at(cls, pose_44: torch.Tensor) -> "CameraTail":
        """Take over a pose that no key produced; its pitch is how far it looks above the horizon."""
        upward = -float(pose_44[1, 2].clamp(-1.0, 1.0))
        return cls(pose_44.clone(), float(torch.rad2deg(torch.asin(torch.tensor(upward, dtype=torch.float64)))))


# -- inputs of clients -------------------------------------------------------------------------------------------------


def read_poses(poses: torch.Tensor, num_frames: int) -> torch.Tensor:
    """Check a `[num_frames, 4, 4]` tensor of poses; returns it in fp64.

    Raises `RequestFailed` `invalid_camera` (shape, range, not a rotation) or `non_finite_pose`.
    """
    if tuple(poses.shape) != (num_frames, 4, 4) or not _is_real(poses):
        raise RequestFailed(
            "invalid_camera",
            f"poses must be floats of shape [{num_frames}, 4, 4], one per pixel frame of this chunk; "
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
            f"poses[{index}][:3, :3] is not a rotation: R R^T must be within {_ROTATION_TOLERANCE:g} of the identity "
            f"and det R = +1",
        )
    last_row = poses_N44[:, 3] - torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    if bool((last_row.abs() > _LAST_ROW_TOLERANCE).any()):
        raise RequestFailed("invalid_camera", "the last row of every pose must be [0, 0, 0, 1]")
    return poses_N44


def read_intrinsics(intrinsics: torch.Tensor, num_frames: int) -> torch.Tensor:
    """Check `[N, 4]`, `[N, 3, 3]`, `[N, 4, 4]`, or one `[4]` / `[3, 3]` for all frames; returns fp64 `[N, 4]`.

    A single row (N = 1) also stands for all frames. Raises `RequestFailed` as `read_poses` does.
    """
    shape = tuple(intrinsics.shape)
    batched = intrinsics.unsqueeze(0) if shape in ((4,), (3, 3)) else intrinsics
    if batched.shape[1:] not in ((4,), (3, 3), (4, 4)) or len(batched) not in (1, num_frames) or not _is_real(batched):
        raise RequestFailed(
            "invalid_camera",
            f"intrinsics must be floats [{num_frames}, 4] (fx, fy, cx, cy), [{num_frames}, 3, 3] or "
            f"[{num_frames}, 4, 4], or one row for all frames; got {intrinsics.dtype} {list(shape)}",
        )
    values = _finite(batched, "intrinsics")
    if values.dim() == 3:
        values = torch.stack((values[:, 0, 0], values[:, 1, 1], values[:, 0, 2], values[:, 1, 2]), dim=1)
    low, high = _FOCAL_RANGE
    if bool(((values[:, :2] < low) | (values[:, :2] > high)).any()):
        raise RequestFailed("invalid_camera", f"focal lengths fx and fy must lie in [{low:g}, {high:g}] pixels")
    return values.expand(num_frames, 4)


def read_keys(actions: Sequence[ActionEntry], num_frames: int) -> list[str]:
    """Check one entry of `actions` per latent frame; missing frames are idle. Returns one string of keys per frame.

    Raises `RequestFailed("invalid_action", ...)`.
    """
    rows = read_actions(ACTION_SPACE, actions, {}, num_frames)
    assert rows is not None
    return ["".join(sorted(held)) for held in rows.held(ACTION_SPACE)]


def read_flags(action: torch.Tensor, num_frames: int) -> torch.Tensor:
    """Check the keys w a s d held in each video frame, 0 or 1; returns fp64 `[num_frames, 4]`.

    Raises `RequestFailed` `invalid_camera`.
    """
    if tuple(action.shape) != (num_frames, 4) or action.layout != torch.strided or action.dtype.is_complex:
        raise RequestFailed(
            "invalid_camera",
            f"action must be numbers of shape [{num_frames}, 4], the keys w a s d of each pixel frame of this chunk; "
            f"got {action.dtype} {list(action.shape)}",
        )
    flags_N4 = action.to("cpu", torch.float64)
    if not bool(((flags_N4 == 0) | (flags_N4 == 1)).all()):
        raise RequestFailed("invalid_camera", "action must hold zeros and ones only, the keys w a s d")
    return flags_N4


def held_flags(held: Sequence[str]) -> torch.Tensor:
    """Return the keys w a s d of each frame as `read_flags` does."""
    return torch.tensor([[float(key in keys) for key in FLAG_KEYS] for keys in held], dtype=torch.float64)


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.dtype.is_floating_point


def _finite(tensor: torch.Tensor, name: str) -> torch.Tensor:
    values = tensor.to("cpu", torch.float64)
    if not bool(torch.isfinite(values).all()):
        raise RequestFailed("non_finite_pose", f"{name} must be finite, got NaN or Inf")
    if bool((values.abs() > _LARGEST).any()):
        raise RequestFailed("invalid_camera", f"{name} must lie within +-{_LARGEST:g}")
    return values


# -- poses -------------------------------------------------------------------------------------------------------------


def latent_rows(per_pixel: torch.Tensor, frames: range) -> torch.Tensor:
    """Pick the rows of latent `frames` (absolute) from a chunk's per-pixel-frame rows: latent i shows pixel 4 i."""
    return per_pixel[[VAE_TEMPORAL * frame - first_pixel_frame(frames.start) for frame in frames]]


def integrate_actions(
    held: Sequence[str],
    tail: CameraTail,
    *,
    yaw_degrees: float = YAW_DEGREES,
    pitch_degrees: float = PITCH_DEGREES,
    move: float = MOVE_UNIT,
) -> tuple[torch.Tensor, CameraTail]:
    """Walk from `tail`, one pose per entry of `held`; returns (poses_N44, the new tail).

    Look first, then move in the horizontal plane along the new view. A pitch step beyond the limit is dropped whole.
    Diagonal movement is not normalised. Opposite keys cancel.
    """
    pose, pitch = tail.pose_44, tail.pitch_degrees
    poses = []
    for keys in held:
        turn = yaw_degrees * (("l" in keys) - ("j" in keys))
        look = pitch_degrees * (("i" in keys) - ("k" in keys))
        if abs(pitch + look) > PITCH_LIMIT_DEGREES:
            look = 0.0
        pitch += look
        pose = pose.clone()
        pose[:3, :3] = _rotation(1, turn) @ pose[:3, :3] @ _rotation(0, look)
        ahead = ("w" in keys) - ("s" in keys)
        aside = ("d" in keys) - ("a" in keys)
        pose[:3, 3] += move * (ahead * _horizontal(pose[:3, 2]) + aside * _horizontal(pose[:3, 0]))
        poses.append(pose)
    return torch.stack(poses), CameraTail(pose, pitch)


def _rotation(axis: int, degrees: float) -> torch.Tensor:
    angle = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    cos, sin, one, zero = angle.cos(), angle.sin(), torch.ones_like(angle), torch.zeros_like(angle)
    rows = {
        0: (one, zero, zero, zero, cos, -sin, zero, sin, cos),
        1: (cos, zero, sin, zero, one, zero, -sin, zero, cos),
    }
    return torch.stack(rows[axis]).view(3, 3)


def _horizontal(direction_3: torch.Tensor) -> torch.Tensor:
    flat = direction_3 * torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    return flat / (flat.norm() + 1e-6)


def relative_poses(poses_N44: torch.Tensor, previous_44: torch.Tensor | None = None) -> torch.Tensor:
    """Return each pose as seen from the one before it, in the type of `poses_N44`.

    `previous_44` precedes the first; None: the first stands.
    """
    first = poses_N44[:1] if previous_44 is None else previous_44.unsqueeze(0)
    before = torch.cat((first, poses_N44[:-1]))
    relative = inverse_poses(before) @ poses_N44
    if previous_44 is None:
        relative[0] = torch.eye(4)
    return relative


def inverse_poses(poses_N44: torch.Tensor) -> torch.Tensor:
    """Invert rigid motions: (R, t) -> (R^T, -R^T t)."""
    inverse = torch.eye(4, dtype=poses_N44.dtype).repeat(len(poses_N44), 1, 1)
    inverse[:, :3, :3] = poses_N44[:, :3, :3].mT
    inverse[:, :3, 3:] = -inverse[:, :3, :3] @ poses_N44[:, :3, 3:]
    return inverse


def scaled_translations(relative_N44: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """Divide translations by `scale`; None = by the largest of them (if any frame moved at all)."""
    if scale is None:
        scale = _largest_step(relative_N44) or 1.0
    out = relative_N44.clone()
    out[:, :3, 3] /= scale
    return out


def _largest_step(relative_N44: torch.Tensor) -> float:
    return float(relative_N44[:, :3, 3].norm(dim=1).max())


# -- the camera map ----------------------------------------------------------------------------------------------------


def scale_intrinsics(intrinsics_N4: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Rescale intrinsics given for 480x832 to the output size (no crop)."""
    x, y = width / NATIVE_WIDTH, height / NATIVE_HEIGHT
    return intrinsics_N4 * torch.tensor([x, y, x, y], dtype=torch.float64)


def action_intrinsics(num_frames: int, height: int, width: int) -> torch.Tensor:
    """Return the intrinsics that go with actions, at the output size."""
    row = torch.tensor([ACTION_FOCAL, ACTION_FOCAL, width / 2, height / 2], dtype=torch.float64)
    return row.expand(num_frames, 4)


def camera_map(
    relative_N44: torch.Tensor,
    intrinsics_N4: torch.Tensor,
    height: int,
    width: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return the ray map [384, N, height/8, width/8], fp32: origin and unit direction of every pixel's ray.

    Components are origin x y z, direction x y z, folded as `_fold` does. intrinsics_N4 are at the output size. Computed
    on `device` in `dtype`.
    """
    relative_N44, intrinsics_N4 = _on(device, dtype, relative_N44, intrinsics_N4)
    direction = _directions(relative_N44, intrinsics_N4, height, width)
    origin = relative_N44[:, :3, 3].view(-1, 3, 1, 1).expand_as(direction)
    return _fold(torch.cat((origin, direction), dim=1))


def action_map(
    relative_N44: torch.Tensor,
    intrinsics_N4: torch.Tensor,
    flags_N4: torch.Tensor,
    height: int,
    width: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return an `act` model's control map, [448, N, height/8, width/8], fp32: ray directions, then the keys w a s d.

    As `camera_map`; translations are not looked at, and a key is the same in all pixels of its frame.
    """
    relative_N44, intrinsics_N4, flags_N4 = _on(device, dtype, relative_N44, intrinsics_N4, flags_N4)
    direction = _directions(relative_N44, intrinsics_N4, height, width)
    flags = flags_N4[:, :, None, None].expand(-1, -1, height, width)
    return _fold(torch.cat((direction, flags), dim=1))


def _on(device: torch.device | str, dtype: torch.dtype, *rows: torch.Tensor) -> list[torch.Tensor]:
    """Host tensors on `device`, in `dtype`, without waiting for it."""
    return [to_device(each.to(dtype).contiguous(), torch.device(device)) for each in rows]


def _directions(relative_N44: torch.Tensor, intrinsics_N4: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Return the unit directions [N, 3, height, width] of the rays through every pixel's centre."""
    device, dtype = intrinsics_N4.device, intrinsics_N4.dtype
    fx, fy, cx, cy = (value.view(-1, 1) for value in intrinsics_N4.unbind(1))
    u = (torch.arange(width, dtype=dtype, device=device) + 0.5 - cx) / fx
    v = (torch.arange(height, dtype=dtype, device=device) + 0.5 - cy) / fy
    shape = (len(relative_N44), height, width)
    x, y = u.unsqueeze(1).expand(shape), v.unsqueeze(2).expand(shape)
    rays = torch.stack((x, y, torch.ones_like(x)), dim=1)
    rays /= rays.norm(dim=1, keepdim=True)
    return torch.einsum("nij,njhw->nihw", relative_N44[:, :3, :3], rays)


def _fold(planes_NCHW: torch.Tensor) -> torch.Tensor:
    """Fold 8x8 pixels into channels: c * 64 + (v mod 8) * 8 + (u mod 8) of a cell is component c of pixel (u, v)."""
    return torch.nn.functional.pixel_unshuffle(planes_NCHW.float(), VAE_SPATIAL).transpose(0, 1).contiguous()
