# SPDX-License-Identifier: Apache-2.0
"""The typed messages of `/v1/realtime/world/camera`: the client's requests, and the replies' fixed shapes.

A message is a map with `endpoint` (`infer` if absent). Unknown keys are ignored (other clients of this protocol send
some); known keys of a wrong type or out of range are refused with a text that names the key. Arrays stay `Any` here and
are checked by `camera.py` and `images.py`.
"""

from typing import Annotated, Any, ClassVar, Final

import msgspec
import numpy as np

from vllm_omni.actions import ActionEntry, ActionSpace, as_entry
from vllm_omni.entrypoints.realtime.action_messages import read_script
from vllm_omni.entrypoints.realtime.camera import CameraPath, PosePolicy
from vllm_omni.entrypoints.realtime.errors import DoorError
from vllm_omni.entrypoints.realtime.facts import WorldFacts
from vllm_omni.entrypoints.realtime.limits import DoorLimits
from vllm_omni.inputs import Loras, SessionId
from vllm_omni.seeds import AskedSeed, check_seed
from vllm_omni.worlds.start_pose import StartPose

PROTOCOL: Final = "omni.world.camera"
PROTOCOL_VERSION: Final = 1
SUBPROTOCOL: Final = "omni.world.camera.v1"
CODECS: Final = ("mp4", "jpeg", "ndarray_u8", "ndarray_f32")
DEFAULT_CODEC: Final = "mp4"

RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class ExtraBody(msgspec.Struct, frozen=True, kw_only=True):
    """Generation settings of one `infer`; all optional.

    frames_per_chunk: frames in one reply message; None = a whole chunk (4 for `ndarray_f32`).
    video_format: one of `CODECS`. with_mp4: each message also carries its frames as an MP4 file, in `mp4`;
    mp4_scale: that file is so many times as large, each pixel a square, up to
    a side of 1280 pixels.
    quality: JPEG quality. pose_policy: how poses that do not fill whole chunks are handled.
    start_pose: where in the world the start image was taken; None = the world's own start images are recognised.
    lora: LoRA adapters from this request on, `[{"name", "scale"}]`; [] = none, None = as before.
    options: options of the model itself (JSON types), checked by the model.
    """

    height: Annotated[int, msgspec.Meta(ge=8, le=8192)] | None = None
    width: Annotated[int, msgspec.Meta(ge=8, le=8192)] | None = None
    num_frames: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] | None = None
    fps: Annotated[float, msgspec.Meta(ge=1, le=240)] | None = None
    seed: AskedSeed | None = None
    frames_per_chunk: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    session_id: SessionId | None = None
    num_inference_steps: Annotated[int, msgspec.Meta(ge=1, le=1000)] | None = None
    guidance_scale: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    negative_prompt: Annotated[str, msgspec.Meta(max_length=16384)] | None = None
    video_format: str | None = None
    with_mp4: bool = False
    mp4_scale: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1
    quality: Annotated[int, msgspec.Meta(ge=1, le=100)] = 90
    pose_policy: PosePolicy | None = None
    start_pose: StartPose | None = None
    lora: Loras | None = None
    options: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_seed(self.seed)

    def model_options(self) -> dict[str, Any]:
        """The options that go to the model as they are; only those that were sent."""
        named = {name: getattr(self, name) for name in ("num_inference_steps", "guidance_scale", "negative_prompt")}
        start = {} if self.start_pose is None else self.start_pose.as_option()
        return {**{name: value for name, value in named.items() if value is not None}, **start, **self.options}


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Keys that every message may carry. `protocol_version` marks a client that knows this server's extra messages."""

    endpoint: ClassVar[str]

    session_id: SessionId | None = None
    request_id: RequestId | None = None
    protocol_version: int | None = None


class Infer(Message, frozen=True, kw_only=True):
    """Generate frames along a camera path (`camera` or `cameras`), or for `actions`, an entry per latent frame."""

    endpoint: ClassVar[str] = "infer"

    chunk_index: Index | None = None
    image: Any = None
    prompt: str | None = None
    camera: dict[str, Any] | None = None
    cameras: dict[str, Any] | None = None
    actions: Annotated[list[ActionEntry], msgspec.Meta(max_length=4096)] | None = None
    restart: bool = False
    extra_body: ExtraBody = ExtraBody()

    def camera_path(self, max_poses: int, size: tuple[int, int]) -> CameraPath | None:
        """Return the checked path, None for actions; both keys must agree. Raises `DoorError`.

        size: (width, height) that its intrinsics are for, unless it names another one.
        """
        paths = [_camera_path(value, max_poses, size) for value in (self.camera, self.cameras) if value is not None]
        if len(paths) + (self.actions is not None) == 0:
            raise DoorError(
                "missing_camera", "camera (or cameras) with poses and intrinsics is required", param="camera"
            )
        if self.actions is not None:
            if paths:
                raise DoorError("invalid_camera", "send camera or actions, not both", param="actions")
            return None
        if len(paths) == 2 and not (
            np.array_equal(paths[0].poses_N44, paths[1].poses_N44)
            and np.array_equal(paths[0].intrinsics_N4, paths[1].intrinsics_N4)
        ):
            raise DoorError("invalid_camera", "camera and cameras are both given and differ; send one", param="camera")
        return paths[0]

    def script(self, space: ActionSpace) -> list[ActionEntry] | None:
        """Return the actions, each checked against the model. Raises `DoorError("invalid_action")`."""
        if self.actions is None:
            return None
        return [as_entry(frame) for frame in read_script(self.actions, space).entries]


class Reset(Message, frozen=True, kw_only=True):
    """Forget a session's world; its id stays usable. Cancels its running requests."""

    endpoint: ClassVar[str] = "reset"


class Stop(Message, frozen=True, kw_only=True):
    """Cancel a session's requests; without `session_id`, also end the connection."""

    endpoint: ClassVar[str] = "stop"


class CloseSession(Message, frozen=True, kw_only=True):
    """Free a session; without `session_id`, the connection's own, and end the connection."""

    endpoint: ClassVar[str] = "close"


class Ping(Message, frozen=True, kw_only=True):
    """Answered at once with `pong`, which carries `t` back. Keeps the connection and its sessions."""

    endpoint: ClassVar[str] = "ping"

    t: float | None = None


class Branch(Message, frozen=True, kw_only=True):
    """Copy a session as it is now into a new one that goes its own way.

    disposable: the copy makes room for another session whenever one needs it, though its client is connected.
    """

    endpoint: ClassVar[str] = "branch"

    new_session_id: SessionId | None = None
    disposable: bool = False


class Resume(Message, frozen=True, kw_only=True):
    """Take a session over on this connection and replay the replies after chunk `last_chunk_id`."""

    endpoint: ClassVar[str] = "resume"

    last_chunk_id: Index | None = None


_MESSAGES: Final[dict[str, type[Message]]] = {
    message.endpoint: message for message in (Infer, Reset, Stop, CloseSession, Ping, Branch, Resume)
}


def parse(value: Any, limits: DoorLimits) -> Message:
    """Turn a decoded message into its type.

    Raises `DoorError` `invalid_request`, `unknown_endpoint`, `prompt_too_long` or `unsupported_codec`.
    """
    if not isinstance(value, dict):
        raise DoorError("invalid_request", f"a message must be a map, got {_kind(value)}")
    endpoint = value.get("endpoint", Infer.endpoint)
    message_type = _MESSAGES.get(endpoint) if isinstance(endpoint, str) else None
    if message_type is None:
        raise DoorError("unknown_endpoint", f"endpoint must be one of {', '.join(_MESSAGES)}", param="endpoint")
    fields = with_whole_numbers(value)
    if fields.get("extra_body") is None:
        fields.pop("extra_body", None)
    elif isinstance(fields["extra_body"], dict):
        fields["extra_body"] = with_whole_numbers(fields["extra_body"])
    try:
        message = msgspec.convert(fields, message_type)
    except msgspec.ValidationError as error:
        raise DoorError("invalid_request", str(error)) from None
    if isinstance(message, Infer):
        _check_infer(message, limits)
    return message


def _check_infer(infer: Infer, limits: DoorLimits) -> None:
    extra = infer.extra_body
    if infer.prompt is not None:
        check_prompt(infer.prompt, limits)
    if extra.video_format is not None and extra.video_format not in CODECS:
        raise DoorError("unsupported_codec", f"video_format must be one of {', '.join(CODECS)}", param="video_format")
    if infer.session_id is not None and extra.session_id not in (None, infer.session_id):
        raise DoorError("invalid_request", "session_id and extra_body.session_id differ; send one", param="session_id")
    if not _is_json(extra.options):
        raise DoorError(
            "invalid_request", "extra_body.options takes numbers, text, lists and maps only", param="options"
        )


def check_prompt(prompt: str, limits: DoorLimits, *, empty_ok: bool = True, name: str = "the prompt") -> None:
    """Raises `DoorError` for a prompt that is too long, or empty where it may not be. name: of it in the error."""
    if not prompt.strip() and not empty_ok:
        raise DoorError("invalid_request", f"{name} must not be empty", param="prompt")
    if len(prompt) > limits.max_prompt_chars:
        raise DoorError(
            "prompt_too_long",
            f"{name} has {len(prompt)} characters; at most {limits.max_prompt_chars} are allowed",
            param="prompt",
        )


def with_whole_numbers(fields: dict[str, Any]) -> dict[str, Any]:
    """JavaScript packs large integers as floats; whole floats become ints again (a float field takes either)."""
    return {key: int(value) if type(value) is float and value.is_integer() else value for key, value in fields.items()}


def _is_json(value: Any) -> bool:
    """Whether a value may travel in `PoolingParams.extra_kwargs`; an array there would kill the engine."""
    if isinstance(value, dict):
        return all(_is_json(item) for item in value.values())
    if isinstance(value, list):
        return all(_is_json(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _camera_path(camera: dict[str, Any], max_poses: int, size: tuple[int, int]) -> CameraPath:
    for name in ("poses", "intrinsics"):
        if camera.get(name) is None:
            raise DoorError("missing_camera", f"camera.{name} is required", param=name)
    own_size = camera.get("intrinsics_size")
    if own_size is not None:
        if not isinstance(own_size, list | tuple) or [type(side) for side in own_size] != [int, int]:
            raise DoorError("invalid_camera", "intrinsics_size must be [width, height]", param="intrinsics_size")
        if min(own_size) < 1 or max(own_size) > 1 << 16:
            raise DoorError("invalid_camera", "intrinsics_size must lie within 1 to 65536", param="intrinsics_size")
        own_size = tuple(own_size)
    return CameraPath.parse(camera["poses"], camera["intrinsics"], max_poses, size, own_size)


def _kind(value: Any) -> str:
    return {list: "a list", str: "text", bytes: "binary", np.ndarray: "an array"}.get(type(value), "a single value")


# -- replies ---------------------------------------------------------------------------------------------------------


def hello(facts: WorldFacts, limits: DoorLimits, session_id: str, max_message_bytes: int) -> dict[str, Any]:
    """The first message to every client: the model's geometry, accepted formats, and the limits."""
    return {
        "patch_size": list(facts.patch_size),
        "vae_stride": list(facts.vae_stride),
        "latent_frames_per_chunk": facts.latent_frames_per_chunk,
        "max_area": facts.max_area,
        "protocol": PROTOCOL,
        "protocol_version": PROTOCOL_VERSION,
        "model": facts.model,
        "session_id": session_id,
        "fps": facts.fps,
        "default_size": [facts.width, facts.height],
        "size_multiple": list(facts.size_multiple),
        "first_chunk_frames": facts.first_chunk_frames,
        "chunk_frames": facts.chunk_frames,
        "max_frames_per_request": limits.max_frames_per_request,
        "max_session_frames": None,
        "pose_convention": "c2w_opencv",
        "pose_units": "scene",
        "intrinsics_reference_size": list(facts.intrinsics_reference_size),
        "key_focal": facts.focal_of_keys(facts.width),
        "actions": facts.actions.as_json(),
        "codecs": list(CODECS),
        "default_codec": DEFAULT_CODEC,
        "limits": {
            "max_message_bytes": max_message_bytes,
            "max_image_bytes": limits.max_image_bytes,
            "max_image_pixels": limits.max_image_pixels,
            "max_prompt_chars": limits.max_prompt_chars,
            "idle_timeout_s": limits.idle_timeout_s,
            "queue": limits.max_requests_per_connection,
            "sessions": facts.max_sessions,
        },
        "resume": {"ttl_s": facts.session_idle_s},
        **({} if facts.card is None else {"domain": facts.card.domain, "world": facts.card.as_hello()}),
    }


def error_message(error: DoorError, request_id: str | None = None, session_id: str | None = None) -> dict[str, Any]:
    message = {
        "type": "error",
        "code": error.code,
        "message": error.message,
        "retryable": error.retryable,
        "request_id": request_id,
        "session_id": session_id,
        "param": error.param,
        **error.details,
    }
    return {key: value for key, value in message.items() if value is not None}
