# SPDX-License-Identifier: Apache-2.0
"""The real EngineCore with the null world: concurrent sessions, aborts, failures and pauses."""

import asyncio

import pytest
import torch
from helpers.engine_client import EngineClient, SharedEngine
from helpers.waits import pause_task, seconds

from vllm_omni.entrypoints.engine.client import OmniEngine
from vllm_omni.inputs import DiffusionParams
from vllm_omni.outputs import RequestFailed

CHUNKS = 4


async def failing(client: EngineClient, session_id: str, index: int, **options: object) -> str:
    """Request a chunk that must fail, and return its error code."""
    with pytest.raises(RequestFailed) as failure:
        await client.send(
            session_id=session_id,
            chunk_index=index,
            prompt="a field",
            output="latents",
            options=options,
        )
    return failure.value.code


def test_concurrent_sessions_equal_single_ones(null_engine: SharedEngine) -> None:
    """Concurrent sessions are bit-identical to sessions that run by themselves, even while other
    sessions fail or are aborted.
    """

    client = null_engine.client

    async def scenario() -> None:
        alone = [await client.chunks(f"alone-{seed}", CHUNKS, seed=seed) for seed in range(3)]

        async def bad_neighbour() -> None:
            assert await failing(client, "bad", 0, fail_in="prepare") == "engine_error"
            await client.chunks("bad", 1)
            assert await failing(client, "bad", 1, fail_in="denoise", fail_at=2) == "engine_error"
            assert await failing(client, "bad", 1, nan_at=3) == "non_finite"
            assert await failing(client, "bad", 7) == "out_of_order"

        together = await asyncio.gather(
            *(
                client.chunks(f"together-{seed}", CHUNKS, seed=seed, options={"step_ms": 2})
                for seed in range(3)
            ),
            bad_neighbour(),
        )
        for solo, interleaved in zip(alone, together[:3], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(solo, interleaved, strict=True))
        assert (await client.stats())["chunks"]["bad"] == 1

    null_engine.run(scenario())


def test_an_abort_stops_the_chunk_and_keeps_the_session(
    null_engine: SharedEngine,
) -> None:
    """An aborted chunk stops well before it would have finished. When the chunk is requested again,
    its result is the same as without the abort.
    """

    client = null_engine.client

    async def scenario() -> None:
        reference = await client.chunks("reference", 2, seed=1)
        await client.chunks("s", 1, seed=1)
        slow = asyncio.create_task(
            client.send(
                session_id="s",
                chunk_index=1,
                request_id="slow",
                options={"step_ms": 100, "steps": 100},
            )
        )
        await client.until_at_step("s", 2)
        await client.engine.abort("slow")
        slow.cancel()
        # About 10 s of steps remained, so a result within 2 s shows that the abort reached the
        # runner.
        again = await asyncio.wait_for(
            client.send(session_id="s", chunk_index=1, output="latents"), seconds(2)
        )
        assert torch.equal(again[1]["latents"], reference[1])

    null_engine.run(scenario())


def test_chunks_sent_ahead_run_in_order(null_engine: SharedEngine) -> None:
    """Chunks requested concurrently and in the wrong order are bit-identical to chunks requested
    one at a time.
    """

    client = null_engine.client

    async def scenario() -> None:
        reference = await client.chunks("reference", CHUNKS, seed=5)
        await client.chunks("s", 1, seed=5)
        blocker = asyncio.create_task(
            client.send(session_id="s", chunk_index=1, options={"step_ms": 30})
        )
        await client.until_at_step("s", 1)
        later = [
            asyncio.create_task(client.send(session_id="s", chunk_index=index, output="latents"))
            for index in (3, 2)
        ]
        await blocker
        third, second = [(await task)[1]["latents"] for task in later]
        assert torch.equal(second, reference[2]) and torch.equal(third, reference[3])

    null_engine.run(scenario())


def test_a_paused_engine_makes_a_request_wait(null_engine: SharedEngine) -> None:
    """A request to a paused engine waits until the engine resumes. vLLM 0.32 holds the request;
    vLLM 0.33 refuses it with `capacity`, and the endpoint retries.
    """

    async def scenario() -> None:
        engine = null_engine.client.engine
        endpoint = OmniEngine(engine)
        params = DiffusionParams(
            session_id="paused", chunk_index=0, prompt="a field", output="latents"
        )
        await engine.pause_generation(mode="wait", clear_cache=False)
        chunk = asyncio.create_task(endpoint.run_when_room(params, {}, timeout_s=60, wait_s=60))
        await pause_task(0.5)
        assert not chunk.done()
        await engine.resume_generation()
        meta, arrays = await chunk
        assert meta["chunk_index"] == 0 and "latents" in arrays

    null_engine.run(scenario())
