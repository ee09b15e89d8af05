# SPDX-License-Identifier: Apache-2.0
"""Several chunks of a stream in flight in a real engine: on one rank, with stages that split
layers, and with one stage per step.
"""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_worker import NAN
from helpers.engine_client import STOCK_SCHEDULER, EngineClient, running_engine
from helpers.waits import pause_task, seconds

from vllm_omni.outputs import RequestFailed

CHUNKS, STREAMS = 7, 3
ABORTED = 3
TOLERANCE = 2e-4


def options(steps: int) -> dict[str, Any]:
    return {
        "cache": "noise_matched",
        "window_frames": 9,
        "sink_frames": 3,
        "denoising_steps": [1000, 750, 500, 250][:steps],
        "video_denoising_steps": [700, 500, 400, 200][:steps],
    }


_numbers = itertools.count()


def engine(model: Path, steps: int, chunks_in_flight: int, **engine_args: Any) -> Any:
    omni = {
        "model": options(steps),
        "chunks_in_flight": chunks_in_flight,
        "max_sessions": 16,
        **engine_args.pop("omni", {}),
    }
    return running_engine(model, omni, dtype="float32", **engine_args)


async def send(
    client: EngineClient, name: str, seed: int, index: int, output: str = "latents"
) -> torch.Tensor:
    """Request one chunk. Its request id is `name-index`, which tests use to abort it."""
    meta, tensors = await client.send(
        session_id=name,
        chunk_index=index,
        prompt={0: f"a field in season {seed}", 4: "a town at night"}.get(index),
        seed=seed if index == 0 else None,
        output=output,
        request_id=f"{name}-{index}-{next(_numbers)}" if index != ABORTED else f"{name}-{index}",
    )
    assert meta["chunk_index"] == index
    return tensors["latents" if output == "latents" else "frames"].clone()


async def one_by_one(
    client: EngineClient, name: str, seed: int, output: str = "latents"
) -> list[torch.Tensor]:
    """Request each chunk only after the result of the previous chunk has arrived."""
    return [await send(client, name, seed, index, output) for index in range(CHUNKS)]


async def ahead(
    client: EngineClient, name: str, seed: int, output: str = "latents"
) -> list[torch.Tensor]:
    """Request all chunks of a stream at once."""
    return list(
        await asyncio.gather(*(send(client, name, seed, index, output) for index in range(CHUNKS)))
    )


async def everything(client: EngineClient, steps: int) -> list[list[torch.Tensor]]:
    """Run the checks that apply to every configuration; return the chunks of each stream when it
    runs by itself.
    """
    alone = [await one_by_one(client, f"alone{seed}", seed) for seed in range(STREAMS)]
    together = await asyncio.gather(*(ahead(client, f"s{seed}", seed) for seed in range(STREAMS)))
    assert_equal(together, alone)
    codes = await with_aborts(client, await one_by_one(client, "frames", 0, "rgb"))
    # With two steps, a chunk that can still be aborted has no successor that has started.
    assert codes <= {"predecessor_failed", "out_of_order"} and (
        steps == 2 or "predecessor_failed" in codes
    )
    await around_chunks_in_flight(client, alone[1])
    return alone


async def with_aborts(client: EngineClient, expected: list[torch.Tensor]) -> set[str]:
    """Abort a chunk with successors in flight. The successors fail, and the stream continues after
    its last committed chunk.

    A concurrent stream is unaffected. Only every other attempt has a concurrent stream, because an
    older stream may fill the step, and then no chunk closely follows the aborted one. Returns the
    error codes.
    """
    codes: set[str] = set()
    for attempt in range(6):
        name = f"aborted{attempt}"
        neighbours = []
        if attempt % 2 == 0:
            neighbours.append(asyncio.create_task(ahead(client, f"neighbour{attempt}", 0, "rgb")))
        tasks = [
            asyncio.create_task(send(client, name, 0, index, "rgb")) for index in range(CHUNKS)
        ]
        await tasks[1]  # The next chunk is about to end, and its successor is running.
        await client.engine.abort(f"{name}-{ABORTED}")
        tasks[ABORTED].cancel()
        outcomes = await asyncio.wait_for(
            asyncio.gather(*tasks, return_exceptions=True), seconds(240)
        )
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, RequestFailed):
                codes.add(outcome.code)
            elif not isinstance(outcome, BaseException):
                assert torch.equal(outcome, expected[index])
        reached = (await client.stats())["chunks"][name]
        for index in range(reached, CHUNKS):
            assert torch.equal(await send(client, name, 0, index, "rgb"), expected[index])
        assert_equal(await asyncio.gather(*neighbours), [expected] * len(neighbours))
        for session_id in (name, f"neighbour{attempt}")[: 1 + len(neighbours)]:
            await client.send(session_id=session_id, op="close")
        if "predecessor_failed" in codes:
            break
    return codes


async def around_chunks_in_flight(client: EngineClient, expected: list[torch.Tensor]) -> None:
    """Check that a fork waits for the chunks in flight to finish and that a refused chunk does not
    affect later chunks.
    """
    tasks = [asyncio.create_task(send(client, "source", 1, index)) for index in range(CHUNKS - 1)]
    fork = asyncio.create_task(client.send(session_id="source", op="fork", fork_to="copy"))
    results = await asyncio.gather(*tasks)
    await fork
    assert_equal([list(results)], [expected[:-1]])
    with pytest.raises(RequestFailed, match="invalid_request"):
        await client.send(
            session_id="copy", chunk_index=CHUNKS - 1, actions=[["w"]], output="latents"
        )
    for name in ("source", "copy"):
        assert torch.equal(await send(client, name, 1, CHUNKS - 1), expected[-1])


def assert_equal(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert [torch.equal(a, b) for a, b in zip(one, other, strict=True)] == [True] * len(other)


@pytest.fixture(scope="module")
def one_rank(causal_wan: Path) -> list[list[torch.Tensor]]:
    """Run four-step streams with three chunks in flight; return their latents."""

    async def scenario() -> list[list[torch.Tensor]]:
        async with engine(causal_wan, steps=4, chunks_in_flight=3) as client:
            return await everything(client, steps=4)

    return asyncio.run(scenario())


def test_chunks_in_flight_equal_chunks_one_by_one(
    one_rank: list[list[torch.Tensor]],
) -> None:
    """With chunks in flight, several streams return the same latents as with one chunk at a time.

    The streams run concurrently, with aborts among the chunks in flight and a fork (see
    `everything`).
    """
    assert len(one_rank) == STREAMS
    assert all(bool(torch.isfinite(x).all()) and x.std() > 0.1 for one in one_rank for x in one)


@pytest.fixture(scope="module")
def two_steps(causal_wan: Path) -> list[list[torch.Tensor]]:
    """Run two-step streams on one rank, one chunk at a time; return their latents."""

    async def scenario() -> list[list[torch.Tensor]]:
        async with engine(causal_wan, steps=2, chunks_in_flight=1) as client:
            return [await one_by_one(client, f"s{seed}", seed) for seed in range(STREAMS)]

    return asyncio.run(scenario())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("stages", "omni"),
    [
        pytest.param(2, {"pipeline": "temporal"}, id="temporal"),
        pytest.param(
            2, {"pipeline": "temporal", "scheduling": "deadline"}, id="temporal, deadline"
        ),
        pytest.param(2, {}, id="blocks"),
        pytest.param(2, {"vae_stage": True}, id="VAE stage"),
        pytest.param(3, {"vae_stage": True}, id="blocks + VAE stage"),
        pytest.param(3, {"vae_stage": True, "pipeline": "temporal"}, id="temporal + VAE stage"),
        pytest.param(
            3,
            {"vae_stage": True, "pipeline": "temporal", "overlap_decode": True},
            id="temporal + VAE stage, late",
        ),
    ],
)
def test_stages_equal_one_rank(
    causal_wan: Path, two_steps: list[list[torch.Tensor]], stages: int, omni: dict[str, Any]
) -> None:
    """Several pipeline stages return latents that are bit-identical to those of one rank, even
    after aborts.
    """

    async def scenario() -> None:
        async with engine(
            causal_wan, 2, chunks_in_flight=2, pipeline_parallel_size=stages, omni=omni
        ) as client:
            assert_equal(await everything(client, steps=2), two_steps)

    asyncio.run(scenario())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("stages", "omni"),
    [
        pytest.param(2, {"pipeline": "temporal"}, id="temporal"),
        pytest.param(2, {}, id="blocks"),
        pytest.param(2, {"vae_stage": True}, id="VAE stage"),
        pytest.param(3, {"vae_stage": True, "pipeline": "temporal"}, id="temporal + VAE stage"),
    ],
)
def test_a_chunk_that_fails_on_the_last_stage_fails_its_successors(
    causal_wan: Path, two_steps: list[list[torch.Tensor]], stages: int, omni: dict[str, Any]
) -> None:
    """When a chunk fails on the last stage, its successors fail too, including those that an
    earlier stage has already started.

    The stream continues afterwards.
    """
    args: dict[str, Any] = {
        "pipeline_parallel_size": stages,
        "worker_cls": "faulty_worker.FaultyWorker",
    }

    async def scenario() -> None:
        async with engine(causal_wan, 2, chunks_in_flight=2, omni=omni, **args) as client:

            async def late(attempt: int, name: str, index: int) -> torch.Tensor:
                await pause_task(0.02 * attempt)
                return await send(client, name, 0, index)

            for attempt in range(4):
                name = f"s{attempt}"
                found = list(
                    await asyncio.gather(
                        *(send(client, name, 0, index) for index in range(ABORTED))
                    )
                )
                spoiled = client.send(
                    session_id=name, chunk_index=ABORTED, prompt=NAN, output="latents"
                )
                after = [
                    asyncio.create_task(late(attempt, name, index))
                    for index in range(ABORTED + 1, CHUNKS)
                ]
                with pytest.raises(RequestFailed, match="non_finite"):
                    await spoiled
                outcomes = await asyncio.wait_for(
                    asyncio.gather(*after, return_exceptions=True), seconds(120)
                )
                codes = {outcome.code for outcome in outcomes if isinstance(outcome, RequestFailed)}
                assert len(outcomes) == CHUNKS - ABORTED - 1 and codes <= {
                    "predecessor_failed",
                    "out_of_order",
                }, outcomes
                found += [await send(client, name, 0, index) for index in range(ABORTED, CHUNKS)]
                assert_equal([found], two_steps[:1])

    asyncio.run(scenario())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("stages", "omni", "sequence_parallel"),
    [
        pytest.param(1, {}, True, id="Ulysses"),
        pytest.param(2, {}, True, id="blocks x Ulysses"),
        pytest.param(
            2,
            {"pipeline": "temporal", "vae_parallel": True},
            True,
            id="temporal x Ulysses, parallel decode",
        ),
        pytest.param(2, {"pipeline": "temporal"}, False, id="temporal x tensor parallel"),
        pytest.param(
            2,
            {"vae_stage": True, "vae_parallel": True},
            True,
            id="VAE stage x Ulysses, parallel decode",
        ),
    ],
)
def test_ranks_that_share_layers_agree_with_one(
    causal_wan: Path,
    two_steps: list[list[torch.Tensor]],
    stages: int,
    omni: dict[str, Any],
    sequence_parallel: bool,
) -> None:
    """Ranks that split layers agree with a single rank to within the tolerance.

    Different runs on the same ranks are bit-identical, even after aborts.
    """
    sizes = {"pipeline_parallel_size": stages, "tensor_parallel_size": 2}
    omni = {**omni, "model": {**options(2), "sequence_parallel": sequence_parallel}}

    async def scenario() -> None:
        async with engine(causal_wan, 2, chunks_in_flight=2, omni=omni, **sizes) as client:
            for made, wanted in zip(await everything(client, steps=2), two_steps, strict=True):
                assert all(
                    (a - b).abs().max() <= TOLERANCE for a, b in zip(made, wanted, strict=True)
                )

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("omni", "engine_args", "reason"),
    [
        ({"pipeline": "temporal"}, {}, "pass --pipeline-parallel-size"),
        (
            {"chunks_in_flight": 2},
            {"scheduler_cls": STOCK_SCHEDULER},
            "one denoise step per engine step",
        ),
    ],
)
def test_impossible_options_are_refused_before_the_start(
    causal_wan: Path, omni: dict[str, Any], engine_args: dict[str, Any], reason: str
) -> None:
    async def start() -> None:
        async with running_engine(causal_wan, {"model": options(2), **omni}, **engine_args):
            pass

    with pytest.raises(ValueError, match="omni") as refused:
        asyncio.run(start())
    assert reason in str(refused.value)
