# SPDX-License-Identifier: Apache-2.0
"""The real EngineCore with the null world: interleaving, abort, failures, both schedulers."""

import asyncio
from pathlib import Path

import pytest
import torch
from helpers.engine_client import STOCK_SCHEDULER, EngineClient, SharedEngine, running_engine
from helpers.waits import pause_task, seconds

from vllm_omni.entrypoints.engine.client import OmniEngine
from vllm_omni.inputs import DiffusionParams
from vllm_omni.outputs import RequestFailed

CHUNKS = 4


async def failing(client: EngineClient, session_id: str, index: int, **options: object) -> str:
    """Send a chunk that must fail; returns its error code."""
    with pytest.raises(RequestFailed) as failure:
        await client.send(
            session_id=session_id,
            chunk_index=index,
            prompt="a field",
            output="latents",
            options=options,
        )
    return failure.value.code


def test_sessions_side_by_side_equal_sessions_alone(null_engine: SharedEngine) -> None:
    """Interleaved sessions, with failing and aborted neighbours, give bit for bit what each
    gives alone.
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


def test_abort_mid_chunk_takes_effect_and_leaves_the_session_as_it_was(
    null_engine: SharedEngine,
) -> None:
    """After an abort the same chunk gives the same result, and the aborted one stopped long
    before its end.
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
        # 10 s of steps were left: an answer within 2 s shows that the abort reached the runner.
        again = await asyncio.wait_for(
            client.send(session_id="s", chunk_index=1, output="latents"), seconds(2)
        )
        assert torch.equal(again[1]["latents"], reference[1])

    null_engine.run(scenario())


def test_chunks_sent_ahead_run_in_order(null_engine: SharedEngine) -> None:
    """All chunks of a session submitted at once, in the wrong order, come out as if sent one by
    one.
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


def test_both_schedulers_give_identical_chunks(null_engine: SharedEngine, null_world: Path) -> None:
    """Whole chunks per engine step (stock scheduler) equal one denoise step per engine step."""

    async def stock() -> list[torch.Tensor]:
        async with running_engine(null_world, scheduler_cls=STOCK_SCHEDULER) as client:
            return await client.chunks("s", CHUNKS, seed=3)

    stepped = null_engine.run(null_engine.client.chunks("s", CHUNKS, seed=3))
    assert all(torch.equal(a, b) for a, b in zip(stepped, asyncio.run(stock()), strict=True))


def test_a_paused_engine_makes_a_request_wait(null_engine: SharedEngine) -> None:
    """A chunk is held back (0.32), or refused as `capacity` and asked for again (0.33), until
    vLLM resumes.
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
