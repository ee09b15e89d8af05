# SPDX-License-Identifier: Apache-2.0
"""The door `/v1/realtime/world/camera`: msgpack messages in, video chunks out.

Says hello, turns messages into `Job`s, follows their runs, answers in the dialect the client speaks. What a session is
and how it reaches the engine is `session.py`'s. One reader task for each connection; each request has its own task, so
that a disconnect, a `reset` or a `ping` is noticed at once. Held by tests/entrypoints/realtime/test_world_camera*.py.
"""

import asyncio
import contextlib
import hashlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import numpy as np
from starlette.websockets import WebSocket

from vllm_omni import log_context
from vllm_omni.entrypoints.metrics import door_metrics
from vllm_omni.entrypoints.realtime import protocol
from vllm_omni.entrypoints.realtime.chunk_source import PlannedChunks
from vllm_omni.entrypoints.realtime.codec import CodecError, Decoded, Dialect, decode, encode
from vllm_omni.entrypoints.realtime.connection import Connection
from vllm_omni.entrypoints.realtime.errors import ClientGone, Close, DoorError
from vllm_omni.entrypoints.realtime.images import load_image
from vllm_omni.entrypoints.realtime.render import FrameRenderer
from vllm_omni.entrypoints.realtime.run import Job, ReplyOptions, Run, WorldStart
from vllm_omni.entrypoints.realtime.session import Session, new_session_id
from vllm_omni.entrypoints.realtime.session_host import SessionKey
from vllm_omni.entrypoints.realtime.session_manager import SessionManager

logger = logging.getLogger("vllm." + __name__)

PATHS: Final = ("/v1/realtime/world/camera", "/v1/realtime/world/camera/")
"""Both, because WebSocket clients do not follow a redirect."""

_DOOR: Final = "realtime/world/camera"
_OFF_LOOP_BYTES: Final = 64 * 1024  # messages from here on are decoded on a thread
_MAX_TEXT_FRAMES: Final = 3


class WorldCameraDoor:
    """The door in one API server process; `serve` runs one connection. `max_message_bytes` is only announced here."""

    def __init__(self, manager: SessionManager, max_message_bytes: int) -> None:
        self.manager = manager
        self.max_message_bytes = max_message_bytes

    async def serve(self, websocket: WebSocket) -> None:
        """Run one connection from handshake to close."""
        async with self.manager.gate.admit(websocket) as admitted:
            if admitted:
                await _Client(self, websocket).run()


class _Client:
    """One connection's life at this door."""

    def __init__(self, door: WorldCameraDoor, websocket: WebSocket) -> None:
        self._door = door
        self._manager, self._limits = door.manager, door.manager.limits
        self._websocket = websocket
        self._connection = Connection(websocket, self._limits)
        self._manager.connections.add(self._connection)
        self._own_session_id = new_session_id()
        self._used: set[SessionKey] = set()
        self._requests: set[asyncio.Task[None]] = set()
        self._num_text_frames = 0

    async def run(self) -> None:
        offered = self._websocket.scope.get("subprotocols") or []
        await self._connection.accept(protocol.SUBPROTOCOL if protocol.SUBPROTOCOL in offered else None)
        end = "client left"
        try:
            await self._greet()
            while True:
                await self._take(await self._connection.receive(busy=lambda: bool(self._requests)))
        except ClientGone:
            pass
        except DoorError as error:  # of the connection, not of a request
            end = error.message
            await self._refuse(error)
            await self._connection.close(error.close or Close.INTERNAL, error.message)
        except Exception:
            end = "internal error"
            logger.exception("world camera connection failed")
            await self._connection.close(Close.INTERNAL, end)
        finally:
            await self._leave()
            with log_context.bound(session_id=",".join(session_id for _, session_id in self._used) or None):
                logger.info("world camera connection ended: %s", end)

    async def _greet(self) -> None:
        if not self._manager.facts.actions.is_steered:
            raise DoorError("unsupported", "the served model takes neither a camera nor actions", close=Close.POLICY)
        facts, max_bytes = self._manager.facts, self._door.max_message_bytes
        await self._send(protocol.hello(facts, self._limits, self._own_session_id, max_bytes))

    async def _leave(self) -> None:
        """Abort the runs of this client; its sessions stay for a while, so that it can come back."""
        requests = list(self._requests)
        for task in requests:
            task.cancel()
        if requests:
            await asyncio.wait(requests)
        for key in self._used:
            session = self._manager.find(key)
            if session is not None:
                session.connections.discard(self)

    async def superseded(self) -> None:
        """Another connection has taken a session of this one over."""
        await self._connection.close(Close.SUPERSEDED, "another connection took this session over")

    # -- messages in ---------------------------------------------------------------------------------------------

    async def _take(self, data: bytes | str) -> None:
        """Decode one message and start its work; a message that cannot be understood is refused, nothing more."""
        request_id: str | None = None
        try:
            if isinstance(data, str):
                self._num_text_frames += 1
                close = Close.UNSUPPORTED_DATA if self._num_text_frames >= _MAX_TEXT_FRAMES else None
                raise DoorError("invalid_frame", "send binary frames with msgpack maps, not text", close=close)
            decoded, digest = await self._decode(data)
            self._connection.count_values(decoded.num_values)
            if isinstance(decoded.value, dict) and isinstance(decoded.value.get("request_id"), str):
                request_id = decoded.value["request_id"][:128]
            self._start(protocol.parse(decoded.value, self._limits), decoded.dialect, digest)
        except DoorError as error:
            await self._refuse(error, request_id)

    async def _decode(self, data: bytes) -> tuple[Decoded, bytes]:
        """Return the message and a digest of its bytes; large ones are worked on off the event loop."""

        def work() -> tuple[Decoded, bytes]:
            return decode(data), hashlib.blake2b(data, digest_size=16).digest()

        try:
            return await self._manager.off_loop(work) if len(data) >= _OFF_LOOP_BYTES else work()
        except CodecError as error:
            raise self._connection.undecodable(error) from None

    def _start(self, message: protocol.Message, dialect: Dialect | None, digest: bytes) -> None:
        """Do the work of one message in its own task; tasks begin in the order of their messages."""
        if len(self._requests) >= self._limits.max_requests_per_connection and not isinstance(message, protocol.Ping):
            raise DoorError(
                "busy", f"{len(self._requests)} requests of this connection are unanswered", retry_after_ms=100
            )
        work: Callable[[], Awaitable[None]]
        match message:
            case protocol.Infer():
                work = partial(self._infer, message, dialect, digest)
            case protocol.Reset():
                work = partial(self._reset, message)
            case protocol.Stop():
                work = partial(self._stop, message)
            case protocol.CloseSession():
                work = partial(self._close_session, message)
            case protocol.Branch():
                work = partial(self._branch, message)
            case protocol.Resume():
                work = partial(self._resume, message)
            case protocol.Ping():
                work = partial(self._pong, message)
            case _:
                raise AssertionError(f"no handler for {type(message).__name__}")
        task = self._manager.spawn(self._answer(message, work))
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    async def _answer(self, message: protocol.Message, work: Callable[[], Awaitable[None]]) -> None:
        """Run one message's work; whatever goes wrong is this message's error."""
        log_context.bind(session_id=self._session_id(message))
        try:
            await work()
        except DoorError as error:
            await self._refuse(error, message.request_id, self._session_id(message))
        except ClientGone:
            pass
        except Exception:
            logger.exception("endpoint %s failed", message.endpoint)
            failure = DoorError("engine_error", "internal error; the server's log has details")
            await self._refuse(failure, message.request_id, self._session_id(message))

    async def _send(self, message: dict[str, Any]) -> None:
        await self._connection.send(encode(message))

    async def _refuse(self, error: DoorError, request_id: str | None = None, session_id: str | None = None) -> None:
        if error.close is Close.SLOW_CONSUMER:
            self._connection.cut_soon()
        with contextlib.suppress(ClientGone):
            await self._send(protocol.error_message(error, request_id, session_id))
        if error.close is not None:
            await self._connection.close(error.close, error.message)

    # -- sessions ------------------------------------------------------------------------------------------------

    def _session_id(self, message: protocol.Message) -> str:
        if message.session_id is not None:
            return message.session_id
        named = message.extra_body.session_id if isinstance(message, protocol.Infer) else None
        return named if named is not None else self._own_session_id

    def _key(self, session_id: str) -> SessionKey:
        return self._connection.principal, session_id

    def _attach(self, session: Session) -> None:
        session.connections.add(self)
        self._used.add(session.key)

    # -- endpoints -----------------------------------------------------------------------------------------------

    async def _infer(self, message: protocol.Infer, dialect: Dialect | None, digest: bytes) -> None:
        job = self._job(message, dialect, digest)
        try:
            session = self._manager.open(self._key(self._session_id(message)), self._connection.client, _DOOR)
        except DoorError as error:
            door_metrics().session_refused(_DOOR, error.code)
            if not self._used:
                error.close = Close.CAPACITY
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

    async def _follow(self, session: Session, run: Run, start: int = 0) -> bool:
        """Deliver a run's replies; when this connection leaves and nobody has taken over, the run is cancelled."""
        try:
            return await run.follow(self._connection.send, self, self._manager.pace(run.job.replies.fps), start)
        finally:
            if not run.finished and not run.has_follower:
                session.cancel([run])

    def _job(self, message: protocol.Infer, dialect: Dialect | None, digest: bytes) -> Job:
        extra, facts, image, limits = message.extra_body, self._manager.facts, message.image, self._limits
        # Clients of the first version of this protocol send `camera` with array markers, expect lists of float
        # frames, and ask for numbers of frames that do not fill chunks.
        first_version = message.camera is not None and dialect is not None and message.protocol_version is None
        camera = message.camera_path(limits.max_frames_per_request, facts.intrinsics_reference_size)
        actions = message.script(facts.actions)
        if camera is not None and not facts.actions.pose:
            raise DoorError(
                "invalid_camera", f"this model takes no poses; it takes {facts.actions.describe()}", param="camera"
            )
        facts.check_prompt(message.prompt)
        codec = extra.video_format or ("ndarray_f32" if first_version else protocol.DEFAULT_CODEC)

        def load(height: int, width: int) -> np.ndarray:
            return load_image(image, height, width, limits)

        return Job(
            request_id=message.request_id or uuid.uuid4().hex,
            digest=digest,
            source=PlannedChunks(
                camera=camera,
                actions=actions,
                num_frames=extra.num_frames,
                policy=extra.pose_policy or ("trim" if first_version else "error"),
                prompt=message.prompt,
                lora=extra.lora,
            ),
            start=WorldStart(
                load_image=load if image is not None else None,
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
                    fps=extra.fps or facts.fps,
                    quality=extra.quality,
                    frames_per_message=extra.frames_per_chunk,
                    dialect=dialect or Dialect.OPENPI,
                    with_mp4=extra.with_mp4,
                    mp4_scale=extra.mp4_scale,
                ),
                fps=extra.fps,
            ),
        )

    async def _reset(self, message: protocol.Reset) -> None:
        session = self._manager.find(self._key(self._session_id(message)))
        if session is not None:
            await session.reset()
        if message.protocol_version is None:
            await self._connection.send("reset successful")
        else:
            session_id = self._session_id(message)
            await self._send({"type": "reset", "status": "reset successful", "session_id": session_id})

    async def _stop(self, message: protocol.Stop) -> None:
        session = self._manager.find(self._key(self._session_id(message)))
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
            await self._connection.close(Close.NORMAL, "stopped by the client")

    async def _close_session(self, message: protocol.CloseSession) -> None:
        session = self._manager.find(self._key(self._session_id(message)))
        if session is not None:
            await session.reset()
        await self._send({"type": "closed", "session_id": self._session_id(message)})
        if message.session_id is None:
            await self._connection.close(Close.NORMAL, "closed by the client")

    async def _branch(self, message: protocol.Branch) -> None:
        source = self._known(self._session_id(message))
        new_id = message.new_session_id or new_session_id()
        branch = await self._manager.branch(source, self._key(new_id))
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

    async def _resume(self, message: protocol.Resume) -> None:
        session = self._known(self._session_id(message))
        missed = session.missed_since(message.last_chunk_id)
        for other in list(session.connections - {self}):
            if isinstance(other, _Client):
                self._manager.spawn(other.superseded())
        self._attach(session)
        session.last_used_s = time.monotonic()
        reply = {"type": "resumed", "session_id": session.session_id, "next_chunk_index": session.next_chunk}
        await self._send({**reply, "replayed": sum(run.num_replies - start for run, start in missed)})
        for run, start in missed:
            was_finished = run.finished
            try:
                await self._follow(session, run, start)
            except DoorError as error:
                if not was_finished or error is not run.error:
                    raise

    def _known(self, session_id: str) -> Session:
        session = self._manager.find(self._key(session_id))
        if session is None:
            raise DoorError("session_evicted", "no such session is kept here; begin again with an image")
        return session

    async def _pong(self, message: protocol.Ping) -> None:
        for key in self._used:
            if (session := self._manager.find(key)) is not None and self in session.connections:
                session.pinged_s = time.monotonic()
        await self._send({"type": "pong", "t": message.t, "server_ms": round(time.time() * 1e3, 3)})
