# SPDX-License-Identifier: Apache-2.0
"""The `/v1/realtime/video` endpoint, which receives JSON control messages and sends fragmented MP4
for browsers.

The endpoint implements vLLM-Omni 0.30's protocol, and extends it in ways that do not affect
existing clients. Streams may have any length, and start images may be as large as the server
allows. Prompts and camera commands work for every model that accepts them. Every connection ends
with a close frame. Binary messages and slow readers do not block the controls.
"""

import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
from starlette.websockets import WebSocket

from vllm_omni.actions import ActionEntry, ActionFrame, as_entry, check_frame
from vllm_omni.entrypoints.errors import EndpointError, WebSocketCloseCode
from vllm_omni.entrypoints.realtime.chunk_source import ChunkControls, ChunkSpan, LiveChunks
from vllm_omni.entrypoints.realtime.connection.images import load_image
from vllm_omni.entrypoints.realtime.connection.live_client import (
    UNSENT_CHUNKS,
    LiveClient,
    MediaClock,
    RealtimeEndpoint,
    TextFrames,
)
from vllm_omni.entrypoints.realtime.connection.session_engine import WORLD_POSES
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.entrypoints.realtime.controls.analog_track import MAX_WAITING
from vllm_omni.entrypoints.realtime.controls.camera import CameraPath
from vllm_omni.entrypoints.realtime.controls.control_track import (
    ControlScript,
    ControlStates,
    ControlTrack,
    TooManyEvents,
)
from vllm_omni.entrypoints.realtime.controls.pose_track import (
    CameraCommand,
    CommandProgress,
    PoseTrack,
    walks,
)
from vllm_omni.entrypoints.realtime.controls.stream_state import encode_state
from vllm_omni.entrypoints.realtime.encoding.frames import FrameStamp
from vllm_omni.entrypoints.realtime.encoding.session_encoders import EncoderSpec
from vllm_omni.entrypoints.realtime.sessions.run import (
    FinishedChunk,
    ReplyOptions,
    SessionJob,
    SessionStart,
)
from vllm_omni.entrypoints.realtime.sessions.session_manager import SessionManager
from vllm_omni.entrypoints.realtime.video import protocol
from vllm_omni.entrypoints.timed_prompts import PromptSchedule
from vllm_omni.inputs import Lora
from vllm_omni.outputs import RequestFailed
from vllm_omni.seeds import chosen_seed
from vllm_omni.worlds.movement import world_pose

PATHS: Final = ("/v1/realtime/video", "/v1/realtime/video/")

_REMEMBERED_IDS: Final = 1024


@dataclass(frozen=True)
class _Media:
    """A chunk to send, which consists of a metadata message and the media bytes that follow it."""

    metadata: dict[str, Any]
    """Contents of the `video.chunk_metadata` message."""
    data: bytes | memoryview
    """MP4 fragment that contains the chunk's frames."""
    is_response: bool
    """Whether an interaction takes effect for the first time in this chunk. If so, the chunk should
    be sent immediately.
    """

    def __len__(self) -> int:
        return len(self.data)


class _FragmentRenderer:
    """Encodes a session's chunks as MP4 fragments, in order."""

    def __init__(self, fps: float, request_id: str) -> None:
        self._spec = EncoderSpec(codec="fmp4", fps=fps)
        self._request_id = request_id

    def __call__(self, chunk: FinishedChunk) -> list[_Media]:
        frames = chunk.stamped_frames(self._spec.fps)
        (part,) = chunk.encoders.encode(self._spec, frames)
        metadata = chunk_metadata(chunk, self._request_id, part.stamps, len(part.data))
        if part.mime_type is not None:
            metadata["mime_type"] = part.mime_type
        return [_Media(metadata, part.data, is_response=bool(metadata["started_event_ids"]))]


def chunk_metadata(
    chunk: FinishedChunk, request_id: str, stamps: Sequence[FrameStamp], num_bytes: int
) -> dict[str, Any]:
    """Return the contents of a chunk's `video.chunk_metadata` message.

    Args:
        chunk: The chunk.
        request_id: Stream id.
        stamps: The chunk's frame stamps.
        num_bytes: Size of the encoded frames in bytes.
    """
    progress: CommandProgress = chunk.controls.mark
    metadata: dict[str, Any] = {
        "type": "video.chunk_metadata",
        "request_id": request_id,
        "kind": "media",
        "num_frames": len(stamps),
        "byte_length": num_bytes,
        "generation_chunk_index": chunk.chunk_index,
        "first_frame": stamps[0].frame,
        "time_us": stamps[0].time_us,
        "started_event_ids": list(progress.started),
        "active_event_ids": list(progress.active),
        "completed_event_ids": list(progress.completed),
        **chunk.result.world_pose_fields,
    }
    if stamps[0].input_id is not None:
        metadata["input_id"] = stamps[0].input_id
    return metadata


class SessionFrame(msgspec.Struct):
    """A session's coordinate system. The session's position in the world may be unknown.

    Camera commands are relative to the start image. If a session starts with poses from its client,
    the model receives poses in the client's coordinates. If a session starts with actions and its
    world pose is known, the model receives poses in the world's coordinates, scaled to pose units.
    """

    unit_m: float
    """Length of a pose unit in metres."""
    start_44: np.ndarray | None = None
    """World pose of the start image in pose units. None: the pose is unknown."""
    first_44: np.ndarray | None = None
    """First pose of a session that starts with poses from its client. None: the session did not
    start with poses.
    """

    def of_session(self, poses_N44: np.ndarray, *, starts: bool) -> np.ndarray:
        """Return poses in the session's coordinates.

        Args:
            poses_N44: Poses relative to the start image.
            starts: Whether these are the session's first poses.
        """
        if starts:
            self.first_44 = poses_N44[0].astype(np.float64)
        if self.first_44 is not None or self.start_44 is None:
            return poses_N44
        return (self.start_44 @ poses_N44).astype(np.float32)

    def note(self, world_poses: Sequence[Sequence[float]]) -> None:
        """If the start image's world pose is not known yet, set it to the first of a chunk's world
        poses.
        """
        if self.start_44 is None:
            self.start_44 = self._pose_44(world_poses[0])

    def position_3(self, row: Sequence[float]) -> np.ndarray:
        """Return a world pose's position, converted to the coordinates that commands use."""
        assert self.start_44 is not None
        relative_44 = np.linalg.inv(self.start_44) @ self._pose_44(row)
        return (relative_44 if self.first_44 is None else self.first_44 @ relative_44)[:3, 3]

    def _pose_44(self, row: Sequence[float]) -> np.ndarray:
        pose_44 = world_pose(*row).numpy()
        pose_44[:3, 3] /= self.unit_m
        return pose_44


class CommandedState(msgspec.Struct, kw_only=True, tag="commanded"):
    """Stream controls that move to another server together with the session."""

    timed: PromptSchedule
    """Prompts with the times at which they take effect."""
    track: ControlTrack
    """Actions that are held or waiting for the next chunk."""
    poses: PoseTrack
    """Camera commands and the resulting camera pose."""
    frame: SessionFrame
    """Coordinate system of the camera commands."""
    new_prompt: tuple[str, str] | None = None
    """New prompt for the next chunk, and the id of the interaction that set it. None: there is no
    new prompt.
    """
    new_lora: tuple[list[Lora], str] | None = None
    """New LoRA adapters for the next chunk, and the id of the interaction that set them. None:
    there are no new adapters.
    """
    acting: tuple[str, ...] = ()
    """Ids of the interactions that were in effect in the last chunk."""
    replaced: list[str] = []
    """Ids of the interactions that have been replaced since the last chunk."""
    has_actions: bool = False
    """Whether the client has sent actions."""
    uses_poses: bool = False
    """Whether the client has sent camera commands."""
    input_id: str | None = None
    """Id of the newest interaction that has taken effect. None: no interaction has taken effect."""

    @classmethod
    def of_start(
        cls,
        start: protocol.StartMessage,
        script: ControlScript | ControlStates | None,
        info: StreamInfo,
    ) -> "CommandedState":
        """Return a new stream's initial controls.

        Args:
            start: The client's first message.
            script: Actions for the first chunks. None: the client sent no actions.
            info: Stream metadata.
        """
        state = cls(
            timed=PromptSchedule(start.extra_params.prompts, start.fps or info.fps),
            track=ControlTrack(info.actions),
            poses=PoseTrack(walks(info.actions), info.pitch_limit_degrees),
            frame=SessionFrame(1.0 if info.card is None else info.card.metres_per_unit),
            has_actions=script is not None,
        )
        if script is not None:
            state.track.apply([script])
        return state


class CommandedSource(LiveChunks):
    """Samples a client's interactions for each chunk.

    Args:
        state: The stream's controls.
        start: The client's first message.
        info: Stream metadata.
        size: Frame height and width in pixels.
        num_chunks: Number of remaining chunks. None: no limit.
        first_frame: Index within the session of the first frame that this source generates.
    """

    def __init__(
        self,
        state: CommandedState,
        start: protocol.StartMessage,
        info: StreamInfo,
        size: tuple[int, int],
        num_chunks: int | None,
        first_frame: int,
    ) -> None:
        self.steered = state
        self._prompt: str | None = None if info.actions.prompt == "none" else start.prompt
        self._lora = start.lora
        self._info, self.num_chunks, self._first_frame = info, num_chunks, first_frame
        # Commands do not change the field of view.
        self._intrinsics_4 = np.array(info.key_intrinsics(size[1], size[0]), np.float32)
        self._expected: deque[np.ndarray | None] = deque()

    def state(self) -> bytes:
        return encode_state(self.steered)

    def check_velocity(self, command: CameraCommand) -> None:
        """Check a velocity command.

        Raises:
            EndpointError: The velocity exceeds the range of the model's axes.
        """
        if not self.steered.poses.walks or command.mode != "velocity":
            return
        try:
            check_frame(
                self._info.actions,
                ActionFrame(axes=command.walk_axes(self._info.key_step)),
                "the velocity",
            )
        except RequestFailed as failure:
            raise EndpointError("invalid_camera", failure.message, param="translation") from None

    def take_interaction(self, interaction: protocol.InteractionMessage) -> None:
        """Apply an interaction to the next chunk.

        Raises:
            EndpointError: `too_many_events`, in which case no part of the interaction is applied.
        """
        if interaction.actions is not None:
            try:
                self.steered.replaced += map(
                    str, self.steered.track.apply([interaction.actions], interaction.event_id)
                )
            except TooManyEvents:
                raise EndpointError(
                    "too_many_events", f"{MAX_WAITING} motion events wait for the next chunk"
                ) from None
            self.steered.has_actions = True
        if interaction.prompt is not None:
            self.steered.new_prompt = (interaction.prompt, interaction.event_id)
        if interaction.lora is not None:
            self.steered.new_lora = (interaction.lora, interaction.event_id)
        if interaction.command is not None:
            self.steered.poses.push(interaction.command)
            self.steered.uses_poses = True

    def _sample_actions(self, num_latents: int) -> tuple[list[ActionEntry], CommandProgress]:
        """Return the actions for each latent frame, and the ids of the events that start, remain
        active or end in the chunk.
        """
        sample = self.steered.track.sample(num_latents)
        started, active = (
            [str(event_id) for event_id in ids] for ids in (sample.applied, sample.active)
        )
        state = self.steered
        ended = [event_id for event_id in [*state.acting, *started] if event_id not in active]
        progress = CommandProgress(tuple(started), tuple(active), (*state.replaced, *ended))
        state.acting, state.replaced = tuple(active), []
        return sample.actions or [[] for _ in range(num_latents)], progress

    def sample(self, span: ChunkSpan) -> ChunkControls:
        state = self.steered
        progress, camera, actions = CommandProgress(), None, None
        velocity = state.poses.velocity if state.poses.walks else None
        if state.uses_poses:
            poses_N44, progress = state.poses.sample(span.num_frames, span.num_latents)
        if velocity is not None:
            step = as_entry(ActionFrame(axes=velocity.walk_axes(self._info.key_step)))
            actions = [step] * span.num_latents
        elif state.uses_poses:
            poses_N44 = state.frame.of_session(poses_N44, starts=span.chunk_index == 0)
            camera = CameraPath(poses_N44, np.tile(self._intrinsics_4, (span.num_frames, 1)))
        elif self._info.actions.has_controls:
            actions, progress = self._sample_actions(span.num_latents)
        self._expected.append(None if velocity is None else state.poses.position_3)
        frame = self._first_frame + span.first_frame
        prompt = state.timed.take_prompt(span.chunk_index, frame)
        if span.chunk_index == 0:
            prompt = prompt or self._prompt
        elif state.new_prompt is not None:
            (prompt, event_id), state.new_prompt = state.new_prompt, None
            done = (*progress.completed, event_id)
            progress = CommandProgress(
                (*progress.started, event_id), progress.active, tuple(dict.fromkeys(done))
            )
        lora = self._lora if span.chunk_index == 0 else None
        if state.new_lora is not None:
            (lora, event_id), state.new_lora = state.new_lora, None
            started, ended = (
                dict.fromkeys((*ids, event_id)) for ids in (progress.started, progress.completed)
            )
            progress = CommandProgress(tuple(started), progress.active, tuple(ended))
        if progress.started:
            state.input_id = progress.started[-1]
        return ChunkControls(
            actions=actions,
            camera=camera,
            prompt=prompt,
            lora=lora,
            input_id=state.input_id,
            mark=progress,
        )

    def note_result(self, meta: Mapping[str, Any]) -> None:
        """If a wall in the world has stopped a velocity command, correct the camera position."""
        expected_3 = self._expected.popleft()
        world_poses = meta.get(WORLD_POSES)
        if world_poses is None:
            return
        self.steered.frame.note(world_poses)
        if expected_3 is None:
            return
        off_3 = self.steered.frame.position_3(world_poses[-1]) - expected_3
        self.steered.poses.shift(off_3)
        self._expected = deque(
            None if later_3 is None else later_3 + off_3 for later_3 in self._expected
        )


class VideoClient(LiveClient):
    """Handler for one client. Subclasses change how frames are encoded and sent."""

    endpoint = "realtime/video"
    format: str = protocol.FORMAT
    """Frame format, as reported in `video.start`."""
    source_class: type[CommandedSource] = CommandedSource
    """Class of the source that samples the client's interactions."""

    def __init__(self, manager: SessionManager, websocket: WebSocket) -> None:
        super().__init__(manager, websocket)
        self._request_id: str | None = None
        self.source: CommandedSource | None = None
        self._follows_moves = False
        self._binaries = TextFrames()
        self._event_ids: OrderedDict[str, None] = OrderedDict()
        self._chunks = 0

    # -- messages in -------------------------------------------------------------------------------

    async def start_now(self) -> None:
        """Wait for `session.start`, and start the session. If the message is invalid, the
        connection ends.
        """
        data = await self.receive_first("Timeout waiting for session.start")
        try:
            if not isinstance(data, str):
                raise EndpointError("invalid_frame", "session.start must be a JSON text message")
            value = protocol.decode(data, protocol.max_start_bytes(self.limits), "session.start")
            await self._start(protocol.parse_start(value, self.limits, self.info.actions))
        except EndpointError as error:
            if error.code != "moved":
                error.close = error.close or WebSocketCloseCode.POLICY
            raise

    @property
    def follows_moves(self) -> bool:
        return self._follows_moves

    async def _start(self, start: protocol.StartMessage) -> None:
        info, start = self.info, msgspec.structs.replace(start, seed=chosen_seed(start.seed))
        served = (info.model, *self.manager.adapters())
        if start.model is not None and start.model not in served:
            names = ", ".join(f"'{name}'" for name in served)
            raise EndpointError(
                "invalid_request", f"Model mismatch: this server runs {names}", param="model"
            )
        start = msgspec.structs.replace(
            start, lora=self.manager.with_adapter(start.model, start.lora)
        )
        self._follows_moves = start.extra_params.follow_moves
        num_chunks = self._num_chunks(start.num_frames)
        script = start.script(info.actions)
        if script is not None and not info.actions.has_controls:
            raise EndpointError(
                "unsupported", "the served model takes no actions", param="extra_params"
            )
        for prompt in (start.prompt, *(timed.prompt for timed in start.extra_params.prompts)):
            info.check_prompt(prompt)
        if start.extra_params.session_id is not None:
            session, state = self.take_stream(start.extra_params.session_id, CommandedState)
            first = SessionStart(height=session.height, width=session.width)
        else:
            first = await self._first(start)
            try:
                session = await self.open_session()
            except EndpointError as error:
                error.close = error.close or WebSocketCloseCode.CAPACITY
                raise
            state = CommandedState.of_start(start, script, info)
        assert first.height is not None
        assert first.width is not None
        self._request_id = request_id = f"video_stream-{uuid.uuid4().hex}"
        fps = start.fps or info.fps
        if start.extra_params.pace_to_media_time:
            self.clock = MediaClock(fps)
        config = {
            "model": info.model,
            "prompt": start.prompt,
            "width": first.width,
            "height": first.height,
            "fps": fps,
        }
        config |= {
            "num_frames": start.num_frames,
            "seed": start.seed if session.seed is None else session.seed,
            "session_id": session.session_id,
        }
        await self._send(
            {
                "type": "video.start",
                "request_id": request_id,
                "format": self.format,
                "config": config,
            }
        )
        if num_chunks is not None:
            num_chunks -= session.next_chunk
        self.source = self.source_class(
            state, start, info, (first.height, first.width), num_chunks, session.next_frame
        )
        start_pose = None if session.started else start.extra_params.start_pose
        self.start_job(
            SessionJob(
                request_id=request_id,
                source=self.source,
                start=first,
                options={} if start_pose is None else start_pose.as_option(),
                replies=ReplyOptions(
                    render=self.renderer(fps, request_id),
                    keep=False,
                    unsent_chunks=UNSENT_CHUNKS,
                    fps=start.fps,
                ),
            )
        )

    async def _first(self, start: protocol.StartMessage) -> SessionStart:
        """Return the parameters for starting a new session."""
        info, size = self.info, (start.height or self.info.height, start.width or self.info.width)
        info.check_size(*size)
        info.check_image(start.image_reference is not None, "image_reference")
        info.check_images(start.images)
        image: np.ndarray | None = None
        if start.image_reference is not None:
            image = await self.manager.off_loop(
                load_image, start.image_reference.image_url, *size, self.limits
            )
        return SessionStart(
            load_image=None if image is None else lambda height, width: image,
            images={name: given.image_url for name, given in start.images.items()},
            seed=start.seed,
            height=size[0],
            width=size[1],
        )

    def _num_chunks(self, num_frames: int | None) -> int | None:
        if num_frames is None:
            return None
        first, later = self.info.first_chunk_frames, self.info.chunk_frames
        chunks, rest = divmod(num_frames - first, later)
        if rest or chunks < 0:
            raise EndpointError(
                "invalid_request",
                f"Invalid session.start: num_frames must be {first} + {later}k, got {num_frames}",
                param="num_frames",
            )
        return chunks + 1

    async def handle_message(self, data: bytes | str) -> None:
        event_id: str | None = None
        try:
            if not isinstance(data, str):
                raise self._binaries.refuse("WebSocket messages must be JSON text")
            try:
                value = protocol.decode(data, protocol.MAX_CONTROL_BYTES, "message")
            except EndpointError as error:
                raise (
                    self.connection.strike(error) if error.code == "invalid_json" else error
                ) from None
            kind = value.get("type")
            if kind == "session.ping":
                await self._send({"type": "session.pong"})
            elif kind == "session.stop":
                await self._stop()
            elif kind == "session.interaction":
                interaction = protocol.parse_interaction(value, self.limits, self.info.actions)
                event_id = interaction.event_id
                async with self.steering() as is_here:
                    if is_here:  # otherwise, the client sends the message to the new server
                        await self._interact(interaction)
            else:
                raise EndpointError("invalid_request", "Unknown message type", param="type")
        except EndpointError as error:
            if error.close is not None:
                raise
            await self._send_event(error, event_id)

    async def _interact(self, interaction: protocol.InteractionMessage) -> None:
        assert self.source is not None
        if interaction.event_id in self._event_ids:
            raise EndpointError("event_id_conflict", "event_id_conflict", param="event_id")
        self.info.check_prompt(interaction.prompt)
        if interaction.command is not None and not self.info.actions.pose:
            raise EndpointError("interaction_failed", "the served model takes no camera")
        if interaction.command is not None and self.source.steered.has_actions:
            raise EndpointError(
                "interaction_failed", "actions steer this session; start one without for the camera"
            )
        if interaction.command is not None:
            self.source.check_velocity(interaction.command)
        if interaction.actions is not None and self.source.steered.uses_poses:
            raise EndpointError(
                "interaction_failed",
                "camera commands steer this session; start another to use actions",
            )
        if interaction.actions is not None and not self.info.actions.has_controls:
            raise EndpointError(
                "invalid_action", f"the served model takes {self.info.actions.describe()}"
            )
        self._event_ids[interaction.event_id] = None
        while len(self._event_ids) > _REMEMBERED_IDS:
            self._event_ids.popitem(last=False)
        reply = {"type": "session.interaction.queued", "request_id": self._request_id}
        await self._send({**reply, "event_id": interaction.event_id})
        # The receipt has already been sent, because clients expect `queued` before any effect.
        self.source.take_interaction(interaction)

    async def _stop(self) -> None:
        await self.stop()
        await self._finish(stopped=True)

    # -- messages out ------------------------------------------------------------------------------

    def renderer(self, fps: float, request_id: str) -> Callable[[FinishedChunk], Sequence[Sized]]:
        """Return the renderer that encodes the stream's chunks.

        Args:
            fps: Playback rate in frames per second.
            request_id: Stream id.
        """
        return _FragmentRenderer(fps, request_id)

    async def deliver(self, payload: Any) -> None:
        await self.wait_for_media_time(payload.metadata["num_frames"], payload.is_response)
        await self.connection.send(self.next_metadata(payload.metadata), payload.data)

    def next_metadata(self, metadata: dict[str, Any]) -> str:
        """Return the metadata message for the next chunk to send."""
        message = _json({**metadata, "transport_chunk_index": self._chunks})
        self._chunks += 1
        return message

    async def complete(self) -> None:
        await self._finish(stopped=False)

    async def _finish(self, *, stopped: bool) -> None:
        done = {
            "type": "session.done",
            "request_id": self._request_id,
            "chunks": self._chunks,
            "stopped": stopped,
        }
        await self._send(done)
        await self.connection.close(
            WebSocketCloseCode.NORMAL, "stopped by the client" if stopped else "generation complete"
        )

    async def send_error(self, error: EndpointError) -> None:
        if error.code != "moved":
            await self._send_event(error, None)
            return
        session_id = None if self.session is None else self.session.session_id
        moved = {"type": "session.moved", "session_id": session_id, "message": error.message}
        moved |= {"request_id": self._request_id, **error.details}
        await self._send({key: value for key, value in moved.items() if value is not None})

    async def _send_event(self, error: EndpointError, event_id: str | None) -> None:
        message = {
            "type": "error",
            "message": error.message,
            "code": error.code,
            "request_id": self._request_id,
            "event_id": event_id,
            "retry_after_ms": error.details.get("retry_after_ms"),
        }
        await self._send({key: value for key, value in message.items() if value is not None})

    async def _send(self, message: dict[str, Any]) -> None:
        await self.connection.send(_json(message))


def _json(message: dict[str, Any]) -> str:
    return msgspec.json.encode(message).decode()


def video_endpoint(manager: SessionManager) -> RealtimeEndpoint:
    """Create the endpoint that implements vLLM-Omni's realtime video protocol."""
    return RealtimeEndpoint(manager, VideoClient)
