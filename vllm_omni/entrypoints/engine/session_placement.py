# SPDX-License-Identifier: Apache-2.0
"""`SessionPlacement`: maps sessions to data-parallel ranks.

With `--data-parallel-size N`, each data-parallel rank is a separate engine with its own sessions.
In this module, `rank` in an identifier means data-parallel rank. Stock vLLM sends a request to the
least busy data-parallel rank, which would scatter a session's requests across ranks. Instead,
`SessionPlacement` assigns a new session to the data-parallel rank with the fewest of this process's
sessions. If that rank refuses the session with `capacity`, the next rank is tried. The session
stays on its data-parallel rank until it is closed. A fork is placed on its parent's data-parallel
rank, because the state is copied within the rank.

This module is independent of the engine and of sockets: its caller passes the function that sends a
request to a data-parallel rank. The module counts only this API server process's sessions. A
data-parallel rank may therefore have less free capacity than computed here and may refuse a session
with `capacity`.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from vllm_omni.inputs import DiffusionParams
from vllm_omni.outputs import RequestFailed

if TYPE_CHECKING:
    from vllm.config import VllmConfig

T = TypeVar("T")

SendToRank = Callable[[int], Awaitable[T]]
"""Function that sends one request to a data-parallel rank and returns the result. It raises
`RequestFailed` if the request fails.
"""


def num_data_parallel_ranks(vllm_config: "VllmConfig") -> int:
    """Return the number of data-parallel ranks that this API server sends requests to."""
    parallel = vllm_config.parallel_config
    return int(
        parallel.data_parallel_size_local
        if parallel.local_engines_only
        else parallel.data_parallel_size
    )


@dataclass(eq=False)
class _Placement:
    """One session's data-parallel rank."""

    rank: int
    """Index of the data-parallel rank; -1 before the first attempt."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that is set once the first chunk has a result. Until then, the session may move to
    another data-parallel rank.
    """


class SessionPlacement:
    """Assigns the sessions of one API server process to data-parallel ranks. This class is not
    thread-safe; use it from one event loop.

    Args:
        size: Number of data-parallel ranks, at least 1.
        offset: Data-parallel rank to use first when all ranks have the same number of sessions.
    """

    def __init__(self, size: int, offset: int = 0) -> None:
        self.size = size
        self._placements: dict[str, _Placement] = {}
        self._held = [0] * size  # sessions and one-shot requests in flight, by rank
        self._next_rank = itertools.count(offset)

    def rank_of(self, session_id: str) -> int | None:
        """Return a session's data-parallel rank, or None if the session does not belong to this
        process.
        """
        placement = self._placements.get(session_id)
        return None if placement is None else placement.rank

    @property
    def held(self) -> list[int]:
        """Number of sessions and one-shot requests of this process on each data-parallel rank."""
        return list(self._held)

    async def route(self, params: DiffusionParams, send: "SendToRank[T]") -> T:
        """Send a request to its session's data-parallel rank.

        Args:
            params: Request parameters.
            send: Function that sends the request to a data-parallel rank. Exceptions from `send`
                propagate to the caller.

        Returns:
            The result of `send`.
        """
        if params.op == "close":
            return await self._close(params.session_id, send)
        placement = self._placements.get(params.session_id)
        while placement is not None and not placement.settled.is_set():
            await placement.settled.wait()  # until the session's rank is final
            placement = self._placements.get(params.session_id)
        if placement is None:
            if params.op == "generate" and params.chunk_index in (None, 0):
                return await self._start(params, send)
            return await send(0)  # every rank refuses an unknown session in the same way
        if params.op == "fork":
            return await self._fork(params, placement.rank, send)
        try:
            return await send(placement.rank)
        except RequestFailed as failure:
            if failure.code == "unknown_session":
                self._remove(params.session_id)
            raise

    async def _start(self, params: DiffusionParams, send: "SendToRank[T]") -> T:
        """Start a session or a one-shot request on the least loaded data-parallel rank that accepts
        it.
        """
        placement = self._assign(params.session_id, -1)
        retained = False
        try:
            for last, rank in self._by_load():
                self._move(placement, rank)
                try:
                    response = await send(rank)
                except RequestFailed as failure:
                    if failure.code != "capacity" or last:
                        raise
                else:
                    retained = not params.one_shot
                    return response
            raise AssertionError("unreachable: the last rank's result is final")
        except asyncio.CancelledError:
            # the chunk may have been committed, so `close` must find the session
            retained = not params.one_shot
            raise
        finally:
            placement.settled.set()
            if not retained:
                self._remove(params.session_id)

    def adopt(self, session_id: str) -> int:
        """Assign a session, which is about to be restored, to the data-parallel rank with the
        fewest sessions, and return that rank.

        `remove_session` undoes the assignment.
        """
        _, rank = next(self._by_load())
        self._assign(session_id, rank).settled.set()
        return rank

    def remove_session(self, session_id: str) -> None:
        """Remove a session from the table."""
        self._remove(session_id)

    def _by_load(self) -> Iterator[tuple[bool, int]]:
        """Yield `(is_last, rank)`, starting with the rank that has the fewest sessions. Ties are
        broken in rotation, so each of the tied ranks comes first in turn.
        """
        turn = next(self._next_rank)
        order = sorted(
            range(self.size), key=lambda rank: (self._held[rank], (rank - turn) % self.size)
        )
        return ((number == self.size - 1, rank) for number, rank in enumerate(order))

    async def _fork(self, params: DiffusionParams, rank: int, send: "SendToRank[T]") -> T:
        response = await send(rank)
        if params.fork_to is not None:
            self._assign(params.fork_to, rank).settled.set()
        return response

    async def _close(self, session_id: str, send: "SendToRank[T]") -> T:
        """Close a session on its data-parallel rank.

        A session unknown to this process may belong to another process, so it is closed on all
        data-parallel ranks.
        """
        rank = self.rank_of(session_id)
        if rank is None:
            responses = await asyncio.gather(*(send(rank) for rank in range(self.size)))
            return responses[0]
        response = await send(rank)
        self._remove(session_id)
        return response

    # -- the table ---------------------------------------------------------------------------------

    def _assign(self, session_id: str, rank: int) -> _Placement:
        self._remove(session_id)
        placement = self._placements[session_id] = _Placement(rank)
        if rank >= 0:
            self._held[rank] += 1
        return placement

    def _move(self, placement: _Placement, rank: int) -> None:
        if placement.rank >= 0:
            self._held[placement.rank] -= 1
        placement.rank = rank
        self._held[rank] += 1

    def _remove(self, session_id: str) -> None:
        placement = self._placements.pop(session_id, None)
        if placement is not None and placement.rank >= 0:
            self._held[placement.rank] -= 1
            placement.settled.set()
