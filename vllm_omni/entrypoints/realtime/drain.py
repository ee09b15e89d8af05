# SPDX-License-Identifier: Apache-2.0
"""`SessionDrain`: the realtime doors' part of stopping gracefully, and where sessions are saved when that happens.

Once draining, no chunk begins. Chunks in the engine are finished, rendered and delivered; then every request ends with
`draining` (close code 1013) unless it was complete. If `save_to` is set, each world is saved exactly once: where its
run ends, because a live client's world goes with its connection, or else when nobody uses it. Knows no signals and no
engine. Held by tests/entrypoints/realtime/test_drain.py.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

from vllm_omni import log_context
from vllm_omni.entrypoints.realtime.errors import Close, DoorError
from vllm_omni.entrypoints.realtime.gate import Gate
from vllm_omni.entrypoints.realtime.journal import Journal

logger = logging.getLogger("vllm." + __name__)

_POLL_S = 0.02


class Drainable(Protocol):
    """A session, as far as draining goes."""

    engine_id: str
    started: bool
    journal: Journal

    @property
    def session_id(self) -> str: ...

    @property
    def is_busy(self) -> bool: ...

    def hold(self) -> AbstractContextManager[None]: ...


S = TypeVar("S", bound=Drainable)
S_co = TypeVar("S_co", bound=Drainable, covariant=True)


class SessionTable(Protocol[S_co]):
    """Who has the sessions."""

    gate: Gate

    def sessions(self) -> Iterable[S_co]: ...

    @property
    def is_working(self) -> bool: ...


class SessionDrain(Generic[S]):
    """save_to: writes a session to where it is kept; None = sessions are not kept."""

    def __init__(self) -> None:
        self.save_to: Callable[[S], Awaitable[None]] | None = None
        self.is_draining = False
        self._begun = asyncio.Event()
        self._saved: set[str] = set()
        self._saving: set[asyncio.Task[None]] = set()

    def check(self, **details: Any) -> None:
        """Raise `DoorError("draining")` if nothing new may begin."""
        if self.is_draining:
            raise DoorError(
                "draining", "the server is stopping; go on with another one", close=Close.CAPACITY, **details
            )

    async def unless_draining(self, waiting: Coroutine[Any, Any, None]) -> None:
        """Await `waiting`, or until draining begins."""
        tasks = [asyncio.ensure_future(waiting), asyncio.ensure_future(self._begun.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def save(self, session: S) -> None:
        """Save a session if that is wanted and has not been done; a failure is logged, it ends nothing else."""
        if self.save_to is None or session.engine_id in self._saved or not session.started:
            return
        self._saved.add(session.engine_id)
        # In a task of its own: a client that leaves must not cut it short.
        saving = asyncio.ensure_future(self._save(self.save_to, session))
        self._saving.add(saving)
        saving.add_done_callback(self._saving.discard)
        await asyncio.shield(saving)

    async def _save(self, save_to: Callable[[S], Awaitable[None]], session: S) -> None:
        with log_context.bound(session_id=session.session_id):
            try:
                await save_to(session)
            except (DoorError, OSError) as error:
                logger.warning("a session could not be saved: %s", error)

    async def run(self, manager: SessionTable[S]) -> None:
        """Stop taking work, and return when all that was begun is done, delivered and saved, and connections closed.

        A client told `draining` is closed with 1013 by its notifying task, not by the server's end (1012).
        """
        self.is_draining = True
        self._begun.set()
        manager.gate.is_draining = True
        while any(_works(session) for session in manager.sessions()):
            await asyncio.sleep(_POLL_S)
        for session in manager.sessions():
            with session.hold():
                await self.save(session)
        if self._saving:
            await asyncio.wait(set(self._saving))
        while manager.is_working:
            await asyncio.sleep(_POLL_S)


def _works(session: Drainable) -> bool:
    """Whether a request runs, or a reader still takes its replies."""
    return session.is_busy or any(run.has_follower for run in session.journal.runs.values())
