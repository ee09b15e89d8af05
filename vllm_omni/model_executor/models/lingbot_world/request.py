# SPDX-License-Identifier: Apache-2.0
"""Validate everything that a client can send with a chunk request.

`read_chunk` reads a request and its session. It returns `ChunkInputs`, or raises a `RequestFailed`
that contains the field, its value and the allowed values. The functions in this module have no side
effects, allocate no device memory, and return the same result on every rank.
"""

# F latent frames of the chunk

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import torch

from vllm_omni.config import parse_options
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import DiffusionRequest
from vllm_omni.model_executor.models.lingbot_world import camera as cam
from vllm_omni.model_executor.models.lingbot_world.config import ControlType, LingBotOptions
from vllm_omni.model_executor.models.lingbot_world.state import ChunkInputs, LingBotSession
from vllm_omni.model_executor.models.wan.camera_inputs import read_intrinsics, read_poses
from vllm_omni.model_executor.streaming.request import (
    check_tensors,
    check_unchanged,
    check_unused,
    read_image,
    read_seed,
)
from vllm_omni.outputs import RequestFailed
from vllm_omni.worlds.movement import CameraMotion, world_pose
from vllm_omni.worlds.served import ServedWorld
from vllm_omni.worlds.start_pose import StartPose

_TENSORS: dict[ControlType, tuple[str, ...]] = {
    "cam": ("image", "poses", "intrinsics"),
    "act": ("image", "poses", "intrinsics", "action"),
    "world": ("image", "poses", "intrinsics"),
}


_ROUNDING = 1e-6
"""Two poses count as equal if none of their elements differ by more than this tolerance. The
tolerance is greater than zero, because clients send poses in fp32.
"""


class ChunkOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`DiffusionParams.options` of one chunk."""

    camera_scale: float | None = None
    """Divisor of the camera translations in this chunk. A client that knows the whole path can send
    the length of the path's largest step, which is the divisor that the original uses. Default: the
    scale that the server's `convention` determines.
    """
    start_pose: StartPose | None = None
    """World pose of the start image. Only a session's first chunk can set it, and only in a world
    with poses. Default: the image's known pose if the server recognises the image, otherwise
    unknown.
    """


@dataclass(frozen=True)
class ChunkCamera:
    """One chunk's validated camera input, with one value per latent frame."""

    relative_F44: torch.Tensor
    """Pose of each latent frame relative to the previous one."""
    intrinsics_F4: torch.Tensor
    """Camera intrinsics fx, fy, cx, cy, in output pixels."""
    tail: cam.CameraTail
    """Camera state after the chunk."""
    world_F44: torch.Tensor | None
    """World pose of each latent frame. None if the world pose is unknown."""
    moves: bool
    """Whether the camera moves within the chunk, or between the previous chunk and this one."""


def read_chunk(
    request: DiffusionRequest,
    session: LingBotSession,
    served: LingBotOptions,
    control: ControlType = "cam",
    world: ServedWorld | None = None,
) -> ChunkInputs:
    """Validate a chunk request against its session.

    Args:
        request: Request for the session's next chunk.
        session: Session that the chunk continues.
        served: Serving options.
        control: The model's control type.
        world: World of a `world` model, otherwise None.

    Raises:
        RequestFailed: A value is invalid.
    """
    params = request.params
    session.window.check_frames(session.next_frames())
    check_unused(params, actions=True)
    check_unchanged(params, session.shape, {})
    check_tensors(request.tensors, _TENSORS[control])
    keeps_prompt = params.prompt is None or (
        served.choices.prompt_switch == "ignore" and session.prompt is not None
    )
    prompt = session.prompt if keeps_prompt else params.prompt
    if not prompt:
        raise RequestFailed(
            "invalid_request", "prompt must not be empty; a session's first chunk needs one"
        )
    first = session.chunk_index == 0
    image = read_image(request.tensors.get("image"), first_chunk=first)
    options = _read_options(params, first, world)
    start_44 = None
    if world is not None and first:
        start_44 = (
            _given_pose(options) if options.start_pose is not None else _recognised(world, image)
        )
    camera = _read_camera(request, session, served, options, world, start_44)
    return ChunkInputs(
        prompt=prompt,
        seed=read_seed(params, session.seed),
        image=image,
        relative_F44=camera.relative_F44,
        intrinsics_F4=camera.intrinsics_F4,
        tail=camera.tail,
        flags_F4=_read_flags(request, session) if control == "act" else None,
        world_F44=camera.world_F44,
        moves=camera.moves,
    )


def _read_options(params: DiffusionParams, first: bool, world: ServedWorld | None) -> ChunkOptions:
    try:
        options = parse_options(ChunkOptions, params.options, "options")
    except ValueError as error:
        raise RequestFailed("invalid_request", str(error)) from error
    scale = options.camera_scale
    if scale is not None and not (math.isfinite(scale) and scale > 0):
        raise RequestFailed(
            "invalid_camera", f"options.camera_scale must be finite and > 0, got {scale}"
        )
    if options.start_pose is not None and world is None:
        raise RequestFailed(
            "invalid_request", "options.start_pose: the served model has no world with poses"
        )
    if options.start_pose is not None and not first:
        raise RequestFailed(
            "invalid_request", "options.start_pose: only a session's first chunk may have one"
        )
    return options


def _given_pose(options: ChunkOptions) -> torch.Tensor:
    assert options.start_pose is not None
    start = options.start_pose
    return world_pose(start.x_m, start.z_m, start.heading_degrees, start.pitch_degrees)


def _recognised(world: ServedWorld, image: torch.Tensor | None) -> torch.Tensor | None:
    return None if image is None else world.recognised_pose(image)


def _read_camera(
    request: DiffusionRequest,
    session: LingBotSession,
    served: LingBotOptions,
    options: ChunkOptions,
    world: ServedWorld | None,
    start_44: torch.Tensor | None,
) -> ChunkCamera:
    """Read a chunk's camera input.

    `start_44` is the world pose of the start image. It is None if that pose is unknown or the chunk
    is not the session's first.
    """
    frames, shape = session.next_frames(), session.shape
    first = session.chunk_index == 0
    pixel_frames = len(session.plan.pixel_frames(session.chunk_index))
    actions, poses = request.params.actions, request.tensors.get("poses")
    if (poses is None) == (actions is None):
        raise RequestFailed(
            "missing_camera" if poses is None else "invalid_camera",
            "send either the tensors `poses` and `intrinsics`, or `actions`: one of the two",
        )
    intrinsics = request.tensors.get("intrinsics")
    if intrinsics is not None:
        given = cam.per_latent(read_intrinsics(intrinsics, pixel_frames), frames)
        intrinsics_F4 = cam.scale_intrinsics(given, shape.height, shape.width)
    elif actions is not None:
        focal = None if world is None else world.focal
        intrinsics_F4 = cam.action_intrinsics(len(frames), shape.height, shape.width, focal)
    else:
        raise RequestFailed(
            "missing_camera", f"poses need intrinsics: [{pixel_frames}, 4] of fx, fy, cx, cy"
        )

    choices = served.choices
    before = last = session.tail
    if actions is not None:
        origin = last or cam.CameraTail.origin()
        if world is not None and start_44 is not None:
            origin = cam.CameraTail.in_world(start_44, world.metres_per_unit)
        motions = cam.motions_of(cam.read_controls(actions, len(frames)))
        # In a world with poses, the session's first latent frame has the start image's pose.
        stands = world is not None and first
        path, tail = _walk(motions[1:] if stands else motions, origin, world)
        if stands:
            path = torch.cat((origin.pose_44[None], path))
        if choices.camera_first_frame == "moves":
            before = origin
    else:
        assert poses is not None
        path = cam.per_latent(read_poses(poses, pixel_frames), frames)
        tail = cam.CameraTail.at(path[-1], None if last is None else last.start)
        if start_44 is not None:
            tail = replace(tail, start=cam.WorldStart(start_44, path[0].clone()))
    if choices.camera_first_frame == "stands_each_chunk":
        before = None
    dtype = choices.camera_torch_dtype
    relative = cam.relative_poses(
        path.to(dtype), None if before is None else before.pose_44.to(dtype)
    )
    tail = tail.after(relative, last)
    relative = cam.scaled_translations(relative, _camera_scale(options, served, tail))
    world_F44 = None
    if world is not None and tail.start is not None:
        world_F44 = tail.start.world_poses(path, world.metres_per_unit)
    rests = last is not None and torch.allclose(
        path, last.pose_44.expand_as(path), rtol=0, atol=_ROUNDING
    )
    return ChunkCamera(relative.double(), intrinsics_F4, tail, world_F44, moves=not rests)


def _walk(
    motions: Sequence[CameraMotion], origin: cam.CameraTail, world: ServedWorld | None
) -> tuple[torch.Tensor, cam.CameraTail]:
    """Move the camera from `origin` by one motion per latent frame. If the camera's world pose and
    the occupancy grid are known, the camera moves in world coordinates and cannot pass through
    walls.

    Returns:
        The pose of each latent frame, and the camera's state after the last frame.
    """
    if not motions:
        return origin.pose_44.new_empty(0, 4, 4), origin
    if world is None:
        return cam.integrate_motions(motions, origin)
    limit = world.pitch_limit_degrees
    if origin.start is None or world.grid is None:
        return cam.integrate_motions(motions, origin, pitch_limit_degrees=limit)
    unit = world.metres_per_unit
    there = replace(origin, pose_44=origin.start.world_poses(origin.pose_44[None], unit)[0])
    walked, tail = cam.integrate_motions(
        motions,
        there,
        move=cam.MOVE_UNIT * unit,
        grid=world.grid,
        pitch_limit_degrees=limit,
    )
    path = origin.start.session_poses(walked, unit)
    return path, replace(tail, pose_44=path[-1])


def _read_flags(request: DiffusionRequest, session: LingBotSession) -> torch.Tensor:
    """Return the flags for the keys w a s d in each latent frame.

    If the request contains `actions`, the flags are derived from the held keys. If it contains
    poses, the flags are read from the `action` tensor; if that tensor is missing, no keys are held.
    """
    frames = session.next_frames()
    action = request.tensors.get("action")
    if request.params.actions is not None:
        if action is not None:
            raise RequestFailed(
                "invalid_camera",
                "send the tensor `action` with poses, or `actions`: one of the two",
            )
        return cam.held_flags(cam.read_controls(request.params.actions, len(frames)))
    pixel_frames = len(session.plan.pixel_frames(session.chunk_index))
    flags_N4 = torch.zeros(pixel_frames, 4, dtype=torch.float64)
    return cam.per_latent(
        flags_N4 if action is None else cam.read_flags(action, pixel_frames), frames
    )


def _camera_scale(
    options: ChunkOptions, served: LingBotOptions, tail: cam.CameraTail
) -> float | None:
    """Return the divisor of the camera translations, or None for the largest translation in the
    chunk. `tail` is the camera state after this chunk.
    """
    if options.camera_scale is not None:
        return options.camera_scale
    scales = {"constant": cam.MOVE_UNIT, "session_max": tail.largest_step or 1.0}
    return scales.get(served.choices.camera_scale)
