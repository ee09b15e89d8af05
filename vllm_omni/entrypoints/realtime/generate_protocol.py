# SPDX-License-Identifier: Apache-2.0
"""The typed messages of `/v1/realtime_video/generate`, wire-compatible with SGLang 0.5.23.

Reads client messages (msgpack maps, already decoded) and writes errors. Integers of the server stay within 32 bits
and its strings below 64 KiB, because the WebUI's own decoder reads nothing larger. Held by
tests/entrypoints/realtime/{test_generate_door,test_fuzz_doors}.py.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec

from vllm_omni.actions import CAMERA_SPACE, ActionSpace
from vllm_omni.entrypoints.realtime.action_messages import camera_buttons, camera_frames, read_actions_message
from vllm_omni.entrypoints.realtime.controls import (
    MAX_SCRIPT_ENTRIES,
    Adapters,
    Prompt,
    Script,
    States,
    Transition,
    Update,
)
from vllm_omni.entrypoints.realtime.errors import DoorError
from vllm_omni.entrypoints.realtime.limits import DoorLimits
from vllm_omni.entrypoints.realtime.protocol import check_prompt, with_whole_numbers
from vllm_omni.entrypoints.timed_prompts import MAX_PROMPTS, TimedPrompt
from vllm_omni.inputs import Loras
from vllm_omni.seeds import AskedSeed, check_seed

EXTENSIONS: Final = ("receipts", "credit", "control", "ping", "actions")
"""Extensions a client may enable with `init.extensions`; others never see another message type."""

INVALID_INIT: Final = "invalid generate request"
INVALID_EVENT: Final = "invalid event"
BUSY: Final = "another realtime session is already active"

_MAX_TRANSITIONS: Final = 512
_U32: Final = (1 << 32) - 1
_SIZE: Final = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})", re.ASCII)

OutputFormat = Literal["raw", "webp", "jpeg", "delta_gzip", "delta-gzip"]
Number = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
EventId = Annotated[int, msgspec.Meta(ge=0, le=_U32)]


class Init(msgspec.Struct, frozen=True, kw_only=True):
    """The first message. Unknown keys are ignored; so are settings that a deployment fixes (steps, causal window).

    size: `"832x480"`; None = the deployment's. first_frame: PNG, JPEG, WebP or GIF bytes, or a `data:` URL.
    prompts: extension; prompts that follow `prompt`, each from its second or chunk on; a prompt event comes in between.
    num_frames: accepted and unused, the model's first chunk has its own length. output_compression: quality of webp and
    jpeg. realtime_preview_max_width: frames are scaled down to this width before they are encoded. lora: LoRA adapters,
    `[{"name", "scale"}]`.
    """

    type: Literal["init"]
    prompt: str
    prompts: Annotated[list[TimedPrompt], msgspec.Meta(max_length=MAX_PROMPTS)] = []
    model: str | None = None
    first_frame: Any = None
    size: str | None = None
    fps: Annotated[int, msgspec.Meta(ge=1, le=240)] | None = None
    num_frames: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] | None = None
    max_chunks: Annotated[int, msgspec.Meta(ge=1, le=_U32)] | None = None
    seed: AskedSeed = 42
    num_inference_steps: Annotated[int, msgspec.Meta(ge=1, le=1000)] | None = None
    guidance_scale: Number | None = None
    negative_prompt: str | None = None
    enhance_prompt: bool = False
    condition_inputs: dict[str, Any] | None = None
    realtime_output_format: OutputFormat | None = None
    output_compression: Annotated[int, msgspec.Meta(ge=1, le=100)] | None = None
    realtime_preview_max_width: Annotated[int, msgspec.Meta(ge=0, le=8192)] | None = None
    realtime_output_pacing: bool = False
    enable_frame_interpolation: bool = False
    enable_upscaling: bool = False
    lora: Loras | None = None
    extensions: Annotated[list[str], msgspec.Meta(max_length=32)] | None = None

    def __post_init__(self) -> None:
        check_seed(self.seed)

    @property
    def granted(self) -> tuple[str, ...]:
        """The extensions that were asked for and exist here."""
        return tuple(name for name in EXTENSIONS if name in (self.extensions or ()))

    def height_width(self) -> tuple[int, int] | None:
        """Raises `DoorError` if `size` is not of the form WIDTHxHEIGHT."""
        if self.size is None:
            return None
        found = _SIZE.fullmatch(self.size)
        if found is None:
            raise DoorError("invalid_request", "size must look like 832x480", param="size")
        return int(found[2]), int(found[1])

    def script(self, space: ActionSpace = CAMERA_SPACE) -> Script | States | None:
        """The actions that steer the first chunks, if the client sent some. Raises `DoorError`."""
        inputs = self.condition_inputs or {}
        if "actions" in self.granted and inputs.get("actions") is not None:
            return read_actions_message(inputs["actions"], space)
        keys = inputs.get("camera_actions")
        return None if keys is None else _script(keys, space)


class Event(msgspec.Struct, frozen=True):
    """A control while the stream runs; `updates` belong together."""

    updates: tuple[Update, ...]
    event_id: int | None


class Control(msgspec.Struct, frozen=True, kw_only=True):
    """Extension `control`: act on the session itself. id comes back in `control_result`."""

    type: Literal["control"]
    op: Literal["pause", "resume", "reset", "stop"]
    id: EventId | Annotated[str, msgspec.Meta(max_length=128)] | None = None


class Credit(msgspec.Struct, frozen=True, kw_only=True):
    """Extension `credit`: the client can take so many chunks more."""

    type: Literal["credit"]
    chunks: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class Ping(msgspec.Struct, frozen=True, kw_only=True):
    """Extension `ping`: answered with `pong`, which carries `t` back."""

    type: Literal["ping"]
    t: float | None = None


Extra = Control | Credit | Ping
_EXTRAS: Final[dict[str, tuple[str, type[Control] | type[Credit] | type[Ping]]]] = {
    "control": ("control", Control),
    "credit": ("credit", Credit),
    "ping": ("ping", Ping),
}


def named_extensions(value: Any) -> tuple[str, ...]:
    """The extensions that a message names, well-formed or not: who names some understands details of a refusal."""
    names = value.get("extensions") if isinstance(value, dict) else None
    return tuple(name for name in EXTENSIONS if name in names) if isinstance(names, list) else ()


def parse_init(value: Any, limits: DoorLimits, space: ActionSpace = CAMERA_SPACE) -> Init:
    """Raises `DoorError`; its text is for the log and for clients with extensions."""
    init = _convert(value, Init)
    if init.enhance_prompt:
        raise DoorError("invalid_request", "enhance_prompt is not offered", param="enhance_prompt")
    check_prompt(init.prompt, limits, empty_ok=True)
    for timed in init.prompts:
        check_prompt(timed.prompt, limits, empty_ok=False)
    image = init.first_frame
    if isinstance(image, str) and not image.startswith("data:image/"):
        raise DoorError("invalid_image", "first_frame must be the image's bytes or a data: URL", param="first_frame")
    if not isinstance(image, bytes | str | None):
        raise DoorError("invalid_image", "first_frame must be the image's bytes or a data: URL", param="first_frame")
    init.height_width()
    init.script(space)
    return init


@dataclass(frozen=True)
class EventReader:
    """Reads events of one client. space: the model's controls. granted: the client's extensions."""

    limits: DoorLimits
    space: ActionSpace = CAMERA_SPACE
    granted: tuple[str, ...] = ()

    def read(self, value: Any) -> Event:
        """Raises `DoorError`: the whole event is refused if any part of it is wrong."""
        event_id = _event_id(value)
        kind, payload = value.get("kind"), value.get("payload")
        if kind == "composite_input":
            return Event(self._composite(payload), event_id)
        return Event((self._update(kind, payload),), event_id)

    def _composite(self, payload: Any) -> tuple[Update, ...]:
        kinds = payload.get("input_types") if isinstance(payload, dict) else None
        if not isinstance(kinds, list) or not kinds:
            raise DoorError("invalid_request", "composite_input needs input_types, a list of kinds", param="payload")
        if len(kinds) > 8 or any(not isinstance(kind, str) or kind not in payload for kind in kinds):
            raise DoorError(
                "invalid_request", "composite_input must hold one entry for each of its kinds", param="payload"
            )
        return tuple(self._update(kind, payload[kind]) for kind in kinds)

    def _update(self, kind: Any, payload: Any) -> Update:
        if kind == "prompt":
            if not isinstance(payload, str):
                raise DoorError("invalid_request", "a prompt must be text", param="payload")
            check_prompt(payload, self.limits, empty_ok=False)
            return Prompt(payload)
        if kind == "camera_actions":
            if isinstance(payload, dict) and payload.get("mode") == "state":
                return _states(payload.get("transitions"), self.space)
            return _script(payload, self.space)
        if kind == "actions" and "actions" in self.granted:
            return read_actions_message(payload, self.space)
        if kind == "lora":
            try:
                return Adapters(tuple(msgspec.convert(payload, Loras)))
            except msgspec.ValidationError as error:
                raise DoorError("invalid_request", f"lora: {error}", param="payload") from None
        raise DoorError("invalid_request", "kind must be camera_actions, prompt, lora or composite_input", param="kind")


def _event_id(value: Any) -> int | None:
    """The id of a message that is an event. Raises `DoorError`."""
    if not isinstance(value, dict) or value.get("type") != "event":
        raise DoorError("invalid_request", "a message must be a map with type 'event'")
    event_id = value.get("event_id")
    if type(event_id) is float and event_id.is_integer():  # as JavaScript packs large ones
        event_id = int(event_id)
    if event_id is not None and (type(event_id) is not int or not 0 <= event_id <= _U32):
        raise DoorError("invalid_request", f"event_id must be a whole number from 0 to {_U32}", param="event_id")
    return event_id


def parse_extra(value: Any, granted: tuple[str, ...]) -> Extra | None:
    """Return an extension's message; None if it is not one, or of an extension that was not granted."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _EXTRAS or _EXTRAS[kind][0] not in granted:
        return None
    return _convert(value, _EXTRAS[kind][1])


def error_reply(error: DoorError, content: str, granted: tuple[str, ...] = ()) -> dict[str, Any]:
    """An `error` message; details only for clients that know extensions."""
    reply: dict[str, Any] = {"type": "error", "content": content}
    if granted:
        reply |= {"code": error.code, "message": error.message, "retryable": error.retryable, **error.details}
    return reply


def _convert(value: Any, kind: type[Any]) -> Any:
    if not isinstance(value, dict):
        raise DoorError("invalid_request", "a message must be a map")
    try:
        return msgspec.convert(with_whole_numbers(value), kind)
    except msgspec.ValidationError as error:
        raise DoorError("invalid_request", str(error)) from None


def _script(value: Any, space: ActionSpace) -> Script:
    if not isinstance(value, list) or len(value) > MAX_SCRIPT_ENTRIES:
        raise DoorError(
            "invalid_request",
            f"camera_actions must be a list of at most {MAX_SCRIPT_ENTRIES} lists of keys",
            param="camera_actions",
        )
    return camera_frames(value, space)


def _states(transitions: Any, space: ActionSpace) -> States:
    if not isinstance(transitions, list) or len(transitions) > _MAX_TRANSITIONS:
        raise DoorError(
            "invalid_request", f"transitions must be a list of at most {_MAX_TRANSITIONS}", param="transitions"
        )
    held = []
    for transition in transitions:
        if not isinstance(transition, dict) or not isinstance(transition.get("client_ts_ms", 0), int | float | None):
            raise DoorError("invalid_request", "a transition must be a map with actions", param="transitions")
        held.append(Transition(camera_buttons(transition.get("actions"), space)))
    return States(tuple(held))
