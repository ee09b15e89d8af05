# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel and pipeline-parallel engines (gloo, one process per rank) return the same
results as one rank.
"""

import asyncio
from pathlib import Path

import pytest
import torch
from helpers.engine_client import EngineClient, SharedEngine, running_engine

from vllm_omni.outputs import RequestFailed

CHUNKS, SESSIONS = 3, 3


async def sessions(client: EngineClient) -> list[list[torch.Tensor]]:
    return await asyncio.gather(
        *(client.chunks(f"s{seed}", CHUNKS, seed=seed) for seed in range(SESSIONS))
    )


@pytest.fixture
def one_rank(null_engine: SharedEngine) -> list[list[torch.Tensor]]:
    return null_engine.run(sessions(null_engine.client))


@pytest.mark.nightly
@pytest.mark.parametrize("parallel", ["pipeline_parallel_size", "tensor_parallel_size"])
def test_two_ranks_equal_one(
    null_world: Path, one_rank: list[list[torch.Tensor]], parallel: str
) -> None:
    """Two ranks return the same results as one rank for three concurrent sessions.

    With pipeline stages, two batches are in flight. The results still equal those of one rank after
    each kind of failure.
    """

    async def scenario() -> None:
        async with running_engine(null_world, **{parallel: 2}) as client:
            assert_equal(await sessions(client), one_rank)
            for options, code in (
                ({"fail_in": "prepare"}, "engine_error"),
                ({"fail_in": "decode"}, "engine_error"),
                ({"nan_at": 4}, "non_finite"),
            ):
                with pytest.raises(RequestFailed, match=code):
                    await client.send(session_id="s0", chunk_index=CHUNKS, options=options)
            slow = asyncio.create_task(
                client.send(
                    session_id="s1",
                    chunk_index=CHUNKS,
                    request_id="slow",
                    options={"step_ms": 50, "steps": 99},
                )
            )
            await client.until_at_step("s1", 3)
            await client.engine.abort("slow")
            slow.cancel()
            # Sessions that failed or were aborted continue like sessions without failures.
            after = await asyncio.gather(
                *(
                    client.send(session_id=f"s{seed}", chunk_index=CHUNKS, output="latents")
                    for seed in range(SESSIONS)
                )
            )
            for seed, (_, tensors) in enumerate(after):
                fresh = await client.chunks(f"fresh{seed}", CHUNKS + 1, seed=seed)
                assert torch.equal(tensors["latents"], fresh[-1])

    asyncio.run(scenario())


@pytest.mark.nightly
def test_more_batches_in_a_step_than_tensors_in_a_message(null_world: Path) -> None:
    """A step can have more batches than one message between ranks can have tensors.

    Twelve sessions run in separate batches, although vLLM's ranks on the CPUs of one host send at
    most eight tensors per message.
    """

    async def scenario() -> None:
        omni = {"batch_invariant": True, "max_sessions": 24, "max_requests_per_step": 12}
        async with running_engine(
            null_world, omni, pipeline_parallel_size=2, max_num_seqs=64
        ) as client:
            names = [f"s{number}" for number in range(24)]
            results = await asyncio.gather(*(client.chunks(name, 2, seed=3) for name in names))
            for result in results[1:]:
                assert_equal([result], results[:1])

    asyncio.run(scenario())


def assert_equal(got: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
