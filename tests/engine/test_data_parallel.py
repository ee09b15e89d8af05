# SPDX-License-Identifier: Apache-2.0
"""Two data-parallel ranks: a session stays on its rank, capacities add up, and results match those
of one rank.

All tests share one engine with two ranks. The last test kills a rank.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from helpers.engine_client import running_engine
from helpers.scheduling import new_request, run_to_end
from helpers.waits import pause_task, seconds

from vllm_omni.entrypoints.engine.client import OmniEngine
from vllm_omni.entrypoints.engine.session_placement import SessionPlacement, num_data_parallel_ranks
from vllm_omni.inputs import DiffusionParams
from vllm_omni.outputs import RequestFailed

CHUNKS, PER_RANK = 4, 3


class Endpoints:
    """A caller that uses the engine in the same way as an endpoint, on one event loop for all
    tests.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, engine: OmniEngine, ranks: SessionPlacement
    ) -> None:
        self.loop, self.engine, self.ranks = loop, engine, ranks

    async def walk(
        self, session_id: str, seed: int, chunks: range = range(CHUNKS)
    ) -> list[np.ndarray]:
        latents = []
        for index in chunks:
            first: dict[str, Any] = {"prompt": "a field", "seed": seed} if index == 0 else {}
            params = DiffusionParams(
                session_id=session_id, chunk_index=index, output="latents", **first
            )
            latents.append((await self.engine.run_request(params, {}))[1]["latents"].copy())
        return latents

    async def close(self, *names: str) -> None:
        await asyncio.gather(*(self.engine.close_session(name) for name in names))


async def until_at_work(endpoints: Endpoints, sessions: set[str]) -> None:
    """Wait until the requests of these sessions, and no others, are running."""
    async with asyncio.timeout(seconds(30)):
        while set(await endpoints.engine.progress()) != sessions:
            await pause_task(0.02)


async def _endpoints(
    model: Path, loop: asyncio.AbstractEventLoop, **engine_args: Any
) -> AsyncIterator[Endpoints]:
    async with running_engine(model, {"max_sessions": PER_RANK}, **engine_args) as client:
        ranks = SessionPlacement(num_data_parallel_ranks(client.engine.vllm_config))
        yield Endpoints(loop, OmniEngine(client.engine, ranks), ranks)


def _run_endpoints(model: Path, **engine_args: Any) -> Iterator[Endpoints]:
    with asyncio.Runner() as runner:
        endpoints = _endpoints(model, runner.get_loop(), **engine_args)
        yield runner.run(anext(endpoints))
        runner.run(endpoints.aclose())  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def two_ranks(null_world: Path) -> Iterator[Endpoints]:
    yield from _run_endpoints(null_world, data_parallel_size=2)


def title(process: psutil.Process) -> str:
    """Return the name of a vLLM process without its prefix, or "" if the process has ended."""
    try:
        return " ".join(process.cmdline()).strip().removeprefix("VLLM::")
    except psutil.Error:
        return ""


def alone(runner: Any, seed: int) -> list[np.ndarray]:
    """Return the chunks of a session that runs by itself on a runner in this process."""
    latents = []
    for index in range(CHUNKS):
        first: dict[str, Any] = {"prompt": "a field", "seed": seed} if index == 0 else {}
        request = new_request(
            f"{seed}-{index}", session_id="alone", chunk_index=index, output="latents", **first
        )
        latents.append(run_to_end(runner, request)[request.req_id][1]["latents"].numpy())
    run_to_end(runner, new_request("close", session_id="alone", op="close"))
    return latents


def test_many_clients_on_two_ranks_equal_one_rank(
    two_ranks: Endpoints, null_world: Path, request: pytest.FixtureRequest
) -> None:
    """With twelve clients and six session slots on two ranks, all chunks equal those of a single
    rank.

    Clients start sessions, wait for free slots, cancel chunks, close sessions and send one-shot
    requests.
    """

    async def client(number: int) -> list[list[np.ndarray]]:
        rng = random.Random(number)
        lives = []
        for life in range(3):
            name, latents = f"storm-{number}-{life}", []
            for index in range(CHUNKS):
                if index and rng.random() < 0.3:
                    slow = DiffusionParams(
                        session_id=name, chunk_index=index, options={"steps": 99, "step_ms": 20}
                    )
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(
                            two_ranks.engine.run_request(slow, {}), rng.random() / 10
                        )
                first: dict[str, Any] = {"prompt": "a field", "seed": number} if index == 0 else {}
                params = DiffusionParams(
                    session_id=name, chunk_index=index, output="latents", **first
                )
                response = await two_ranks.engine.run_when_room(params, {}, timeout_s=60, wait_s=60)
                latents.append(response[1]["latents"].copy())
            await two_ranks.close(name)
            lives.append(latents)
            shot = DiffusionParams(session_id=f"{name}-shot", prompt="x", one_shot=True)
            await two_ranks.engine.run_when_room(shot, {}, timeout_s=60, wait_s=60)
        return lives

    async def storm() -> list[list[list[np.ndarray]]]:
        return await asyncio.gather(*(client(number) for number in range(4 * PER_RANK)))

    results = two_ranks.loop.run_until_complete(storm())
    assert two_ranks.ranks.held == [0, 0]
    runner = request.getfixturevalue("make_runner")(null_world)
    for number, lives in enumerate(results):
        expected = alone(runner, number)
        for latents in lives:
            assert all(np.array_equal(a, b) for a, b in zip(latents, expected, strict=True))


def test_two_ranks_hold_twice_as_many_sessions(two_ranks: Endpoints) -> None:
    """Two ranks accept twice as many sessions as one. A session above this limit is refused.
    Closing a session frees its slot on its rank.
    """

    async def scenario() -> None:
        await asyncio.gather(
            *(two_ranks.walk(f"s{seed}", seed, range(1)) for seed in range(2 * PER_RANK))
        )
        stats = await two_ranks.engine.session_stats()
        assert two_ranks.ranks.held == [rank["sessions"] for rank in stats] == [PER_RANK] * 2
        for rank, held in enumerate(stats):
            assert {two_ranks.ranks.rank_of(name) for name in held["chunks"]} == {rank}
        with pytest.raises(RequestFailed, match="capacity"):
            await two_ranks.walk("one-too-many", 9)
        home = two_ranks.ranks.rank_of("s0")
        await two_ranks.close("s0")
        await two_ranks.walk("one-more", 9)
        assert two_ranks.ranks.rank_of("one-more") == home
        await two_ranks.close("one-more", *(f"s{seed}" for seed in range(1, 2 * PER_RANK)))
        assert [rank["sessions"] for rank in await two_ranks.engine.session_stats()] == [0, 0]

    two_ranks.loop.run_until_complete(scenario())


def test_forks_progress_and_aborts_reach_the_right_rank(two_ranks: Endpoints) -> None:
    """Fork, progress and abort requests reach the session's rank.

    A fork continues like its source, progress lists the requests of both ranks, and a cancellation
    stops only the cancelled request.
    """

    async def scenario() -> None:
        for name, seed in (("a", 1), ("b", 2)):
            await two_ranks.walk(name, seed, range(2))
        homes = {two_ranks.ranks.rank_of(name) for name in ("a", "b")}
        assert homes == {0, 1}
        for name in ("a", "b"):
            await two_ranks.engine.run_request(
                DiffusionParams(session_id=name, op="fork", fork_to=f"{name}-fork"), {}
            )
            parent, fork = await asyncio.gather(
                two_ranks.walk(name, 0, range(2, 4)), two_ranks.walk(f"{name}-fork", 0, range(2, 4))
            )
            assert all(np.array_equal(x, y) for x, y in zip(parent, fork, strict=True))
        slow = {
            name: asyncio.create_task(
                two_ranks.engine.run_request(
                    DiffusionParams(
                        session_id=name, chunk_index=4, options={"steps": 100, "step_ms": 50}
                    ),
                    {},
                )
            )
            for name in ("a", "b")
        }
        await until_at_work(two_ranks, {"a", "b"})
        slow["a"].cancel()
        await until_at_work(two_ranks, {"b"})
        slow["b"].cancel()
        await asyncio.wait(slow.values())
        await two_ranks.close("a", "b", "a-fork", "b-fork")

    two_ranks.loop.run_until_complete(scenario())


def test_a_snapshot_moves_a_session_to_the_other_rank(two_ranks: Endpoints, tmp_path: Path) -> None:
    """A snapshot is restored on the rank with more free slots, and the restored session continues
    bit for bit like its source.
    """

    async def scenario() -> None:
        for name, seed in (("a", 1), ("b", 2)):
            await two_ranks.walk(name, seed, range(2))
        for name, other in (("a", "b"), ("b", "a")):
            path = tmp_path / name
            header = await two_ranks.engine.save_session(name, path, None)
            assert header.chunk_index == 2 and len(header.ranks) == 1
            await two_ranks.close(other)
            await two_ranks.engine.restore_session("moved", path)
            assert two_ranks.ranks.rank_of("moved") == 1 - two_ranks.ranks.rank_of(name)
            stays, moved = await asyncio.gather(
                two_ranks.walk(name, 0, range(2, 4)), two_ranks.walk("moved", 0, range(2, 4))
            )
            assert all(np.array_equal(x, y) for x, y in zip(stays, moved, strict=True))
            await two_ranks.close(name, "moved")
            await two_ranks.walk("a", 1, range(2))
            await two_ranks.walk("b", 2, range(2))
        await two_ranks.close("a", "b")

    two_ranks.loop.run_until_complete(scenario())


def test_a_killed_rank_ends_the_engine_and_fails_all_requests(
    two_ranks: Endpoints,
) -> None:
    """When one engine process dies, vLLM's client stops all engine processes, and every pending
    request fails.
    """

    async def scenario() -> None:
        for name, seed in (("a", 1), ("b", 2)):
            await two_ranks.walk(name, seed, range(1))
        requests = [
            asyncio.create_task(
                two_ranks.engine.run_request(
                    DiffusionParams(
                        session_id=name, chunk_index=1, options={"steps": 100, "step_ms": 100}
                    ),
                    {},
                )
            )
            for name in ("a", "b")
        ]
        await until_at_work(two_ranks, {"a", "b"})
        victims = [
            child
            for child in psutil.Process().children(recursive=True)
            if title(child) == "EngineCore_DP1"
        ]
        assert len(victims) == 1
        victims[0].kill()
        done, _ = await asyncio.wait(requests, timeout=seconds(30))
        assert len(done) == 2
        for request in done:
            with pytest.raises(RequestFailed, match="engine_dead"):
                request.result()
        assert two_ranks.engine.is_dead

    two_ranks.loop.run_until_complete(scenario())
