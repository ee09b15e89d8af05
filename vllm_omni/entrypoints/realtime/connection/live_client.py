# SPDX-License-Identifier: Apache-2.0
"""Handlers for realtime connections: `ConnectionHandler`, and `LiveClient` for one live stream.

A connection's main task receives messages, so it detects a disconnect immediately. In a
`LiveClient`, a second task delivers chunks, and when either task ends, so does the other. When its
client disconnects, a `LiveClient` aborts the chunk in flight and closes the session. The handlers
of the camera and spectator endpoints derive directly from `ConnectionHandler`: the camera handler
runs one task per request and retains its sessions, and the spectator handler does not own its
session.
"""

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

from starlette.websockets import WebSocket

from vllm_omni.entrypoints.errors import ClientDisconnected, EndpointError, WebSocketCloseCode
from vllm_omni.entrypoints.realtime.connection.connection import Connection
from vllm_omni.entrypoints.realtime.connection.delivery_window import DeliveryWindow
from vllm_omni.entrypoints.realtime.controls.stream_state import T, decode_state
from vllm_omni.entrypoints.realtime.sessions.run import SessionJob
from vllm_omni.entrypoints.realtime.sessions.session import Session, new_session_id
from vllm_omni.entrypoints.realtime.sessions.session_manager import SessionManager
from vllm_omni.entrypoints.telemetry.metrics import endpoint_metrics
from vllm_omni.runtime import log_context

logger = logging.getLogger("vllm." + __name__)

UNSENT_CHUNKS: Final = 1
"""Maximum number of finished chunks that wait for the client while the next chunk is being
generated.

A larger number would delay the effect of a client's controls.
"""

# Clients of these protocols expect a reply to each invalid message. The limit is therefore high,
# but it still stops floods.
_MAX_STRIKES: Final = 100
_SLOT_POLL_S: Final = 0.1
_MAX_TEXT_FRAMES: Final = 3


class ConnectionHandler(ABC):
    """Handles one WebSocket connection: accepts it, receives messages, and closes it with a code
    and a reason.

    Each endpoint subclasses this class and defines its messages.
    """

    endpoint: str
    """Endpoint name in log lines and metrics."""
    subprotocol = "omni.v1"
    """Subprotocol that the server selects if the client offers it. Browsers require the server to
    select an offered subprotocol.
    """

    def __init__(
        self, manager: SessionManager, websocket: WebSocket, max_strikes: int | None = None
    ) -> None:
        """Initialize the handler.

        Args:
            manager: Sessions of this process.
            websocket: WebSocket that has not been accepted yet.
            max_strikes: Number of malformed messages after which the connection is closed. Default:
                `Connection`'s default.
        """
        self.manager, self.limits, self.info = manager, manager.limits, manager.info
        strikes = () if max_strikes is None else (max_strikes,)
        self.connection = Connection(websocket, manager.limits, *strikes)
        manager.connections.add(self.connection)
        self._offered: list[str] = websocket.scope.get("subprotocols") or []
        self._texts = TextFrames()
        self._end = "client disconnected"

    @property
    @abstractmethod
    def is_active(self) -> bool:
        """Whether work for this client is in progress. While no work is in progress, time without
        messages counts towards the idle timeout.
        """

    async def serve_connection(self) -> None:
        """Serve the connection until either side closes it."""
        await self.connection.accept(
            self.subprotocol if self.subprotocol in self._offered else None
        )
        started_s = time.monotonic()
        try:
            await self.start_now()
            while True:
                await self.handle_message(await self.receive())
        except ClientDisconnected:
            pass
        except EndpointError as error:  # an error of the connection, not of a single message
            await self.end_with(error)
        except Exception:
            logger.exception("%s connection failed", self.endpoint)
            self._end = "internal error"
            await self.connection.close(WebSocketCloseCode.INTERNAL, self._end)
        finally:
            await self.stop()
            self._log_end(time.monotonic() - started_s)

    @property
    def follows_moves(self) -> bool:
        """Whether the client continues its sessions on another server when instructed to."""
        return False

    async def session_moved(self, session: Session) -> None:  # noqa: B027  (by default, only the last reply names the server)
        """Tell the client which server a session has moved to, unless the last reply to the
        session's request already names that server.
        """

    def _log_end(self, seconds: float) -> None:
        logger.info("%s ended after %.1f s: %s", self.endpoint, seconds, self._end)

    def receive(self) -> Awaitable[bytes | str]:
        return self.connection.receive(busy=lambda: self.is_active)

    async def receive_first(self, missing: str) -> bytes | str:
        """Wait for the first message that a client must send, and return it.

        Args:
            missing: Error text to use if the message does not arrive.

        Raises:
            EndpointError: `timeout` if no message arrives within `start_timeout_s`.
        """
        try:
            async with asyncio.timeout(self.limits.start_timeout_s):
                return await self.receive()
        except TimeoutError:
            raise EndpointError("timeout", missing, close=WebSocketCloseCode.POLICY) from None

    async def end_with(self, error: EndpointError) -> None:
        """Send an error, and close the connection with that error's close code and reason."""
        self._end = f"{error.code}: {error.message}"
        if error.close is WebSocketCloseCode.SLOW_CONSUMER:
            self.connection.cut_soon()
        try:
            await self.send_error(error)
        except ClientDisconnected:
            return
        is_planned = error.code == "moved"
        otherwise = WebSocketCloseCode.NORMAL if is_planned else WebSocketCloseCode.INTERNAL
        await self.connection.close(error.close or otherwise, error.message)

    # -- for endpoints -----------------------------------------------------------------------------

    async def start_now(self) -> None:  # noqa: B027  (most endpoints do not send first)
        """Perform work that must happen before the receive loop starts. By default, this method
        does nothing.
        """

    @abstractmethod
    async def handle_message(self, data: bytes | str) -> None:
        """Handle one message from the client. If this method raises an `EndpointError`, the
        connection ends.
        """

    @abstractmethod
    async def send_error(self, error: EndpointError) -> None:
        """Send an error message to the client."""

    @abstractmethod
    async def stop(self) -> None:
        """Cancel the work for this client. This method is called once, when the connection ends."""


class LiveClient(ConnectionHandler):
    """A connection with at most one stream at a time."""

    def __init__(self, manager: SessionManager, websocket: WebSocket) -> None:
        super().__init__(manager, websocket, _MAX_STRIKES)
        self.session: Session | None = None
        self._stream: asyncio.Task[None] | None = None
        self._num_messages = 0
        self.clock: MediaClock | None = None
        """Clock that paces chunks by their playing time. None: chunks are sent without delay."""
        self._window: DeliveryWindow | None = None

    async def wait_for_media_time(self, num_frames: int, skip: bool) -> float:
        """If the client has requested pacing, wait until a chunk is due for playback. Return the
        waiting time in milliseconds.

        Args:
            num_frames: Number of frames in the chunk.
            skip: Whether to send this chunk without waiting.
        """
        waited_ms = 0.0 if self.clock is None else await self.clock.wait(num_frames, skip)
        if waited_ms and self._window is not None:
            self._window.note_wait()
        return waited_ms

    @property
    def is_active(self) -> bool:
        """Whether chunks are being generated for this client."""
        return self._stream is not None and not self._stream.done()

    def _log_end(self, seconds: float) -> None:
        logger.info(
            "%s ended after %.1f s and %d messages: %s",
            self.endpoint,
            seconds,
            self._num_messages,
            self._end,
        )

    @abstractmethod
    async def deliver(self, payload: Any) -> None:
        """Send one reply that the job's `render` function has produced."""

    @abstractmethod
    async def complete(self) -> None:
        """Report the planned end of the stream, and close the connection."""

    # -- the stream --------------------------------------------------------------------------------

    async def open_session(self, session_id: str | None = None) -> Session:
        """Open a session for this connection. If all sessions are in use, wait for up to
        `slot_wait_s`.

        Only `capacity` is retried because waiting cannot help if the client has reached its own
        limit or the server is draining.

        Raises:
            EndpointError: The session is refused, for the same reasons as in `SessionManager.open`.
                Each refused session is counted once in the metrics.
            ClientDisconnected: The client disconnected while waiting.
        """
        key = (self.connection.principal, session_id or new_session_id(self.manager.server_name))
        log_context.bind(session_id=key[1])
        deadline_s = time.monotonic() + self.limits.slot_wait_s
        receive_task: asyncio.Task[None] | None = None
        try:
            while True:
                try:
                    self.session = self.manager.open(key, self.connection.client, self.endpoint)
                    self.session.connections.add(self)
                    return self.session
                except EndpointError as error:
                    if error.code != "capacity" or time.monotonic() >= deadline_s:
                        endpoint_metrics().session_refused(self.endpoint, error.code)
                        raise
                if receive_task is None:
                    receive_task = asyncio.create_task(self.connection.read_ahead())
                await asyncio.wait(
                    [receive_task],
                    timeout=max(0.0, min(_SLOT_POLL_S, deadline_s - time.monotonic())),
                )
                if receive_task.done():
                    receive_task.result()
        finally:
            if receive_task is not None:
                receive_task.cancel()
                await asyncio.wait([receive_task])

    def take_stream(self, session_id: str, kind: type[T]) -> tuple[Session, T]:
        """Continue a session that was moved to this server together with its live stream.

        Args:
            session_id: Session id.
            kind: Class of the stream's controls.

        Returns:
            `(session, controls)`: the session and the controls of its stream.

        Raises:
            EndpointError: `moved` if the session continues on another server, `session_evicted` if
                no stream of the session is waiting here, or `invalid_request` if another endpoint
                started the session.
        """
        key = (self.connection.principal, session_id)
        log_context.bind(session_id=session_id)
        try:
            self.manager.check_moved(key)
        except EndpointError as error:  # the session was moved again before its client arrived
            error.details["session_id"] = session_id
            raise
        session = self.manager.find(key)
        controls = None if session is None else session.stream_state()
        if session is None or controls is None or session.connections:
            raise EndpointError(
                "session_evicted", "no stream of this session waits here; start a new one"
            )
        state = decode_state(controls, kind)
        session.connections.add(self)
        self.session = session
        return session, state

    @contextlib.asynccontextmanager
    async def steering(self) -> AsyncIterator[bool]:
        """Hold the session's steering lock, so an input takes effect either entirely before or
        entirely after a move.

        Yields:
            Whether the session is still on this server.
        """
        if (session := self.session) is None:
            yield True
            return
        async with session.steering:
            yield session.destination is None

    def start_job(self, job: SessionJob) -> None:
        """Start generating and delivering a job's chunks. `open_session` must already have been
        called.
        """
        assert self.session is not None
        self._stream = self.manager.spawn(self._deliver_all(self.session, job))

    async def _deliver_all(self, session: Session, job: SessionJob) -> None:
        try:
            run = session.submit(job)
            try:
                self._window = self.manager.delivery_window(job.replies.fps)
                await run.follow(self.deliver, self, self._window)
            finally:
                self._num_messages += run.delivered
                if not run.finished:
                    session.cancel([run])
            self._end = "complete"
            await self.complete()
        except ClientDisconnected:
            pass
        except EndpointError as error:
            await self.end_with(error)
        except Exception:
            logger.exception("%s stream failed", self.endpoint)
            await self.end_with(
                EndpointError("engine_error", "internal error; the server's log has details")
            )

    async def stop(self) -> None:
        """Cancel the stream and free the session. Idempotent."""
        session, self.session = self.session, None
        if session is not None:
            session.cancel()  # Cancel first, so the engine stops the chunk early.
        if self._stream is not None:
            self._stream.cancel()
            await asyncio.wait([self._stream])
            self._stream = None
        if session is not None:
            session.connections.discard(self)
            await session.reset()
            self.manager.remove_if_empty(session)


class RealtimeEndpoint:
    """A realtime WebSocket endpoint in one API server process."""

    def __init__(
        self,
        manager: SessionManager,
        handler: Callable[[SessionManager, WebSocket], ConnectionHandler],
    ) -> None:
        """Initialize the endpoint.

        Args:
            manager: Session manager of this process, whose guard admits connections.
            handler: Function that creates the handler for one connection.
        """
        self._manager, self._handler = manager, handler

    async def serve(self, websocket: WebSocket) -> None:
        """Serve one connection from handshake to close."""
        async with self._manager.guard.admit(websocket) as admitted:
            if admitted:
                # The handler runs in its own task because each message resumes every coroutine on
                # the waiting task's stack. The current task's stack contains more than a dozen
                # layers of middleware.
                handler = self._handler(self._manager, websocket)
                await asyncio.create_task(handler.serve_connection())


class TextFrames:
    """Counts messages of the wrong type: text instead of binary, or vice versa. The third such
    message ends the connection.
    """

    def __init__(self) -> None:
        self._count = 0

    def refuse(self, message: str) -> EndpointError:
        self._count += 1
        return EndpointError(
            "invalid_frame",
            message,
            close=WebSocketCloseCode.UNSUPPORTED_DATA if self._count >= _MAX_TEXT_FRAMES else None,
        )


class MediaClock:
    """Paces a stream's chunks by their playing time."""

    def __init__(self, fps: float) -> None:
        self._fps = fps
        self._next_s = 0.0

    async def wait(self, num_frames: int, skip: bool) -> float:
        """Sleep until the previous chunk has finished playing.

        Args:
            num_frames: Number of frames in this chunk.
            skip: Whether to send this chunk without waiting because it responds to the client's
                input.

        Returns:
            Time in milliseconds that the call slept.
        """
        now_s = time.monotonic()
        if skip:
            self._next_s = now_s
        delay_s = max(0.0, self._next_s - now_s)
        self._next_s = max(self._next_s, now_s) + num_frames / self._fps
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        return delay_s * 1e3


class ChunkThrottle:
    """Decides when the next chunk may start. No chunk starts while the stream is paused or has no
    credit left.
    """

    def __init__(self) -> None:
        self.credit: int | None = None
        """Number of chunks that may still start. None: no limit."""
        self.paused = False
        self._changed = asyncio.Event()

    @property
    def ready(self) -> bool:
        return not self.paused and self.credit != 0

    async def wait_until_ready(self) -> None:
        while not self.ready:
            await self._changed.wait()

    def take_chunk(self) -> None:
        """Consume one chunk of credit."""
        if self.credit is not None:
            self.credit -= 1

    def update(self, *, paused: bool | None = None, more_credit: int = 0) -> None:
        if paused is not None:
            self.paused = paused
        if more_credit:
            self.credit = min((self.credit or 0) + more_credit, 1 << 31)
        self._changed.set()
        self._changed = asyncio.Event()
