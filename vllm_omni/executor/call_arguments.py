# SPDX-License-Identifier: Apache-2.0
"""Converts a request to the arguments of a pipeline's `__call__`, and validates them.

The signature of the pipeline's `__call__` defines which options a request may contain. If a request
field or option has no matching argument, the request fails with an error that lists the valid
names. Values are validated as far as possible without running the pipeline. This module contains no
model-specific code.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import torch

from vllm_omni.executor.call_tensors import tensor_arguments
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.models.diffusers_pipeline.conventions import (
    PipelineConventions,
    conventions_of,
    language_of,
)
from vllm_omni.model_executor.models.diffusers_pipeline.options import DiffusersOptions
from vllm_omni.model_executor.models.diffusers_pipeline.tasks import (
    Parameters,
    call_parameters,
    default_of,
    default_size,
    guidance_argument,
    is_required,
    makes_video,
    max_pixels,
    tasks_of,
)
from vllm_omni.outputs import RequestFailed
from vllm_omni.seeds import definite_seed

_OURS = ("aspect_ratio", "lora", "prompt_suffix", "first_block_cache")
"""Options that this package defines, which are not pipeline arguments."""
_FROM_FIELDS = (
    *(
        "prompt",
        "negative_prompt",
        "height",
        "width",
        "num_frames",
        "num_inference_steps",
        "generator",
        "latents",
    ),
    *(
        "num_images_per_prompt",
        "num_videos_per_prompt",
        "output_type",
        "return_dict",
        "callback",
        "callback_steps",
    ),
    *(
        "callback_on_step_end",
        "callback_on_step_end_tensor_inputs",
        "attention_kwargs",
        "joint_attention_kwargs",
    ),
    *("cross_attention_kwargs", "padding_mask_crop"),
)
"""Arguments that are not accepted as options, because requests set them through dedicated fields or
cannot set them at all.
"""
_FRAME_RATE = ("frame_rate", "fps")
_MAX_LIST = 1000
_MAX_IMAGES = 8
"""Maximum number of images in a request."""
_MAX_SEQUENCE_LENGTH = 4096
_Change = Annotated[float, msgspec.Meta(gt=0, le=10)]
"""Threshold of a first-block cache, as a relative change."""


@dataclass(frozen=True)
class PipelineInfo:
    """Properties of a loaded pipeline, used to validate requests. The properties are read from the
    pipeline once.
    """

    class_name: str
    """Name of the pipeline class."""
    parameters: Parameters
    """Parameters of the pipeline's `__call__` method."""
    conventions: PipelineConventions
    """The pipeline class's prompt suffixes and aspect ratios."""
    size_multiple: int
    """Height and width must be multiples of this number of pixels."""
    frame_stride: int
    """The number of frames must be 1 plus a multiple of `frame_stride`."""
    guidance: str | None
    """Name of the argument for the guidance scale, or None if the pipeline has no such argument."""
    text_widths: tuple[int, ...]
    """Possible widths of text embeddings. Empty: the widths are unknown."""
    tensor_dtype: torch.dtype
    """Dtype of the pipeline's floating-point tensor arguments."""
    encodes_text: bool
    """Whether the pipeline has a text encoder. False if the deployment omits the text encoder."""

    @property
    def video(self) -> bool:
        return makes_video(self.parameters)

    @classmethod
    def of_pipeline(cls, pipeline: Any) -> "PipelineInfo":
        parts = pipeline.components
        denoiser = next(
            (
                parts[name]
                for name in ("transformer", "unet", "prior")
                if parts.get(name) is not None
            ),
            None,
        )
        config = {} if denoiser is None else dict(denoiser.config)
        parameters = call_parameters(type(pipeline))
        attributes = vars(pipeline)
        widths = [
            config.get(key) for key in ("joint_attention_dim", "text_dim", "cross_attention_dim")
        ]
        return cls(
            class_name=type(pipeline).__name__,
            parameters=parameters,
            conventions=conventions_of(type(pipeline).__name__),
            size_multiple=_size_multiple(attributes, config),
            frame_stride=int(attributes.get("vae_scale_factor_temporal") or 1)
            if makes_video(parameters)
            else 1,
            guidance=guidance_argument(parameters, distilled=config.get("guidance_embeds") is True),
            text_widths=tuple(width for width in widths if isinstance(width, int)),
            tensor_dtype=torch.float32 if denoiser is None else denoiser.dtype,
            encodes_text="text_encoder" not in parts or parts["text_encoder"] is not None,
        )


def _size_multiple(attributes: Mapping[str, Any], denoiser_config: Mapping[str, Any]) -> int:
    """Return the number of pixels that heights and widths must be multiples of: a token's side
    length (the VAE's scale factor times the patch size), or an image processor's scale factor if
    that is larger.

    The function looks up the scale factor and the patch size under several names, because pipeline
    classes store them under different names.
    """
    scale = attributes.get("vae_scale_factor_spatial") or attributes.get("vae_scale_factor") or 1
    patch = denoiser_config.get("patch_size")
    patch = patch[-1] if isinstance(patch, list | tuple) else patch
    multiple = int(scale) * (patch if isinstance(patch, int) else 1)
    processors = (attributes.get("image_processor"), attributes.get("video_processor"))
    steps = [
        processor.config.get("vae_scale_factor", 1)
        for processor in processors
        if processor is not None
    ]
    return max(multiple, *steps, 1)


@dataclass(frozen=True)
class PipelineCall:
    """A validated request, converted to a pipeline call."""

    arguments: dict[str, Any]
    """Arguments of the pipeline's `__call__`, except the generator and the callback."""
    seed: int
    """Seed for the video or for the first image."""
    num_images: int
    """Number of noise generators: one per image, or one for a video."""
    num_steps: int
    """Number of denoise steps. 0: the number is unknown."""
    fps: float
    """Video frame rate in frames per second."""
    lora: Any
    """LoRA adapters as requested; see `PipelineAdapters.select`."""
    meta: dict[str, Any]
    """Metadata to add to the result."""
    first_block_cache: float | None = None
    """First-block cache threshold. None: the cache is disabled."""


def pipeline_call(
    params: DiffusionParams,
    tensors: Mapping[str, torch.Tensor],
    info: PipelineInfo,
    options: DiffusersOptions,
    device: torch.device,
) -> PipelineCall:
    """Convert a request to a pipeline call.

    Args:
        params: Request parameters.
        tensors: Request tensors by name.
        info: The pipeline's properties.
        options: Deployment options.
        device: The pipeline's device.

    Raises:
        RequestFailed: The request is invalid. The code is `invalid_request`, `unsupported_size` or
            `invalid_image`.
    """
    _check_fields(params)
    requested = dict(params.options)
    own = {name: requested.pop(name) for name in _OURS if name in requested}
    arguments = {
        name: value for name, value in options.call_defaults().items() if name in info.parameters
    }
    arguments |= _checked_options(requested, info)
    arguments |= tensor_arguments(
        tensors, info.parameters, info.text_widths, device, info.tensor_dtype
    )
    meta: dict[str, Any] = {"pipeline": info.class_name}
    meta |= _texts(arguments, params, own, info, options)
    _size(arguments, params, own, info, options)
    _counts(arguments, params, info, options)
    _guidance(arguments, params, info)
    if "image" not in arguments and not any(
        task.startswith("text") for task in tasks_of(info.class_name, info.parameters)
    ):
        raise _invalid(f"{info.class_name} needs an image: send the tensor image, uint8 [H, W, 3]")
    for name in info.parameters:
        if (
            is_required(info.parameters, name)
            and name not in arguments
            and name not in ("args", "kwargs")
        ):
            raise _invalid(f"{info.class_name} needs {name!r}, and the request has none")
    if params.fps is not None and not info.video:
        raise _invalid(f"{info.class_name} generates images: leave fps out")
    fps = params.fps or options.request_defaults().fps
    for name in _FRAME_RATE:
        if params.fps is not None and name in info.parameters:
            arguments[name] = type(default_of(info.parameters, name) or 1.0)(params.fps)
    if params.output == "both":
        raise _invalid("output 'both' requires a streaming model; allowed: 'rgb', 'latents'")
    if params.trajectory:
        raise _invalid("trajectory requires a streaming model; leave it out")
    arguments["output_type"] = "latent" if params.output == "latents" else "pt"
    steps = arguments.get("num_inference_steps", default_of(info.parameters, "num_inference_steps"))
    return PipelineCall(
        arguments=arguments,
        seed=definite_seed(params.seed),
        num_images=1 if info.video else params.num_images,
        num_steps=steps if isinstance(steps, int) else 0,
        fps=fps,
        lora=_adapters(params, own),
        meta=meta,
        first_block_cache=_first_block_cache(own, options),
    )


def _adapters(params: DiffusionParams, own: Mapping[str, Any]) -> Any:
    """Return the LoRA adapters that a request specifies in its `lora` field or in
    `options.lora`.
    """
    if params.lora is None:
        return own.get("lora")
    if "lora" in own:
        raise _invalid("lora and options.lora are both given; send one")
    return {one.name: one.scale for one in params.lora}


def _first_block_cache(own: Mapping[str, Any], options: DiffusersOptions) -> float | None:
    """Return the first-block cache threshold that a request specifies, or None."""
    if "first_block_cache" not in own:
        return None
    if options.interleave > 1:
        raise _invalid(
            "first_block_cache requires omni.model.interleave 1, this server's is "
            f"{options.interleave}: interleaved "
            "requests would share one transformer's cache"
        )
    try:
        return msgspec.convert(own["first_block_cache"], _Change)
    except msgspec.ValidationError as error:
        raise _invalid(f"options.first_block_cache: {error}") from error


def _invalid(message: str) -> RequestFailed:
    return RequestFailed("invalid_request", message)


def _check_fields(params: DiffusionParams) -> None:
    if params.chunk_index not in (None, 0):
        raise _invalid(
            f"chunk_index {params.chunk_index}: a pipeline has no sessions, each request is "
            "independent"
        )
    if params.actions is not None:
        raise _invalid("actions steer worlds; a diffusers pipeline does not support them")


def _checked_options(requested: Mapping[str, Any], info: PipelineInfo) -> dict[str, Any]:
    """Check that all options are arguments of the pipeline and have valid values, and return them
    unchanged.
    """
    allowed = [
        name
        for name in info.parameters
        if name not in _FROM_FIELDS and not _is_tensor_argument(name)
    ]
    for name, value in requested.items():
        if name not in allowed:
            raise _invalid(
                f"options: {info.class_name} has no option {name!r}; it has "
                f"{', '.join([*_OURS, *sorted(allowed)])}"
            )
        if isinstance(value, dict) or (
            isinstance(value, list) and len(json.dumps(value)) > 16 * _MAX_LIST
        ):
            raise _invalid(f"options.{name} must be a number, a text, true, false or a short list")
    length = requested.get("max_sequence_length", 1)
    if (
        not isinstance(length, int)
        or isinstance(length, bool)
        or not 1 <= length <= _MAX_SEQUENCE_LENGTH
    ):
        raise _invalid(
            f"options.max_sequence_length must be an integer from 1 to {_MAX_SEQUENCE_LENGTH}"
        )
    for name in ("sigmas", "timesteps"):
        if requested.get(name) is not None and not _is_numeric(requested[name]):
            raise _invalid(f"options.{name} must be a list of 1 to {_MAX_LIST} numbers")
    return dict(requested)


def _is_tensor_argument(name: str) -> bool:
    return name.endswith(
        ("_embeds", "_embeds_mask", "image", "_mask", "video", "latents", "attention_mask")
    )


def _is_numeric(value: Any) -> bool:
    return (
        isinstance(value, list)
        and 1 <= len(value) <= _MAX_LIST
        and all(isinstance(item, int | float) and not isinstance(item, bool) for item in value)
    )


def _texts(
    arguments: dict[str, Any],
    params: DiffusionParams,
    own: Mapping[str, Any],
    info: PipelineInfo,
    options: DiffusersOptions,
) -> dict[str, Any]:
    """Set the prompts. If requested, add the suffix for the prompt's language.

    Returns:
        Metadata to add to the result.
    """
    meta: dict[str, Any] = {}
    prompt = params.prompt
    if "prompt_embeds" in arguments:
        if prompt:
            raise _invalid("send either a prompt or prompt_embeds, not both")
        arguments.pop("prompt", None)
    elif "prompt" in info.parameters:
        if prompt is None:
            raise _invalid("a prompt or the tensor prompt_embeds is needed")
        if not info.encodes_text:
            raise _invalid(
                "the pipeline is served without its text encoder: send the tensor prompt_embeds"
            )
        language = own.get("prompt_suffix", options.request_defaults().prompt_suffix)
        suffixes = info.conventions.prompt_suffixes
        if language not in ("off", "auto", *suffixes):
            raise _invalid(
                f"options.prompt_suffix must be one of off, auto, {', '.join(suffixes)}; got "
                f"{language!r}"
            )
        if language != "off" and suffixes:
            suffix = suffixes[language_of(prompt) if language == "auto" else language]
            prompt, meta["prompt_suffix"] = prompt + suffix, suffix
        arguments["prompt"] = prompt
    elif prompt:
        raise _invalid(f"{info.class_name} takes no prompt")
    if params.negative_prompt is not None:
        if "negative_prompt" not in info.parameters:
            raise _invalid(f"{info.class_name} takes no negative prompt")
        if params.negative_prompt and not info.encodes_text:
            raise _invalid(
                "the pipeline is served without its text encoder: send the tensor "
                "negative_prompt_embeds"
            )
        arguments["negative_prompt"] = params.negative_prompt
    if "negative_prompt_embeds" in arguments:
        if params.negative_prompt:
            raise _invalid("send either a negative prompt or negative_prompt_embeds, not both")
        arguments.pop("negative_prompt", None)
    return meta


def _size(
    arguments: dict[str, Any],
    params: DiffusionParams,
    own: Mapping[str, Any],
    info: PipelineInfo,
    options: DiffusersOptions,
) -> None:
    """Set the arguments for height and width.

    The size is determined by the aspect ratio, or else by the request's height and width, or else
    by the deployment's defaults. If none of these is given, the pipeline chooses the size.
    """
    width, height = params.width, params.height
    ratio = own.get("aspect_ratio")
    if ratio is not None:
        table = info.conventions.aspect_ratios
        if ratio not in table:
            known = ", ".join(table) or f"{info.class_name} has none; send width and height"
            raise _invalid(f"options.aspect_ratio {ratio!r} is unknown; known: {known}")
        # The aspect ratio takes precedence, because endpoints always send width and height.
        width, height = table[ratio]
    if (width is None) != (height is None):
        raise _invalid("send both width and height, or neither")
    defaults = options.request_defaults()
    width, height = width or defaults.width, height or defaults.height
    if width is None or height is None:
        return
    if "width" not in info.parameters or "height" not in info.parameters:
        raise _invalid(
            f"{info.class_name} derives its size from the input; send no width and height"
        )
    multiple = info.size_multiple
    if width % multiple or height % multiple:
        near = [max(multiple, round(side / multiple) * multiple) for side in (width, height)]
        raise RequestFailed(
            "unsupported_size",
            f"{width}x{height}: width and height must be multiples of {multiple}, for example "
            f"{near[0]}x{near[1]}",
        )
    default_width, default_height = default_size(info.parameters, options)
    limit = max(max_pixels(info.parameters, options), default_width * default_height)
    if width * height > limit:
        raise RequestFailed(
            "unsupported_size",
            f"{width}x{height} exceeds the limit of {limit} pixels on this server",
        )
    arguments["width"], arguments["height"] = width, height


def _counts(
    arguments: dict[str, Any],
    params: DiffusionParams,
    info: PipelineInfo,
    options: DiffusersOptions,
) -> None:
    """Set the arguments for the numbers of steps, frames and images."""
    if params.num_inference_steps is not None:
        if "num_inference_steps" not in info.parameters:
            raise _invalid(f"{info.class_name} has a fixed number of steps")
        if params.num_inference_steps > options.max_num_inference_steps:
            raise _invalid(
                f"num_inference_steps {params.num_inference_steps} is more than "
                f"{options.max_num_inference_steps}"
            )
        arguments["num_inference_steps"] = params.num_inference_steps
    frames = (
        params.num_frames
        if params.num_frames is not None
        else options.request_defaults().num_frames
    )
    if info.video and frames is not None:
        stride = info.frame_stride
        if (frames - 1) % stride:
            near = 1 + stride * round((frames - 1) / stride)
            raise _invalid(
                f"num_frames {frames}: must be 1 + a multiple of {stride}, for example {near}"
            )
        if frames > options.max_num_frames:
            raise _invalid(f"num_frames {frames} is more than {options.max_num_frames}")
        arguments["num_frames"] = frames
    elif params.num_frames is not None:
        raise _invalid(f"{info.class_name} generates images; send no num_frames")
    if params.num_images > 1:
        if info.video or "num_images_per_prompt" not in info.parameters:
            raise _invalid(
                f"{info.class_name} generates one result per request; num_images must be 1"
            )
        if params.num_images > _MAX_IMAGES:
            raise _invalid(f"num_images {params.num_images} is more than {_MAX_IMAGES}")
        arguments["num_images_per_prompt"] = params.num_images


def _guidance(arguments: dict[str, Any], params: DiffusionParams, info: PipelineInfo) -> None:
    if params.guidance_scale is None:
        return
    if info.guidance is None:
        raise _invalid(f"{info.class_name} has no guidance scale")
    # An option named after the guidance argument takes precedence, because endpoints always send
    # guidance_scale.
    if info.guidance not in params.options:
        arguments[info.guidance] = params.guidance_scale
