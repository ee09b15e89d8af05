# SPDX-License-Identifier: Apache-2.0
"""Everything a client may send with one chunk, checked: here and nowhere else.

Reads a request beside its session and returns `ChunkInputs`, or raises `RequestFailed` with the field, its value
and the allowed ones. Changes nothing, allocates nothing on the device, gives the same answer on every rank.
Held by tests/model_executor/models/lingbot_world/test_lingbot_pipeline.py.
"""

# F latent frames of the chunk

import math

import msgspec
import torch

from vllm_omni.config import parse_options
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import DiffusionRequest
from vllm_omni.model_executor.models.lingbot_world import camera as cam
from vllm_omni.model_executor.models.lingbot_world.config import ControlType, LingBotOptions
from vllm_omni.model_executor.models.lingbot_world.state import ChunkInputs, LingBotSession
from vllm_omni.model_executor.streaming.request import (
    check_tensors,
    check_unchanged,
    check_unused,
    read_image,
    read_seed,
)
from vllm_omni.outputs import RequestFailed

_TENSORS: dict[ControlType, tuple[str, ...]] = {
    "cam": ("image", "poses", "intrinsics"),
    "act": ("image", "poses", "intrinsics", "action"),
}


class ChunkOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`DiffusionParams.options` of one chunk.

    camera_scale: divide this chunk's camera translations by it (a client that knows its whole path sends the path's
    largest step, the original's normalisation); None = as served.
    """

    camera_scale: float | None = None


def read_chunk(
    request: DiffusionRequest, session: LingBotSession, served: LingBotOptions, control: ControlType = "cam"
) -> ChunkInputs:
    """Check one chunk's request against its session. Raises `RequestFailed`."""
    params = request.params
    session.window.check_fits(session.next_frames())
    check_unused(params, actions=True)
    check_unchanged(params, session.shape, {})
    check_tensors(request.tensors, _TENSORS[control])
    keeps_prompt = params.prompt is None or (served.choices.prompt_switch == "ignore" and session.prompt is not None)
    prompt = session.prompt if keeps_prompt else params.prompt
    if not prompt:
        raise RequestFailed("invalid_request", "prompt must not be empty; a session's first chunk needs one")
    relative, intrinsics, tail = _read_camera(request, session, served)
    return ChunkInputs(
        prompt=prompt,
        seed=read_seed(params, session.seed),
        image=read_image(request.tensors.get("image"), first_chunk=session.chunk_index == 0),
        relative_F44=relative,
        intrinsics_F4=intrinsics,
        tail=tail,
        flags_F4=_read_flags(request, session) if control == "act" else None,
    )


def _read_camera(
    request: DiffusionRequest, session: LingBotSession, served: LingBotOptions
) -> tuple[torch.Tensor, torch.Tensor, cam.CameraTail]:
    """Return (frame-to-frame poses, intrinsics at output size, new tail), a row for each latent frame of the chunk."""
    frames, shape = session.next_frames(), session.shape
    pixel_frames = len(session.plan.pixel_frames(session.chunk_index))
    actions, poses = request.params.actions, request.tensors.get("poses")
    if (poses is None) == (actions is None):
        raise RequestFailed(
            "missing_camera" if poses is None else "invalid_camera",
            "send either the tensors `poses` and `intrinsics`, or `actions`: one of the two",
        )
    intrinsics = request.tensors.get("intrinsics")
    if intrinsics is not None:
        given = cam.latent_rows(cam.read_intrinsics(intrinsics, pixel_frames), frames)
        intrinsics_F4 = cam.scale_intrinsics(given, shape.height, shape.width)
    elif actions is not None:
        intrinsics_F4 = cam.action_intrinsics(len(frames), shape.height, shape.width)
    else:
        raise RequestFailed("missing_camera", f"poses need intrinsics: [{pixel_frames}, 4] of fx, fy, cx, cy")

    before = last = session.tail
    if actions is not None:
        start = before or cam.CameraTail.origin()
        path, tail = cam.integrate_actions(cam.read_keys(actions, len(frames)), start)
        if served.choices.camera_first_frame == "moves":
            before = start
    else:
        assert poses is not None
        path = cam.latent_rows(cam.read_poses(poses, pixel_frames), frames)
        tail = cam.CameraTail.at(path[-1])
    if served.choices.camera_first_frame == "stands_each_chunk":
        before = None
    dtype = served.choices.camera_torch_dtype
    relative = cam.relative_poses(path.to(dtype), None if before is None else before.pose_44.to(dtype))
    tail = tail.after(relative, last)
    relative = cam.scaled_translations(relative, _camera_scale(request.params, served, tail))
    return relative.double(), intrinsics_F4, tail


def _read_flags(request: DiffusionRequest, session: LingBotSession) -> torch.Tensor:
    """Return the keys w a s d, a row for each latent frame of the chunk, on the same grid as the poses.

    Held keys are the flags themselves; beside poses they are a tensor of their own, and without one nothing is held.
    """
    frames = session.next_frames()
    action = request.tensors.get("action")
    if request.params.actions is not None:
        if action is not None:
            raise RequestFailed("invalid_camera", "send the tensor `action` with poses, or `actions`: one of the two")
        return cam.held_flags(cam.read_keys(request.params.actions, len(frames)))
    pixel_frames = len(session.plan.pixel_frames(session.chunk_index))
    flags_N4 = torch.zeros(pixel_frames, 4, dtype=torch.float64)
    return cam.latent_rows(flags_N4 if action is None else cam.read_flags(action, pixel_frames), frames)


def _camera_scale(params: DiffusionParams, served: LingBotOptions, tail: cam.CameraTail) -> float | None:
    """Return the divisor of translations; None = the chunk's largest. tail: after this chunk."""
    try:
        scale = parse_options(ChunkOptions, params.options, "options").camera_scale
    except ValueError as error:
        raise RequestFailed("invalid_request", str(error)) from error
    if scale is None:
        scales = {"constant": cam.MOVE_UNIT, "session_max": tail.largest_step or 1.0}
        return scales.get(served.choices.camera_scale)
    if not (math.isfinite(scale) and scale > 0):
        raise RequestFailed("invalid_camera", f"options.camera_scale must be finite and > 0, got {scale}")
    return scale
