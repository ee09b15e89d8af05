# SPDX-License-Identifier: Apache-2.0
"""`SessionRanks`: which data-parallel rank holds which session.

Under `--data-parallel-size N` each rank is an engine of its own with its own sessions; stock vLLM sends a request to
whichever is least busy, which would scatter a session. Here a session gets its rank when it begins (the rank with the
fewest sessions of this process; one that answers `capacity` passes it on to the next) and keeps it until it is closed.
A fork lives where its parent does, since its state is copied there.

Knows no engine and no sockets: it is handed a function that asks one rank. Sessions of other API server processes are
not known here; that a rank is fuller than it seems shows as `capacity`. Held by tests/entrypoints/test_ranks.py and
tests/engine/test_data_parallel.py.
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

Ask = Callable[[int], Awaitable[T]]
"""Sends one request to the rank of that number and returns its answer; raises `RequestFailed`."""


def num_ranks(vllm_config: "VllmConfig") -> int:
    """How many data-parallel ranks this API server sends requests to."""
    parallel = vllm_config.parallel_config
    return int(parallel.data_parallel_size_local if parallel.local_engines_only else parallel.data_parallel_size)


@dataclass(eq=False)
class _Placement:
    """Where a session is. settled: its first chunk has been answered; before that it may still move."""

    rank: int
    settled: asyncio.Event = field(default_factory=asyncio.Event)


class SessionRanks:
    """The sessions of one API server process; used from one event loop.

    size: number of ranks, at least 1. offset: the rank that is tried first when all hold equally much.
    """

    def __init__(self, size: int, offset: int = 0) -> None:
        self.size = size
        self._placements: dict[str, _Placement] = {}
        self._held = [0] * size  # sessions, and one-shot requests in flight
        self._turn = itertools.count(offset)

    def rank_of(self, session_id: str) -> int | None:
        """The rank that holds a session of this process; None if it is not known."""
        placement = self._placements.get(session_id)
        return None if placement is None else placement.rank

    @property
    def held(self) -> list[int]:
        """Sessions and one-shot requests of this process, for each rank."""
        return list(self._held)

    async def route(self, params: DiffusionParams, ask: "Ask[T]") -> T:
        """Send a request to the rank it belongs to, through `ask`. Raises `ask`'s exceptions."""
        if params.op == "close":
            return await self._close(params.session_id, ask)
        placement = self._placements.get(params.session_id)
        while placement is not None and not placement.settled.is_set():
            await placement.settled.wait()  # chunks sent ahead wait until the session has its rank
            placement = self._placements.get(params.session_id)
        if placement is None:
            if params.op == "generate" and params.chunk_index in (None, 0):
                return await self._start(params, ask)
            return await ask(0)  # nobody holds it: any rank gives the right refusal
        if params.op == "fork":
            return await self._fork(params, placement.rank, ask)
        try:
            return await ask(placement.rank)
        except RequestFailed as failure:
            if failure.code == "unknown_session":
                self._forget(params.session_id)
            raise

    async def _start(self, params: DiffusionParams, ask: "Ask[T]") -> T:
        """Begin a session (or run a one-shot request) where there is most room, elsewhere if there is none."""
        placement = self._place(params.session_id, -1)
        kept = False
        try:
            for last, rank in self._by_load():
                self._move(placement, rank)
                try:
                    answer = await ask(rank)
                except RequestFailed as failure:
                    if failure.code != "capacity" or last:
                        raise
                else:
                    kept = not params.one_shot
                    return answer
            raise AssertionError("unreachable: the last rank's answer is final")
        except asyncio.CancelledError:
            kept = not params.one_shot  # the chunk may have been committed all the same: `close` must find it
            raise
        finally:
            placement.settled.set()
            if not kept:
                self._forget(params.session_id)

    def adopt(self, session_id: str) -> int:
        """Place a session that is about to be restored where there is most room; `forget` it if that fails."""
        _, rank = next(self._by_load())
        self._place(session_id, rank).settled.set()
        return rank

    def forget(self, session_id: str) -> None:
        """A session is no longer anywhere."""
        self._forget(session_id)

    def _by_load(self) -> Iterator[tuple[bool, int]]:
        """`(whether it is the last one, rank)`: fewest sessions first, ties in turn."""
        turn = next(self._turn)
        order = sorted(range(self.size), key=lambda rank: (self._held[rank], (rank - turn) % self.size))
        return ((number == self.size - 1, rank) for number, rank in enumerate(order))

    async def _fork(self, params: DiffusionParams, rank: int, ask: "Ask[T]") -> T:
        answer = await ask(rank)
        if params.fork_to is not None:
            self._place(params.fork_to, rank).settled.set()
        return answer

    async def _close(self, session_id: str, ask: "Ask[T]") -> T:
        """Close it where it is. One that is not known here is closed on every rank: it may be another process's."""
        rank = self.rank_of(session_id)
        if rank is None:
            answers = await asyncio.gather(*(ask(rank) for rank in range(self.size)))
            return answers[0]
        answer = await ask(rank)
        self._forget(session_id)
        return answer

    # -- the table -----------------------------------------------------------------------------------------------

    def _place(self, session_id: str, rank: int) -> _Placement:
        self._forget(session_id)
        placement = self._placements[session_id] = _Placement(rank)
        if rank >= 0:
            self._held[rank] += 1
        return placement

    def _move(self, placement: _Placement, rank: int) -> None:
        if placement.rank >= 0:
            self._held[placement.rank] -= 1
        placement.rank = rank
        self._held[rank] += 1

    def _forget(self, session_id: str) -> None:
        placement = self._placements.pop(session_id, None)
        if placement is not None and placement.rank >= 0:
            self._held[placement.rank] -= 1
            placement.settled.set()
