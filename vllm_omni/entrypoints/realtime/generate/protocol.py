# SPDX-License-Identifier: Apache-2.0
"""Typed messages of `/v1/realtime_video/generate`, which are wire-compatible with SGLang 0.5.23.

This module parses client messages (decoded msgpack maps) and builds error messages. In messages
from the server, integers fit in 32 bits and strings are shorter than 64 KiB, because the web UI's
decoder does not support larger values.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import msgspec

from vllm_omni.actions import CAMERA_SPACE, ActionSpace, NamedSources
from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.controls.action_messages import (
    camera_buttons,
    camera_frames,
    read_actions_message,
)
from vllm_omni.entrypoints.realtime.controls.control_track import (
    MAX_SCRIPT_ENTRIES,
    AdapterChange,
    ControlScript,
    ControlStates,
    ControlTransition,
    PromptChange,
    Update,
)
from vllm_omni.entrypoints.realtime.encoding.session_encoders import VideoCodec
from vllm_omni.entrypoints.realtime.world_camera.protocol import check_prompt, with_integers
from vllm_omni.entrypoints.timed_prompts import MAX_PROMPTS, TimedPrompt
from vllm_omni.inputs import Loras, SessionId
from vllm_omni.seeds import RequestedSeed, check_seed
from vllm_omni.worlds.start_pose import StartPose

EXTENSIONS: Final = (
    "receipts",
    "credit",
    "control",
    "ping",
    "actions",
    "world_poses",
    "key_frame",
    "moves",
)
"""Extensions that a client may enable with `init.extensions`. A client that enables no extension
receives only the message types of SGLang's protocol.
"""

INVALID_INIT: Final = "invalid generate request"
INVALID_EVENT: Final = "invalid event"
BUSY: Final = "another realtime session is already active"

_MAX_TRANSITIONS: Final = 512
_NOT_OFFERED: Final = ("enhance_prompt", "enable_frame_interpolation", "enable_upscaling")
"""SGLang options that change the frames. A request that sets such an option is refused because the
client would not receive the frames that it expects.
"""
_U32: Final = (1 << 32) - 1
_SIZE: Final = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})", re.ASCII)

OutputFormat = Literal["raw", "webp", "jpeg", "h264", "delta_gzip", "delta-gzip"]
Number = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
EventId = Annotated[int, msgspec.Meta(ge=0, le=_U32)]


class InitMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of a connection.

    Unknown keys are ignored, as are settings that the deployment fixes (steps, causal window).
    """

    type: Literal["init"]
    """Message type."""
    prompt: str
    """First prompt."""
    prompts: Annotated[list[TimedPrompt], msgspec.Meta(max_length=MAX_PROMPTS)] = []
    """Extension. Later prompts, each with the second or chunk at which it takes effect. The client
    may also send prompt events in between.
    """
    model: str | None = None
    """Name of the served model or of a LoRA adapter. An adapter's name selects that adapter. Any
    other name is ignored.
    """
    first_frame: Any = None
    """Start image as PNG, JPEG, WebP or GIF bytes, or a `data:` URL."""
    images: NamedSources = {}
    """Extension. Named images, for models that accept them. Each image has one of the forms that
    `first_frame` accepts.
    """
    size: str | None = None
    """Frame size, for example `"832x480"`. Default: the size set by the deployment."""
    fps: Annotated[int, msgspec.Meta(ge=1, le=240)] | None = None
    """Playback rate in frames per second, 1 to 240. Default: the model's frame rate."""
    num_frames: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] | None = None
    """This field is accepted but ignored, because the model fixes the length of the first chunk."""
    max_chunks: Annotated[int, msgspec.Meta(ge=1, le=_U32)] | None = None
    """Maximum number of chunks. Default: no limit."""
    seed: RequestedSeed = 42
    """Noise seed. Default: 42."""
    num_inference_steps: Annotated[int, msgspec.Meta(ge=1, le=1000)] | None = None
    """This field is accepted for compatibility and ignored."""
    guidance_scale: Number | None = None
    """This field is accepted for compatibility and ignored."""
    negative_prompt: str | None = None
    """This field is accepted for compatibility and ignored."""
    enhance_prompt: bool = False
    """A request that sets this field to True is refused."""
    condition_inputs: dict[str, Any] | None = None
    """Actions for the first chunks: `camera_actions`, or `actions` if that extension is enabled."""
    realtime_output_format: OutputFormat | None = None
    """Frame encoding. Default: raw."""
    output_compression: Annotated[int, msgspec.Meta(ge=1, le=100)] | None = None
    """Quality of webp and jpeg frames, 1 to 100. Default: 90 for webp and 95 for jpeg."""
    realtime_preview_max_width: Annotated[int, msgspec.Meta(ge=0, le=8192)] | None = None
    """Maximum frame width in pixels. Wider frames are scaled down before encoding. Default or 0: no
    limit.
    """
    realtime_output_pacing: bool = False
    """Whether to send each chunk no earlier than it is due for playback. Default: False."""
    realtime_causal_kv_cache_num_frames: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    """This session's attention window in latent frames. A value above the server's window is
    reduced to it. Default: the server's window.
    """
    realtime_causal_sink_size: Annotated[int, msgspec.Meta(ge=0, le=4096)] | None = None
    """Number of sink frames for this session. A value above the server's configured value is
    reduced to it. Default: the server's configured value.
    """
    enable_frame_interpolation: bool = False
    """A request that sets this field to True is refused."""
    enable_upscaling: bool = False
    """A request that sets this field to True is refused."""
    lora: Loras | None = None
    """LoRA adapters to apply, as `[{"name", "scale"}]`."""
    session_id: SessionId | None = None
    """`moves` extension. Id of the session to continue after it has been moved to this server. The
    other keys must have the same values as at the start of the session, except that images may be
    absent. Default: start a new session.
    """
    start_pose: StartPose | None = None
    """Extension. World pose of the start image."""
    extensions: Annotated[list[str], msgspec.Meta(max_length=32)] | None = None
    """Names of the requested extensions."""

    def __post_init__(self) -> None:
        check_seed(self.seed)

    @property
    def granted(self) -> tuple[str, ...]:
        """Names of the requested extensions that the server supports."""
        return tuple(name for name in EXTENSIONS if name in (self.extensions or ()))

    @property
    def codec(self) -> VideoCodec:
        """Frame codec."""
        match self.realtime_output_format:
            case None:
                return "raw"
            case "delta-gzip":
                return "delta_gzip"
            case codec:
                return codec

    def height_width(self) -> tuple[int, int] | None:
        """Return (height, width), or None for the default size.

        Raises:
            EndpointError: `size` is not of the form WIDTHxHEIGHT.
        """
        if self.size is None:
            return None
        found = _SIZE.fullmatch(self.size)
        if found is None:
            raise EndpointError("invalid_request", "size must look like 832x480", param="size")
        return int(found[2]), int(found[1])

    def window(
        self, most_frames: int | None, most_sinks: int | None
    ) -> tuple[int | None, int | None]:
        """Return the session's attention window and number of sink frames. None means the server's
        value.

        Values above the server's are reduced to the server's values, because the original web page
        always sends 18 and 9.

        Args:
            most_frames: The server's window. If None, clients cannot choose the window.
            most_sinks: The server's sink frames. If None, clients cannot choose the sink frames.
        """
        frames, sinks = self.realtime_causal_kv_cache_num_frames, self.realtime_causal_sink_size
        if most_frames is None or most_sinks is None:
            return None, None
        return (
            None if frames is None else min(frames, most_frames),
            None if sinks is None else min(sinks, most_sinks),
        )

    def script(self, space: ActionSpace = CAMERA_SPACE) -> ControlScript | ControlStates | None:
        """Return the actions for the first chunks, if the client sent any.

        Raises:
            EndpointError: The actions are invalid.
        """
        inputs = self.condition_inputs or {}
        if "actions" in self.granted and inputs.get("actions") is not None:
            return read_actions_message(inputs["actions"], space)
        keys = inputs.get("camera_actions")
        return None if keys is None else _script(keys, space)


class EventMessage(msgspec.Struct, frozen=True):
    """A control event during the stream."""

    updates: tuple[Update, ...]
    """The event's updates, which are applied together."""
    event_id: int | None
    """Id that the client assigned to the event."""


class ControlMessage(msgspec.Struct, frozen=True, kw_only=True):
    """`control` extension: pauses, resumes, restarts or stops the session."""

    type: Literal["control"]
    """Message type."""
    op: Literal["pause", "resume", "reset", "stop"]
    """Operation to perform."""
    id: EventId | Annotated[str, msgspec.Meta(max_length=128)] | None = None
    """Message id, which the server returns in `control_result`."""


class CreditMessage(msgspec.Struct, frozen=True, kw_only=True):
    """`credit` extension: allows the server to start additional chunks."""

    type: Literal["credit"]
    """Message type."""
    chunks: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    """Number of additional chunks that may start."""


class PingMessage(msgspec.Struct, frozen=True, kw_only=True):
    """`ping` extension. The server replies with `pong`."""

    type: Literal["ping"]
    """Message type."""
    t: float | None = None
    """The client's timestamp, which the server returns in `pong`."""


class KeyFrameMessage(msgspec.Struct, frozen=True, kw_only=True):
    """`key_frame` extension: makes the next `h264` chunk start with a key frame."""

    type: Literal["key_frame"]
    """Message type."""


Extra = ControlMessage | CreditMessage | PingMessage | KeyFrameMessage
_EXTRAS: Final[dict[str, tuple[str, type[Extra]]]] = {
    "key_frame": ("key_frame", KeyFrameMessage),
    "control": ("control", ControlMessage),
    "credit": ("credit", CreditMessage),
    "ping": ("ping", PingMessage),
}


def named_extensions(value: Any) -> tuple[str, ...]:
    """Return the extensions that a message names, even if the message is invalid.

    The server sends the details of a refusal only to clients that name extensions, because only
    they can parse the details.
    """
    names = value.get("extensions") if isinstance(value, dict) else None
    return tuple(name for name in EXTENSIONS if name in names) if isinstance(names, list) else ()


def parse_init(
    value: Any, limits: EndpointLimits, space: ActionSpace = CAMERA_SPACE
) -> InitMessage:
    """Parse and check an `init` message.

    Raises:
        EndpointError: The message is invalid. The error text is logged, and also sent to clients
            that use extensions.
    """
    init = _convert(value, InitMessage)
    for name in _NOT_OFFERED:
        if getattr(init, name):
            raise EndpointError(
                "invalid_request", f"{name} is not offered: leave it out", param=name
            )
    check_prompt(init.prompt, limits, empty_ok=True)
    for timed in init.prompts:
        check_prompt(timed.prompt, limits, empty_ok=False)
    image = init.first_frame
    if isinstance(image, str) and not image.startswith("data:image/"):
        raise EndpointError(
            "invalid_image",
            "first_frame must be the image's bytes or a data: URL",
            param="first_frame",
        )
    if not isinstance(image, bytes | str | None):
        raise EndpointError(
            "invalid_image",
            "first_frame must be the image's bytes or a data: URL",
            param="first_frame",
        )
    if not all(isinstance(source, bytes | str) for source in init.images.values()):
        raise EndpointError(
            "invalid_image", "images must be bytes or data: URLs by name", param="images"
        )
    init.height_width()
    init.script(space)
    return init


@dataclass(frozen=True)
class EventReader:
    """Parses the events of one client."""

    limits: EndpointLimits
    """Limits on message contents."""
    space: ActionSpace = CAMERA_SPACE
    """The model's controls."""
    granted: tuple[str, ...] = ()
    """Extensions that the client has enabled."""

    def read_event(self, value: Any) -> EventMessage:
        """Parse and check one event.

        Raises:
            EndpointError: Part of the event is invalid, so the whole event is refused.
        """
        event_id = _event_id(value)
        kind, payload = value.get("kind"), value.get("payload")
        if kind == "composite_input":
            return EventMessage(self._composite(payload), event_id)
        return EventMessage((self._update(kind, payload),), event_id)

    def _composite(self, payload: Any) -> tuple[Update, ...]:
        kinds = payload.get("input_types") if isinstance(payload, dict) else None
        if not isinstance(kinds, list) or not kinds:
            raise EndpointError(
                "invalid_request",
                "composite_input needs input_types, a list of kinds",
                param="payload",
            )
        if len(kinds) > 8 or any(
            not isinstance(kind, str) or kind not in payload for kind in kinds
        ):
            raise EndpointError(
                "invalid_request",
                "composite_input must have one entry for each of its kinds",
                param="payload",
            )
        return tuple(self._update(kind, payload[kind]) for kind in kinds)

    def _update(self, kind: Any, payload: Any) -> Update:
        if kind == "prompt":
            if not isinstance(payload, str):
                raise EndpointError("invalid_request", "a prompt must be text", param="payload")
            check_prompt(payload, self.limits, empty_ok=False)
            return PromptChange(payload)
        if kind == "camera_actions":
            if isinstance(payload, dict) and payload.get("mode") == "state":
                return _states(payload.get("transitions"), self.space)
            return _script(payload, self.space)
        if kind == "actions" and "actions" in self.granted:
            return read_actions_message(payload, self.space)
        if kind == "lora":
            try:
                return AdapterChange(tuple(msgspec.convert(payload, Loras)))
            except msgspec.ValidationError as error:
                raise EndpointError("invalid_request", f"lora: {error}", param="payload") from None
        raise EndpointError(
            "invalid_request",
            "kind must be camera_actions, prompt, lora or composite_input",
            param="kind",
        )


def _event_id(value: Any) -> int | None:
    """Return the `event_id` of an event message, or None if it has none.

    Raises:
        EndpointError: The message is not an event, or its id is invalid.
    """
    if not isinstance(value, dict) or value.get("type") != "event":
        raise EndpointError("invalid_request", "a message must be a map with type 'event'")
    event_id = value.get("event_id")
    # JavaScript encodes large integers as floats.
    if type(event_id) is float and event_id.is_integer():
        event_id = int(event_id)
    if event_id is not None and (type(event_id) is not int or not 0 <= event_id <= _U32):
        raise EndpointError(
            "invalid_request", f"event_id must be a whole number from 0 to {_U32}", param="event_id"
        )
    return event_id


def parse_extra(value: Any, granted: tuple[str, ...]) -> Extra | None:
    """Parse a message that belongs to a granted extension. Return None for any other message."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _EXTRAS or _EXTRAS[kind][0] not in granted:
        return None
    return _convert(value, _EXTRAS[kind][1])


def error_reply(
    error: EndpointError, content: str, granted: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return an `error` message, which contains details only for clients that use extensions."""
    reply: dict[str, Any] = {"type": "error", "content": content}
    if granted:
        reply |= {
            "code": error.code,
            "message": error.message,
            "retryable": error.retryable,
            **error.details,
        }
    return reply


def _convert(value: Any, kind: type[Any]) -> Any:
    if not isinstance(value, dict):
        raise EndpointError("invalid_request", "a message must be a map")
    try:
        return msgspec.convert(with_integers(value), kind)
    except msgspec.ValidationError as error:
        raise EndpointError("invalid_request", str(error)) from None


def _script(value: Any, space: ActionSpace) -> ControlScript:
    if not isinstance(value, list) or len(value) > MAX_SCRIPT_ENTRIES:
        raise EndpointError(
            "invalid_request",
            f"camera_actions must be a list of at most {MAX_SCRIPT_ENTRIES} lists of keys",
            param="camera_actions",
        )
    return camera_frames(value, space)


def _states(transitions: Any, space: ActionSpace) -> ControlStates:
    if not isinstance(transitions, list) or len(transitions) > _MAX_TRANSITIONS:
        raise EndpointError(
            "invalid_request",
            f"transitions must be a list of at most {_MAX_TRANSITIONS}",
            param="transitions",
        )
    held = []
    for transition in transitions:
        if not isinstance(transition, dict) or not isinstance(
            transition.get("client_ts_ms", 0), int | float | None
        ):
            raise EndpointError(
                "invalid_request", "a transition must be a map with actions", param="transitions"
            )
        held.append(ControlTransition(camera_buttons(transition.get("actions"), space)))
    return ControlStates(tuple(held))
