# SPDX-License-Identifier: Apache-2.0
"""Everything a client may ask of Lance, checked: here and nowhere else.

Reads `DiffusionParams` and the named tensors of one request and returns `GenerationInputs` or
`UnderstandingInputs`, or raises `RequestFailed` with the field, its value and the allowed ones.
Changes nothing, allocates nothing on the device.
Held by tests/model_executor/models/lance/test_lance_request.py.
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
    Preset,
    Size,
    buckets,
    sampled_frames,
)
from vllm_omni.model_executor.models.lance.network.pack import padded_capacity
from vllm_omni.model_executor.models.lance.sizes import generation_grid, reference_grid
from vllm_omni.model_executor.models.lance.tasks.prompt import (
    CAPTION_PROMPT,
    SYSTEM_PROMPTS,
    Message,
)
from vllm_omni.model_executor.models.lance.tasks.sampling import RENORM_TYPES, Guidance, TokenChoice
from vllm_omni.model_executor.models.lance.tasks.sequence_layout import Grid
from vllm_omni.model_executor.step_cache import StepCache
from vllm_omni.outputs import RequestFailed

_MIN_SIDE, _MAX_SIDE = 28, 8192
_MAX_CLIP_FRAMES = 7200
_MAX_TURNS = 256
_TEMPLATE_TOKENS = 64
"""More than the chat template's own tokens."""
_TURN_TOKENS = 8
"""More than those of one more turn."""

Unit = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class MessageOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant"]
    text: Annotated[str, msgspec.Meta(max_length=16384)]


class RequestOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`DiffusionParams.options` of one request.

    task: None = by prompt, tensors, `num_frames` and `modalities`. modalities: of the result,
    `["text"]`, `["image"]` or `["video"]`. resolution: the preset that references are resized to.
    origin_fps: of the clip that is sent; None = it has 12 frames a second already. system_prompt:
    instead of the task's own.
    turns: of a conversation, before the prompt. picture_turn: which of them shows the picture; None
    = the prompt. Drawing: cfg_text_scale (the same as `guidance_scale`), cfg_img_scale (of edits;
    above 1 it guides away from the result without the picture or clip), cfg_interval,
    cfg_renorm_type, cfg_renorm_min, timestep_shift, step_cache (`step_cache.py`). Reading:
    max_tokens, temperature, top_p, stop; chunk_tokens = answer in pieces, one request each.
    """

    task: Task | None = None
    modalities: list[Literal["text", "image", "video"]] | None = None
    resolution: str | None = None
    origin_fps: Annotated[float, msgspec.Meta(gt=0, le=240)] | None = None
    system_prompt: Annotated[str, msgspec.Meta(max_length=16384)] | None = None
    cfg_text_scale: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    cfg_img_scale: Annotated[float, msgspec.Meta(ge=0, le=100)] = 1.0
    cfg_interval: tuple[Unit, Unit] = DEFAULTS.cfg_interval
    cfg_renorm_type: str | None = DEFAULTS.cfg_renorm_type
    cfg_renorm_min: Unit = DEFAULTS.cfg_renorm_min
    timestep_shift: Annotated[float, msgspec.Meta(gt=0, le=100)] = DEFAULTS.timestep_shift
    step_cache: StepCache | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    stop: Annotated[
        list[Annotated[str, msgspec.Meta(min_length=1, max_length=256)]],
        msgspec.Meta(max_length=16),
    ] = msgspec.field(default_factory=list)
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    turns: Annotated[list[MessageOptions], msgspec.Meta(max_length=_MAX_TURNS)] = msgspec.field(
        default_factory=list
    )
    picture_turn: Annotated[int, msgspec.Meta(ge=0)] | None = None


@dataclass(frozen=True)
class GenerationInputs:
    """A checked drawing. grid: of the result in latents. source: uint8 [T, H, W, 3], the
    reference's or first frame.

    reference_size: pixels the reference is encoded at. preset: for the vision tower.
    """

    task: Task
    prompt: str
    negative_prompt: str | None
    system_prompt: str | None
    seed: int
    num_images: int
    num_steps: int
    shift: float
    guidance: Guidance
    grid: Grid
    fps: float
    source: torch.Tensor | None
    preset: Preset
    step_cache: float | None = None

    @property
    def size(self) -> Size:
        return self.grid[1] * PIXELS_PER_LATENT, self.grid[2] * PIXELS_PER_LATENT

    @property
    def num_frames(self) -> int:
        return 1 + FRAMES_PER_LATENT * (self.grid[0] - 1)


@dataclass(frozen=True)
class UnderstandingInputs:
    """A checked question. source: uint8 [T, H, W, 3]; an image has one frame.

    source None: there is nothing to look at. preset: for the vision tower. messages,
    image_message: as `build_prompt` takes them.
    """

    task: Task
    prompt: str
    system_prompt: str | None
    source: torch.Tensor | None
    preset: Preset
    choice: TokenChoice
    seed: int
    max_tokens: int
    stop: tuple[str, ...]
    messages: tuple[Message, ...] = ()
    image_message: int | None = None


def parse_request_options(params: DiffusionParams) -> RequestOptions:
    """Parse `options`. Raises `RequestFailed("invalid_request", ...)`."""
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
    """Return the tasks that a request may be, before its tensors are seen."""
    if options.task is not None:
        return (options.task,)
    wanted = _wanted(params, options)
    if wanted == "text":
        return READING_TASKS
    return VIDEO_TASKS if wanted == "video" else ("t2i", "image_edit")


def find_task(
    params: DiffusionParams, options: RequestOptions, tensors: Mapping[str, torch.Tensor]
) -> Task:
    """Return the task a request asks for.

    Raises `RequestFailed` when its parts contradict each other.
    """
    wanted, has_image, has_video = _wanted(params, options), "image" in tensors, "video" in tensors
    unknown = sorted(set(tensors) - {"image", "video"})
    if unknown:
        raise _invalid(
            f"unknown tensors {unknown[:3]}; this model takes one `image` or one `video`"
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


_DRAWING_FIELDS = (
    *(
        "prompt",
        "seed",
        "height",
        "width",
        "negative_prompt",
        "num_images",
        "num_inference_steps",
        "guidance_scale",
    ),
)


def read_generation(
    params: DiffusionParams,
    options: RequestOptions,
    task: Task,
    tensors: Mapping[str, torch.Tensor],
    config: LanceConfig,
    served: LanceOptions,
) -> GenerationInputs:
    """Check a request that draws. Raises `RequestFailed`."""
    if task in VIDEO_TASKS and not config.makes_video:
        raise _invalid(f"this checkpoint draws images only; {task} needs Lance_3B_Video")
    if not params.prompt or not params.prompt.strip():
        raise _invalid("prompt must not be empty: say what to draw or what to change")
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
        params, (*_DRAWING_FIELDS, *(("num_frames", "fps") if task in VIDEO_TASKS else ()))
    )
    if task in VIDEO_TASKS and params.num_images != 1:
        raise _invalid(f"num_images is for images, got {params.num_images} with {task}")
    if options.cfg_img_scale != 1.0 and task not in EDIT_TASKS:
        raise _invalid(
            f"options.cfg_img_scale is for edits of a picture or clip; leave it out with {task}"
        )
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
        guidance=Guidance(
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
    """Check a request that reads.

    Raises `RequestFailed`. Without a prompt the model is asked for a description.
    """
    prompt = (
        CAPTION_PROMPT.format("video" if task == "x2t_video" else "image")
        if params.prompt is None
        else params.prompt
    )
    if not prompt.strip():
        raise _invalid("prompt must not be empty: ask something, or leave it out for a description")
    refuse_unused(params, ("prompt", "seed"))
    if params.output != "rgb":
        raise _invalid("understanding makes text: leave output out")
    if options.picture_turn is not None and (
        task == "t2t" or options.picture_turn >= len(options.turns)
    ):
        raise _invalid(
            f"options.picture_turn {options.picture_turn}: there are {len(options.turns)} turns"
            + (" and no picture" if task == "t2t" else "")
        )
    source = _clip(tensors)
    preset = PRESETS[
        options.resolution or ("video_480p" if task == "x2t_video" else "image_768res")
    ]
    if task == "x2t_video":
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
        messages=tuple(Message(turn.role, turn.text) for turn in options.turns),
        image_message=options.picture_turn,
    )


def reply_tokens(options: RequestOptions, served: LanceOptions) -> int:
    """Return how long an answer may become. Raises `RequestFailed`."""
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
    """Return the picture or clip as uint8 [T, H, W, 3]. Raises `RequestFailed`."""
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
    """Return (cache slots, latent tokens) that a request may need at most, before its tensors are
    seen.

    count_tokens: of a text. Raises `RequestFailed` for sizes out of range.
    """
    user = count_tokens(params.prompt or CAPTION_PROMPT) + count_tokens(
        params.negative_prompt or ""
    )
    user += sum(count_tokens(turn.text) + _TURN_TOKENS for turn in options.turns)
    slots = latents = 0
    for task in possible_tasks(params, options):
        text = user + _TEMPLATE_TOKENS + count_tokens(options.system_prompt or SYSTEM_PROMPTS[task])
        video = task in ("video_edit", "x2t_video")
        preset = PRESETS[options.resolution or ("video_480p" if video else "image_768res")]
        frames = len(sampled_frames(_MAX_CLIP_FRAMES, DEFAULTS.fps)) if video else 1
        vision = 0
        if task in (*EDIT_TASKS, "x2t_image", "x2t_video"):
            largest_frame = max(h * w for h, w in buckets(preset.vit, LATENT_MULTIPLE))
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
