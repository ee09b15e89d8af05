# SPDX-License-Identifier: Apache-2.0
"""`SessionPause` runs work between two of a session's chunks. `Destination` is the server that a
session has moved to.

During a pause, none of the session's requests is in the engine, so the session's state does not
change. If the session stays on this server, a request that was running continues after the pause.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from vllm_omni.entrypoints.errors import EndpointError


@dataclass(frozen=True)
class Destination:
    """The server that a session continues on."""

    server: str
    """Name of the server."""
    url: str | None
    """URL where clients can reach the server. None: clients use the same address as before,
    together with the server's name.
    """
    next_chunk_index: int
    """Index of the session's next chunk."""

    def as_error(self) -> EndpointError:
        """Return the error that ends a moved session's request. Endpoints do not report this error
        to clients as a failure.
        """
        return EndpointError(
            "moved",
            f"the session continues on the server {self.server!r}",
            server=self.server,
            url=self.url,
            next_chunk_index=self.next_chunk_index,
        )


async def _at_once() -> None:
    return


class SessionPause:
    """A pause between two of a session's chunks, during which some work runs.

    Args:
        work: Coroutine function that runs during the pause. It returns the session's new server, or
            None if the session stays.
    """

    def __init__(self, work: "Callable[[SessionPause], Awaitable[Destination | None]]") -> None:
        self._work = work
        self.is_started = False
        self.is_cancelled = False
        """Whether the paused request has been cancelled. If so, the session ends after the pause.
        """
        self.wait_until_delivered: Callable[[], Awaitable[None]] = _at_once
        """Function that waits until the clients have received all finished chunks."""
        self.stream_state: Callable[[], bytes | None] = lambda: None
        """Function that returns the controls of the paused request (`ChunkSource.state`)."""
        self.done: asyncio.Future[Destination | None] = asyncio.get_running_loop().create_future()
        """Future that receives the work's result."""

    async def run(self) -> None:
        """Run the work once. If the caller is cancelled, the work still runs to completion."""
        self.is_started = True
        work = asyncio.ensure_future(self._work(self))
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            self.is_cancelled = True
            await asyncio.wait([work])
            raise
        finally:
            self._finish(work)

    def _finish(self, work: "asyncio.Future[Destination | None]") -> None:
        if work.cancelled():
            self.done.cancel()
        elif (error := work.exception()) is not None:
            self.done.set_exception(error)
            self.done.exception()  # retrieve the exception so that asyncio does not report it
        else:
            self.done.set_result(work.result())


class PauseSlot:
    """Allows at most one pause per session at a time.

    Args:
        turn: Lock that is held while a request is running and during a pause.
    """

    def __init__(self, turn: asyncio.Lock) -> None:
        self._turn = turn
        self.pending: SessionPause | None = None
        """Pause that has been requested or is running. None: no pause has been requested."""
        self.requested = asyncio.Event()
        """Event that is set while a pause is requested or running."""

    def request(
        self, work: Callable[[SessionPause], Awaitable[Destination | None]]
    ) -> SessionPause:
        """Request a pause. If a request is running, that request executes the pause before its next
        chunk.

        Raises:
            EndpointError: `session_busy` if another pause has already been requested.
        """
        if self.pending is not None:
            raise EndpointError("session_busy", "the session is being moved")
        self.pending = SessionPause(work)
        self.requested.set()
        return self.pending

    async def wait(self, pause: SessionPause) -> Destination | None:
        """Wait until a pause has ended. If no request runs the pause, this call runs it."""

        async def pause_when_idle() -> None:
            async with self._turn:
                await self.run(pause)

        idle = asyncio.ensure_future(pause_when_idle())
        first: list[asyncio.Future[Any]] = [idle, pause.done]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not idle.done():
            idle.cancel()  # the running request has executed the pause
        return await pause.done

    async def run(self, pause: SessionPause) -> None:
        """Run a pause's work if it has not run yet. The caller must hold `turn`."""
        if pause.is_started:
            return
        try:
            await pause.run()
        finally:
            self.pending = None
            self.requested.clear()
