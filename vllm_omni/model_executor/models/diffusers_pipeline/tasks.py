# SPDX-License-Identifier: Apache-2.0
"""Determine a pipeline class's tasks from the signature of its `__call__`. The executor and the
endpoints check requests against these tasks.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from vllm_omni.model_executor.models.capabilities import Capabilities, Task
from vllm_omni.model_executor.models.diffusers_pipeline.options import DiffusersOptions

Parameters = Mapping[str, inspect.Parameter]

_MAX_IMAGE_PIXELS = 2048 * 2048
_MAX_VIDEO_PIXELS = 1280 * 720
_FALLBACK_SIDE = 1024
_FALLBACK_FRAMES = 81
# Substrings of the names of classes that require an image. A signature does not show whether an
# image is optional.
_NEEDS_IMAGE = (
    "Edit",
    "Img2Img",
    "Image2Image",
    "ImageToImage",
    "Inpaint",
    "Control",
    "Upscale",
    "Layered",
)
_TAKES_SEVERAL_IMAGES = ("EditPlus", "Flux2")
_MAX_INPUT_IMAGES = 4


def call_parameters(pipeline_class: type) -> Parameters:
    """Return the named parameters of a pipeline's `__call__`, without `self`."""
    parameters = dict(inspect.signature(pipeline_class.__call__).parameters)
    parameters.pop("self", None)
    return parameters


def default_of(parameters: Parameters, name: str) -> Any:
    """Return a parameter's default, or None if the parameter has no default or does not exist."""
    parameter = parameters.get(name)
    return (
        None
        if parameter is None or parameter.default is inspect.Parameter.empty
        else parameter.default
    )


def is_required(parameters: Parameters, name: str) -> bool:
    return name in parameters and parameters[name].default is inspect.Parameter.empty


def makes_video(parameters: Parameters) -> bool:
    return "num_frames" in parameters


def guidance_argument(parameters: Parameters, *, distilled: bool) -> str | None:
    """Return the call argument that corresponds to a request's `guidance_scale`, or None if the
    pipeline does not support guidance.

    Some pipelines have both `guidance_scale` and `true_cfg_scale`. They use `guidance_scale` only
    as an input to a guidance-distilled transformer. If the transformer is not distilled, they
    ignore `guidance_scale`, and `true_cfg_scale` controls classifier-free guidance.
    """
    if "true_cfg_scale" in parameters and not (distilled and "guidance_scale" in parameters):
        return "true_cfg_scale"
    return "guidance_scale" if "guidance_scale" in parameters else None


def max_pixels(parameters: Parameters, options: DiffusersOptions) -> int:
    return options.max_pixels or (
        _MAX_VIDEO_PIXELS if makes_video(parameters) else _MAX_IMAGE_PIXELS
    )


def default_size(parameters: Parameters, options: DiffusersOptions) -> tuple[int, int]:
    """Return the (width, height) for a request that does not specify a size."""
    requested = options.request_defaults()
    width = requested.width or default_of(parameters, "width") or _FALLBACK_SIDE
    height = requested.height or default_of(parameters, "height") or _FALLBACK_SIDE
    return int(width), int(height)


def tasks_of(class_name: str, parameters: Parameters) -> tuple[Task, ...]:
    """Return a pipeline class's tasks, based on its inputs and its output."""
    takes_image = "image" in parameters
    needs_image = takes_image and (
        is_required(parameters, "image") or any(word in class_name for word in _NEEDS_IMAGE)
    )
    from_text: Task = "text_to_video" if makes_video(parameters) else "text_to_image"
    from_image: Task = "image_to_video" if makes_video(parameters) else "image_edit"
    if needs_image:
        return (from_image,)
    return (from_text, from_image) if takes_image else (from_text,)


def capabilities(
    class_name: str, options: DiffusersOptions, temporal_stride: int, *, distilled: bool
) -> Capabilities:
    """Return the capabilities of a diffusers pipeline class under these options, for the OpenAI
    endpoints.
    """
    import diffusers

    parameters = call_parameters(getattr(diffusers, class_name))
    width, height = default_size(parameters, options)
    guidance = guidance_argument(parameters, distilled=distilled)
    defaults, requested = options.call_defaults(), options.request_defaults()
    steps = defaults.get("num_inference_steps", default_of(parameters, "num_inference_steps"))
    scale = None if guidance is None else defaults.get(guidance, default_of(parameters, guidance))
    stride = temporal_stride if makes_video(parameters) else 1
    return Capabilities(
        tasks=tasks_of(class_name, parameters),
        width=width,
        height=height,
        max_pixels=max(max_pixels(parameters, options), width * height),
        num_inference_steps=steps,
        max_num_inference_steps=options.max_num_inference_steps,
        guidance_scale=None if scale is None else float(scale),
        true_cfg_scale="true_cfg_scale" in parameters,
        negative_prompt="negative_prompt" in parameters,
        num_frames=requested.num_frames or default_of(parameters, "num_frames") or _FALLBACK_FRAMES,
        max_num_frames=options.max_num_frames,
        frame_stride=stride,
        fps=requested.fps,
        images_per_request=1,  # so that an image does not depend on how many others are requested
        input_images=_MAX_INPUT_IMAGES
        if any(word in class_name for word in _TAKES_SEVERAL_IMAGES)
        else 1,
        mask="mask_image" in parameters,
    )
