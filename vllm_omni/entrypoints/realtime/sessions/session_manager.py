# SPDX-License-Identifier: Apache-2.0
"""`SessionManager`: manages one API server process's table of sessions, and evicts sessions.

The manager also owns the connection guard, the background tasks and the threads that decode images
and encode frames.
"""

import asyncio
import contextlib
import contextvars
import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine, Iterable
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from vllm_omni.entrypoints.errors import EndpointError, WebSocketCloseCode
from vllm_omni.entrypoints.limits.quotas import Quotas
from vllm_omni.entrypoints.realtime.connection.connection import Connection
from vllm_omni.entrypoints.realtime.connection.delivery_window import DeliveryWindow
from vllm_omni.entrypoints.realtime.connection.drain import SessionDrain
from vllm_omni.entrypoints.realtime.connection.guard import ConnectionGuard
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.connection.session_engine import SessionEngine
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.entrypoints.realtime.encoding.implementations import (
    Implementations,
    machine_implementations,
)
from vllm_omni.entrypoints.realtime.sessions.run import HeldBytes
from vllm_omni.entrypoints.realtime.sessions.session import Session
from vllm_omni.entrypoints.realtime.sessions.session_host import SessionKey
from vllm_omni.inputs import Lora
from vllm_omni.runtime import log_context

logger = logging.getLogger("vllm." + __name__)

T = TypeVar("T")

_REMEMBERED_EVICTIONS: Final = 4096
_REMEMBERED_MOVES: Final = 4096
_OWN_ERRORS_S: Final = 0.5
"""Time in seconds within which requests in flight may report errors with their own request ids
before the connection is closed.
"""
_FAREWELL_S: Final = 1.5


@runtime_checkable
class FollowsSession(Protocol):
    """A connection whose client may continue a session on another server."""

    @property
    def follows_moves(self) -> bool:
        """Whether the client continues its session on another server after a move."""
        ...

    async def session_moved(self, session: Session) -> None:
        """Tell the client which server a session has moved to, unless the last reply to the
        session's request already names that server.
        """
        ...


class SessionManager:
    """All sessions of one API server process.

    A session that has been idle for `session_idle_s` is closed. If its client sends pings, the
    limit is `pinged_session_idle_s` instead. A new session may evict the least recently used
    session that has no connection, unless its connection has just broken, or that is kept open
    only by pings.

    Args:
        engine: Interface for engine requests.
        info: Stream metadata of the served model.
        limits: Limits on connections and sessions.
        executor: Threads that decode images and encode frames.
        origins: Allowed browser origins, in the form that `ConnectionGuard` accepts.
        quotas: Client quotas. Default: no client has a quota.
    """

    def __init__(
        self,
        engine: SessionEngine,
        info: StreamInfo,
        limits: EndpointLimits,
        executor: Executor,
        origins: Iterable[str] = (),
        quotas: Quotas | None = None,
    ) -> None:
        self.engine, self.info, self.limits = engine, info, limits
        self.guard = ConnectionGuard(limits, origins)
        self.drain = SessionDrain[Session]()
        self.quotas = quotas or Quotas()
        self._executor = executor
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()
        self._evicted: OrderedDict[SessionKey, None] = OrderedDict()
        self._moved: OrderedDict[SessionKey, Session] = OrderedDict()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self.on_engine_session_end: list[Callable[[str], None]] = []
        """Functions that are called with a session's engine id when the session's state is
        discarded.
        """
        self.connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self.adapters: Callable[[], Collection[str]] = tuple
        """Function that returns the names of the loaded LoRA adapters. A stream's `model` field can
        name one of them.
        """
        self.implementations: Callable[[], Implementations] = partial(
            machine_implementations, limits.gpu_encoders
        )
        """Function that returns the codec implementations. The first call blocks."""
        self.server_name: str | None = None
        """Value of `omni.server_name`, which is the prefix of new session ids."""
        self.held = HeldBytes()
        """Counter for the total size of all sessions' undelivered and retained replies."""

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, key: SessionKey) -> Session | None:
        return self._sessions.get(key)

    def sessions(self) -> list[Session]:
        """Return the sessions that clients can use."""
        return [session for session in self._sessions.values() if session.is_visible]

    # -- sessions that move ------------------------------------------------------------------------

    def find_moved(self, key: SessionKey) -> Session | None:
        """Return a session that has been moved to another server and may still have undelivered
        replies.
        """
        return self._moved.get(key)

    def check_moved(self, key: SessionKey) -> None:
        """Check that a session has not been moved to another server.

        Raises:
            EndpointError: `moved` if the session continues on another server.
        """
        session = self._moved.get(key)
        if session is not None and session.destination is not None:
            raise session.destination.as_error()

    def session_left(self, session: Session) -> None:
        """Record that a session has been moved, and notify its clients that are not waiting for a
        reply.
        """
        self._moved[session.key] = session
        while len(self._moved) > _REMEMBERED_MOVES:
            self._moved.popitem(last=False)[1].delivery_log.discard()
        for connection in list(session.connections):
            if isinstance(connection, FollowsSession):
                self.spawn(connection.session_moved(session))

    def admit_moved(self, session: Session, key: SessionKey) -> None:
        """Assign the final key to a session that was moved to this server.

        Raises:
            EndpointError: `session_exists` if a session with this key is live.
        """
        if key in self._sessions:
            raise EndpointError("session_exists", "a session with this id is live here")
        del self._sessions[session.key]
        session.key = key
        self._sessions[key] = session
        self._evicted.pop(key, None)
        if (old := self._moved.pop(key, None)) is not None:
            old.delivery_log.discard()
        session.is_visible = True
        session.last_used_s = time.monotonic()

    def lose(self, session: Session) -> None:
        """End a session that may be live on another server."""
        self._evict(session, "lost")

    def with_adapter(self, model: str | None, lora: list[Lora] | None) -> list[Lora] | None:
        """Return a stream's adapters: the adapters in its `lora`, and the adapter that its `model`
        names, if any.
        """
        if model not in self.adapters() or any(adapter.name == model for adapter in lora or ()):
            return lora
        return [Lora(name=str(model)), *(lora or ())]

    def was_evicted(self, key: SessionKey) -> bool:
        return key in self._evicted

    def open(
        self, key: SessionKey, client: str | None = None, endpoint: str = "realtime"
    ) -> Session:
        """Return the session with the given key, and create it if it does not exist.

        Args:
            key: Principal and session id.
            client: Client whose `sessions_per_client` limit the session counts against. Default:
                the principal.
            endpoint: Endpoint name in metrics.

        Raises:
            EndpointError: `moved` if the session continues on another server, `draining` if no new
                session may start, `session_limit` or `quota_exceeded` if the client has reached its
                limit or quota, or `capacity` if there is no room.
        """
        if self._sweeper is None:
            self._sweeper = self.spawn_background(self._sweep())
        session = self._sessions.get(key)
        if session is None:
            self.check_moved(key)
            self.drain.check_new()
            client = key[0] if client is None else client
            self._check_bounds(client)
            self.quotas.allowance_of(client).check_session()
            if len(self._sessions) >= self.info.max_sessions:
                self._make_room()
            with log_context.bound(session_id=key[1]):
                session = self._sessions[key] = Session(key, self, client, endpoint)
        self._sessions.move_to_end(key)
        return session

    def _check_bounds(self, client: str) -> None:
        limit = self.limits.sessions_per_client
        if (
            len(self._sessions) >= limit
            and sum(s.client == client for s in self._sessions.values()) >= limit
        ):
            raise EndpointError(
                "session_limit", f"you have {limit} sessions, the maximum for one client"
            )
        if self.is_over_budget:
            raise EndpointError(
                "capacity",
                "slow readers fill the buffer memory; try again later",
                retry_after_ms=1000,
            )

    # -- memory of the replies ---------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        return self.held.total

    @property
    def is_over_budget(self) -> bool:
        return self.held.total > self.limits.max_held_bytes

    def trim(self) -> None:
        """Drop the oldest delivered replies until the total size is within the budget.

        Replies that have not been delivered are retained, and their session pauses.
        """
        for session in (*self._moved.values(), *self._sessions.values()):  # in order of last use
            if not self.is_over_budget:
                return
            session.delivery_log.drop_delivered(0)

    # -- capacity ----------------------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """Whether the manager would accept a new session now."""
        return not self.is_over_budget and (
            len(self._sessions) < self.info.max_sessions or self.can_make_room
        )

    @property
    def can_make_room(self) -> bool:
        """Whether an unused session can be evicted."""
        return any(self._is_unused(session) for session in self._sessions.values())

    def _is_unused(self, session: Session) -> bool:
        if session.is_busy or time.monotonic() < session.protected_until_s:
            return False
        return not session.connections or session.idle_s >= self.info.session_idle_s

    def await_reconnection(self, session: Session) -> None:
        """Do not evict a session while its client may reconnect after a broken connection."""
        grace_s = min(self.limits.reconnect_grace_s, self.info.session_idle_s)
        session.protected_until_s = max(session.protected_until_s, time.monotonic() + grace_s)

    def _make_room(self) -> None:
        for session in self._sessions.values():  # least recently used first
            if self._is_unused(session):
                self._evict(session, "made_room")
                return
        raise EndpointError(
            "capacity",
            f"all {self.info.max_sessions} sessions are in use; try again later",
            retry_after_ms=1000,
        )

    def _evict(self, session: Session, reason: str) -> None:
        """Close a session that is not busy, and record that the server closed it."""
        with log_context.bound(session_id=session.session_id):
            session.free_engine_state()
            session.on_removed(reason)
            self.remove_if_empty(session)
        self._evicted[session.key] = None
        while len(self._evicted) > _REMEMBERED_EVICTIONS:
            self._evicted.popitem(last=False)

    async def branch(self, source: Session, key: SessionKey) -> Session:
        """Copy a session to a new session with the given key.

        Raises:
            EndpointError: `invalid_request` if the key is in use, or `capacity` if there is no
                room.
        """
        if key in self._sessions:
            raise EndpointError(
                "invalid_request",
                "a session with this id exists; choose another",
                param="new_session_id",
            )
        new = self.open(key, source.client)
        await source.fork(new)
        return new

    def remove_if_empty(self, session: Session) -> None:
        """Remove a session from the table if it has neither state nor requests, so that its id can
        be reused.
        """
        if (
            not session.started
            and not session.is_busy
            and self._sessions.get(session.key) is session
        ):
            del self._sessions[session.key]
            if session.destination is None:
                session.delivery_log.discard()
            with log_context.bound(session_id=session.session_id):
                session.on_removed("closed" if session.destination is None else "moved")
        elif session.started:
            self._evicted.pop(session.key, None)

    def engine_session_ended(self, engine_id: str) -> None:
        for notify in self.on_engine_session_end:
            notify(engine_id)

    def close_engine_session(self, engine_id: str) -> None:
        """Free a session's engine state in the background."""
        task = self.spawn(self._close_engine_session(engine_id))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close_engine_session(self, engine_id: str) -> None:
        try:
            await self.engine.close_session(engine_id)
        except EndpointError as error:
            logger.warning("the engine did not close a session: %s", error)

    async def wait_for_closed_sessions(self) -> None:
        """Wait until the engine has freed all closed sessions.

        Waiting is necessary because a new session may require the closed sessions' memory.
        """
        if self._closing:
            await asyncio.wait(set(self._closing))

    async def _sweep(self) -> None:
        """Periodically close idle sessions, and drop the replies of idle sessions that have been
        moved.
        """
        idle_s = self.info.session_idle_s
        pinged_idle_s = max(idle_s, self.limits.pinged_session_idle_s)
        while True:
            await asyncio.sleep(min(5.0, idle_s / 4))
            for session in list(self._sessions.values()):
                is_pinged = time.monotonic() - session.pinged_s < idle_s
                is_idle = session.idle_s >= (pinged_idle_s if is_pinged else idle_s)
                if is_idle and time.monotonic() >= session.protected_until_s:
                    self._evict(session, "idle")
            for session in self._moved.values():
                if session.idle_s >= idle_s:
                    session.delivery_log.discard()

    def delivery_window(self, fps: float | None) -> DeliveryWindow:
        """Return a delivery window, which enforces the minimum rate at which a client must read a
        run's replies.

        Args:
            fps: The client's playback rate in frames per second. Default: the server's rate.
        """
        info = self.info
        return DeliveryWindow(self.limits.slow_reader_timeout_s, fps or info.target_fps or info.fps)

    # -- tasks and threads -------------------------------------------------------------------------

    def spawn(
        self, work: Coroutine[Any, Any, T], context: contextvars.Context | None = None
    ) -> asyncio.Task[T]:
        """Run a coroutine as a task, and hold a reference to the task so that it is not
        garbage-collected.

        Args:
            work: Coroutine to run.
            context: The task's context, which contains its logging ids. Default: the caller's
                context.
        """
        task = asyncio.get_running_loop().create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def spawn_background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine as a task that lasts as long as the manager and belongs to no request."""
        task = self.spawn(work, contextvars.Context())
        self._background.add(task)
        return task

    @property
    def is_working(self) -> bool:
        """Whether any task other than a background task is running."""
        return bool(self._tasks - self._background)

    async def off_loop(self, function: Any, *args: Any) -> Any:
        """Run a CPU-bound function on one of the executor's threads."""
        run = contextvars.copy_context().run
        return await asyncio.get_running_loop().run_in_executor(
            self._executor, run, function, *args
        )

    async def engine_died(self) -> None:
        """Send an error to every connection, and close the connections with 1011.

        The call returns when all connections are closed, or after a time limit.
        """
        for connection in list(self.connections):
            connection.fail(
                EndpointError(
                    "engine_error", "the engine has stopped", close=WebSocketCloseCode.INTERNAL
                ),
                _OWN_ERRORS_S,
            )
        give_up_s = time.monotonic() + _FAREWELL_S
        while self.guard.num_connections and time.monotonic() < give_up_s:
            await asyncio.sleep(0.02)

    async def shutdown(self) -> None:
        """Cancel all tasks. Only tests call this method."""
        for task in list(self._tasks):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks, return_exceptions=True)
