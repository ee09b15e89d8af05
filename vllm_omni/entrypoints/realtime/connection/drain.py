# SPDX-License-Identifier: Apache-2.0
"""`SessionDrain`: graceful shutdown of the realtime endpoints.

If `move_away` is set, sessions are first moved to other servers, and each session keeps running
until it is moved. The remaining sessions are then drained. While the server drains, no new chunk
starts, and chunks in flight are finished, rendered and delivered. Every incomplete request then
ends with `draining` (close code 1013). If `save_to` is set, each session is saved exactly once. A
session that has a running request is saved at the end of its run because closing a live connection
frees the session. All other sessions are saved while they are idle. This module does not depend on
signals or on the engine.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

from vllm_omni.entrypoints.errors import EndpointError, WebSocketCloseCode
from vllm_omni.entrypoints.realtime.connection.guard import ConnectionGuard
from vllm_omni.entrypoints.realtime.sessions.run import DeliveryLog
from vllm_omni.runtime import log_context

logger = logging.getLogger("vllm." + __name__)

_POLL_S = 0.02


class DrainableSession(Protocol):
    """The part of a session's interface that draining uses."""

    engine_id: str
    """The engine's id for the session."""
    started: bool
    """Whether the session has a finished chunk."""
    delivery_log: DeliveryLog
    """Log of the session's requests and their replies."""

    @property
    def session_id(self) -> str: ...

    @property
    def is_busy(self) -> bool: ...

    def keep_alive(self) -> AbstractContextManager[None]: ...


S = TypeVar("S", bound=DrainableSession)
S_co = TypeVar("S_co", bound=DrainableSession, covariant=True)


class SessionTable(Protocol[S_co]):
    """The part of the session manager's interface that draining uses."""

    guard: ConnectionGuard
    """Guard that admits connections."""

    def sessions(self) -> Iterable[S_co]: ...

    @property
    def is_working(self) -> bool: ...


class SessionDrain(Generic[S]):
    """Drains the sessions of one API server process.

    `save_to` is a function that writes a session to persistent storage. By default, sessions are
    discarded. `move_away` is a function that moves as many sessions as possible to other servers.
    By default, no session is moved.
    """

    def __init__(self) -> None:
        self.save_to: Callable[[S], Awaitable[None]] | None = None
        self.move_away: Callable[[], Awaitable[None]] | None = None
        self.is_draining = False
        self.is_leaving = False
        """Whether sessions are being moved away. If so, no new session may start."""
        self._started = asyncio.Event()
        self._saved: set[str] = set()
        self._saving: set[asyncio.Task[None]] = set()

    def check_new(self) -> None:
        """Check whether a new session may start.

        Raises:
            EndpointError: `draining` if no new session may start.
        """
        self.check(is_refused=self.is_leaving or self.is_draining)

    def check(self, is_refused: bool | None = None, **details: Any) -> None:
        """Check whether a session may start new work.

        Args:
            is_refused: Whether new work is refused. Default: whether the server is draining.
            details: Additional fields for the error message.

        Raises:
            EndpointError: `draining` if new work is refused.
        """
        if self.is_draining if is_refused is None else is_refused:
            raise EndpointError(
                "draining",
                "the server is stopping; continue on another one",
                close=WebSocketCloseCode.CAPACITY,
                **details,
            )

    async def unless_draining(self, *waiting: Coroutine[Any, Any, Any]) -> None:
        """Await coroutines until one of them finishes or draining starts, and cancel the rest."""
        tasks = [asyncio.ensure_future(one) for one in (*waiting, self._started.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def save(self, session: S) -> None:
        """If `save_to` is set, save a session that has started and has not been saved yet. A
        failure is logged rather than raised.
        """
        if self.save_to is None or session.engine_id in self._saved or not session.started:
            return
        self._saved.add(session.engine_id)
        # Save in a separate task because a disconnect must not interrupt it.
        saving = asyncio.ensure_future(self._save(self.save_to, session))
        self._saving.add(saving)
        saving.add_done_callback(self._saving.discard)
        await asyncio.shield(saving)

    async def _save(self, save_to: Callable[[S], Awaitable[None]], session: S) -> None:
        with log_context.bound(session_id=session.session_id):
            try:
                await save_to(session)
            except (EndpointError, OSError) as error:
                logger.warning("a session could not be saved: %s", error)

    async def drain_sessions(self, manager: SessionTable[S]) -> None:
        """Drain the server: refuse new work, move sessions away, and finish and save the remaining
        sessions.

        The call returns only when all connections are closed, so that each connection's own task
        closes the connection with 1013 after `draining`. The server's shutdown would close it with
        1012.
        """
        manager.guard.is_draining = True
        if self.move_away is not None:
            self.is_leaving = True
            await self.move_away()
        self.is_draining = True
        self._started.set()
        while any(_works(session) for session in manager.sessions()):
            await asyncio.sleep(_POLL_S)
        for session in manager.sessions():
            with session.keep_alive():
                await self.save(session)
        if self._saving:
            await asyncio.wait(set(self._saving))
        while manager.is_working:
            await asyncio.sleep(_POLL_S)


def _works(session: DrainableSession) -> bool:
    """Return whether any of the session's requests is running, or a client is still receiving the
    session's replies.
    """
    return session.is_busy or any(run.has_follower for run in session.delivery_log.runs.values())
