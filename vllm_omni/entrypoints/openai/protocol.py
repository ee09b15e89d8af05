# SPDX-License-Identifier: Apache-2.0
"""Pydantic models for the OpenAI routes' requests and replies, independent of the served model.

Field names and the reply structure follow the types in openai-python 3.x. Additional fields are
marked as extensions. `engine_requests.py` checks requests against the served model's capabilities.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from vllm_omni.entrypoints.errors import ApiError, invalid
from vllm_omni.entrypoints.timed_prompts import JSON_SCHEMA, MAX_PROMPTS, TimedPrompt
from vllm_omni.seeds import MAX_SEED, RANDOM_SEED

MAX_PROMPT_CHARS = 16384

Prompt = Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARS)]
Size = Annotated[str, Field(pattern=r"^(auto|[1-9][0-9]{0,3}x[1-9][0-9]{0,3})$")]
Format = Literal["png", "jpeg", "webp"]


def _no_boolean(value: Any) -> Any:
    """Reject booleans, which Python would otherwise accept as the numbers 0 and 1."""
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "Input should be a valid number")
    return value


def _number(value: Any, info: ValidationInfo) -> Any:
    """Reject booleans. Also reject strings, except in forms, where every field is a string."""
    if isinstance(value, str) and not (info.context or {}).get("is_form", False):
        raise PydanticCustomError("number_type", "Input should be a valid number")
    return _no_boolean(value)


def _boolean(value: Any, info: ValidationInfo) -> Any:
    """Reject numbers. Also reject strings, except in forms, where every field is a string."""
    is_text = isinstance(value, str) and not (info.context or {}).get("is_form", False)
    if is_text or (isinstance(value, int | float) and not isinstance(value, bool)):
        raise PydanticCustomError("bool_type", "Input should be a valid boolean")
    return value


Boolean = Annotated[bool, BeforeValidator(_boolean)]
Integer = Annotated[int, BeforeValidator(_number)]
Number = Annotated[float, BeforeValidator(_number)]
NumberOrText = Annotated[float, BeforeValidator(_no_boolean)]
_TimedPrompt = Annotated[
    TimedPrompt, PlainValidator(TimedPrompt.read_json), WithJsonSchema(JSON_SCHEMA)
]
M = TypeVar("M", bound=BaseModel)


class LoraChoice(BaseModel):
    """A LoRA adapter, selected by its name on the server, and its scale.

    vLLM-Omni's clients use the alternative field names and send an `int_id`, which is ignored.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, populate_by_name=True)

    name: str = Field(
        min_length=1,
        max_length=256,
        validation_alias=AliasChoices("name", "lora_name", "adapter", "adapter_name"),
    )
    """Name of the adapter on the server."""
    scale: Number = Field(
        1.0, ge=-100, le=100, validation_alias=AliasChoices("scale", "lora_scale")
    )
    """Strength of the adapter, -100 to 100. Default: 1."""
    int_id: Any = Field(None, validation_alias=AliasChoices("int_id", "lora_int_id"))
    """This field is accepted for compatibility and has no effect."""


def _as_list(value: Any) -> Any:
    """Convert a single adapter object to a list."""
    return [value] if isinstance(value, dict) else value


_LoraChoice = Annotated[
    LoraChoice,
    WithJsonSchema(  # inlined, without a reference to another schema
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 256},
                "scale": {"type": "number", "minimum": -100, "maximum": 100, "default": 1.0},
            },
            "required": ["name"],
            "additionalProperties": False,
        }
    ),
]


class _Request(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    prompt: Prompt
    """Prompt, 1 to 16384 characters."""
    model: str | None = Field(None, max_length=1024)
    """Name of the served model or of a LoRA adapter. Default: the served model."""
    size: Size | None = None
    """Size of the result: `WIDTHxHEIGHT` in pixels, or `auto`. Default: the model's default size.
    """
    width: Integer | None = Field(None, ge=1, le=9999)
    """Extension. Width of the result in pixels. Requires `height`. The two fields together are an
    alternative to `size`.
    """
    height: Integer | None = Field(None, ge=1, le=9999)
    """Extension. Height of the result in pixels. Requires `width`. The two fields together are an
    alternative to `size`.
    """
    user: str | None = Field(None, max_length=1024)
    """This field is accepted for compatibility and has no effect."""
    safety_identifier: str | None = Field(None, max_length=1024)
    """This field is accepted for compatibility and has no effect."""
    # extensions
    # `Integer` with these limits would let pydantic round the upper limit in its error message.
    seed: Annotated[int, Field(ge=RANDOM_SEED, le=MAX_SEED), BeforeValidator(_number)] | None = None
    """Extension. Noise seed. Default: a random seed, which -1 also selects."""
    negative_prompt: str | None = Field(None, max_length=MAX_PROMPT_CHARS)
    """Extension. Text that classifier-free guidance steers away from."""
    num_inference_steps: Integer | None = Field(None, ge=1, le=1000)
    """Extension. Number of denoise steps, 1 to 1000. Default: the model's default."""
    guidance_scale: Number | None = Field(None, ge=0, le=100)
    """Extension. Classifier-free guidance scale, 0 to 100. Default: the model's default."""
    true_cfg_scale: Number | None = Field(None, ge=0, le=100)
    """Extension. Second guidance scale, for models that have two. For all other models, it is an
    alias for `guidance_scale`.
    """
    vae_use_slicing: Boolean | None = None
    """This field is accepted for compatibility and has no effect."""
    vae_use_tiling: Boolean | None = None
    """This field is accepted for compatibility and has no effect."""
    lora: Annotated[list[_LoraChoice], BeforeValidator(_as_list)] | None = Field(
        None, max_length=16
    )
    """Extension. LoRA adapters, at most 16: `[{name, scale}]`."""
    extra_params: dict[str, Any] | None = None
    """Extension. Options for the served model, which checks their names and values."""

    @property
    def wanted_size(self) -> str | None:
        """Requested size as `WIDTHxHEIGHT`, "auto" or None, taken from `size` or from `width` and
        `height`.

        Raises:
            ApiError: Status 400 if the fields contradict each other.
        """
        if self.width is None and self.height is None:
            return self.size
        if self.width is None or self.height is None:
            missing = "width" if self.width is None else "height"
            raise invalid(
                f"width and height go together, or send size: {missing} is missing", missing
            )
        size = f"{self.width}x{self.height}"
        if self.size not in (None, "auto", size):
            raise invalid(
                f"size {self.size} and width x height {size} differ: send one of the two", "size"
            )
        return size


class ImageGenerationRequest(_Request):
    n: Integer | None = Field(None, ge=1, le=10)
    """Number of images, 1 to 10. Default: 1."""
    response_format: Literal["b64_json", "url"] | None = None
    """Whether to return image data or links to files. Default: `b64_json`."""
    output_format: Format | None = None
    """File format of the images. Default: png."""
    output_compression: Integer | None = Field(None, ge=0, le=100)
    """Quality of jpeg and webp files, 0 to 100. Default: derived from `quality`."""
    quality: Literal["auto", "standard", "hd", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    """Quality of jpeg and webp files if `output_compression` is absent."""
    background: Literal["auto", "opaque", "transparent"] | None = None
    """Background of the images. The value `transparent` is refused."""
    moderation: Literal["low", "auto"] | None = None
    """This field is accepted for compatibility and has no effect."""
    style: Literal["vivid", "natural"] | None = None
    """This field is accepted for compatibility and has no effect."""
    stream: Boolean | None = None
    """Whether to send server-sent events, one for each finished image. Default: False."""
    partial_images: Integer | None = Field(None, ge=0, le=3)
    """This field is accepted, but the server sends only finished images."""


class ImageEditRequest(ImageGenerationRequest):
    """An image edit. The client sends images as multipart files (`image` or `image[]`, and `mask`)
    or as `images` in a JSON body.
    """

    input_fidelity: Literal["high", "low"] | None = None
    """This field is accepted for compatibility and has no effect."""


class VideoRequest(_Request):
    prompt: Prompt | None = None  # type: ignore[assignment]
    """Prompt. Required if the model takes prompts."""
    seconds: Annotated[NumberOrText, Field(gt=0, le=3600)] | None = None
    """Length of the video in seconds, as a string or a number. The server uses the closest length
    that the model supports.
    """
    # extensions
    n: Integer | None = Field(None, ge=1, le=1)
    """Number of videos. The only supported value is 1."""
    num_frames: Integer | None = Field(None, ge=1, le=10_000)
    """Extension. Length of the video in frames, as an alternative to `seconds`."""
    fps: Number | None = Field(None, gt=0, le=240)
    """Extension. Frame rate of the video in frames per second. Default: the model's default."""
    camera_actions: list[list[Annotated[str, Field(max_length=16)]]] | None = Field(
        None, max_length=4096
    )
    """Extension, for world models only. Keys (w a s d i j k l) held in each latent frame. No keys
    are held after the end of the list.
    """
    prompts: list[_TimedPrompt] | None = Field(None, max_length=MAX_PROMPTS)
    """Extension, for world models only. Later prompts, each with the `seconds` or `chunk` at which
    it takes effect.
    """
    actions: list[Any] | None = Field(None, max_length=4096)
    """Extension, for world models only. Controls for each latent frame: a list of held buttons, or
    a map of buttons, axes and scroll. No controls are active after the end of the list. This field
    is an alternative to `camera_actions`.
    """


# -- replies ---------------------------------------------------------------------------------------


class Error(BaseModel):
    message: str
    """Human-readable explanation."""
    type: str
    """Error type, as defined by OpenAI."""
    param: str | None = None
    """Field that caused the error."""
    code: str | None = None
    """Stable identifier of the error."""


class ErrorReply(BaseModel):
    error: Error
    """Error that caused the request to fail."""


class ImageData(BaseModel):
    b64_json: str | None = None
    """Image file, encoded as base64."""
    url: str | None = None
    """Link to the image file."""


class ImagesReply(BaseModel):
    """Response body of the image routes. The `seed` field is an extension; image i of the call has
    the seed `seed + i`.
    """

    created: int
    """Unix time of the reply in seconds."""
    data: list[ImageData]
    """Generated images, in order."""
    background: Literal["opaque"] = "opaque"
    """Background of the images."""
    output_format: Format
    """File format of the images."""
    quality: str | None = None
    """Quality that the client requested."""
    size: str
    """Size of the images: `WIDTHxHEIGHT` in pixels."""
    seed: int
    """Seed of the first image."""


class JobError(BaseModel):
    code: str
    """Stable identifier of the error."""
    message: str
    """Human-readable explanation."""


class Video(BaseModel):
    """A video job.

    The fields `fps`, `num_frames`, `seed`, `inference_time_s` and `world_poses` are extensions.
    """

    id: str
    """Job id."""
    object: Literal["video"] = "video"
    """Type of the object."""
    model: str
    """Name of the model."""
    prompt: str
    """Prompt of the video."""
    status: Literal["queued", "in_progress", "completed", "failed"]
    """State of the job."""
    progress: int = Field(ge=0, le=100)
    """Progress in percent."""
    seconds: str
    """Length of the video in seconds."""
    size: str
    """Size of the video: `WIDTHxHEIGHT` in pixels."""
    created_at: int
    """Unix time in seconds at which the job was created."""
    completed_at: int | None = None
    """Unix time in seconds at which the job completed or failed. None: the job has not ended."""
    expires_at: int | None = None
    """Unix time in seconds at which the job and its files are removed. None: the job has not ended.
    """
    remixed_from_video_id: str | None = None
    """This field is always None."""
    error: JobError | None = None
    """Reason why the job failed. None: the job has not failed."""
    fps: float
    """Frame rate of the video in frames per second."""
    num_frames: int
    """Number of pixel frames in the video."""
    seed: int
    """Noise seed."""
    inference_time_s: float | None = None
    """Time in seconds that generation took. None: generation is not complete."""
    world_poses: list[list[float]] | None = None
    """World pose of each latent frame: x_m, z_m, heading_degrees, pitch_degrees. None: the poses
    are unknown, or the video is not complete.
    """


class VideoList(BaseModel):
    object: Literal["list"] = "list"
    """Type of the object."""
    data: list[Video]
    """Video jobs on this page."""
    first_id: str | None
    """Id of the first job on this page."""
    last_id: str | None
    """Id of the last job on this page."""
    has_more: bool
    """Whether another page follows."""


class VideoDeleted(BaseModel):
    id: str
    """Id of the deleted job."""
    object: Literal["video.deleted"] = "video.deleted"
    """Type of the object."""
    deleted: Literal[True] = True
    """This field is always True."""


# -- reading ---------------------------------------------------------------------------------------


def read_request(cls: type[M], fields: Mapping[str, Any], is_form: bool = False) -> M:
    """Validate a request body's fields.

    Args:
        cls: Pydantic model of the request.
        fields: The body's fields.
        is_form: Whether numbers may be given as strings.

    Raises:
        ApiError: Status 400. The message names the first invalid field, its value and the allowed
            values.
    """
    try:
        return cls.model_validate(dict(fields), context={"is_form": is_form})
    except ValidationError as error:
        raise _as_api_error(cls, error) from None


def _as_api_error(cls: type[BaseModel], error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"])[:200] or None
    if first["type"] == "extra_forbidden":
        return invalid(
            f"Unknown parameter: {param!r}; {_remedy(cls, first['loc'])}",
            param,
            "unknown_parameter",
        )
    if first["type"] == "missing":
        return invalid(
            f"Missing required parameter: {param!r}", param, "missing_required_parameter"
        )
    return invalid(
        f"Invalid value for {param!r}: {first['msg']}; got {_shown(first['input'])}", param
    )


_OTHER_NAMES: Final = {
    "steps": "num_inference_steps",
    "num_steps": "num_inference_steps",
    "cfg": "guidance_scale",
    "cfg_scale": "guidance_scale",
    "guidance": "guidance_scale",
    "num_images": "n",
    "num_images_per_prompt": "n",
    "num_outputs_per_prompt": "n",
    "duration": "seconds",
    "frames": "num_frames",
    "video_length": "num_frames",
    "frame_rate": "fps",
    "image": "input_reference",
    "image_url": "input_reference",
    "image_reference": "input_reference",
    "first_frame": "input_reference",
    "video_params": "width, height, num_frames and fps",
    "loras": "lora",
    "extra_args": "extra_params",
}
"""Field names that other servers use, and this server's equivalent fields."""


def _remedy(cls: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """Return a suggestion for an unknown field: either the equivalent field or the list of allowed
    fields.
    """
    name = str(location[-1])
    if location[0] == "lora":
        if "path" in name:
            return (
                "requests contain names of adapters, not paths: POST /v1/load_lora_adapter, then "
                "send its name"
            )
        return "allowed: name, scale"
    other = _OTHER_NAMES.get(name, "")
    if other and (other not in _Request.model_fields or other in cls.model_fields):
        return f"use {other} instead"
    return (
        f"allowed: {', '.join(cls.model_fields)}; options of the model itself go into extra_params"
    )


def _shown(value: Any) -> str:
    """Return an invalid value in a form suitable for an error message. The value is shortened, and
    the contents of containers are omitted.
    """
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:60] + "...")
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        return repr(value) if abs(value) < 10**20 else "a very large number"
    return f"a value of type {type(value).__name__}"
