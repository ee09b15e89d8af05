# SPDX-License-Identifier: Apache-2.0
"""Convert validated client requests to engine requests, filling in the model's sizes, lengths,
seeds and defaults.

This module does no I/O and does not use the engine. If a request is refused, `ApiError` is raised
with status 400, or 404 if the request names a model that is not served. The message states the
field, the received value and the allowed values.
"""

import math
import secrets
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from vllm_omni.actions import ActionEntry, as_entry
from vllm_omni.entrypoints.errors import ApiError, EndpointError, invalid
from vllm_omni.entrypoints.openai.protocol import ImageGenerationRequest, VideoRequest
from vllm_omni.entrypoints.openai.served import ServedModel, SizeLimits
from vllm_omni.entrypoints.realtime.controls.action_messages import (
    camera_frames,
    convert_frames,
    read_script,
)
from vllm_omni.entrypoints.timed_prompts import TimedPrompt
from vllm_omni.inputs import DiffusionParams, Lora
from vllm_omni.seeds import definite_seed, nth_seed

_MAX_OPTIONS_BYTES: Final = 64 << 10
_OPENAI_SECONDS: Final = (4, 8, 12)
"""Values of `seconds` that OpenAI's client types allow."""
_MIN_SIDE = 8  # lower bound of height and width in `DiffusionParams`


@dataclass(frozen=True, kw_only=True)
class MediaSampling:
    """Sampling parameters for an image or video request."""

    model: str
    """Model name, as stated in replies."""
    prompt: str | None
    """Prompt. None: the model takes no prompt."""
    negative_prompt: str | None
    """Negative prompt. None: the request has no negative prompt."""
    width: int
    """Width of the result in pixels."""
    height: int
    """Height of the result in pixels."""
    seed: int
    """Seed of the first image or of the video."""
    steps: int | None
    """Number of denoise steps. None: the model fixes the number."""
    guidance: float | None
    """Classifier-free guidance scale. None: the model fixes the scale."""
    lora: list[Lora] | None
    """LoRA adapters to apply. None: the adapters are not changed."""
    options: dict[str, Any]
    """Options specific to the model."""

    def params(self, session_id: str, **fields: Any) -> DiffusionParams:
        """Return a one-shot engine request with these sampling parameters.

        Args:
            session_id: The engine's id for the session.
            fields: Additional parameters, or values that override others.
        """
        common: dict[str, Any] = {
            "session_id": session_id,
            "one_shot": True,
            "prompt": self.prompt,
            "negative_prompt": self.negative_prompt,
            "height": self.height,
            "width": self.width,
            "seed": self.seed,
            "num_inference_steps": self.steps,
            "guidance_scale": self.guidance,
            "lora": self.lora,
            "options": self.options,
        }
        return DiffusionParams(**{**common, **fields})


@dataclass(frozen=True)
class ImageJob:
    sampling: MediaSampling
    """Sampling parameters for all images."""
    n: int
    """Number of images."""
    images_per_request: int
    """Maximum number of images per engine request."""

    def requests(self) -> list[DiffusionParams]:
        """Return the call's engine requests, in image order.

        Image i has the seed `seed + i`.
        """
        requests = []
        for start in range(0, self.n, self.images_per_request):
            count = min(self.images_per_request, self.n - start)
            requests.append(
                self.sampling.params(
                    new_engine_id(), num_images=count, seed=nth_seed(self.sampling.seed, start)
                )
            )
        return requests


@dataclass(frozen=True)
class VideoPlan:
    """Parameters of one video."""

    sampling: MediaSampling
    """Sampling parameters for the video."""
    num_frames: int
    """Number of pixel frames in the video file."""
    fps: float
    """Playback rate in frames per second."""
    actions: list[ActionEntry]
    """Actions for each latent frame, for world models. The list may be shorter than the video."""
    prompts: tuple[TimedPrompt, ...] = ()
    """Prompts that take effect after the first one, for world models."""

    @property
    def seconds(self) -> str:
        return f"{self.num_frames / self.fps:g}"


def new_engine_id() -> str:
    return f"once-{secrets.token_hex(16)}"


def plan_images(
    request: ImageGenerationRequest, served: ServedModel, input_size: tuple[int, int] | None = None
) -> ImageJob:
    """Return the parameters of an image request.

    Args:
        request: The request.
        served: The served model.
        input_size: (width, height) of the first image of an edit. If `size` is `auto` or absent,
            the result gets this image's aspect ratio. None: the request is not an edit.

    Raises:
        ApiError: Status 400 if the model does not support the request.
    """
    capabilities = served.capabilities
    if not (capabilities.edits_images if input_size is not None else capabilities.makes_images):
        what = "edit images" if input_size is not None else "generate images from text"
        raise unsupported(served, what)
    if request.background == "transparent":
        raise invalid(
            "background 'transparent' is not supported; allowed: 'auto', 'opaque'", "background"
        )
    sizes = served.images
    automatic = (
        fit_size(*input_size, sizes) if input_size is not None else (sizes.width, sizes.height)
    )
    return ImageJob(
        _sampling(request, served, sizes, automatic),
        request.n or 1,
        capabilities.images_per_request,
    )


def plan_video(request: VideoRequest, served: ServedModel, has_image: bool) -> VideoPlan:
    """Return the parameters of a video request.

    Args:
        request: The request.
        served: The served model.
        has_image: Whether the client sent a start image.

    Raises:
        ApiError: Status 400 if the model does not support the request.
    """
    capabilities = served.capabilities
    if not capabilities.makes_videos:
        raise unsupported(served, "generate videos")
    if has_image and "image_to_video" not in capabilities.tasks:
        raise unsupported(served, "start a video from an image", "input_reference")
    if not has_image and "text_to_video" not in capabilities.tasks:
        raise invalid(
            "this model starts a video from an image: send input_reference",
            "input_reference",
            "missing_required_parameter",
        )
    _check_prompt(request, served)
    actions = _actions(request, served)
    if request.prompts and served.world is None:
        raise unsupported(served, "change its prompt during a video", "prompts")
    sizes = served.videos
    sampling = _sampling(request, served, sizes, (sizes.width, sizes.height))
    fps = capabilities.fps if request.fps is None else request.fps
    return VideoPlan(
        sampling, _num_frames(request, served, fps), fps, actions, tuple(request.prompts or ())
    )


def _check_prompt(request: VideoRequest, served: ServedModel) -> None:
    if served.world is not None and served.world.actions.prompt == "none":
        try:
            for prompt in (request.prompt, *(timed.prompt for timed in request.prompts or ())):
                served.world.check_prompt(prompt)
        except EndpointError as error:
            raise invalid(error.message, "prompt", error.code) from None
    elif request.prompt is None:
        raise invalid(
            "Missing required parameter: 'prompt'", "prompt", "missing_required_parameter"
        )


def _actions(request: VideoRequest, served: ServedModel) -> list[ActionEntry]:
    """Check the actions for each latent frame against the model's controls, and return them."""
    name = "actions" if request.actions else "camera_actions"
    if request.actions and request.camera_actions:
        raise invalid("send actions or camera_actions: one of the two", name)
    if not request.actions and not request.camera_actions:
        return []
    if served.world is None or not served.world.actions.has_controls:
        raise unsupported(served, f"follow {name}", name)
    space = served.world.actions
    try:
        if request.actions:
            script = read_script(convert_frames(request.actions, space), space)
        else:
            script = camera_frames(request.camera_actions or [], space)
    except EndpointError as error:
        raise invalid(error.message, name, error.code) from None
    return [as_entry(frame) for frame in script.entries]


def check_video_edit(request: VideoRequest, served: ServedModel) -> None:
    """Check the fields of a clip edit before the clip is decoded.

    Raises:
        ApiError: Status 400 if the model or the clip edit does not support a field.
    """
    if "video_edit" not in served.capabilities.tasks:
        raise unsupported(served, "edit a video", "input_reference")
    follows = {"num_frames": request.num_frames, "seconds": request.seconds, "fps": request.fps}
    for name in [name for name, value in follows.items() if value is not None]:
        raise invalid(f"{name} follows the video that is edited: leave it out", name)
    for name in ("actions", "camera_actions"):
        if getattr(request, name):
            raise unsupported(served, f"follow {name}", name)
    if request.prompts:
        raise unsupported(served, "change its prompt during a video", "prompts")
    if request.prompt is None:
        raise invalid(
            "Missing required parameter: 'prompt'", "prompt", "missing_required_parameter"
        )


def plan_video_edit(request: VideoRequest, served: ServedModel, clip_frames: int) -> VideoPlan:
    """Return the parameters of a clip edit. The model derives the result's size from the clip.

    Args:
        request: The request.
        served: The served model.
        clip_frames: Number of frames in the decoded clip at the model's frame rate.
    """
    check_video_edit(request, served)
    sizes, stride = served.videos, served.capabilities.frame_stride
    sampling = _sampling(request, served, sizes, (sizes.width, sizes.height))
    return VideoPlan(
        sampling, 1 + (clip_frames - 1) // stride * stride, served.capabilities.fps, []
    )


def unsupported(served: ServedModel, what: str, param: str | None = None) -> ApiError:
    tasks = ", ".join(served.capabilities.tasks)
    return invalid(
        f"{served.names[0]} cannot {what}; it can: {tasks}", param, "unsupported_by_model"
    )


def fit_size(width: int, height: int, sizes: SizeLimits) -> tuple[int, int]:
    """Return the allowed size closest to the given size. The result is larger than the given size
    only if the minimum requires it.
    """
    wide, high = sizes.multiple
    scale = min(
        1.0, math.sqrt(sizes.max_pixels / (width * height)), sizes.max_side / max(width, height)
    )
    fitted = [
        max(side, -(-_MIN_SIDE // side) * side, int(length * scale) // side * side)
        for length, side in ((width, wide), (height, high))
    ]
    # If the short side of a very long image was raised to the minimum, reduce the long side.
    if fitted[0] * fitted[1] > sizes.max_pixels:
        longer = 0 if fitted[0] > fitted[1] else 1
        side = (wide, high)[longer]
        fitted[longer] = max(side, sizes.max_pixels // fitted[1 - longer] // side * side)
    return fitted[0], fitted[1]


def _sampling(
    request: ImageGenerationRequest | VideoRequest,
    served: ServedModel,
    sizes: SizeLimits,
    automatic: tuple[int, int],
) -> MediaSampling:
    capabilities = served.capabilities
    selected = served.adapter_named(request.model)
    named = [Lora(name=one.name, scale=one.scale) for one in request.lora or ()]
    lora = [*(one for one in selected if one.name not in {other.name for other in named}), *named]
    if request.negative_prompt and not capabilities.negative_prompt:
        raise unsupported(served, "use a negative_prompt", "negative_prompt")
    if request.num_inference_steps is not None:
        if capabilities.num_inference_steps is None:
            raise unsupported(served, "change its num_inference_steps", "num_inference_steps")
        if request.num_inference_steps > capabilities.max_num_inference_steps:
            raise invalid(
                f"num_inference_steps {request.num_inference_steps}: allowed: 1 to "
                f"{capabilities.max_num_inference_steps}",
                "num_inference_steps",
            )
    guidance, options = _guidance(request, served)
    width, height = _size(request.wanted_size, sizes, automatic)
    return MediaSampling(
        model=request.model or served.names[0],
        prompt=request.prompt or None,
        negative_prompt=request.negative_prompt or None,
        width=width,
        height=height,
        seed=definite_seed(request.seed),
        steps=request.num_inference_steps or capabilities.num_inference_steps,
        guidance=guidance,
        lora=None if request.lora is None and not lora else lora,
        options=_checked_options(options),
    )


def _guidance(
    request: ImageGenerationRequest | VideoRequest, served: ServedModel
) -> tuple[float | None, dict[str, Any]]:
    """Return the guidance scale and the model's options.

    `true_cfg_scale` is an option for pipelines that have an argument with this name. For all other
    pipelines, it is an alias for `guidance_scale`. If a request contains both fields, a
    `true_cfg_scale` of 1 (no guidance) is ignored, because vLLM-Omni's nodes always send both
    fields.
    """
    scale, true_scale = request.guidance_scale, request.true_cfg_scale
    options = dict(request.extra_params or {})
    if true_scale is not None and served.capabilities.true_cfg_scale:
        if options.setdefault("true_cfg_scale", true_scale) != true_scale:
            raise invalid(
                "true_cfg_scale and extra_params.true_cfg_scale differ: send one", "true_cfg_scale"
            )
    elif true_scale is not None and scale is None:
        fixed = served.capabilities.guidance_scale is None and true_scale == 1
        scale = None if fixed else true_scale
    elif true_scale not in (None, 1, scale):
        raise invalid(
            "this model has one guidance scale: send only guidance_scale", "true_cfg_scale"
        )
    if scale is not None and served.capabilities.guidance_scale is None:
        name = "true_cfg_scale" if request.guidance_scale is None else "guidance_scale"
        raise unsupported(served, f"change its {name}", name)
    return served.capabilities.guidance_scale if scale is None else scale, options


def _size(text: str | None, sizes: SizeLimits, automatic: tuple[int, int]) -> tuple[int, int]:
    if text is None or text == "auto":
        return automatic
    width, height = (int(side) for side in text.split("x"))
    wide, high = sizes.multiple
    in_range = min(width, height) >= _MIN_SIDE and max(width, height) <= sizes.max_side
    if width % wide or height % high or width * height > sizes.max_pixels or not in_range:
        near = "x".join(str(side) for side in fit_size(width, height, sizes))
        raise invalid(
            f"size {text}: width must be a multiple of {wide}, height of {high}, both at most "
            f"{sizes.max_side}, and width x height at most {sizes.max_pixels}; allowed and near: "
            f"{near}",
            "size",
        )
    return width, height


def _num_frames(request: VideoRequest, served: ServedModel, fps: float) -> int:
    capabilities = served.capabilities
    most = capabilities.max_num_frames
    if request.num_frames is not None and request.seconds is not None:
        raise invalid("send num_frames or seconds, not both", "num_frames")
    if request.num_frames is not None:
        near = capabilities.nearest_num_frames(request.num_frames)
        if near != request.num_frames:
            stride = capabilities.frame_stride
            rule = (
                f"1 to {most}"
                if served.world is not None or stride == 1
                else f"1 + {stride} k, at most {most}"
            )
            raise invalid(
                f"num_frames {request.num_frames}: allowed: {rule}; near: {near}", "num_frames"
            )
        return near
    if request.seconds is None:
        return capabilities.nearest_num_frames(capabilities.num_frames)
    wanted = request.seconds * fps
    if round(wanted) > most:
        fit = [f"{seconds}" for seconds in _OPENAI_SECONDS if round(seconds * fps) <= most]
        raise invalid(
            f"seconds {request.seconds:g} at {fps:g} fps are {round(wanted)} frames: at most "
            f"{most} ({most / fps:g} seconds); shorter videos of any length are possible, of "
            f"OpenAI's values {' and '.join(fit) or 'none'}",
            "seconds",
        )
    return capabilities.nearest_num_frames(max(1, round(wanted)))


def _checked_options(options: dict[str, Any]) -> dict[str, Any]:
    """Check that options can be sent to the engine. The model itself checks their values."""
    try:
        size = len(msgspec.msgpack.encode(options))
    except (OverflowError, ValueError, TypeError, RecursionError, UnicodeEncodeError):
        raise invalid(
            "extra_params contain a value that cannot be sent to the engine", "extra_params"
        ) from None
    if size > _MAX_OPTIONS_BYTES:
        raise invalid(
            f"extra_params have {size} bytes; at most {_MAX_OPTIONS_BYTES}", "extra_params"
        )
    return options
