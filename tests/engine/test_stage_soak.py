# SPDX-License-Identifier: Apache-2.0
"""A thousand requests to an engine with pipeline stages, with aborts and failures at random times
drawn from a fixed seed.

Each request ends exactly once and in an expected way, no rank retains state, and every result is
bit-identical to that of an undisturbed run.
"""

import asyncio
import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine_client import EngineClient, running_engine

from vllm_omni.outputs import RequestFailed

pytestmark = pytest.mark.nightly

REQUESTS, SESSIONS, AT_ONCE, SEED = 1000, 6, 12, 20261121
STUCK_S = 60.0
FAULTS: list[tuple[dict[str, Any], set[str]]] = [
    ({"fail_in": "prepare"}, {"engine_error"}),
    ({"fail_in": "decode", "clean_pass": True}, {"engine_error"}),
    ({"nan_at": 2}, {"non_finite"}),
    ({"stepz": 1}, {"invalid_request"}),
]


class Traffic:
    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.random = random.Random(SEED)
        self.outcomes: Counter[str] = Counter()
        self.results: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.numbers = itertools.count()

    async def one(self) -> None:
        """Send one request for a random session. The request can fail, or be aborted after a random
        time.
        """
        number, seed = next(self.numbers), self.random.randrange(SESSIONS)
        name, dice = f"soak-{number}", self.random.random()
        fault, codes = self.random.choice(FAULTS) if dice < 0.15 else ({}, set())
        abort_after_s = self.random.uniform(0, 0.08) if 0.15 <= dice < 0.5 else None
        closes = 0.5 <= dice < 0.53
        fields: dict[str, Any] = (
            {"op": "close"} if closes else {"prompt": "a field", "seed": seed, "options": fault}
        )
        task = asyncio.create_task(
            self.client.send(session_id=f"s{seed}", request_id=name, output="latents", **fields)
        )
        if abort_after_s is not None:
            await asyncio.wait([task], timeout=abort_after_s)
            if not task.done():
                await self.client.engine.abort(name)
                task.cancel()
        try:
            meta, tensors = await asyncio.wait_for(task, STUCK_S)
        except asyncio.CancelledError:
            self.outcomes["aborted"] += 1
        except RequestFailed as failure:
            self.outcomes["failed" if failure.code in codes else f"unexpected {failure}"] += 1
        else:
            assert not fault, (fault, meta)
            self.outcomes["closed" if closes else "done"] += 1
            if not closes:
                self.results.setdefault((seed, meta["chunk_index"]), []).append(
                    tensors["latents"].clone()
                )

    async def run(self) -> None:
        room = asyncio.Semaphore(AT_ONCE)

        async def limited() -> None:
            async with room:
                await self.one()

        await asyncio.gather(*(limited() for _ in range(REQUESTS)))


@pytest.mark.parametrize(
    "omni",
    [{}, {"vae_stage": True}, {"vae_stage": True, "overlap_decode": True}],
    ids=["PP2", "VAE stage", "late"],
)
def test_a_thousand_requests_and_aborts(null_world: Path, omni: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with running_engine(
            null_world, {"max_sessions": 64, **omni}, pipeline_parallel_size=2
        ) as client:
            traffic = Traffic(client)
            await traffic.run()
            print(dict(traffic.outcomes))
            assert sum(traffic.outcomes.values()) == REQUESTS
            assert set(traffic.outcomes) == {"done", "failed", "aborted", "closed"}
            assert (
                min(traffic.outcomes[kind] for kind in ("done", "failed", "aborted", "closed")) > 20
            )
            for seed in range(SESSIONS):
                await client.send(session_id=f"s{seed}", op="close")
            longest = 1 + max(index for _, index in traffic.results)
            for seed in range(SESSIONS):
                undisturbed = await client.chunks(f"alone{seed}", longest, seed=seed)
                for (each, index), latents in traffic.results.items():
                    assert each != seed or all(torch.equal(x, undisturbed[index]) for x in latents)
                await client.send(session_id=f"alone{seed}", op="close")
            for rank in await client.engine.collective_rpc("session_stats"):
                assert rank["sessions"] == 0 and rank["bytes"] == 0
            assert await client.engine.collective_rpc("request_progress") == [{}, {}]

    asyncio.run(scenario())
