# SPDX-License-Identifier: Apache-2.0
"""The real EngineCore with the deadline scheduler: concurrent streams, refusals and a very long
stream.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.engine_client import SharedEngine, running_engine, shared_engine
from helpers.waits import pause_task, seconds

from vllm_omni.model_executor.models.registry import get_family
from vllm_omni.outputs import RequestFailed

CHUNKS = 4
STEP = {"step_ms": 20}
"""Duration of a step. It is the same for all requests, because the scheduler measures step times.
"""
OMNI = {
    "scheduling": "deadline",
    "target_fps": 16,
    "degradations": ["fewer_steps"],
    "max_sessions": 16,
}


@pytest.fixture(scope="module")
def engine(null_world: Path) -> Iterator[SharedEngine]:
    with shared_engine(null_world, omni=OMNI) as shared:
        yield shared


@pytest.fixture(autouse=True)
def _clear(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engine" in request.fixturenames:
        request.getfixturevalue("engine").clear()


def test_concurrent_streams_equal_single_ones_under_deadlines(engine: SharedEngine) -> None:
    """With deadlines, concurrent streams are bit-identical to streams that run by themselves.

    Meanwhile, other streams are aborted, fail, or change their prompts.
    """
    client = engine.client

    async def scenario() -> None:
        alone = [
            await client.chunks(f"alone-{seed}", CHUNKS, seed=seed, options=STEP)
            for seed in range(3)
        ]

        async def aborted() -> None:
            await client.chunks("aborted", 1, options=STEP)
            slow = asyncio.create_task(
                client.send(
                    session_id="aborted",
                    chunk_index=1,
                    request_id="slow",
                    deadline_s=0.1,
                    options={**STEP, "steps": 500},
                )
            )
            await client.until_at_step("aborted", 3)
            await client.engine.abort("slow")
            slow.cancel()
            await client.send(session_id="aborted", chunk_index=1, options=STEP)

        async def failing() -> None:
            await client.chunks("failing", 1, options=STEP)
            for _ in range(3):
                with pytest.raises(RequestFailed, match="engine_error"):
                    await client.send(
                        session_id="failing",
                        chunk_index=1,
                        deadline_s=0.05,
                        options={**STEP, "fail_in": "denoise", "fail_at": 2},
                    )

        async def switching() -> None:
            for index in range(CHUNKS):
                await client.send(
                    session_id="switching",
                    chunk_index=index,
                    prompt=f"scene {index}",
                    deadline_s=1.0,
                    options=STEP,
                )

        together = await asyncio.gather(
            *(
                client.chunks(
                    f"together-{seed}", CHUNKS, seed=seed, deadline_s=20.0 + seed, options=STEP
                )
                for seed in range(3)
            ),
            aborted(),
            failing(),
            switching(),
        )
        for solo, alongside in zip(alone, together[:3], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(solo, alongside, strict=True))
        assert (await client.stats())["chunks"]["aborted"] == 2

    engine.run(asyncio.wait_for(scenario(), seconds(60)))


def test_a_stream_above_capacity_is_refused_with_the_reason(engine: SharedEngine) -> None:
    """A stream that would exceed the engine's capacity is refused with `capacity`. It is accepted
    once an earlier stream no longer counts as live.

    The engine has capacity for one stream that needs a 0.13 s chunk every 0.25 s.
    """
    client = engine.client
    slow = {**STEP, "steps": 6}

    async def scenario() -> None:
        for name, period_s in (("learn", None), ("held", 0.25)):
            for index in range(3):
                await client.send(
                    session_id=name,
                    chunk_index=index,
                    prompt="a field",
                    chunk_period_s=period_s,
                    options=slow,
                )
        with pytest.raises(RequestFailed, match="live streams") as refused:
            await client.send(
                session_id="late",
                chunk_index=0,
                prompt="a field",
                chunk_period_s=0.25,
                options=slow,
            )
        assert refused.value.code == "capacity"
        assert "late" not in (await client.stats())["chunks"]
        # A stream without a rate is not refused, and an accepted stream continues.
        await client.send(session_id="whenever", prompt="a field", options=slow)
        await client.send(session_id="held", chunk_index=3, chunk_period_s=0.25, options=slow)
        await pause_task(1.5)
        await client.send(
            session_id="late", chunk_index=0, prompt="a field", chunk_period_s=0.25, options=slow
        )

    engine.run(asyncio.wait_for(scenario(), seconds(60)))


@pytest.mark.nightly
def test_1100_latent_frames_in_one_stream(tmp_path: Path) -> None:
    """A stream can have more latent frames than the original code's rotary table has entries
    (1,024).

    All latents are finite, and the session's size stays constant.
    """
    get_family("causal_wan").make_tiny(tmp_path / "model", 0, "original")
    omni = {
        "scheduling": "deadline",
        "model": {"window_frames": 9, "sink_frames": 3, "video_input": False},
    }
    omni |= {"height": 32, "width": 32}

    async def scenario() -> None:
        async with running_engine(tmp_path / "model", omni=omni, dtype="float32") as client:
            frames, held = 0, set()
            for index in range(367):
                _, tensors = await client.send(
                    session_id="s",
                    chunk_index=index,
                    prompt="a coast road" if index == 0 else None,
                    output="latents",
                    deadline_s=5.0,
                )
                frames += tensors["latents"].shape[1]
                assert bool(torch.isfinite(tensors["latents"]).all())
                held.add((await client.stats())["bytes"])
            assert frames == 1101 and len(held) == 1

    asyncio.run(scenario())
