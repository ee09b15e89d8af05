# SPDX-License-Identifier: Apache-2.0
"""`SessionPause` and `Destination`: work between two chunks of a session, and the session's new
location.

While the work runs, no request of the session is in the engine, so the session's state does not
change. A running request continues afterwards, unless the session has left this server.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from vllm_omni.entrypoints.errors import EndpointError


@dataclass(frozen=True)
class Destination:
    """The server on which a session continues."""

    server: str
    """Name of the server."""
    url: str | None
    """Address of the server for clients. None: the address that clients have already used, together
    with the name.
    """
    next_chunk_index: int
    """Index of the session's next chunk."""

    def as_error(self) -> EndpointError:
        """Return the error that ends a request of the session. It is not sent as a failure."""
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
    """A pause of a session.

    Args:
        work: Runs during the pause. Returns the new location of the session, or None if it stays.
    """

    def __init__(self, work: "Callable[[SessionPause], Awaitable[Destination | None]]") -> None:
        self._work = work
        self.is_started = False
        self.is_cancelled = False
        """Whether the paused request has been cancelled, so that the session will end."""
        self.wait_until_delivered: Callable[[], Awaitable[None]] = _at_once
        """Waits until all finished chunks have been received by the clients."""
        self.stream_state: Callable[[], bytes | None] = lambda: None
        """Returns the controls of the paused request (`ChunkSource.state`)."""
        self.done: asyncio.Future[Destination | None] = asyncio.get_running_loop().create_future()
        """Result of the work."""

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
            self.done.exception()  # retrieved, even if nobody waits for the result
        else:
            self.done.set_result(work.result())


class PauseSlot:
    """Allows at most one pause of a session at a time.

    Args:
        turn: Held by the running request, and during a pause.
    """

    def __init__(self, turn: asyncio.Lock) -> None:
        self._turn = turn
        self.pending: SessionPause | None = None
        """The pause that has been requested or is running."""
        self.requested = asyncio.Event()
        """Set while a pause is requested or running."""

    def request(
        self, work: Callable[[SessionPause], Awaitable[Destination | None]]
    ) -> SessionPause:
        """Request a pause. A running request executes it before its next chunk.

        Raises:
            EndpointError: `session_busy`.
        """
        if self.pending is not None:
            raise EndpointError("session_busy", "the session is being moved")
        self.pending = SessionPause(work)
        self.requested.set()
        return self.pending

    async def wait(self, pause: SessionPause) -> Destination | None:
        """Wait for the end of a pause, and run it if no request does so."""

        async def pause_when_idle() -> None:
            async with self._turn:
                await self.run(pause)

        idle = asyncio.ensure_future(pause_when_idle())
        first: list[asyncio.Future[Any]] = [idle, pause.done]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if not idle.done():
            idle.cancel()  # a request that runs has taken the pause
        return await pause.done

    async def run(self, pause: SessionPause) -> None:
        """Run the work of a pause if it has not run yet. The caller has the turn."""
        if pause.is_started:
            return
        try:
            await pause.run()
        finally:
            self.pending = None
            self.requested.clear()
