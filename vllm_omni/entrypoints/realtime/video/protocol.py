# SPDX-License-Identifier: Apache-2.0
"""Typed messages of `/v1/realtime/video`, which are the JSON control messages of vLLM-Omni 0.30.

A client's first message is `session.start`, followed by interactions (a prompt, a camera command,
actions), `session.stop` and `session.ping`.
"""

import uuid
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np

from vllm_omni.actions import CAMERA_SPACE, MAX_IMAGES, ActionSpace
from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.json_values import MAX_JSON_VALUES, has_too_many_values
from vllm_omni.entrypoints.realtime.connection.limits import MIB, EndpointLimits
from vllm_omni.entrypoints.realtime.controls.action_messages import (
    camera_frames,
    read_actions_message,
)
from vllm_omni.entrypoints.realtime.controls.control_track import (
    MAX_SCRIPT_ENTRIES,
    ControlScript,
    ControlStates,
)
from vllm_omni.entrypoints.realtime.controls.pose_track import CameraCommand, unit_quaternion
from vllm_omni.entrypoints.realtime.world_camera.protocol import check_prompt, with_integers
from vllm_omni.entrypoints.timed_prompts import MAX_PROMPTS, TimedPrompt
from vllm_omni.inputs import Lora, Loras, SessionId
from vllm_omni.seeds import RequestedSeed, check_seed
from vllm_omni.worlds.start_pose import StartPose

FORMAT: Final = "m4s"
MAX_CONTROL_BYTES: Final = 128 * 1024

# Same limit as for camera paths, because larger float32 positions have no useful precision.
_LARGEST: Final = 1e6
_MAX_TRANSITION_CHUNKS: Final = 10_000

Pixels = Annotated[int, msgspec.Meta(ge=8, le=8192)]
Coordinate = Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]


class ImageReference(msgspec.Struct, frozen=True):
    image_url: str
    """Image as a `data:` URL."""


class ExtraParams(msgspec.Struct, frozen=True, kw_only=True):
    """Additional parameters of `session.start`."""

    camera_action_script: (
        Annotated[list[list[str] | str], msgspec.Meta(max_length=MAX_SCRIPT_ENTRIES)] | None
    ) = None
    """Camera keys held in each latent frame."""
    action_script: Any = None
    """Extension. Actions for each latent frame, which are checked against the model's controls."""
    prompts: Annotated[list[TimedPrompt], msgspec.Meta(max_length=MAX_PROMPTS)] = []
    """Later prompts, each with the second or chunk at which it takes effect. The client may also
    send interactions in between.
    """
    start_pose: StartPose | None = None
    """World pose of the start image. Default: the pose is recognized automatically if the image is
    one of the world's own start images.
    """
    follow_moves: bool = False
    """Extension. Whether the client continues its session on another server after it has received
    `session.moved`. Default: False.
    """
    session_id: SessionId | None = None
    """Extension. Id of the session to continue after it has been moved to this server. The other
    keys must have the same values as at the start of the session, except that images may be absent.
    Default: start a new session.
    """
    pace_to_media_time: bool = False
    """Whether to send each chunk no earlier than it is due for playback. Default: False."""
    preencode_mp4: bool = False
    """A request that sets this field to True is refused."""


class StartMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The first message of a connection.

    Unknown keys are ignored, as are settings that the deployment fixes (steps, guidance).
    """

    prompt: str = ""
    """First prompt."""
    model: str | None = None
    """Name of the served model or of a loaded LoRA adapter. Any other name is refused. Default: the
    name is not checked.
    """
    format: str = FORMAT
    """Container format. The only supported format is `m4s`."""
    width: Pixels | None = None
    """Frame width in pixels. Default: the server's width."""
    height: Pixels | None = None
    """Frame height in pixels. Default: the server's height."""
    fps: Annotated[float, msgspec.Meta(ge=1, le=240)] | None = None
    """Playback rate in frames per second, 1 to 240. Default: the model's frame rate."""
    num_frames: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)] | None = None
    """Length of the stream in pixel frames, which must be the length of a whole number of chunks,
    counted from the first. Default: the stream continues until `session.stop`.
    """
    seed: RequestedSeed | None = None
    """Noise seed. Default: the server selects a random seed."""
    image_reference: ImageReference | None = None
    """Start image."""
    images: Annotated[dict[str, ImageReference], msgspec.Meta(max_length=MAX_IMAGES)] = {}
    """Extension. Named images, for models that accept them."""
    lora: Loras | None = None
    """LoRA adapters to apply, as `[{"name", "scale"}]`."""
    extra_params: ExtraParams = ExtraParams()
    """Additional parameters of the session."""

    def __post_init__(self) -> None:
        check_seed(self.seed)

    def script(self, space: ActionSpace) -> ControlScript | ControlStates | None:
        """Return the actions for the first chunks.

        Raises:
            EndpointError: The actions are invalid.
        """
        keys, actions = self.extra_params.camera_action_script, self.extra_params.action_script
        if actions is not None:
            if keys is not None:
                raise EndpointError(
                    "invalid_request", "send camera_action_script or action_script: one of the two"
                )
            return read_actions_message(actions, space)
        return None if keys is None else camera_frames(map(list, keys), space)


class InteractionMessage(msgspec.Struct, frozen=True):
    """An interaction: a prompt, LoRA adapters, and either a camera command or actions, any of which
    may be absent.
    """

    event_id: str
    """Id that the client assigned to the interaction."""
    prompt: str | None
    """New prompt. None: the prompt does not change."""
    lora: list[Lora] | None
    """New LoRA adapters. None: the adapters do not change."""
    command: CameraCommand | None
    """Camera command. None: the interaction contains no command."""
    actions: ControlScript | ControlStates | None
    """Actions. None: the interaction contains no actions."""


class _CameraData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    translation: tuple[Coordinate, Coordinate, Coordinate] = (0.0, 0.0, 0.0)
    """Translation (x, y, z) in pose units."""
    rotation: tuple[Coordinate, Coordinate, Coordinate, Coordinate] = (0.0, 0.0, 0.0, 1.0)
    """Rotation as a quaternion (x, y, z, w)."""


class _Camera(msgspec.Struct, frozen=True):
    data: _CameraData
    """Target pose, or a velocity's step per latent frame."""
    mode: Literal["target", "velocity"] = "target"
    """Whether to move to a pose (`target`) or to keep moving (`velocity`)."""


class _MultiModal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    camera: _Camera | None = None
    """Camera command."""
    actions: Any = None
    """Actions, which are checked against the model's controls."""


class _InteractionEvent(msgspec.Struct, frozen=True):
    prompt: str | None = None
    """New prompt. None: the prompt does not change."""
    lora: Loras | None = None
    """New LoRA adapters. None: the adapters do not change."""
    multi_modal_data: _MultiModal | None = None
    """Camera command or actions."""


class _Interaction(msgspec.Struct, frozen=True):
    event: _InteractionEvent
    """Content of the interaction."""
    event_id: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] | None = None
    """Id that the client assigns to the interaction, 1 to 128 characters. Default: the server
    generates an id.
    """
    transition_chunks: Annotated[int, msgspec.Meta(ge=0, le=_MAX_TRANSITION_CHUNKS)] | None = None
    """Number of chunks until a target is reached, 0 to 10000. Default: 1."""


def max_start_bytes(limits: EndpointLimits) -> int:
    """Return the maximum size of `session.start`, which contains the start image as base64 text."""
    return limits.max_image_bytes * 4 // 3 + MIB // 4


def decode(text: str, max_length: int, name: str) -> dict[str, Any]:
    """Decode one message, which must be a JSON object.

    Args:
        text: The message.
        max_length: Maximum number of characters.
        name: Name of the expected message, for error messages.

    Raises:
        EndpointError: The message is invalid.
    """
    if len(text) > max_length:
        raise EndpointError(
            "invalid_request", f"{name} too large: {len(text)} characters, at most {max_length}"
        )
    if has_too_many_values(text):
        raise EndpointError("invalid_json", f"more than {MAX_JSON_VALUES} values in {name}")
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise EndpointError("invalid_json", f"Invalid JSON in {name}") from None
    if not isinstance(value, dict):
        raise EndpointError("invalid_request", f"{name} must be a JSON object")
    return value


def parse_start(
    value: dict[str, Any], limits: EndpointLimits, space: ActionSpace = CAMERA_SPACE
) -> StartMessage:
    """Parse and check `session.start`.

    Raises:
        EndpointError: The message is invalid.
    """
    if value.get("type") != "session.start":
        raise EndpointError("invalid_request", "Expected session.start", param="type")
    nested = value.get("sampling_params")
    fields = with_integers({**(nested if isinstance(nested, dict) else {}), **value})
    start: StartMessage = _convert(fields, StartMessage, "Invalid session.start")
    if start.format != FORMAT:
        raise EndpointError(
            "unsupported_codec",
            f"Invalid session.start format: expected '{FORMAT}'.",
            param="format",
        )
    check_prompt(start.prompt, limits, empty_ok=space.prompt != "required")
    for timed in start.extra_params.prompts:
        check_prompt(timed.prompt, limits, empty_ok=False)
    if (start.width is None) != (start.height is None):
        raise EndpointError(
            "invalid_request",
            "Invalid session.start: send width and height, or neither",
            param="width",
        )
    if start.extra_params.preencode_mp4:
        raise EndpointError(
            "invalid_request",
            "Invalid session.start: preencode_mp4 does not stream",
            param="extra_params",
        )
    return start


def parse_interaction(
    value: dict[str, Any], limits: EndpointLimits, space: ActionSpace = CAMERA_SPACE
) -> InteractionMessage:
    """Parse and check an interaction.

    Raises:
        EndpointError: The message is invalid, so no part of it takes effect.
    """
    wanted: _Interaction = _convert(
        value.get("interaction"), _Interaction, "Invalid session.interaction"
    )
    event = wanted.event
    data = event.multi_modal_data or _MultiModal()
    camera, actions = data.camera, data.actions
    if all(part is None for part in (event.prompt, event.lora, camera, actions)):
        raise EndpointError(
            "invalid_request",
            "session.interaction needs event.prompt, event.lora or event.multi_modal_data.camera "
            "or .actions",
        )
    if camera is not None and actions is not None:
        raise EndpointError(
            "invalid_request", "send multi_modal_data.camera or .actions: one of the two"
        )
    if event.prompt is not None:
        check_prompt(event.prompt, limits, empty_ok=False)
    event_id = wanted.event_id or uuid.uuid4().hex
    command = None
    if camera is not None:
        try:
            rotation_4 = unit_quaternion(camera.data.rotation)
        except ValueError as error:
            raise EndpointError("invalid_camera", str(error), param="rotation") from None
        chunks = 1 if wanted.transition_chunks is None else wanted.transition_chunks
        command = CameraCommand(
            event_id, camera.mode, np.array(camera.data.translation), rotation_4, chunks
        )
    updates = None if actions is None else read_actions_message(actions, space)
    return InteractionMessage(event_id, event.prompt, event.lora, command, updates)


def _convert(value: Any, kind: type[Any], what: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise EndpointError("invalid_request", f"{what}: {error}") from None
