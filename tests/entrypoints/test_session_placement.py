# SPDX-License-Identifier: Apache-2.0
"""`SessionPlacement` keeps every session on the data-parallel rank where it started.

In these tests, each rank is simulated by a store that holds up to `capacity` sessions.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from helpers.waits import until

from vllm_omni.entrypoints.engine.session_placement import SessionPlacement
from vllm_omni.inputs import DiffusionParams
from vllm_omni.outputs import RequestFailed


class Ranks:
    """Simulates the engines of several ranks without a model. Each engine stores sessions and
    counts their chunks.
    """

    def __init__(self, size: int, capacity: int = 100) -> None:
        self.router = SessionPlacement(size)
        self.capacity = capacity
        self.stores: list[dict[str, int]] = [{} for _ in range(size)]
        self.pause_s = 0.0
        self.requested: list[int] = []

    async def send(self, session_id: str, index: int | None = None, **fields: object) -> int:
        """Run one request and return the rank that ran it."""
        params = DiffusionParams(session_id=session_id, chunk_index=index, **fields)  # type: ignore[arg-type]
        return await self.router.route(params, self._asker(params))

    def _asker(self, params: DiffusionParams) -> Callable[[int], Awaitable[int]]:
        async def send(rank: int) -> int:
            self.requested.append(rank)
            await asyncio.sleep(self.pause_s)
            store, name = self.stores[rank], params.session_id
            if params.op == "close":
                store.pop(name, None)
            elif params.op == "fork":
                assert params.fork_to is not None
                store[params.fork_to] = store[name]
            elif name in store or params.chunk_index in (None, 0):
                if name not in store and len(store) >= self.capacity:
                    raise RequestFailed("capacity", "full")
                store[name] = store.get(name, 0) + 1
                if params.one_shot:
                    del store[name]
            else:
                raise RequestFailed("unknown_session", "not here")
            return rank

        return send


def test_sessions_start_on_the_emptiest_rank_and_stay_there() -> None:
    """Six sessions are distributed evenly over three ranks, and each session's later chunks go to
    the same rank as its first chunk.
    """

    async def scenario() -> None:
        ranks = Ranks(3)
        homes = {f"s{n}": await ranks.send(f"s{n}", 0) for n in range(6)}
        assert sorted(homes.values()) == [0, 0, 1, 1, 2, 2]
        for index in range(1, 4):
            for name, home in homes.items():
                assert await ranks.send(name, index) == home
        gone = [name for name, home in homes.items() if home == 1]
        for name in gone:
            assert await ranks.send(name, op="close") == 1
        assert ranks.router.held == [2, 0, 2]
        assert [await ranks.send("new", 0), await ranks.send("newer", 0)] == [1, 1]

    asyncio.run(scenario())


def test_a_new_session_is_tried_on_every_rank() -> None:
    """All ranks are tried before `capacity` is raised, and a refused session is not stored."""

    async def scenario() -> None:
        ranks = Ranks(2, capacity=2)
        # These sessions belong to another API server, so this router has no record of them.
        ranks.stores[0].update(other_process=1, another=1)
        assert [await ranks.send(f"s{n}", 0) for n in range(2)] == [1, 1]
        with pytest.raises(RequestFailed, match="capacity"):
            await ranks.send("one-too-many", 0)
        assert ranks.router.rank_of("one-too-many") is None
        assert ranks.router.held == [0, 2]

    asyncio.run(scenario())


def test_chunks_sent_ahead_follow_the_first_one() -> None:
    """A second chunk submitted before the first chunk has finished waits until its session's rank
    is known.
    """

    async def scenario() -> None:
        ranks = Ranks(2, capacity=1)
        first = await ranks.send("full", 0)
        ranks.pause_s = 0.01
        ranks.router._held = [0, 0]  # the first choice may now be the full rank
        for _ in range(4):
            homes = await asyncio.gather(*(ranks.send("ahead", index) for index in range(3)))
            assert set(homes) == {1 - first}
            await ranks.send("ahead", op="close")

    asyncio.run(scenario())


def test_a_fork_stays_on_its_parents_rank() -> None:
    async def scenario() -> None:
        ranks = Ranks(3)
        for n in range(5):
            await ranks.send(f"s{n}", 0)
        home = await ranks.send("s1", op="fork", fork_to="child")
        assert ranks.router.rank_of("child") == home == ranks.router.rank_of("s1")
        assert await ranks.send("child", 1) == home

    asyncio.run(scenario())


def test_one_shot_requests_spread_and_are_evicted() -> None:
    async def scenario() -> None:
        ranks = Ranks(2)
        ranks.pause_s = 0.01
        homes = await asyncio.gather(*(ranks.send(f"picture-{n}", one_shot=True) for n in range(8)))
        assert sorted(homes) == [0] * 4 + [1] * 4
        assert ranks.router.held == [0, 0]

    asyncio.run(scenario())


def test_a_session_the_engine_has_lost_may_start_again_elsewhere() -> None:
    async def scenario() -> None:
        ranks = Ranks(2)
        home = await ranks.send("s", 0)
        ranks.stores[home].clear()
        with pytest.raises(RequestFailed, match="unknown_session"):
            await ranks.send("s", 1)
        assert ranks.router.rank_of("s") is None and ranks.router.held == [0, 0]

    asyncio.run(scenario())


def test_a_session_of_another_process_is_closed_on_any_rank() -> None:
    async def scenario() -> None:
        ranks = Ranks(3)
        ranks.stores[2]["theirs"] = 4
        await ranks.send("theirs", op="close")
        assert ranks.stores == [{}, {}, {}]

    asyncio.run(scenario())


def test_a_cancelled_first_chunk_is_still_found_by_close() -> None:
    """A session whose first chunk was cancelled can still be closed, because the engine may have
    committed that chunk.
    """

    async def scenario() -> None:
        ranks = Ranks(2)
        ranks.pause_s = 10
        task = asyncio.create_task(ranks.send("s", 0))
        await until(lambda: ranks.requested)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        ranks.pause_s, home = 0.0, ranks.router.rank_of("s")
        assert await ranks.send("s", op="close") == home
        assert ranks.router.held == [0, 0]

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(5))
def test_under_random_load_no_session_ever_moves(seed: int) -> None:
    """While many clients start, continue, fork, cancel and close sessions, each chunk runs on its
    session's rank.
    """
    rng = random.Random(seed)

    async def client(ranks: Ranks, name: str) -> None:
        for life in range(4):
            try:
                home = await ranks.send(name, 0)
            # All ranks are full, which is acceptable. A misrouted chunk would fail later.
            except RequestFailed:
                continue
            for index in range(1, rng.randrange(1, 6)):
                assert await ranks.send(name, index) == home
                if rng.random() < 0.2:
                    fork = f"{name}-{life}-{index}"
                    assert await ranks.send(name, op="fork", fork_to=fork) == home
                    assert await ranks.send(fork, index + 1) == home
                    await ranks.send(fork, op="close")
            await ranks.send(name, op="close")

    async def scenario() -> None:
        ranks = Ranks(3, capacity=6)
        ranks.pause_s = 0.0005
        await asyncio.gather(*(client(ranks, f"client-{n}") for n in range(30)))
        assert ranks.stores == [{}, {}, {}] and ranks.router.held == [0, 0, 0]

    asyncio.run(scenario())
