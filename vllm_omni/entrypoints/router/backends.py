# SPDX-License-Identifier: Apache-2.0
"""`Backends`: the servers behind the router: which live, which have room, and the choice of server for a request.

A server is asked for `/omni/ready` every `interval_s`; it is down from the first refused connection on, up again with
the first answer. A request for a named rank, or a session seen before, goes to that server while it lives.
Everything else goes to a server with room: a named session by rendezvous hash (so that several routers, or one that was
started again, choose alike), the rest to the one with the fewest open requests. Knows no sockets of clients.
Held by tests/entrypoints/test_router.py.
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
    """One server. open: requests and sockets that go through it now; facts: its last answer to `/omni/ready`."""

    name: str
    url: str
    is_up: bool = False
    has_room: bool = False
    open: int = 0
    facts: dict[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    def lost(self, why: object) -> None:
        """It did not answer: nothing goes there until it does again."""
        if self.is_up:
            logger.warning("%s (%s) is gone: %s; its sessions are lost", self.name, self.url, why)
        self.is_up = self.has_room = False
        self.facts = {}


class Backends:
    """All servers, named `rank-0`, `rank-1`, ... in the order of `urls`; used from one event loop."""

    def __init__(self, urls: Sequence[str], interval_s: float = 1.0, timeout_s: float = 5.0) -> None:
        self.all = [Backend(f"rank-{number}", url.rstrip("/")) for number, url in enumerate(urls)]
        self._by_name = {backend.name: backend for backend in self.all}
        self._interval_s = interval_s
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._homes: OrderedDict[str, Backend] = OrderedDict()

    @property
    def up(self) -> list[Backend]:
        return [backend for backend in self.all if backend.is_up]

    # -- choice of server ----------------------------------------------------------------------------------------

    def choose(
        self, session: str | None = None, rank: str | None = None, but: Sequence[Backend] = ()
    ) -> Backend | None:
        """The server for one request; None if no server is left. but: servers that were tried already.

        session: a name that the client keeps; rank: a server that it asks for, by name.
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
            return self._settle(session, max(roomy, key=lambda backend: _score(session, backend.name)))
        return min(roomy, key=lambda backend: backend.open)

    def _settle(self, session: str | None, backend: Backend | None) -> Backend | None:
        if session is not None and backend is not None:
            self._homes[session] = backend
            self._homes.move_to_end(session)
            if len(self._homes) > _MAX_REMEMBERED:
                self._homes.popitem(last=False)
        return backend

    # -- who lives -----------------------------------------------------------------------------------------------

    async def watch(self, client: aiohttp.ClientSession) -> None:
        """Ask every server again and again; runs until it is cancelled."""
        while True:
            await self.ask(client)
            await asyncio.sleep(self._interval_s)

    async def ask(self, client: aiohttp.ClientSession) -> None:
        await asyncio.gather(*(self._ask(client, backend) for backend in self.all))

    async def _ask(self, client: aiohttp.ClientSession, backend: Backend) -> None:
        try:
            async with client.get(backend.url + READY_PATH, timeout=self._timeout) as answer:
                facts = await answer.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            backend.lost(error or type(error).__name__)
            return
        status = facts.get("status") if isinstance(facts, dict) else None
        if status not in ("ready", "capacity"):
            backend.lost(f"status {status!r}")
            return
        if not backend.is_up:
            logger.info("%s (%s) is up", backend.name, backend.url)
        backend.is_up, backend.has_room, backend.facts = True, status == "ready", facts


def _score(session: str, name: str) -> bytes:
    """Rendezvous hashing: a session's server is the one with the highest score; losing one moves only its sessions."""
    return hashlib.blake2b(f"{session}\0{name}".encode("utf-8", "surrogateescape"), digest_size=8).digest()
