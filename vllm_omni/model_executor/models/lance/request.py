# SPDX-License-Identifier: Apache-2.0
"""Validate requests to Lance.

The functions convert the `DiffusionParams` and named tensors of a request to `GenerationInputs` or
`UnderstandingInputs`. If a value is invalid, they raise a `RequestFailed` that contains the field,
the value and the allowed values. They do not allocate device memory.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import torch

from vllm_omni.config import parse_options
from vllm_omni.inputs import DiffusionParams, refuse_unused
from vllm_omni.model_executor.models.lance.config import (
    DEFAULTS,
    EDIT_TASKS,
    FRAMES_PER_LATENT,
    PIXELS_PER_LATENT,
    READING_TASKS,
    VIDEO_TASKS,
    LanceConfig,
    LanceOptions,
    Task,
)
from vllm_omni.model_executor.models.lance.media import (
    LATENT_MULTIPLE,
    PRESETS,
    VISION_MULTIPLE,
    Size,
    SizePreset,
    buckets,
    sampled_frames,
    smart_limits,
    smart_size,
)
from vllm_omni.model_executor.models.lance.network.pack import padded_capacity
from vllm_omni.model_executor.models.lance.sizes import generation_grid, reference_grid
from vllm_omni.model_executor.models.lance.tasks.prompt import (
    CAPTION_PROMPT,
    ConversationMessage,
    system_prompt_of,
)
from vllm_omni.model_executor.models.lance.tasks.sampling import (
    RENORM_TYPES,
    ClassifierFreeGuidance,
    TokenChoice,
)
from vllm_omni.model_executor.models.lance.tasks.sequence_layout import Grid
from vllm_omni.model_executor.step_cache import StepCache
from vllm_omni.outputs import RequestFailed

_MIN_SIDE, _MAX_SIDE = 28, 8192
_MAX_CLIP_FRAMES = 7200
_MAX_TURNS = 256
_TEMPLATE_TOKENS = 64
"""Upper bound on the number of tokens in the chat template."""
_TURN_TOKENS = 8
"""Upper bound on the number of template tokens around each additional message."""

Unit = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class MessageOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An earlier message of a conversation."""

    role: Literal["user", "assistant"]
    """Author of the message."""
    text: Annotated[str, msgspec.Meta(max_length=16384)]
    """Text of the message, at most 16,384 characters."""


class RequestOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request's options (`DiffusionParams.options`)."""

    task: Task | None = None
    """Task of the request. Default: derived from the prompt, tensors, `num_frames` and
    `modalities`."""
    modalities: list[Literal["text", "image", "video"]] | None = None
    """Kind of output to generate: `["text"]`, `["image"]` or `["video"]`. Default: derived from the
    request.
    """
    resolution: str | None = None
    """Name of a preset in `PRESETS`, which determines the size that references are resized to.
    Default: the task's preset.
    """
    origin_fps: Annotated[float, msgspec.Meta(gt=0, le=240)] | None = None
    """Frame rate of the input video in frames per second. Default: 12, so no frames are dropped."""
    system_prompt: Annotated[str, msgspec.Meta(max_length=16384)] | None = None
    """System prompt. Default: the task's system prompt."""
    cfg_text_scale: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    """Alias for `guidance_scale`: scale of the guidance against the context without the user's
    text.
    """
    cfg_img_scale: Annotated[float, msgspec.Meta(ge=0, le=100)] = 1.0
    """For edits: scale of the guidance against the context without the reference. 1 disables this
    guidance.
    """
    cfg_interval: tuple[Unit, Unit] = DEFAULTS.cfg_interval
    """Interval (low, high) of the timesteps t with guidance: low < t <= high."""
    cfg_renorm_type: str | None = DEFAULTS.cfg_renorm_type
    """Renormalisation of the guided velocity: `global`, `channel` or `none`."""
    cfg_renorm_min: Unit = DEFAULTS.cfg_renorm_min
    """Lower bound on the factor by which the renormalisation scales the velocity."""
    timestep_shift: Annotated[float, msgspec.Meta(gt=0, le=100)] = DEFAULTS.timestep_shift
    """Shift of the timesteps."""
    step_cache: StepCache | None = None
    """Threshold for skipping denoise steps (`step_cache.py`). Default: no step is skipped."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Maximum number of text tokens. Default: 256, or the server's limit if it is lower."""
    temperature: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.0
    """Temperature of token sampling. 0 selects the most likely token."""
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """Nucleus sampling: each token is sampled from the most likely tokens whose total probability
    reaches this value. 1 includes all tokens.
    """
    stop: Annotated[
        list[Annotated[str, msgspec.Meta(min_length=1, max_length=256)]],
        msgspec.Meta(max_length=16),
    ] = msgspec.field(default_factory=list)
    """At most 16 strings that end the generation and are not included in the result."""
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Number of text tokens per request, if several requests in a session generate one text.
    Default: one request generates the whole text.
    """
    turns: Annotated[list[MessageOptions], msgspec.Meta(max_length=_MAX_TURNS)] = msgspec.field(
        default_factory=list
    )
    """Earlier messages of the conversation, at most 256."""
    picture_turn: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Index in `turns` of the message that contains the image or video. Default: the prompt
    contains it.
    """


@dataclass(frozen=True)
class GenerationInputs:
    """A validated request that generates images or a video."""

    task: Task
    """Task of the request."""
    prompt: str
    """The user's text."""
    negative_prompt: str | None
    """User text in the unconditional context. None: no text."""
    system_prompt: str | None
    """System prompt. None: the task's system prompt."""
    seed: int
    """Seed of the noise."""
    num_images: int
    """Number of images to generate, or 1 for a video."""
    num_steps: int
    """Number of denoise steps."""
    shift: float
    """Shift of the timesteps."""
    guidance: ClassifierFreeGuidance
    """Settings of classifier-free guidance."""
    grid: Grid
    """Size of the result in latent cells, (T, h, w)."""
    fps: float
    """Frame rate of a video, in frames per second."""
    source: torch.Tensor | None
    """Reference or first frame, uint8 [T, H, W, 3]. None if the request contains no image or video.
    """
    preset: SizePreset
    """Preset that determines the sizes to which a reference is resized for the vision tower."""
    step_cache: float | None = None
    """Threshold for skipping denoise steps (`step_cache.py`). None: no step is skipped."""

    @property
    def size(self) -> Size:
        return self.grid[1] * PIXELS_PER_LATENT, self.grid[2] * PIXELS_PER_LATENT

    @property
    def num_frames(self) -> int:
        return 1 + FRAMES_PER_LATENT * (self.grid[0] - 1)


@dataclass(frozen=True)
class UnderstandingInputs:
    """A validated understanding request."""

    task: Task
    """Task of the request."""
    prompt: str
    """The user's text."""
    system_prompt: str | None
    """System prompt. None: the task's system prompt."""
    source: torch.Tensor | None
    """Image (T = 1) or video, uint8 [T, H, W, 3]. None for a request that contains only text."""
    preset: SizePreset | None
    """Preset that determines the sizes to which `source` is resized for the vision tower. None:
    resize as Qwen2-VL does.
    """
    choice: TokenChoice
    """Settings of token sampling."""
    seed: int
    """Seed of token sampling."""
    max_tokens: int
    """Maximum number of text tokens."""
    stop: tuple[str, ...]
    """Strings that end the generation."""
    messages: tuple[ConversationMessage, ...] = ()
    """Earlier messages of the conversation."""
    image_message: int | None = None
    """Index of the message that contains the image or video. None: the prompt contains it.
    """


def parse_request_options(params: DiffusionParams) -> RequestOptions:
    """Parse a request's options.

    Raises:
        RequestFailed: An option is invalid (`invalid_request`).
    """
    try:
        options = parse_options(RequestOptions, params.options, "options")
    except ValueError as error:
        raise _invalid(str(error)) from error
    if options.resolution is not None and options.resolution not in PRESETS:
        raise _invalid(
            f"options.resolution {options.resolution!r} is unknown; allowed: {', '.join(PRESETS)}"
        )
    if options.cfg_interval[0] >= options.cfg_interval[1]:
        raise _invalid(
            "options.cfg_interval must be [low, high] with low < high, got "
            f"{list(options.cfg_interval)}"
        )
    if (options.cfg_renorm_type or "none") not in (*RENORM_TYPES, "null"):
        raise _invalid(
            f"options.cfg_renorm_type {options.cfg_renorm_type!r} is unknown; allowed: "
            f"{', '.join(RENORM_TYPES)}"
        )
    return options


def possible_tasks(params: DiffusionParams, options: RequestOptions) -> tuple[Task, ...]:
    """Return the tasks that a request may have, based only on its parameters, not on its
    tensors.
    """
    if options.task is not None:
        return (options.task,)
    wanted = _wanted(params, options)
    if wanted == "text":
        return READING_TASKS
    return VIDEO_TASKS if wanted == "video" else ("t2i", "image_edit")


def find_task(
    params: DiffusionParams, options: RequestOptions, tensors: Mapping[str, torch.Tensor]
) -> Task:
    """Return a request's task.

    Raises:
        RequestFailed: The parameters and tensors contradict each other.
    """
    wanted, has_image, has_video = _wanted(params, options), "image" in tensors, "video" in tensors
    unknown = sorted(set(tensors) - {"image", "video"})
    if unknown:
        raise _invalid(
            f"unknown tensors {unknown[:3]}; this model accepts one `image` or one `video`"
        )
    if has_image and has_video:
        raise _invalid("send either `image` or `video`, not both")
    found: Task
    if wanted == "text":
        found = "x2t_video" if has_video else "x2t_image" if has_image else "t2t"
        if found == "t2t" and params.prompt is None:
            raise _invalid("understanding without a prompt needs an `image` or a `video`")
    elif wanted == "video":
        found = "video_edit" if has_video else "i2v" if has_image else "t2v"
    elif has_video:
        raise _invalid(
            'a `video` was sent: set options.modalities to ["text"] or ["video"], or options.task'
        )
    else:
        found = "image_edit" if has_image else "t2i"
    if options.task is not None and options.task != found:
        sent = "a video" if has_video else "an image" if has_image else "no image or video"
        raise _invalid(f"options.task is {options.task!r}, but {sent} was sent")
    return found


def _wanted(params: DiffusionParams, options: RequestOptions) -> str:
    if options.task is not None:
        return (
            "text"
            if options.task in READING_TASKS
            else "video"
            if options.task in VIDEO_TASKS
            else "image"
        )
    if options.modalities:
        if len(options.modalities) != 1:
            raise _invalid(
                f"options.modalities must name one of text, image, video, got {options.modalities}"
            )
        return options.modalities[0]
    return "video" if params.num_frames is not None else "image"


_GENERATION_FIELDS = (
    "prompt",
    "seed",
    "height",
    "width",
    "negative_prompt",
    "num_images",
    "num_inference_steps",
    "guidance_scale",
)


def read_generation(
    params: DiffusionParams,
    options: RequestOptions,
    task: Task,
    tensors: Mapping[str, torch.Tensor],
    config: LanceConfig,
    served: LanceOptions,
) -> GenerationInputs:
    """Validate a request that generates images or a video.

    Raises:
        RequestFailed: A value is invalid.
    """
    if task in VIDEO_TASKS and not config.makes_video:
        raise _invalid(f"this checkpoint generates images only; {task} requires Lance_3B_Video")
    if not params.prompt or not params.prompt.strip():
        raise _invalid("prompt must not be empty: describe the result or the change")
    source = _clip(tensors)
    preset = PRESETS[
        options.resolution or ("video_480p" if task == "video_edit" else "image_768res")
    ]
    if task in EDIT_TASKS:
        assert source is not None
        if task == "video_edit":
            source = source[sampled_frames(source.shape[0], options.origin_fps)]
        grid = reference_grid(source.shape, preset, config)
        if grid[0] > config.max_latent_frames:
            raise RequestFailed(
                "unsupported_size",
                f"a clip of {source.shape[0]} frames is longer than {config.max_frames}",
            )
    else:
        grid = generation_grid(params, task, config, served)
    refuse_unused(
        params, (*_GENERATION_FIELDS, *(("num_frames", "fps") if task in VIDEO_TASKS else ()))
    )
    if task in VIDEO_TASKS and params.num_images != 1:
        raise _invalid(f"num_images is for images, got {params.num_images} with {task}")
    if options.cfg_img_scale != 1.0 and task not in EDIT_TASKS:
        raise _invalid(f"options.cfg_img_scale applies to edits only; omit it with {task}")
    scale = params.guidance_scale
    if options.cfg_text_scale is not None:
        if scale is not None and scale != options.cfg_text_scale:
            raise _invalid(
                f"guidance_scale {scale} contradicts options.cfg_text_scale "
                f"{options.cfg_text_scale}"
            )
        scale = options.cfg_text_scale
    return GenerationInputs(
        task=task,
        prompt=params.prompt,
        negative_prompt=params.negative_prompt,
        system_prompt=options.system_prompt,
        seed=DEFAULTS.seed if params.seed is None else params.seed,
        num_images=params.num_images,
        num_steps=DEFAULTS.num_timesteps
        if params.num_inference_steps is None
        else params.num_inference_steps,
        shift=options.timestep_shift,
        guidance=ClassifierFreeGuidance(
            scale=DEFAULTS.cfg_text_scale if scale is None else scale,
            interval=options.cfg_interval,
            renorm="none"
            if options.cfg_renorm_type in (None, "", "null")
            else options.cfg_renorm_type,
            renorm_min=options.cfg_renorm_min,
            image_scale=options.cfg_img_scale,
        ),
        grid=grid,
        fps=DEFAULTS.fps if params.fps is None else params.fps,
        source=source,
        preset=preset,
        step_cache=options.step_cache,
    )


def read_question(
    params: DiffusionParams,
    options: RequestOptions,
    task: Task,
    tensors: Mapping[str, torch.Tensor],
    served: LanceOptions,
) -> UnderstandingInputs:
    """Validate an understanding request. If the request has no prompt, a default prompt asks for a
    description.

    Raises:
        RequestFailed: A value is invalid.
    """
    prompt = (
        CAPTION_PROMPT.format("video" if task == "x2t_video" else "image")
        if params.prompt is None
        else params.prompt
    )
    if not prompt.strip():
        raise _invalid("prompt must not be empty; omit it to get a description")
    refuse_unused(params, ("prompt", "seed"))
    if params.output != "rgb":
        raise _invalid("output must be omitted, because understanding requests generate text")
    if options.picture_turn is not None and (
        task == "t2t" or options.picture_turn >= len(options.turns)
    ):
        raise _invalid(
            f"options.picture_turn {options.picture_turn}: there are {len(options.turns)} turns"
            + (" and no image" if task == "t2t" else "")
        )
    source = _clip(tensors)
    preset: SizePreset | None = PRESETS[
        options.resolution or ("video_480p" if task == "x2t_video" else "image_768res")
    ]
    if _retains_frames(task, served):
        assert source is not None
        _check_retained_clip(source, options, served)
        preset = None
    elif task == "x2t_video":
        assert source is not None
        source = source[sampled_frames(source.shape[0], options.origin_fps)]
    return UnderstandingInputs(
        task=task,
        prompt=prompt,
        system_prompt=options.system_prompt,
        source=source,
        preset=preset,
        choice=TokenChoice(options.temperature, options.top_p),
        seed=DEFAULTS.seed if params.seed is None else params.seed,
        max_tokens=reply_tokens(options, served),
        stop=tuple(options.stop),
        messages=tuple(ConversationMessage(turn.role, turn.text) for turn in options.turns),
        image_message=options.picture_turn,
    )


def _retains_frames(task: Task, served: LanceOptions) -> bool:
    """Return whether an input clip is processed as in Qwen2-VL's video processor, which scales
    every frame without cropping.
    """
    return task == "x2t_video" and served.choices.understanding_video == "smart_resize"


def _check_retained_clip(
    clip_THWC: torch.Tensor, options: RequestOptions, served: LanceOptions
) -> None:
    if options.resolution is not None:
        raise _invalid(
            "options.resolution names buckets; this server reads clips with smart_resize: "
            "leave it out"
        )
    frames, height, width, _ = clip_THWC.shape
    if frames > served.max_num_frames:
        raise RequestFailed(
            "invalid_video",
            f"video has {frames} frames; this server reads every frame of a clip (smart_resize) "
            "and allows 1 to "
            f"{served.max_num_frames}",
        )
    try:
        smart_size((height, width))
    except ValueError as error:
        raise RequestFailed("invalid_video", f"video is {width}x{height}: {error}") from error


def reply_tokens(options: RequestOptions, served: LanceOptions) -> int:
    """Return the maximum number of text tokens for a request.

    Raises:
        RequestFailed: The requested number of tokens is not allowed.
    """
    wanted = (
        min(DEFAULTS.max_text_tokens, served.max_new_tokens)
        if options.max_tokens is None
        else options.max_tokens
    )
    if wanted > served.max_new_tokens:
        raise _invalid(
            f"options.max_tokens {wanted} is above this server's {served.max_new_tokens}"
        )
    return wanted


def _clip(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return a request's image or video as uint8 [T, H, W, 3], or None if it contains neither.

    Raises:
        RequestFailed: The tensors are invalid.
    """
    if "image" in tensors:
        image = tensors["image"]
        if image.dtype != torch.uint8 or image.dim() != 3 or image.shape[2] != 3:
            raise RequestFailed(
                "invalid_image",
                f"image must be uint8 of shape [H, W, 3], got {image.dtype} {list(image.shape)}",
            )
        _check_sides("invalid_image", "image", image.shape[0], image.shape[1])
        return image.unsqueeze(0)
    if "video" in tensors:
        video = tensors["video"]
        if video.dtype != torch.uint8 or video.dim() != 4 or video.shape[3] != 3:
            raise RequestFailed(
                "invalid_video",
                f"video must be uint8 of shape [T, H, W, 3], got {video.dtype} {list(video.shape)}",
            )
        if not 1 <= video.shape[0] <= _MAX_CLIP_FRAMES:
            raise RequestFailed(
                "invalid_video",
                f"video has {video.shape[0]} frames; allowed are 1 to {_MAX_CLIP_FRAMES}",
            )
        _check_sides("invalid_video", "video", video.shape[1], video.shape[2])
        return video
    return None


def _check_sides(code: str, what: str, height: int, width: int) -> None:
    if min(height, width) < _MIN_SIDE or max(height, width) > _MAX_SIDE:
        raise RequestFailed(
            code,
            f"{what} is {width}x{height}; each side must have {_MIN_SIDE} to {_MAX_SIDE} pixels",
        )


def largest_needs(
    params: DiffusionParams,
    options: RequestOptions,
    count_tokens: Callable[[str], int],
    config: LanceConfig,
    served: LanceOptions,
) -> tuple[int, int]:
    """Return upper bounds on the number of cache slots and the number of latent tokens that a
    request needs, without reading its tensors.

    Args:
        params: The request's parameters.
        options: The request's parsed options.
        count_tokens: Function that returns the number of tokens in a text.
        config: The model's architecture.
        served: The server's options.

    Raises:
        RequestFailed: A size is out of range.
    """
    user = count_tokens(params.prompt or CAPTION_PROMPT) + count_tokens(
        params.negative_prompt or ""
    )
    user += sum(count_tokens(turn.text) + _TURN_TOKENS for turn in options.turns)
    slots = latents = 0
    for task in possible_tasks(params, options):
        text = (
            user
            + _TEMPLATE_TOKENS
            + count_tokens(options.system_prompt or system_prompt_of(task, served))
        )
        video = task in ("video_edit", "x2t_video")
        preset = PRESETS[options.resolution or ("video_480p" if video else "image_768res")]
        frames = len(sampled_frames(_MAX_CLIP_FRAMES, DEFAULTS.fps)) if video else 1
        vision = 0
        if task in (*EDIT_TASKS, "x2t_image", "x2t_video"):
            largest_frame = max(h * w for h, w in buckets(preset.vit, LATENT_MULTIPLE))
            if _retains_frames(task, served):
                largest_frame, frames = smart_limits()[1], served.max_num_frames
            cells = largest_frame // VISION_MULTIPLE**2
            vision = cells * -(-frames // 2) + 2
        if task in READING_TASKS:
            slots = max(slots, text + vision + reply_tokens(options, served))
            continue
        if task in VIDEO_TASKS and not config.makes_video:
            continue
        if task in EDIT_TASKS:
            largest = max(h * w for h, w in buckets(preset.vae, LATENT_MULTIPLE, config.max_side))
            block = largest // PIXELS_PER_LATENT**2 * (1 + (frames - 1) // FRAMES_PER_LATENT)
            reference = block + 2
        else:
            block, reference = math.prod(generation_grid(params, task, config, served)), 0
        branch = padded_capacity(text + vision + reference) + block + 2
        branches = 3 if options.cfg_img_scale > 1.0 else 2
        slots = max(slots, branches * params.num_images * branch)
        latents = max(latents, params.num_images * block)
    return slots, latents


def _invalid(message: str) -> RequestFailed:
    return RequestFailed("invalid_request", message)
