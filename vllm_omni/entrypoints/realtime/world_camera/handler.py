# SPDX-License-Identifier: Apache-2.0
"""The `/v1/realtime/world/camera` endpoint, which receives msgpack messages and sends video chunks.

The endpoint sends `hello`, converts messages to `SessionJob`s, follows their runs, and replies in
the client's array encoding. Each connection has one task that receives messages and one task per
request, so a disconnect, a `reset` or a `ping` is processed immediately.
"""

import asyncio
import contextlib
import hashlib
import logging
import time
import uuid
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import numpy as np
from starlette.websockets import WebSocket

from vllm_omni.entrypoints.errors import ClientDisconnected, EndpointError, WebSocketCloseCode
from vllm_omni.entrypoints.realtime.chunk_source import PlannedChunks
from vllm_omni.entrypoints.realtime.connection.codec import (
    CodecError,
    DecodedMessage,
    MessageDialect,
    decode,
    encode,
)
from vllm_omni.entrypoints.realtime.connection.images import load_image
from vllm_omni.entrypoints.realtime.connection.live_client import (
    ConnectionHandler,
    RealtimeEndpoint,
)
from vllm_omni.entrypoints.realtime.sessions.run import (
    ReplyOptions,
    SessionJob,
    SessionRun,
    SessionStart,
)
from vllm_omni.entrypoints.realtime.sessions.session import Session, new_session_id
from vllm_omni.entrypoints.realtime.sessions.session_host import SessionKey
from vllm_omni.entrypoints.realtime.sessions.session_manager import SessionManager
from vllm_omni.entrypoints.realtime.world_camera import protocol
from vllm_omni.entrypoints.realtime.world_camera.frames import FrameRenderer
from vllm_omni.entrypoints.telemetry.metrics import endpoint_metrics
from vllm_omni.runtime import log_context

logger = logging.getLogger("vllm." + __name__)

PATHS: Final = ("/v1/realtime/world/camera", "/v1/realtime/world/camera/")
"""The endpoint's paths. Both paths are routed because WebSocket clients do not follow redirects."""

_OFF_LOOP_BYTES: Final = 64 * 1024  # messages of this size and above are decoded on a worker thread


def world_camera_endpoint(manager: SessionManager, max_message_bytes: int) -> RealtimeEndpoint:
    """Create the world camera endpoint.

    Args:
        manager: Sessions of this process.
        max_message_bytes: Maximum size of a WebSocket message in bytes, which `hello` reports.
    """
    return RealtimeEndpoint(manager, partial(_Client, max_message_bytes=max_message_bytes))


class _Client(ConnectionHandler):
    """Handler for one connection. It runs each request in a separate task."""

    endpoint = "realtime/world/camera"
    subprotocol = protocol.SUBPROTOCOL

    def __init__(
        self, manager: SessionManager, websocket: WebSocket, max_message_bytes: int
    ) -> None:
        super().__init__(manager, websocket)
        self._max_message_bytes = max_message_bytes
        self._own_session_id = new_session_id(manager.server_name)
        self._used: set[SessionKey] = set()
        self._requests: set[asyncio.Task[None]] = set()
        self._endings: weakref.WeakSet[asyncio.Task[None]] = weakref.WeakSet()
        """Tasks in `_requests` that free a session and may therefore outlive the connection."""

    @property
    def is_active(self) -> bool:
        return bool(self._requests)

    def _log_end(self, seconds: float) -> None:
        with log_context.bound(
            session_id=",".join(session_id for _, session_id in self._used) or None
        ):
            super()._log_end(seconds)

    async def start_now(self) -> None:
        """Send `hello`, the first message to every client."""
        info = self.info
        if not info.actions.is_steered:
            raise EndpointError(
                "unsupported",
                "the served model takes neither a camera nor actions",
                close=WebSocketCloseCode.POLICY,
            )
        hello = protocol.hello(info, self.limits, self._own_session_id, self._max_message_bytes)
        await self._send(hello)

    async def send_error(self, error: EndpointError) -> None:
        await self._send(protocol.error_message(error))

    async def stop(self) -> None:
        """Cancel this client's runs, but retain its sessions so that it can reconnect."""
        requests = list(self._requests)
        for task in self._requests.difference(self._endings):
            task.cancel()
        if requests:
            await asyncio.wait(requests)
        for key in self._used:
            session = self.manager.find(key)
            if session is not None:
                session.connections.discard(self)
                if self.connection.is_broken:
                    self.manager.await_reconnection(session)

    @property
    def follows_moves(self) -> bool:
        return True

    async def session_moved(self, session: Session) -> None:
        """Send `moved`, unless one of this client's requests ends with that message."""
        if any(run.is_followed_by(self) for run in session.delivery_log.runs.values()):
            return
        assert session.destination is not None
        await self._refuse(session.destination.as_error(), session_id=session.session_id)

    async def superseded(self) -> None:
        """Close this connection because another connection has resumed one of its sessions."""
        await self.connection.close(
            WebSocketCloseCode.SUPERSEDED, "another connection took this session over"
        )

    # -- messages in -------------------------------------------------------------------------------

    async def handle_message(self, data: bytes | str) -> None:
        """Decode a message, and start the corresponding work. An invalid message is refused but
        does not end the connection.
        """
        request_id: str | None = None
        try:
            if isinstance(data, str):
                raise self._texts.refuse("send binary frames with msgpack maps, not text")
            decoded, digest = await self._decode(data)
            self.connection.count_values(decoded.num_values)
            if isinstance(decoded.value, dict) and isinstance(decoded.value.get("request_id"), str):
                request_id = decoded.value["request_id"][:128]
            self._start(protocol.parse(decoded.value, self.limits), decoded.dialect, digest)
        except EndpointError as error:
            await self._refuse(error, request_id)

    async def _decode(self, data: bytes) -> tuple[DecodedMessage, bytes]:
        """Decode a message, and return it with a digest of its bytes. Large messages are decoded on
        a worker thread.
        """

        def work() -> tuple[DecodedMessage, bytes]:
            return decode(data), hashlib.blake2b(data, digest_size=16).digest()

        try:
            return await self.manager.off_loop(work) if len(data) >= _OFF_LOOP_BYTES else work()
        except CodecError as error:
            raise self.connection.undecodable(error) from None

    def _start(
        self, message: protocol.ClientMessage, dialect: MessageDialect | None, digest: bytes
    ) -> None:
        """Start a task for one message. Tasks start in the order of their messages."""
        if len(self._requests) >= self.limits.max_requests_per_connection and not isinstance(
            message, protocol.PingMessage
        ):
            raise EndpointError(
                "busy",
                f"{len(self._requests)} requests of this connection are in progress",
                retry_after_ms=100,
            )
        work: Callable[[], Awaitable[None]]
        match message:
            case protocol.InferMessage():
                work = partial(self._infer, message, dialect, digest)
            case protocol.ResetMessage():
                work = partial(self._reset, message)
            case protocol.StopMessage():
                work = partial(self._stop, message)
            case protocol.CloseSession():
                work = partial(self._close_session, message)
            case protocol.BranchMessage():
                work = partial(self._branch, message)
            case protocol.ResumeMessage():
                work = partial(self._resume, message)
            case protocol.PingMessage():
                work = partial(self._pong, message)
            case _:
                raise AssertionError(f"no handler for {type(message).__name__}")
        task = self.manager.spawn(self._response(message, work))
        self._requests.add(task)
        if isinstance(message, protocol.ResetMessage | protocol.CloseSession):
            self._endings.add(task)
        task.add_done_callback(self._requests.discard)

    async def _response(
        self, message: protocol.ClientMessage, work: Callable[[], Awaitable[None]]
    ) -> None:
        """Run one message's work. A failure is reported to the client as an error for this
        message.
        """
        log_context.bind(session_id=self._session_id(message))
        try:
            await work()
        except EndpointError as error:
            await self._refuse(error, message.request_id, self._session_id(message))
        except ClientDisconnected:
            pass
        except Exception:
            logger.exception("endpoint %s failed", message.endpoint)
            failure = EndpointError("engine_error", "internal error; the server's log has details")
            await self._refuse(failure, message.request_id, self._session_id(message))

    async def _send(self, message: dict[str, Any]) -> None:
        await self.connection.send(encode(message))

    async def _refuse(
        self, error: EndpointError, request_id: str | None = None, session_id: str | None = None
    ) -> None:
        if error.close is WebSocketCloseCode.SLOW_CONSUMER:
            self.connection.cut_soon()
        with contextlib.suppress(ClientDisconnected):
            await self._send(protocol.error_message(error, request_id, session_id))
        if error.close is not None:
            await self.connection.close(error.close, error.message)

    # -- sessions ----------------------------------------------------------------------------------

    def _session_id(self, message: protocol.ClientMessage) -> str:
        if message.session_id is not None:
            return message.session_id
        named = (
            message.extra_body.session_id if isinstance(message, protocol.InferMessage) else None
        )
        return named if named is not None else self._own_session_id

    def _key(self, session_id: str) -> SessionKey:
        return self.connection.principal, session_id

    def _attach(self, session: Session) -> None:
        session.connections.add(self)
        self._used.add(session.key)

    # -- endpoints ---------------------------------------------------------------------------------

    async def _infer(
        self, message: protocol.InferMessage, dialect: MessageDialect | None, digest: bytes
    ) -> None:
        job = self._job(message, dialect, digest)
        try:
            session = self.manager.open(
                self._key(self._session_id(message)), self.connection.client, self.endpoint
            )
        except EndpointError as error:
            endpoint_metrics().session_refused(self.endpoint, error.code)
            if not self._used:
                error.close = WebSocketCloseCode.CAPACITY
            raise
        self._attach(session)
        run = session.submit(job)
        started_s = time.monotonic()
        if await self._follow(session, run) and message.protocol_version is not None:
            await self._send(
                {
                    "type": "done",
                    "request_id": job.request_id,
                    "session_id": session.session_id,
                    "next_chunk_index": run.first_chunk + run.completed,
                    "frames": sum(run.sizes),
                    "wall_ms": round((time.monotonic() - started_s) * 1e3, 3),
                }
            )

    async def _follow(self, session: Session, run: SessionRun, start: int = 0) -> bool:
        """Deliver a run's replies to this connection.

        If this connection ends and no other connection follows the run, the run is cancelled.
        """
        try:
            return await run.follow(
                self.connection.send,
                self,
                self.manager.delivery_window(run.job.replies.fps),
                start,
            )
        finally:
            if not run.finished and not run.has_follower:
                session.cancel([run])

    def _job(
        self, message: protocol.InferMessage, dialect: MessageDialect | None, digest: bytes
    ) -> SessionJob:
        extra, info, image, limits = (
            message.extra_body,
            self.manager.info,
            message.image,
            self.limits,
        )
        # Clients of the protocol's first version send `camera` with array markers, expect lists of
        # float frames, and may request a number of frames that does not fill complete chunks.
        first_version = (
            message.camera is not None and dialect is not None and message.protocol_version is None
        )
        camera = message.camera_path(limits.max_frames_per_request, info.intrinsics_reference_size)
        actions = message.script(info.actions)
        if camera is not None and not info.actions.pose:
            raise EndpointError(
                "invalid_camera",
                f"this model takes no poses; it takes {info.actions.describe()}",
                param="camera",
            )
        info.check_prompt(message.prompt, starts_session=message.restart)
        codec = extra.video_format or ("ndarray_f32" if first_version else protocol.DEFAULT_CODEC)

        def load(height: int, width: int) -> np.ndarray:
            return load_image(image, height, width, limits)

        return SessionJob(
            request_id=message.request_id or uuid.uuid4().hex,
            digest=digest,
            source=PlannedChunks(
                camera=camera,
                actions=actions,
                num_frames=extra.num_frames,
                policy=extra.pose_policy or ("trim" if first_version else "error"),
                prompt=message.prompt,
                lora=extra.lora,
                input_id=message.request_id,
            ),
            start=SessionStart(
                load_image=load if image is not None else None,
                images=message.images,
                seed=extra.seed,
                height=extra.height,
                width=extra.width,
                restart=message.restart,
            ),
            chunk_index=message.chunk_index,
            options=extra.model_options(),
            replies=ReplyOptions(
                render=FrameRenderer(
                    codec=codec,
                    fps=extra.fps or info.fps,
                    quality=extra.quality,
                    frames_per_message=extra.frames_per_chunk,
                    dialect=dialect or MessageDialect.OPENPI,
                    with_mp4=extra.with_mp4,
                    mp4_scale=extra.mp4_scale,
                    key_frame=extra.key_frame,
                    transfer_ms=extra.transfer_ms,
                ),
                fps=extra.fps,
            ),
        )

    def _find(self, session_id: str) -> Session | None:
        """Return a session, or None if the server has no session with this id.

        Raises:
            EndpointError: `moved` if the session continues on another server.
        """
        session = self.manager.find(self._key(session_id))
        if session is None:
            self.manager.check_moved(self._key(session_id))
        return session

    async def _reset(self, message: protocol.ResetMessage) -> None:
        session = self._find(self._session_id(message))
        if session is not None:
            await session.reset()
        if message.protocol_version is None:
            await self.connection.send("reset successful")
        else:
            session_id = self._session_id(message)
            await self._send(
                {"type": "reset", "status": "reset successful", "session_id": session_id}
            )

    async def _stop(self, message: protocol.StopMessage) -> None:
        session = self._find(self._session_id(message))
        if session is not None:
            await session.stop()
        await self._send(
            {
                "type": "stopped",
                "session_id": self._session_id(message),
                "next_chunk_index": session.next_chunk if session is not None else 0,
            }
        )
        if message.session_id is None:
            await self.connection.close(WebSocketCloseCode.NORMAL, "stopped by the client")

    async def _close_session(self, message: protocol.CloseSession) -> None:
        session = self._find(self._session_id(message))
        if session is not None:
            await session.reset()
        await self._send({"type": "closed", "session_id": self._session_id(message)})
        if message.session_id is None:
            await self.connection.close(WebSocketCloseCode.NORMAL, "closed by the client")

    async def _branch(self, message: protocol.BranchMessage) -> None:
        source = self._known(self._session_id(message))
        new_id = message.new_session_id or new_session_id(self.manager.server_name)
        branch = await self.manager.branch(source, self._key(new_id))
        if not message.disposable:
            self._attach(branch)
        await self._send(
            {
                "type": "branched",
                "session_id": new_id,
                "parent_session_id": source.session_id,
                "next_chunk_index": branch.next_chunk,
            }
        )

    async def _resume(self, message: protocol.ResumeMessage) -> None:
        session_id = self._session_id(message)
        # A moved session still has the replies that its client has not received.
        moved = self.manager.find_moved(self._key(session_id))
        session = self._known(session_id) if moved is None else moved
        try:
            missed = session.missed_since(message.last_chunk_id)
        except EndpointError:
            self.manager.check_moved(session.key)
            raise
        for other in list(session.connections - {self}):
            if isinstance(other, _Client):
                self.manager.spawn(other.superseded())
        if moved is None:
            self._attach(session)
        elif not missed:
            self.manager.check_moved(session.key)
        session.last_used_s = time.monotonic()
        reply = {
            "type": "resumed",
            "session_id": session.session_id,
            "next_chunk_index": session.next_chunk,
        }
        await self._send(
            {
                **reply,
                "replayed": sum(run.num_replies - start for run, start in missed),
            }
        )
        for run, start in missed:
            was_finished = run.finished
            try:
                await self._follow(session, run, start)
            except EndpointError as error:
                if not was_finished or error is not run.error:
                    raise
        if moved is not None:
            self.manager.check_moved(session.key)

    def _known(self, session_id: str) -> Session:
        session = self._find(session_id)
        if session is None:
            raise EndpointError(
                "session_evicted", "the server has no such session; start again with an image"
            )
        return session

    async def _pong(self, message: protocol.PingMessage) -> None:
        for key in self._used:
            if (session := self.manager.find(key)) is not None and self in session.connections:
                session.pinged_s = time.monotonic()
        await self._send({"type": "pong", "t": message.t, "server_ms": round(time.time() * 1e3, 3)})
