# SPDX-License-Identifier: Apache-2.0
"""Validates everything that a client can send with a video request.

`read_request` returns a `VideoRequest` with all defaults resolved, or raises `RequestFailed` with
the field, its value and the allowed values. The function allocates nothing on a device and returns
the same result on every rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vllm_omni.config import OmniConfig, parse_options
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.models.wan2_2.config import (
    Wan22Checkpoint,
    Wan22Options,
    Wan22RequestOptions,
    recommended,
)
from vllm_omni.outputs import RequestFailed


@dataclass(frozen=True)
class VideoRequest:
    """A validated request. The negative prompt has an effect only if the guidance scale is above
    1.
    """

    prompt: str
    """Text that describes the video."""
    negative_prompt: str
    """Text that guidance steers the video away from."""
    height: int
    """Height of the video in pixels."""
    width: int
    """Width of the video in pixels."""
    num_frames: int
    """Number of video frames."""
    latent_shape: tuple[int, int, int, int]
    """Shape of the latents, [z_dim, F, h, w]."""
    num_inference_steps: int
    """Number of denoise steps."""
    guidance: float
    """Guidance scale of the first or only expert."""
    guidance_2: float
    """Guidance scale below the boundary."""
    flow_shift: float | None
    """Shift of the noise schedule, or None for the checkpoint's value."""
    seed: int
    """Seed of the noise."""
    fps: float
    """Frame rate of the video, in frames per second."""
    step_cache: float | None = None
    """Threshold for skipping denoise steps (`step_cache.py`), or None to compute every step."""

    @property
    def guided(self) -> bool:
        """Return whether the network also runs with the negative prompt. As in diffusers, the first
        expert's guidance scale determines whether guidance is used for both experts.
        """
        return self.guidance > 1


def read_request(
    params: DiffusionParams, checkpoint: Wan22Checkpoint, options: Wan22Options, omni: OmniConfig
) -> VideoRequest:
    """Validate the parameters of a request and resolve their defaults. The request's tensors are
    not read.

    Raises:
        RequestFailed: A value is invalid.
    """
    if not params.one_shot:
        raise _invalid("this model makes whole videos: send one_shot")
    if params.num_images != 1:
        raise _invalid(f"this model makes one video per request, num_images is {params.num_images}")
    if params.actions is not None:
        raise _invalid("actions mean nothing to this model (it has no camera): leave them out")
    if not params.prompt:
        raise _invalid("prompt must not be empty")
    try:
        own = parse_options(Wan22RequestOptions, params.options, "options")
    except ValueError as error:
        raise _invalid(str(error)) from error
    best = recommended(checkpoint)
    height, width = params.height or omni.height, params.width or omni.width
    num_frames = params.num_frames or default_num_frames(checkpoint, options)
    if num_frames > options.max_num_frames:
        raise _invalid(
            f"num_frames {num_frames} is more than {options.max_num_frames}, the most this "
            "server makes"
        )
    if height * width > omni.max_area:
        raise RequestFailed(
            "unsupported_size",
            f"{height}x{width} has {height * width} pixels; this server makes at most "
            f"{omni.max_area}",
        )
    try:
        frames, size = checkpoint.latent_frames(num_frames), checkpoint.latent_size(height, width)
    except ValueError as error:
        raise RequestFailed("unsupported_size", str(error)) from error
    steps = (
        params.num_inference_steps
        or options.defaults.num_inference_steps
        or best.num_inference_steps
    )
    if steps > options.max_num_inference_steps:
        raise _invalid(
            f"num_inference_steps {steps} is more than {options.max_num_inference_steps}"
        )
    guidance, guidance_2 = _guidance(params, own, checkpoint, options)
    return VideoRequest(
        prompt=params.prompt,
        negative_prompt=options.defaults.negative_prompt
        if params.negative_prompt is None
        else params.negative_prompt,
        height=height,
        width=width,
        num_frames=num_frames,
        latent_shape=(checkpoint.z_dim, frames, *size),
        num_inference_steps=steps,
        guidance=guidance,
        guidance_2=guidance_2,
        flow_shift=options.defaults.flow_shift if own.flow_shift is None else own.flow_shift,
        seed=params.seed or 0,
        fps=params.fps or options.defaults.fps or best.fps,
        step_cache=own.step_cache,
    )


def read_image(
    tensors: Mapping[str, torch.Tensor], request: VideoRequest, checkpoint: Wan22Checkpoint
) -> torch.Tensor | None:
    """Return the start image, uint8 [H, W, 3], or None if the request has none.

    Raises:
        RequestFailed: The tensors are invalid for this request or checkpoint.
    """
    allowed = set() if checkpoint.kind == "t2v" else {"image"}
    unknown = sorted(set(tensors) - allowed)
    if unknown:
        takes = "no tensors (text to video)" if not allowed else "the tensor 'image'"
        raise _invalid(f"unknown tensors {unknown[:3]}; this model takes {takes}")
    image = tensors.get("image")
    if image is None:
        if checkpoint.kind == "i2v":
            raise RequestFailed(
                "missing_image", "this model starts a video from a picture: send the tensor 'image'"
            )
        return None
    expected = [request.height, request.width, 3]
    if image.dtype != torch.uint8 or list(image.shape) != expected:
        raise RequestFailed(
            "invalid_image",
            f"image must be uint8 {expected}, the video's size, got {image.dtype} "
            f"{list(image.shape)}",
        )
    return image


def default_num_frames(checkpoint: Wan22Checkpoint, options: Wan22Options) -> int:
    """Return the default number of frames: the server's default or, if there is none, the number
    that the model's authors recommend, capped at the server's limit.
    """
    wanted = options.defaults.num_frames or min(
        recommended(checkpoint).num_frames, options.max_num_frames
    )
    return 1 + (wanted - 1) // checkpoint.temporal_factor * checkpoint.temporal_factor


def default_guidance(checkpoint: Wan22Checkpoint, options: Wan22Options) -> tuple[float, float]:
    """Return the default guidance scales for timesteps at or above the expert boundary and for
    those below it.
    """
    best = recommended(checkpoint)
    if options.defaults.guidance_scale is None:
        first, second = best.guidance, best.guidance if best.guidance_2 is None else best.guidance_2
    else:
        first = second = options.defaults.guidance_scale
    return (
        first,
        second if options.defaults.guidance_scale_2 is None else options.defaults.guidance_scale_2,
    )


def _guidance(
    params: DiffusionParams,
    own: Wan22RequestOptions,
    checkpoint: Wan22Checkpoint,
    options: Wan22Options,
) -> tuple[float, float]:
    """Return the guidance scales above and below the boundary.

    As in diffusers, if the request contains only one scale, this scale applies to both experts,
    unless it equals the default.
    """
    first, second = default_guidance(checkpoint, options)
    if params.guidance_scale is not None and params.guidance_scale != first:
        first = second = params.guidance_scale
    return first, second if own.guidance_scale_2 is None else own.guidance_scale_2


def _invalid(message: str) -> RequestFailed:
    return RequestFailed("invalid_request", message)
