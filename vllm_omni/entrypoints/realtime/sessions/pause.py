# SPDX-License-Identifier: Apache-2.0
"""`SessionPause` and `Destination`: work between two chunks of a session, and where it went.

While the work runs, no request of the session is in the engine, so its state does not change. A
request that runs continues afterwards, unless the session has left.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from vllm_omni.entrypoints.errors import EndpointError


@dataclass(frozen=True)
class Destination:
    """The server on which a session continues."""

    server: str
    """Name of the server."""
    url: str | None
    """Address of the server for clients. None: the address that they have used, with the name."""
    next_chunk_index: int
    """Number of the session's next chunk."""

    def as_error(self) -> EndpointError:
        """Return the end of a request of the session. It is not sent as a failure."""
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
    """One pause of a session.

    Args:
        work: Runs during the pause. Returns where the session has gone, or None if it stays.
    """

    def __init__(self, work: "Callable[[SessionPause], Awaitable[Destination | None]]") -> None:
        self._work = work
        self.is_started = False
        self.is_cancelled = False
        """Whether the request that was paused has been cancelled, so that the session will end."""
        self.wait_until_delivered: Callable[[], Awaitable[None]] = _at_once
        """Waits until the client has received every finished chunk."""
        self.done: asyncio.Future[Destination | None] = asyncio.get_running_loop().create_future()
        """Result of the work."""

    async def run(self) -> None:
        """Run the work once. If the caller is cancelled, the work still runs to its end."""
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
