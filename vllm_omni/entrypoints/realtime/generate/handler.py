# SPDX-License-Identifier: Apache-2.0
"""The `/v1/realtime_video/generate` endpoint, which implements SGLang's wire protocol for live,
steered video.

SGLang's clients and web UI work without changes. A client that names `extensions` in `init` can use
additional messages, such as receipts, credit, pause, reset and ping. Other clients never receive
additional messages because they would interpret an unknown message as their next frame.

The endpoint differs from SGLang's in four ways that require no changes to clients: it supports
multiple concurrent sessions, sends a close frame at the end of every connection, disconnects slow
readers, and aborts the running chunk when a client disconnects.
"""

import time
import uuid
from typing import Any, Final

import msgspec
import numpy as np
from starlette.websockets import WebSocket

from vllm_omni.entrypoints.errors import EndpointError, WebSocketCloseCode
from vllm_omni.entrypoints.realtime.chunk_source import ChunkControls, ChunkSpan, LiveChunks
from vllm_omni.entrypoints.realtime.connection.codec import CodecError, decode
from vllm_omni.entrypoints.realtime.connection.images import load_image
from vllm_omni.entrypoints.realtime.connection.live_client import (
    UNSENT_CHUNKS,
    ChunkThrottle,
    LiveClient,
    MediaClock,
    RealtimeEndpoint,
)
from vllm_omni.entrypoints.realtime.controls.analog_track import MAX_WAITING, EventId
from vllm_omni.entrypoints.realtime.controls.control_track import (
    ControlTrack,
    PromptChange,
    TooManyEvents,
)
from vllm_omni.entrypoints.realtime.controls.stream_state import encode_state
from vllm_omni.entrypoints.realtime.encoding.session_encoders import EncoderSpec
from vllm_omni.entrypoints.realtime.generate import protocol
from vllm_omni.entrypoints.realtime.generate.frames import ChunkReport, FrameBatcher, FrameMessage
from vllm_omni.entrypoints.realtime.sessions.run import ReplyOptions, SessionJob, SessionStart
from vllm_omni.entrypoints.realtime.sessions.session import Session
from vllm_omni.entrypoints.realtime.sessions.session_manager import SessionManager
from vllm_omni.entrypoints.timed_prompts import PromptSchedule
from vllm_omni.seeds import chosen_seed

PATHS: Final = ("/v1/realtime_video/generate", "/v1/realtime_video/generate/")

_OFF_LOOP_BYTES: Final = 64 * 1024

_pack = msgspec.msgpack.Encoder().encode


class _KeyedState(msgspec.Struct, kw_only=True, tag="keyed"):
    """Stream controls that move to another server together with the session."""

    timed: PromptSchedule
    """Prompts with the times at which they take effect."""
    track: ControlTrack
    """Controls that are waiting for the next chunk."""
    paused: bool = False
    """Whether the client has paused the stream."""
    input_id: EventId | None = None
    """Id of the newest event that has taken effect. None: no event has taken effect."""


class _KeyedSource(LiveChunks):
    """Samples a client's controls for each chunk.

    Args:
        state: The stream's controls.
        init: The client's first message.
        prompt: Prompt from `init`. None: the model takes no prompt.
        throttle: Pause state and credit of the stream.
        session: Session that the stream's chunks belong to.
    """

    def __init__(
        self,
        state: _KeyedState,
        init: protocol.InitMessage,
        prompt: str | None,
        throttle: ChunkThrottle,
        session: Session,
    ) -> None:
        self._state, self._throttle, self._first_frame = state, throttle, session.next_frame
        self._prompt, self._lora = prompt, init.lora
        if init.max_chunks is not None:
            self.num_chunks = init.max_chunks - session.next_chunk
        self._takes_actions = state.track.space.has_controls

    @property
    def ready(self) -> bool:
        return self._throttle.ready

    async def wait_until_ready(self) -> None:
        await self._throttle.wait_until_ready()

    def state(self) -> bytes:
        self._state.paused = self._throttle.paused
        return encode_state(self._state)

    def sample(self, span: ChunkSpan) -> ChunkControls:
        state = self._state
        self._throttle.take_chunk()
        sample = state.track.sample(span.num_latents, with_prompt=span.chunk_index > 0)
        actions = (
            sample.actions if sample.actions is not None else [[] for _ in range(span.num_latents)]
        )
        timed = state.timed.take_prompt(span.chunk_index, self._first_frame + span.first_frame)
        own = self._prompt if span.chunk_index == 0 else None
        if sample.is_new:
            state.input_id = sample.event_id
        return ChunkControls(
            actions=actions if self._takes_actions else None,
            prompt=sample.prompt or timed or own,
            lora=sample.lora if sample.lora is not None or span.chunk_index else self._lora,
            input_id=state.input_id,
            mark=sample,
        )


class _Client(LiveClient):
    endpoint = "realtime_video/generate"

    def __init__(self, manager: SessionManager, websocket: WebSocket) -> None:
        super().__init__(manager, websocket)
        self._init: protocol.InitMessage | None = None
        self._granted: tuple[str, ...] = ()
        self._events = protocol.EventReader(self.limits, self.info.actions)
        self._size = (0, 0)
        self._image: np.ndarray | None = None
        self._track = ControlTrack(self.info.actions)
        self._throttle = ChunkThrottle()
        self._fps = self.info.fps
        self._sent_bytes = 0
        self._write_ms = self._throttle_ms = 0.0

    @property
    def is_active(self) -> bool:
        return super().is_active and self._throttle.ready

    # -- messages in -------------------------------------------------------------------------------

    async def handle_message(self, data: bytes | str) -> None:
        content = protocol.INVALID_INIT if self._init is None else protocol.INVALID_EVENT
        event_id: int | None = None
        granted = self._granted
        try:
            if isinstance(data, str):
                raise self._texts.refuse("send binary frames with msgpack maps, not text")
            value = await self._decode(data)
            if self._init is None:
                granted = protocol.named_extensions(value)
                await self._start_now(value)
            elif (extra := protocol.parse_extra(value, self._granted)) is not None:
                await self._take_extra(extra)
            else:
                event_id = _event_id(value)
                async with self.steering() as is_here:
                    if is_here:  # otherwise, the client sends the event to the new server
                        await self._take_event(self._events.read_event(value))
        except EndpointError as error:
            if error.close is not None or error.code == "moved":
                raise
            if event_id is not None and self.session is not None:
                await self._acknowledge("rejected", event_id, reason=error.code)
            await self._send(protocol.error_reply(error, content, granted))

    async def _decode(self, data: bytes) -> Any:
        try:
            decoded = (
                await self.manager.off_loop(decode, data)
                if len(data) >= _OFF_LOOP_BYTES
                else decode(data)
            )
        except CodecError as error:
            raise self.connection.undecodable(error) from None
        self.connection.count_values(decoded.num_values)
        return decoded.value

    @property
    def follows_moves(self) -> bool:
        return "moves" in self._granted

    async def _start_now(self, value: Any) -> None:
        """Start the session that an `init` message describes. After an error, the client may send
        another `init`.
        """
        init = protocol.parse_init(value, self.limits, self.info.actions)
        continues = init.session_id is not None and "moves" in init.granted
        lora = self.manager.with_adapter(init.model, init.lora)
        init = msgspec.structs.replace(init, seed=chosen_seed(init.seed), lora=lora)
        for prompt in (init.prompt, *(timed.prompt for timed in init.prompts)):
            self.info.check_prompt(prompt)
        size = init.height_width() or (self.info.height, self.info.width)
        self.info.check_size(*size)
        if not continues:
            self.info.check_image(init.first_frame is not None, "first_frame")
            self.info.check_images(init.images)
        if init.first_frame is not None:
            self._image = await self.manager.off_loop(
                load_image, init.first_frame, *size, self.limits
            )
        self._granted = init.granted  # set before a refusal, whose fields depend on the extensions
        if continues:
            assert init.session_id is not None
            session, state = self.take_stream(init.session_id, _KeyedState)
        else:
            session, state = await self._open(init), self._first_state(init)
        self._init, self._size = init, size
        self._events = protocol.EventReader(self.limits, self.info.actions, init.granted)
        if "credit" in self._granted:
            self._throttle.credit = 0
        if self._granted:
            await self._send(
                {
                    "type": "session",
                    "protocol": 1,
                    "session_id": session.session_id,
                    "granted": list(self._granted),
                    "seed": init.seed if session.seed is None else session.seed,
                    "limits": {
                        "max_image_bytes": min(self.limits.max_image_bytes, (1 << 32) - 1),
                        "max_prompt_chars": self.limits.max_prompt_chars,
                        "max_messages_per_s": self.limits.max_messages_per_s,
                    },
                    "server": {"name": "vllm-omni", "model": self.info.model},
                    **(
                        {"actions": self.info.actions.as_json()}
                        if "actions" in self._granted
                        else {}
                    ),
                }
            )
        self._start(session, state, init)

    async def _open(self, init: protocol.InitMessage) -> Session:
        """Open a new session. If it is refused, the connection is closed."""
        try:
            return await self.open_session(uuid.uuid4().hex)
        except EndpointError as error:
            error.close = error.close or (
                WebSocketCloseCode.CAPACITY if init.granted else WebSocketCloseCode.POLICY
            )
            raise

    def _first_state(self, init: protocol.InitMessage) -> _KeyedState:
        """Return a stream's initial controls."""
        timed = PromptSchedule(init.prompts, init.fps or self.info.fps)
        state = _KeyedState(timed=timed, track=ControlTrack(self.info.actions))
        script = init.script(self.info.actions)
        if script is not None:
            state.track.apply([script])
        return state

    def _start(self, session: Session, state: _KeyedState, init: protocol.InitMessage) -> None:
        """Start generating chunks, from the session's next chunk on.

        Args:
            session: The session.
            state: The stream's controls.
            init: The client's first message.
        """
        self._track, self._fps = state.track, init.fps or self.info.fps
        self._throttle.update(paused=state.paused)
        if init.realtime_output_pacing:
            self.clock = MediaClock(self._fps)
        self.start_job(self._job(session, state, init))

    def _job(self, session: Session, state: _KeyedState, init: protocol.InitMessage) -> SessionJob:
        kind = init.codec
        image = self._image
        window_frames, sink_frames = init.window(self.info.window_frames, self.info.sink_frames)
        prompt = None if self.info.actions.prompt == "none" else init.prompt
        start, options = SessionStart(), {}
        if not session.started:
            start = SessionStart(
                load_image=None if image is None else lambda height, width: image,
                images=init.images,
                seed=init.seed,
                height=self._size[0],
                width=self._size[1],
                window_frames=window_frames,
                sink_frames=sink_frames,
            )
            options = {} if init.start_pose is None else init.start_pose.as_option()
        return SessionJob(
            request_id=uuid.uuid4().hex,
            source=_KeyedSource(state, init, prompt, self._throttle, session),
            start=start,
            options=options,
            replies=ReplyOptions(
                render=FrameBatcher(
                    EncoderSpec(
                        codec=kind,
                        fps=self._fps,
                        quality=init.output_compression,
                        max_width=init.realtime_preview_max_width,
                        full_chroma=True,
                    )
                ),
                inline=kind == "raw",
                keep=False,
                unsent_chunks=UNSENT_CHUNKS,
                fps=init.fps,
            ),
        )

    async def _take_event(self, event: protocol.EventMessage) -> None:
        if self._track.is_repeated(event.event_id):
            return
        for update in event.updates:
            if isinstance(update, PromptChange):
                self.info.check_prompt(update.text)
        try:
            superseded = self._track.apply(event.updates, event.event_id)
        except TooManyEvents:
            raise EndpointError(
                "too_many_events", f"{MAX_WAITING} motion events wait for the next chunk"
            ) from None
        for event_id in superseded:
            await self._acknowledge("superseded", event_id)
        if event.event_id is not None:
            await self._acknowledge("accepted", event.event_id)

    # -- messages out ------------------------------------------------------------------------------

    async def deliver(self, payload: FrameMessage) -> None:
        if payload.is_first:
            self._sent_bytes, self._write_ms, self._throttle_ms = 0, 0.0, 0.0
            self._throttle_ms = await self.wait_for_media_time(
                payload.chunk_frames, payload.is_new_event
            )
        self._sent_bytes += payload.num_bytes
        last = [] if payload.report is None else self._after_chunk(payload.report)
        started_s = time.perf_counter()
        await self.connection.send(*payload.parts, *last)
        self._write_ms += (time.perf_counter() - started_s) * 1e3
        if payload.report is not None and self.session is not None:
            playing_s = payload.chunk_frames / self._fps
            self.session.encoders.note_transfer(self._write_ms / 1e3, playing_s)

    def _after_chunk(self, report: ChunkReport) -> list[bytes]:
        """Return the messages to send in the same write as a chunk's last frames."""
        messages = [self._stats(report)]
        for event_id in report.sample.applied if "receipts" in self._granted else ():
            applied = {"type": "event_applied", "event_id": event_id}
            messages.append(
                _pack({**applied, "chunk_index": report.chunk_index, "frame_offset": 0})
            )
        if "world_poses" in self._granted and report.world_pose_fields:
            messages.append(
                _pack(
                    {
                        "type": "world_poses",
                        "chunk_index": report.chunk_index,
                        **report.world_pose_fields,
                    }
                )
            )
        return messages

    def _stats(self, report: ChunkReport) -> bytes:
        """Return the `chunk_stats` message. All its numbers are non-negative integers, and times
        are rounded to milliseconds.

        The write time excludes the last frame message of the chunk because that message is sent in
        the same write as this one.
        """
        forward_ms, build_ms, throttle_ms, write_ms = (
            report.forward_ms,
            report.build_ms,
            self._throttle_ms,
            self._write_ms,
        )
        stats = {
            "type": "chunk_stats",
            "session_id": report.session_id,
            "request_id": report.request_id,
            "chunk_index": report.chunk_index,
            "event_id": report.sample.event_id,
            "request_prepare_ms": 0,
            "scheduler_forward_ms": int(forward_ms + 0.5),
            "pace_wait_ms": int(throttle_ms + 0.5),
            "header_write_ms": 0,
            "raw_payload_build_ms": int(build_ms + 0.5),
            "raw_write_ms": int(write_ms + 0.5),
            "ws_write_ms": int(write_ms + 0.5),
            "chunk_total_ms": int(forward_ms + build_ms + throttle_ms + write_ms + 0.5),
            "num_batches": report.num_batches,
            "num_frames": report.num_frames,
            "raw_bytes": report.raw_bytes,
            "ws_payload_bytes": self._sent_bytes,
            "content_type": report.content_type,
        }
        return _pack(stats)

    async def complete(self) -> None:
        await self.connection.close(WebSocketCloseCode.NORMAL, "generation complete")

    async def send_error(self, error: EndpointError) -> None:
        # Send no error message, because the close frame states the reason and these clients would
        # show the message permanently.
        if error.close is WebSocketCloseCode.IDLE:
            return
        if error.code == "moved":
            session_id = None if self.session is None else self.session.session_id
            moved = {"type": "moved", "session_id": session_id, "message": error.message}
            moved |= error.details
            await self._send({key: value for key, value in moved.items() if value is not None})
            return
        if error.code in ("capacity", "session_limit", "quota_exceeded"):
            content = protocol.BUSY
        elif error.close is WebSocketCloseCode.INTERNAL or (
            self.session is not None
            and error.close not in (WebSocketCloseCode.UNSUPPORTED_DATA, WebSocketCloseCode.POLICY)
        ):
            content = f"error during generate loop: {error.message}"
        else:
            content = protocol.INVALID_INIT if self._init is None else protocol.INVALID_EVENT
        await self._send(protocol.error_reply(error, content, self._granted))

    async def _send(self, message: dict[str, Any]) -> None:
        await self.connection.send(_pack(message))

    # -- extensions --------------------------------------------------------------------------------

    async def _acknowledge(self, status: str, event_id: EventId, reason: str | None = None) -> None:
        if "receipts" in self._granted:
            message: dict[str, Any] = {"type": "event_ack", "event_id": event_id, "status": status}
            await self._send(message if reason is None else {**message, "reason": reason})

    async def _take_extra(self, extra: protocol.Extra) -> None:
        match extra:
            case protocol.KeyFrameMessage():
                if self.session is not None:
                    self.session.encoders.request_key_frame()
            case protocol.PingMessage(t=sent):
                await self._send({"type": "pong", "t": sent, "server_ms": time.time() * 1e3})
            case protocol.CreditMessage(chunks=chunks):
                self._throttle.update(more_credit=chunks)
            case protocol.ControlMessage(op="pause" | "resume" as op):
                async with self.steering() as is_here:
                    if not is_here:
                        return
                    self._throttle.update(paused=op == "pause")
                    result = {"type": "control_result", "id": extra.id, "ok": True, "op": op}
                    await self._send(result)
            case protocol.ControlMessage(op="stop"):
                await self._send(
                    {"type": "control_result", "id": extra.id, "ok": True, "op": "stop"}
                )
                await self.stop()
                await self.connection.close(WebSocketCloseCode.NORMAL, "stopped by the client")
            case protocol.ControlMessage():
                await self._restart(extra)

    async def _restart(self, control: protocol.ControlMessage) -> None:
        """Restart the stream with its original `init`. The controls are cleared, and the first
        prompt applies again.
        """
        assert self._init is not None
        await self.stop()
        session = await self.open_session(uuid.uuid4().hex)
        reply = {"type": "control_result", "id": control.id, "ok": True, "op": "reset"}
        await self._send({**reply, "session_id": session.session_id})
        self._start(session, self._first_state(self._init), self._init)


def _event_id(value: Any) -> int | None:
    """Return a refused event's id, or None if the event has no valid id."""
    event_id = value.get("event_id") if isinstance(value, dict) else None
    return event_id if type(event_id) is int and 0 <= event_id < 1 << 32 else None


def generate_endpoint(manager: SessionManager) -> RealtimeEndpoint:
    """Create the endpoint that implements SGLang's protocol."""
    return RealtimeEndpoint(manager, _Client)
