# SPDX-License-Identifier: Apache-2.0
"""`Backends`: the servers of the router: their state, and the choice of a server for a request.

Each server's `/omni/ready` is polled every `interval_s`. A server is down from the first refused
connection on, and up with the next response. A request that names a rank or a known session goes to
that server while it is alive. Otherwise a server with capacity is chosen: for a named session by
rendezvous hash, so that several or restarted routers choose alike, else the one with the fewest
open requests.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

logger = logging.getLogger("vllm_omni.router")

READY_PATH: Final = "/omni/ready"
_MAX_REMEMBERED: Final = 100_000


@dataclass(eq=False)
class Backend:
    """One server."""

    name: str
    """`rank-0`, `rank-1` and so on."""
    url: str
    """URL of the server, without a trailing slash."""
    is_up: bool = False
    """Whether the server responds."""
    has_room: bool = False
    """Whether the server accepts new work."""
    open: int = 0
    """Number of requests and WebSockets that use it now."""
    info: dict[str, Any] = field(default_factory=dict)
    """Its last response to `/omni/ready`."""

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    def unreachable(self, why: object) -> None:
        """Mark the server as down until it responds again."""
        if self.is_up:
            logger.warning("%s (%s) is gone: %s; its sessions are lost", self.name, self.url, why)
        self.is_up = self.has_room = False
        self.info = {}


class Backends:
    """All servers, named `rank-0`, `rank-1` and so on in the order of `urls`.

    Use it from one event loop.
    """

    def __init__(
        self, urls: Sequence[str], interval_s: float = 1.0, timeout_s: float = 5.0
    ) -> None:
        self.all = [Backend(f"rank-{number}", url.rstrip("/")) for number, url in enumerate(urls)]
        self._by_name = {backend.name: backend for backend in self.all}
        self._interval_s = interval_s
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._homes: OrderedDict[str, Backend] = OrderedDict()

    @property
    def up(self) -> list[Backend]:
        return [backend for backend in self.all if backend.is_up]

    # -- choice of server --------------------------------------------------------------------------

    def choose(
        self, session: str | None = None, rank: str | None = None, but: Sequence[Backend] = ()
    ) -> Backend | None:
        """Return the server for a request, or None if there is none.

        Args:
            session: Session name that the client uses.
            rank: Name of the server that the client requests.
            but: Servers that were already tried.
        """
        candidates = [backend for backend in self.up if backend not in but]
        if not candidates:
            return None
        named = self._by_name.get(rank or "")
        if named in candidates:
            return self._settle(session, named)
        if session is not None and (home := self._homes.get(session)) in candidates:
            return self._settle(session, home)
        roomy = [backend for backend in candidates if backend.has_room] or candidates
        if session is not None:
            return self._settle(
                session, max(roomy, key=lambda backend: _score(session, backend.name))
            )
        return min(roomy, key=lambda backend: backend.open)

    def _settle(self, session: str | None, backend: Backend | None) -> Backend | None:
        if session is not None and backend is not None:
            self._homes[session] = backend
            self._homes.move_to_end(session)
            if len(self._homes) > _MAX_REMEMBERED:
                self._homes.popitem(last=False)
        return backend

    # -- who lives ---------------------------------------------------------------------------------

    async def watch(self, client: aiohttp.ClientSession) -> None:
        """Poll every server until cancelled."""
        while True:
            await self.poll_backends(client)
            await asyncio.sleep(self._interval_s)

    async def poll_backends(self, client: aiohttp.ClientSession) -> None:
        await asyncio.gather(*(self._poll(client, backend) for backend in self.all))

    async def _poll(self, client: aiohttp.ClientSession, backend: Backend) -> None:
        try:
            async with client.get(backend.url + READY_PATH, timeout=self._timeout) as response:
                info = await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            backend.unreachable(error or type(error).__name__)
            return
        status = info.get("status") if isinstance(info, dict) else None
        if status not in ("ready", "capacity"):
            backend.unreachable(f"status {status!r}")
            return
        if not backend.is_up:
            logger.info("%s (%s) is up", backend.name, backend.url)
        backend.is_up, backend.has_room, backend.info = True, status == "ready", info


def _score(session: str, name: str) -> bytes:
    """Return the rendezvous hash of a session and a server.

    A session's server is the one with the highest hash, so the loss of a server moves only its own
    sessions.
    """
    return hashlib.blake2b(
        f"{session}\0{name}".encode("utf-8", "surrogateescape"), digest_size=8
    ).digest()
