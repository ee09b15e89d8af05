# SPDX-License-Identifier: Apache-2.0
"""Convert camera poses or held keys to the camera map that conditions the transformer.

A pose is a 4x4 camera-to-world matrix with OpenCV axes (x right, y down, z forward). The
transformer is conditioned on the camera's motion from one latent frame to the next. The
translations of the relative poses are divided by a scale, and the poses are then converted to one
ray per pixel (origin and unit direction). A chunk's map is computed in fp64 and rounded once to
fp32. Maths: Robbyant/lingbot-world @ a43bec7, wan/utils/cam_utils.py and wasd_ijkl_to_c2ws.py.

There are two conventions, with different scales and different reference poses for a chunk's first
frame:

- interactive: the reference is the previous chunk's last pose, so every frame's action takes
  effect; the scale is constant.
- trajectory: the first frame of the clip has no reference pose and does not move; the scale is the
  largest translation in the clip.

`request.py` selects the reference pose and the scale according to the server options.
"""

# N frames; poses_N44 camera-to-world; intrinsics_N4 = fx, fy, cx, cy in pixels

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from vllm_omni.actions import CAMERA_SPACE, ActionEntry, ActionFrames, Axis, read_actions
from vllm_omni.model_executor.device_async import to_device
from vllm_omni.model_executor.models.lingbot_world.config import (
    ACTION_FOCAL,
    NATIVE_HEIGHT,
    NATIVE_WIDTH,
)
from vllm_omni.model_executor.models.wan.vae.latents import VAE_SPATIAL, VAE_TEMPORAL
from vllm_omni.model_executor.streaming.chunk_plan import first_pixel_frame
from vllm_omni.outputs import RequestFailed
from vllm_omni.worlds.grid import OccupancyGrid
from vllm_omni.worlds.movement import (
    PITCH_LIMIT_DEGREES,
    CameraMotion,
    inverse_poses,
    move_cameras,
    pitch_of,
)

MOVE_UNIT = 0.05
"""Distance that the camera moves per latent frame while a movement key is held."""
_STEPS, _DEGREES = 8.0, 90.0


def _look_axis(name: str, direction: str, unit: str, **more: Any) -> Axis:
    return Axis(
        name=name, title=f"look {direction}", unit=unit, low=-_DEGREES, high=_DEGREES, **more
    )


ACTION_SPACE = msgspec.structs.replace(
    CAMERA_SPACE,
    axes=(
        *(
            Axis(name=name, title=name, unit="steps per latent frame", low=-_STEPS, high=_STEPS)
            for name in ("forward", "right", "up")
        ),
        _look_axis("yaw", "right", "degrees per latent frame"),
        _look_axis("pitch", "up", "degrees per latent frame"),
        _look_axis("turn", "right", "degrees", kind="motion", mouse="x", scale=0.12),
        _look_axis("look", "up", "degrees", kind="motion", mouse="y", scale=-0.12),
    ),
)
"""The eight keys and their analog equivalents. The effects of keys and axes add up. A movement key
moves the camera by one step. A look key turns the camera by six degrees (yaw) or four degrees
(pitch).
"""
_AXIS_NAMES = ACTION_SPACE.axis_names
FLAG_KEYS = "wasd"
"""The keys that condition an `act` model, in the order of its channels."""


@dataclass(frozen=True, eq=False)
class WorldStart:
    """Conversion between a session's poses and its world's coordinates."""

    world_44: torch.Tensor
    """World pose of the start image, fp64, in metres."""
    first_44: torch.Tensor
    """Pose of the start image in the session's own coordinates, in the client's units."""

    def world_poses(self, poses_F44: torch.Tensor, metres_per_unit: float) -> torch.Tensor:
        """Convert the session's poses to world poses, fp64, in metres."""
        from_first = inverse_poses(self.first_44[None]) @ poses_F44
        from_first[:, :3, 3] *= metres_per_unit
        return self.world_44 @ from_first

    def session_poses(self, world_F44: torch.Tensor, metres_per_unit: float) -> torch.Tensor:
        """Convert world poses to the session's poses."""
        from_first = inverse_poses(self.world_44[None]) @ world_F44
        from_first[:, :3, 3] /= metres_per_unit
        return self.first_44 @ from_first


@dataclass(frozen=True)
class CameraTail:
    """Camera state at the end of a chunk."""

    pose_44: torch.Tensor
    """Latest camera pose, in the session's coordinates."""
    pitch_degrees: float
    """Camera pitch in degrees."""
    largest_step: float = 0.0
    """Longest translation between two consecutive latent frames in the session so far."""
    start: "WorldStart | None" = None
    """Conversion to world coordinates. None if the session's world pose is unknown."""

    def after(self, relative_F44: torch.Tensor, before: "CameraTail | None") -> "CameraTail":
        """Return a copy of this state with an updated `largest_step`.

        Args:
            relative_F44: The chunk's relative poses, before they are scaled.
            before: State before the chunk, or None for the first chunk.
        """
        sofar = 0.0 if before is None else before.largest_step
        return replace(self, largest_step=max(sofar, _largest_step(relative_F44)))

    @classmethod
    def origin(cls) -> "CameraTail":
        return cls(torch.eye(4, dtype=torch.float64), 0.0)

    @classmethod
    def in_world(cls, world_44: torch.Tensor, metres_per_unit: float) -> "CameraTail":
        """Return the camera state at the start of a session that uses world coordinates. The
        position is converted from metres to the session's units.
        """
        pose_44 = world_44.clone()
        pose_44[:3, 3] /= metres_per_unit
        return cls(pose_44, pitch_of(pose_44), start=WorldStart(world_44, pose_44))

    @classmethod
    def at(cls, pose_44: torch.Tensor, start: WorldStart | None = None) -> "CameraTail":
        """Return the camera state for an uploaded pose. The pitch is the pose's angle above the
        horizon.
        """
        return cls(pose_44.clone(), pitch_of(pose_44), start=start)


# -- inputs of clients -----------------------------------------------------------------------------


def read_controls(actions: Sequence[ActionEntry], num_frames: int) -> ActionFrames:
    """Validate `actions`, which contains one entry per latent frame. In frames without an entry,
    the camera is at rest.

    Raises:
        RequestFailed: An action is invalid (`invalid_action`).
    """
    action_frames = read_actions(ACTION_SPACE, actions, {}, num_frames)
    assert action_frames is not None
    return action_frames


def read_keys(actions: Sequence[ActionEntry], num_frames: int) -> list[str]:
    """Return the keys held in each frame, sorted, as one string per frame. Raises the same errors
    as `read_controls`.
    """
    return ["".join(sorted(held)) for held in read_controls(actions, num_frames).held(ACTION_SPACE)]


def motions_of(actions: ActionFrames) -> list[CameraMotion]:
    """Return the camera's motion in each latent frame. The effects of keys and axes add up."""
    motions = []
    for held, values in zip(
        actions.held(ACTION_SPACE), actions.axes_NA.double().unbind(0), strict=True
    ):
        keys = CameraMotion.of_keys(["".join(held)])
        axis = dict(zip(_AXIS_NAMES, values.split(1), strict=True))
        motions.append(
            CameraMotion(
                ahead=keys.ahead + axis["forward"],
                aside=keys.aside + axis["right"],
                up=axis["up"],
                yaw_degrees=keys.yaw_degrees + axis["yaw"] + axis["turn"],
                pitch_degrees=keys.pitch_degrees + axis["pitch"] + axis["look"],
            )
        )
    return motions


def read_flags(action: torch.Tensor, num_frames: int) -> torch.Tensor:
    """Validate a client's flags (0 or 1), which state whether the keys w a s d are held in each
    video frame.

    Returns:
        The flags as an fp64 tensor `[num_frames, 4]` on the CPU.

    Raises:
        RequestFailed: The shape or a value is invalid (`invalid_camera`).
    """
    if (
        tuple(action.shape) != (num_frames, 4)
        or action.layout != torch.strided
        or action.dtype.is_complex
    ):
        raise RequestFailed(
            "invalid_camera",
            f"action must be numbers of shape [{num_frames}, 4], the keys w a s d of each pixel "
            "frame of this chunk; "
            f"got {action.dtype} {list(action.shape)}",
        )
    flags_N4 = action.to("cpu", torch.float64)
    if not bool(((flags_N4 == 0) | (flags_N4 == 1)).all()):
        raise RequestFailed(
            "invalid_camera", "action must hold zeros and ones only, the keys w a s d"
        )
    return flags_N4


def held_flags(actions: ActionFrames) -> torch.Tensor:
    """Return each frame's flags in the format of `read_flags`. A nonzero movement axis counts as
    the key for the same direction.
    """
    axes = dict(zip(_AXIS_NAMES, actions.axes_NA.unbind(1), strict=True))
    pressed = {
        "w": axes["forward"] > 0,
        "s": axes["forward"] < 0,
        "d": axes["right"] > 0,
        "a": axes["right"] < 0,
    }
    buttons = dict(zip(ACTION_SPACE.button_names, actions.buttons_NB.unbind(1), strict=True))
    return torch.stack([buttons[key] | pressed[key] for key in FLAG_KEYS], dim=1).double()


# -- poses -----------------------------------------------------------------------------------------


def per_latent(per_pixel: torch.Tensor, frames: range) -> torch.Tensor:
    """From the values for a chunk's video frames, select those that apply to its latent frames.

    Latent frame i corresponds to video frame 4 i.

    Args:
        per_pixel: One row for each video frame in the chunk.
        frames: Absolute indices of the chunk's latent frames.
    """
    return per_pixel[[VAE_TEMPORAL * frame - first_pixel_frame(frames.start) for frame in frames]]


def integrate_actions(
    held: Sequence[str],
    tail: CameraTail,
    *,
    move: float = MOVE_UNIT,
    grid: OccupancyGrid | None = None,
) -> tuple[torch.Tensor, CameraTail]:
    """Move the camera from `tail` by one step per frame, according to the keys held in the frame
    (`move_cameras`).

    Returns:
        The pose of each frame, and the camera's state after the last frame.
    """
    return integrate_motions(
        [CameraMotion.of_keys([keys]) for keys in held], tail, move=move, grid=grid
    )


def integrate_motions(
    motions: Sequence[CameraMotion],
    tail: CameraTail,
    *,
    move: float = MOVE_UNIT,
    grid: OccupancyGrid | None = None,
    pitch_limit_degrees: float = PITCH_LIMIT_DEGREES,
) -> tuple[torch.Tensor, CameraTail]:
    """Like `integrate_actions`, but move the camera by one given motion per frame. If `grid` is
    set, positions are in world coordinates, in metres.
    """
    pose_144 = tail.pose_44[None]
    pitch_1 = torch.tensor([tail.pitch_degrees], dtype=torch.float64)
    poses = []
    for motion in motions:
        pose_144, pitch_1 = move_cameras(pose_144, pitch_1, motion, move, grid, pitch_limit_degrees)
        poses.append(pose_144)
    return torch.cat(poses), replace(tail, pose_44=pose_144[0], pitch_degrees=float(pitch_1))


def relative_poses(
    poses_N44: torch.Tensor, previous_44: torch.Tensor | None = None
) -> torch.Tensor:
    """Return each pose relative to the previous one, in the dtype of `poses_N44`.

    The first pose is relative to `previous_44`. If `previous_44` is None, the first relative pose
    is the identity.
    """
    first = poses_N44[:1] if previous_44 is None else previous_44.unsqueeze(0)
    before = torch.cat((first, poses_N44[:-1]))
    relative = inverse_poses(before) @ poses_N44
    if previous_44 is None:
        relative[0] = torch.eye(4)
    return relative


def scaled_translations(relative_N44: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """Return the poses with their translations divided by `scale`. Default: the largest
    translation, or 1 if all translations are zero.
    """
    if scale is None:
        scale = _largest_step(relative_N44) or 1.0
    out = relative_N44.clone()
    out[:, :3, 3] /= scale
    return out


def _largest_step(relative_N44: torch.Tensor) -> float:
    return float(relative_N44[:, :3, 3].norm(dim=1).max())


# -- the camera map --------------------------------------------------------------------------------


def scale_intrinsics(intrinsics_N4: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Rescale intrinsics from 480x832 to the output size. The image is not cropped."""
    x, y = width / NATIVE_WIDTH, height / NATIVE_HEIGHT
    return intrinsics_N4 * torch.tensor([x, y, x, y], dtype=torch.float64)


def action_intrinsics(
    num_frames: int, height: int, width: int, focal: float | None = None
) -> torch.Tensor:
    """Return the intrinsics, in output pixels, for a request that contains actions but no
    intrinsics.

    `focal` is the focal length divided by the width. Default: `ACTION_FOCAL`.
    """
    pixels = ACTION_FOCAL if focal is None else focal * width
    row = torch.tensor([pixels, pixels, width / 2, height / 2], dtype=torch.float64)
    return row.expand(num_frames, 4)


def camera_map(
    relative_N44: torch.Tensor,
    intrinsics_N4: torch.Tensor,
    height: int,
    width: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return the ray map [384, N, height/8, width/8], fp32, computed on `device` in `dtype`.

    Each pixel's ray has six components: its origin x y z and its unit direction x y z. `_fold`
    moves the pixels of each 8x8 cell into channels. `intrinsics_N4` is in output pixels.
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
    """Return the control map for an `act` model, [448, N, height/8, width/8], fp32.

    The map contains ray directions and flags for the keys w a s d. Translations are ignored, and a
    key's flag has the same value in all pixels of a frame. Except for `flags_N4`, the arguments are
    those of `camera_map`.
    """
    relative_N44, intrinsics_N4, flags_N4 = _on(
        device, dtype, relative_N44, intrinsics_N4, flags_N4
    )
    direction = _directions(relative_N44, intrinsics_N4, height, width)
    flags = flags_N4[:, :, None, None].expand(-1, -1, height, width)
    return _fold(torch.cat((direction, flags), dim=1))


def _on(
    device: torch.device | str, dtype: torch.dtype, *actions: torch.Tensor
) -> list[torch.Tensor]:
    """Copy host tensors to `device` and convert them to `dtype` without synchronising the host with
    the device.
    """
    return [to_device(each.to(dtype).contiguous(), torch.device(device)) for each in actions]


def _directions(
    relative_N44: torch.Tensor, intrinsics_N4: torch.Tensor, height: int, width: int
) -> torch.Tensor:
    """Return the unit directions [N, 3, height, width] of the rays through the pixel centres."""
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
    """Fold each cell of 8x8 pixels into channels. Channel c * 64 + (v mod 8) * 8 + (u mod 8) of a
    cell contains component c of pixel (u, v).
    """
    return (
        torch.nn.functional.pixel_unshuffle(planes_NCHW.float(), VAE_SPATIAL)
        .transpose(0, 1)
        .contiguous()
    )
