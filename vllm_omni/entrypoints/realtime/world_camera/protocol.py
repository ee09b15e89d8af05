# SPDX-License-Identifier: Apache-2.0
"""Typed messages of `/v1/realtime/world/camera`: client requests and server replies.

A message is a map with an `endpoint` key (default `infer`). Unknown keys are ignored because other
clients of this protocol send additional keys. If a known key has a wrong type or value, the message
is refused with an error that names the key. Fields that contain arrays or actions have the type
`Any` here. `../controls/camera.py`, `../connection/images.py` and `../controls/action_messages.py`
check them.
"""

from typing import Annotated, Any, ClassVar, Final

import msgspec
import numpy as np

from vllm_omni.actions import ActionEntry, ActionSpace, NamedSources, as_entry
from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.entrypoints.realtime.controls.action_messages import convert_frames, read_script
from vllm_omni.entrypoints.realtime.controls.camera import CameraPath, PosePolicy
from vllm_omni.inputs import Loras, SessionId
from vllm_omni.seeds import RequestedSeed, check_seed
from vllm_omni.worlds.start_pose import StartPose

PROTOCOL: Final = "omni.world.camera"
PROTOCOL_VERSION: Final = 1
SUBPROTOCOL: Final = "omni.world.camera.v1"
CODECS: Final = ("mp4", "jpeg", "h264", "ndarray_u8", "ndarray_f32")
DEFAULT_CODEC: Final = "mp4"
_MAX_ACTIONS: Final = 4096

RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class ExtraBody(msgspec.Struct, frozen=True, kw_only=True):
    """Generation settings for one `infer` request."""

    height: Annotated[int, msgspec.Meta(ge=8, le=8192)] | None = None
    """Frame height in pixels, 8 to 8192. Default: the server's height."""
    width: Annotated[int, msgspec.Meta(ge=8, le=8192)] | None = None
    """Frame width in pixels, 8 to 8192. Default: the server's width."""
    num_frames: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] | None = None
    """Number of pixel frames to generate. Default: one frame per pose."""
    fps: Annotated[float, msgspec.Meta(ge=1, le=240)] | None = None
    """Playback rate in frames per second, 1 to 240. Default: the model's frame rate."""
    seed: RequestedSeed | None = None
    """Noise seed. Default: the server selects a random seed."""
    frames_per_chunk: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    """Number of frames in one reply. Default: a whole chunk, except 4 for `ndarray_f32` and 1 for
    `h264`.
    """
    session_id: SessionId | None = None
    """Session that the message refers to. This key has the same meaning as the message's own
    `session_id`.
    """
    num_inference_steps: Annotated[int, msgspec.Meta(ge=1, le=1000)] | None = None
    """Number of denoise steps, which is passed to the model. Default: the model's default."""
    guidance_scale: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    """Classifier-free guidance scale, which is passed to the model. Default: the model's default.
    """
    negative_prompt: Annotated[str, msgspec.Meta(max_length=16384)] | None = None
    """Negative prompt, which is passed to the model. Default: the model's default."""
    video_format: str | None = None
    """Frame encoding, one of `CODECS`.

    Default: `mp4`, except `ndarray_f32` for clients of the protocol's first version.
    """
    with_mp4: bool = False
    """Whether to add an MP4 file of the frames to each reply, in the `mp4` field. Default: False.
    """
    mp4_scale: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1
    """Integer scale factor of the `mp4` file. The factor is limited so that no side is enlarged
    beyond 1280 pixels. Default: 1.
    """
    key_frame: bool = False
    """Whether `h264` frames must start with a key frame, for example because the client has just
    joined or has lost frames. The first frame of a session is always a key frame. Default: False.
    """
    transfer_ms: Annotated[float, msgspec.Meta(ge=0, le=600_000)] | None = None
    """Time in milliseconds from the first to the last message of the previous chunk, as measured by
    the client. The bitrate of `h264` is adapted to this time. Default: the bitrate does not change.
    """
    quality: Annotated[int, msgspec.Meta(ge=1, le=100)] = 90
    """JPEG quality, 1 to 100. Default: 90."""
    pose_policy: PosePolicy | None = None
    """Policy for poses that do not fill complete chunks.

    Default: `error`, except `trim` for clients of the protocol's first version.
    """
    start_pose: StartPose | None = None
    """World pose of the start image. Default: the pose is recognized automatically if the image is
    one of the world's own start images.
    """
    lora: Loras | None = None
    """LoRA adapters that apply from this request onwards, as `[{"name", "scale"}]`. An empty list
    removes all adapters. Default: the adapters do not change.
    """
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Model options, whose values have JSON types. The model validates the options."""

    def __post_init__(self) -> None:
        check_seed(self.seed)

    def model_options(self) -> dict[str, Any]:
        """Return the options to pass to the model, including those that have fields of their
        own.
        """
        named = {
            name: getattr(self, name)
            for name in ("num_inference_steps", "guidance_scale", "negative_prompt")
        }
        start = {} if self.start_pose is None else self.start_pose.as_option()
        return {
            **{name: value for name, value in named.items() if value is not None},
            **start,
            **self.options,
        }


class ClientMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Keys that every message may contain."""

    endpoint: ClassVar[str]
    """Value of the `endpoint` key that selects this message type."""

    session_id: SessionId | None = None
    """Session that the message refers to. Default: the connection's own session."""
    request_id: RequestId | None = None
    """Id that the client assigns to the request, 1 to 128 characters. Default: the server generates
    an id.
    """
    protocol_version: int | None = None
    """Protocol version. A client that sends this key receives additional messages, which are
    specific to this server.
    """


class InferMessage(ClientMessage, frozen=True, kw_only=True):
    """Request to generate the frames for a camera path or an action sequence."""

    endpoint: ClassVar[str] = "infer"
    """See `ClientMessage`."""

    chunk_index: Index | None = None
    """Index that the session's next chunk must have. Default: any index is accepted."""
    image: Any = None
    """Start image."""
    images: NamedSources = {}
    """Named images, for models that accept them (`actions.images` in `hello`). Each image may have
    any form allowed for `image`.
    """
    prompt: str | None = None
    """Prompt. Default: the prompt does not change."""
    camera: dict[str, Any] | None = None
    """Camera path with `poses` and `intrinsics`."""
    cameras: dict[str, Any] | None = None
    """Alternative name for `camera`."""
    actions: Any = None
    """Actions with one entry per latent frame, at most 4096 entries, which `script` checks."""
    restart: bool = False
    """Whether to discard the session's existing state and restart the session. Default: False."""
    extra_body: ExtraBody = ExtraBody()
    """Generation settings for the request."""

    def camera_path(self, max_poses: int, size: tuple[int, int]) -> CameraPath | None:
        """Return the camera path after checking it, or None if the message contains actions.

        Args:
            max_poses: Maximum number of poses.
            size: Width and height that the intrinsics refer to if the path does not specify another
                size.

        Raises:
            EndpointError: The path is missing or invalid, or `camera` and `cameras` have different
                values.
        """
        paths = [
            _camera_path(value, max_poses, size)
            for value in (self.camera, self.cameras)
            if value is not None
        ]
        if len(paths) + (self.actions is not None) == 0:
            raise EndpointError(
                "missing_camera",
                "camera (or cameras) with poses and intrinsics is required",
                param="camera",
            )
        if self.actions is not None:
            if paths:
                raise EndpointError(
                    "invalid_camera", "send camera or actions, not both", param="actions"
                )
            return None
        if len(paths) == 2 and not (
            np.array_equal(paths[0].poses_N44, paths[1].poses_N44)
            and np.array_equal(paths[0].intrinsics_N4, paths[1].intrinsics_N4)
        ):
            raise EndpointError(
                "invalid_camera",
                "camera and cameras are both given and differ; send one",
                param="camera",
            )
        return paths[0]

    def script(self, space: ActionSpace) -> list[ActionEntry] | None:
        """Return the actions after checking them against the model's controls.

        Raises:
            EndpointError: `invalid_action` if the actions are malformed or do not match the
                controls.
        """
        if self.actions is None:
            return None
        if isinstance(self.actions, list) and len(self.actions) > _MAX_ACTIONS:
            raise EndpointError(
                "invalid_action",
                f"{len(self.actions)} entries arrived; at most {_MAX_ACTIONS}",
                param="actions",
            )
        frames = convert_frames(self.actions, space)
        return [as_entry(frame) for frame in read_script(frames, space).entries]


class ResetMessage(ClientMessage, frozen=True, kw_only=True):
    """Request to cancel a session's requests and discard its state. The session id remains
    valid.
    """

    endpoint: ClassVar[str] = "reset"


class StopMessage(ClientMessage, frozen=True, kw_only=True):
    """Request to cancel a session's requests. If `session_id` is absent, the connection is also
    closed.
    """

    endpoint: ClassVar[str] = "stop"


class CloseSession(ClientMessage, frozen=True, kw_only=True):
    """Request to free a session. If `session_id` is absent, the connection's own session is freed
    and the connection is closed.
    """

    endpoint: ClassVar[str] = "close"


class PingMessage(ClientMessage, frozen=True, kw_only=True):
    """Request for an immediate `pong`. Pings keep the connection and its sessions open."""

    endpoint: ClassVar[str] = "ping"

    t: float | None = None
    """Value that the server returns in `pong`."""


class BranchMessage(ClientMessage, frozen=True, kw_only=True):
    """Request to copy a session's current state to a new session."""

    endpoint: ClassVar[str] = "branch"
    """See `ClientMessage`."""

    new_session_id: SessionId | None = None
    """Id of the new session. Default: the server generates an id."""
    disposable: bool = False
    """Whether a new session may evict the copy even while its client is connected. Default: False.
    """


class ResumeMessage(ClientMessage, frozen=True, kw_only=True):
    """Request to continue a session on this connection and to replay missed replies."""

    endpoint: ClassVar[str] = "resume"

    last_chunk_id: Index | None = None
    """Index of the last chunk that the client has received. Default: the client has received no
    chunks.
    """


_MESSAGES: Final[dict[str, type[ClientMessage]]] = {
    message.endpoint: message
    for message in (
        InferMessage,
        ResetMessage,
        StopMessage,
        CloseSession,
        PingMessage,
        BranchMessage,
        ResumeMessage,
    )
}


def parse(value: Any, limits: EndpointLimits) -> ClientMessage:
    """Convert a decoded message to the struct of its message type.

    Raises:
        EndpointError: The message is invalid (`invalid_request`, `unknown_endpoint`,
            `prompt_too_long` or `unsupported_codec`).
    """
    if not isinstance(value, dict):
        raise EndpointError("invalid_request", f"a message must be a map, got {_kind(value)}")
    endpoint = value.get("endpoint", InferMessage.endpoint)
    message_type = _MESSAGES.get(endpoint) if isinstance(endpoint, str) else None
    if message_type is None:
        raise EndpointError(
            "unknown_endpoint", f"endpoint must be one of {', '.join(_MESSAGES)}", param="endpoint"
        )
    fields = with_integers(value)
    if fields.get("extra_body") is None:
        fields.pop("extra_body", None)
    elif isinstance(fields["extra_body"], dict):
        fields["extra_body"] = with_integers(fields["extra_body"])
    try:
        message = msgspec.convert(fields, message_type)
    except msgspec.ValidationError as error:
        raise EndpointError("invalid_request", str(error)) from None
    if isinstance(message, InferMessage):
        _check_infer(message, limits)
    return message


def _check_infer(infer: InferMessage, limits: EndpointLimits) -> None:
    extra = infer.extra_body
    if infer.prompt is not None:
        check_prompt(infer.prompt, limits)
    if extra.video_format is not None and extra.video_format not in CODECS:
        raise EndpointError(
            "unsupported_codec",
            f"video_format must be one of {', '.join(CODECS)}",
            param="video_format",
        )
    if infer.session_id is not None and extra.session_id not in (None, infer.session_id):
        raise EndpointError(
            "invalid_request",
            "session_id and extra_body.session_id differ; send one",
            param="session_id",
        )
    if not _is_json(extra.options):
        raise EndpointError(
            "invalid_request",
            "extra_body.options takes numbers, text, lists and maps only",
            param="options",
        )


def check_prompt(
    prompt: str, limits: EndpointLimits, *, empty_ok: bool = True, name: str = "the prompt"
) -> None:
    """Check a prompt's length.

    Args:
        prompt: The prompt.
        limits: Limits that contain the maximum length.
        empty_ok: Whether the prompt may be empty.
        name: Name of the prompt in the error message.

    Raises:
        EndpointError: The prompt is too long or empty.
    """
    if not prompt.strip() and not empty_ok:
        raise EndpointError("invalid_request", f"{name} must not be empty", param="prompt")
    if len(prompt) > limits.max_prompt_chars:
        raise EndpointError(
            "prompt_too_long",
            f"{name} has {len(prompt)} characters; at most {limits.max_prompt_chars} are allowed",
            param="prompt",
        )


def with_integers(fields: dict[str, Any]) -> dict[str, Any]:
    """Convert floats with integer values to ints, because JavaScript encodes large integers as
    floats.

    Fields of type float also accept ints.
    """
    return {
        key: int(value) if type(value) is float and value.is_integer() else value
        for key, value in fields.items()
    }


def _is_json(value: Any) -> bool:
    """Return whether a value consists of JSON types only.

    The check is needed because other values in `PoolingParams.extra_kwargs`, for example arrays,
    would crash the engine.
    """
    if isinstance(value, dict):
        return all(_is_json(item) for item in value.values())
    if isinstance(value, list):
        return all(_is_json(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _camera_path(camera: dict[str, Any], max_poses: int, size: tuple[int, int]) -> CameraPath:
    for name in ("poses", "intrinsics"):
        if camera.get(name) is None:
            raise EndpointError("missing_camera", f"camera.{name} is required", param=name)
    own_size = camera.get("intrinsics_size")
    if own_size is not None:
        if not isinstance(own_size, list | tuple) or [type(side) for side in own_size] != [
            int,
            int,
        ]:
            raise EndpointError(
                "invalid_camera", "intrinsics_size must be [width, height]", param="intrinsics_size"
            )
        if min(own_size) < 1 or max(own_size) > 1 << 16:
            raise EndpointError(
                "invalid_camera",
                "intrinsics_size must lie within 1 to 65536",
                param="intrinsics_size",
            )
        own_size = tuple(own_size)
    return CameraPath.parse(camera["poses"], camera["intrinsics"], max_poses, size, own_size)


def _kind(value: Any) -> str:
    return {list: "a list", str: "text", bytes: "binary", np.ndarray: "an array"}.get(
        type(value), "a single value"
    )


# -- replies ---------------------------------------------------------------------------------------


def hello(
    info: StreamInfo, limits: EndpointLimits, session_id: str, max_message_bytes: int
) -> dict[str, Any]:
    """Return `hello`, the first message to every client, which contains the model's geometry,
    formats and limits.
    """
    return {
        "patch_size": list(info.patch_size),
        "vae_stride": list(info.vae_stride),
        "latent_frames_per_chunk": info.latent_frames_per_chunk,
        "max_area": info.max_area,
        "protocol": PROTOCOL,
        "protocol_version": PROTOCOL_VERSION,
        "model": info.model,
        "preset": info.preset,
        "session_id": session_id,
        "fps": info.fps,
        "default_size": [info.width, info.height],
        "size_multiple": list(info.size_multiple),
        "first_chunk_frames": info.first_chunk_frames,
        "chunk_frames": info.chunk_frames,
        "max_frames_per_request": limits.max_frames_per_request,
        "max_session_frames": None,
        "pose_convention": "c2w_opencv",
        "pose_units": "scene",
        "intrinsics_reference_size": list(info.intrinsics_reference_size),
        "key_focal": info.focal_of_keys(info.width),
        "actions": info.actions.as_json(),
        "codecs": list(CODECS),
        "default_codec": DEFAULT_CODEC,
        "limits": {
            "max_message_bytes": max_message_bytes,
            "max_image_bytes": limits.max_image_bytes,
            "max_image_pixels": limits.max_image_pixels,
            "max_prompt_chars": limits.max_prompt_chars,
            "idle_timeout_s": limits.idle_timeout_s,
            "queue": limits.max_requests_per_connection,
            "sessions": info.max_sessions,
        },
        "resume": {"ttl_s": info.session_idle_s},
        **(
            {} if info.card is None else {"domain": info.card.domain, "world": info.card.as_hello()}
        ),
    }


def error_message(
    error: EndpointError, request_id: str | None = None, session_id: str | None = None
) -> dict[str, Any]:
    message = {
        "type": "moved" if error.code == "moved" else "error",
        "code": error.code,
        "message": error.message,
        "retryable": error.retryable,
        "request_id": request_id,
        "session_id": session_id,
        "param": error.param,
        **error.details,
    }
    return {key: value for key, value in message.items() if value is not None}
