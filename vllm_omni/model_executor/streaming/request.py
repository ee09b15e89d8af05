# SPDX-License-Identifier: Apache-2.0
"""Validates the request fields that all streaming models share.

Every function in this module raises `RequestFailed` for an invalid request and has no side effects.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from vllm_omni.actions import (
    ACTION_TENSORS,
    ActionFrames,
    ActionSpace,
    image_tensor,
    read_actions,
)
from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams, refuse_unused
from vllm_omni.model_executor.interfaces import DiffusionRequest
from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan, check_sliding
from vllm_omni.model_executor.streaming.session import SessionShape, StreamingSession
from vllm_omni.outputs import RequestFailed

DEFAULT_SEED = 0
_MAX_IMAGE_SIDE = 8192


class SizedArchitecture(Protocol):
    """An architecture that supports only certain video sizes."""

    def latent_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of the latents for a video size.

        Raises:
            ValueError: The size is not supported. The error message names the supported sizes.
        """
        ...


def read_size(
    params: DiffusionParams, config: SizedArchitecture, omni: OmniConfig
) -> tuple[int, int]:
    """Return the video height and width that a session's first chunk sets."""
    height = omni.height if params.height is None else params.height
    width = omni.width if params.width is None else params.width
    try:
        config.latent_size(height, width)
    except ValueError as error:
        raise RequestFailed("unsupported_size", str(error)) from error
    if height * width > omni.max_area:
        raise RequestFailed(
            "unsupported_size",
            f"{height}x{width} has {height * width} pixels; this server generates at most "
            f"{omni.max_area}",
        )
    return height, width


def check_unused(params: DiffusionParams, *, actions: bool) -> None:
    """Reject parameters that only image and video models support. Also reject actions if the model
    takes none.
    """
    refuse_unused(params, ("prompt", "seed", "height", "width", *(("actions",) if actions else ())))


def read_window(params: DiffusionParams, plan: ChunkPlan) -> tuple[int, int] | None:
    """Read and check the `(window_frames, sink_frames)` that the first chunk of a session requests.

    Returns:
        The two values, or None if the chunk requests neither.

    Raises:
        RequestFailed: `invalid_request` if the server or the model does not allow the values.
    """
    if params.window_frames is None and params.sink_frames is None:
        return None
    window = plan.window_frames if params.window_frames is None else params.window_frames
    sinks = plan.sink_frames if params.sink_frames is None else params.sink_frames
    if window > plan.window_frames:
        raise RequestFailed(
            "invalid_request",
            f"window_frames is at most the server's {plan.window_frames}, got {window}",
        )
    try:
        replace(plan, window_frames=window, sink_frames=sinks)
        if sinks != plan.sink_frames or window != plan.window_frames:
            check_sliding(window, sinks, plan.chunk_frames)
    except ValueError as error:
        raise RequestFailed("invalid_request", str(error)) from error
    return window, sinks


def check_unchanged(
    params: DiffusionParams, shape: SessionShape, others: Mapping[str, tuple[Any, Any]]
) -> None:
    """Reject a later chunk that changes a field set by the session's first chunk.

    Args:
        params: Parameters of a later chunk.
        shape: Properties that the first chunk has set.
        others: Additional fields that must not change, as a mapping from field name to (sent value,
            fixed value).
    """
    fixed_by_all = {
        "height": (params.height, shape.height),
        "width": (params.width, shape.width),
        "output": (params.output, shape.output),
        "window_frames": (
            params.window_frames,
            "the server's" if shape.window is None else shape.window[0],
        ),
        "sink_frames": (
            params.sink_frames,
            "the server's" if shape.window is None else shape.window[1],
        ),
    }
    for name, (sent, fixed) in {**fixed_by_all, **others}.items():
        if sent is not None and sent != fixed:
            raise RequestFailed(
                "invalid_request",
                f"{name} is fixed at {fixed} by the session's first chunk, got {sent}",
            )


def check_prompt(params: DiffusionParams, space: ActionSpace, *, first_chunk: bool) -> None:
    """Reject a prompt if the model takes none, and reject a first chunk without a prompt if one is
    required.
    """
    if space.prompt == "none" and params.prompt:
        raise RequestFailed(
            "invalid_request",
            f"this model takes no prompt; it takes an image and {space.describe()}",
        )
    if space.prompt == "required" and first_chunk and not params.prompt:
        raise RequestFailed("invalid_request", "a session's first chunk needs a prompt")


def read_seed(params: DiffusionParams, retained: int | None) -> int:
    """Return the seed of a chunk: the requested seed if there is one, otherwise the session's seed,
    otherwise the default seed.

    Args:
        params: Parameters of the chunk.
        retained: Seed of the session, or None if the session has not started.
    """
    seed = retained if params.seed is None else params.seed
    return DEFAULT_SEED if seed is None else seed


def check_tensors(tensors: Mapping[str, torch.Tensor], taken: Sequence[str]) -> None:
    """Reject tensors that the model does not accept."""
    unknown = sorted(set(tensors) - set(taken))
    if unknown:
        raise RequestFailed(
            "invalid_request", f"unknown tensors {unknown[:3]}; this model takes {', '.join(taken)}"
        )


@dataclass(frozen=True)
class PlayedChunk:
    """The validated fields of a request, except its controls."""

    prompt: str
    """Prompt of the chunk: the request's prompt if there is one, otherwise the session's prompt,
    otherwise an empty string.
    """
    seed: int
    """Seed of the chunk."""
    image: torch.Tensor | None
    """Start image of a session's first chunk, uint8 [H, W, 3] of any size."""
    images: Mapping[str, torch.Tensor]
    """Named images of a session's first chunk, each uint8 [H, W, 3] of any size."""


def read_played(
    request: DiffusionRequest[Any, Any], session: StreamingSession[Any, Any], space: ActionSpace
) -> PlayedChunk:
    """Validate a request to a model whose only inputs are controls, a prompt, a start image and
    named images.

    Args:
        request: Request for one chunk.
        session: Session that the request belongs to.
        space: Controls of the model.
    """
    params, first_chunk = request.params, session.chunk_index == 0
    check_unused(params, actions=True)
    check_unchanged(params, session.shape, {})
    check_prompt(params, space, first_chunk=first_chunk)
    if params.options:
        raise RequestFailed(
            "invalid_request", f"this model takes no options, got {sorted(params.options)[:3]}"
        )
    images = read_named_images(request.tensors, space, first_chunk=first_chunk)
    named = map(image_tensor, space.image_names)
    check_tensors(request.tensors, ("image", *named, *ACTION_TENSORS))
    image = request.tensors.get("image")
    if image is not None and not first_chunk:
        raise RequestFailed(
            "invalid_image",
            "a session has one start image; reset the session to start from another",
        )
    needed = first_chunk and space.image == "required"
    prompt = session.prompt if params.prompt is None else params.prompt
    return PlayedChunk(
        prompt or "", read_seed(params, session.seed), read_image(image, first_chunk=needed), images
    )


def read_named_images(
    tensors: Mapping[str, torch.Tensor], space: ActionSpace, *, first_chunk: bool
) -> dict[str, torch.Tensor]:
    """Validate and return the named images of a request, each uint8 [H, W, 3] of any size.

    Args:
        tensors: Tensors of the request.
        space: Controls and other inputs of the model.
        first_chunk: Whether the chunk is its session's first chunk.
    """
    prefix = image_tensor("")
    sent = {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    if unknown := sorted(set(sent) - set(space.image_names)):
        raise RequestFailed(
            "invalid_image",
            f"unknown images {', '.join(unknown[:3])}; this model takes "
            f"{', '.join(space.image_names) or 'no named images'}",
        )
    if sent and not first_chunk:
        raise RequestFailed(
            "invalid_image",
            "a session's named images come with its first chunk; reset the session to change them",
        )
    for image in space.images:
        tensor = sent.get(image.name)
        if tensor is not None:
            try:
                read_image(tensor, first_chunk=False)
            except RequestFailed as error:
                raise RequestFailed(error.code, f"images.{image.name}: {error.message}") from error
        elif first_chunk and image.use == "required":
            raise RequestFailed(
                "missing_image", f"a session's first chunk needs the image {image.name}"
            )
    return sent


def read_image(image: torch.Tensor | None, *, first_chunk: bool) -> torch.Tensor | None:
    """Validate and return a start image, uint8 [H, W, 3] of any size.

    Args:
        image: The start image, or None if the session continues without a new image.
        first_chunk: Whether to raise an error if `image` is None. Set it for a session's first
            chunk if the model requires a start image.
    """
    if image is None:
        if first_chunk:
            raise RequestFailed(
                "missing_image", "a session's first chunk needs an image, uint8 [H, W, 3]"
            )
        return None
    if image.dtype != torch.uint8 or image.dim() != 3 or image.shape[2] != 3 or image.numel() == 0:
        raise RequestFailed(
            "invalid_image",
            f"image must be uint8 of shape [H, W, 3], got {image.dtype} {list(image.shape)}",
        )
    if max(image.shape[:2]) > _MAX_IMAGE_SIDE:
        raise RequestFailed(
            "image_too_large",
            f"image is {image.shape[1]}x{image.shape[0]}; each side may have at most "
            f"{_MAX_IMAGE_SIDE} pixels",
        )
    return image


def read_action_frames(
    params: DiffusionParams,
    tensors: Mapping[str, torch.Tensor],
    space: ActionSpace,
    plan: ChunkPlan,
    chunk_index: int,
) -> ActionFrames:
    """Return the controls for every video frame of a chunk. If the request has no actions, no
    button is held.

    An entry of `params.actions` or a row of the tensors applies to all video frames of a latent
    frame. The tensors may instead have one row per video frame.
    """
    frames, pixel_frames = plan.frames(chunk_index), len(plan.pixel_frames(chunk_index))
    dense = [tensors[name] for name in ACTION_TENSORS if name in tensors]
    if any(tensor.shape[:1] == (pixel_frames,) for tensor in dense):
        action_frames = read_actions(space, params.actions, tensors, pixel_frames)
        assert action_frames is not None
        return action_frames
    action_frames = read_latent_actions(params, tensors, space, len(frames))
    return action_frames.repeated(
        [plan.rate.first_frame(frame + 1) - plan.rate.first_frame(frame) for frame in frames]
    )


def read_latent_actions(
    params: DiffusionParams,
    tensors: Mapping[str, torch.Tensor],
    space: ActionSpace,
    num_frames: int,
) -> ActionFrames:
    """Return the controls for `num_frames` latent frames. If the request has no actions, no button
    is held.
    """
    dense = any(name in tensors for name in ACTION_TENSORS)
    action_frames = read_actions(
        space, [] if params.actions is None and not dense else params.actions, tensors, num_frames
    )
    assert action_frames is not None
    return action_frames
