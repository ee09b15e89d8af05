# SPDX-License-Identifier: Apache-2.0
"""Causal Wan (tiny) in the real engine: concurrent streams, aborts, prompt switches, video input
and several ranks.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine_client import STOCK_SCHEDULER, EngineClient, running_engine

from vllm_omni.outputs import RequestFailed

CHUNKS, STREAMS = 4, 3
TOLERANCE = 2e-4
"""Absolute tolerance for fp32 latents of order 1 after four chunks of five forward passes each. A
tolerance is required because several ranks sum in a different order than one rank.
"""
MODEL = {"window_frames": 7, "sink_frames": 2}


async def stream(
    client: EngineClient, name: str, seed: int, chunks: int = CHUNKS
) -> list[torch.Tensor]:
    """Return the latents of a stream. The prompt changes at chunk 2, and the stream with seed 1 has
    a start image.
    """
    latents = []
    for index in range(chunks):
        image = (
            {"image": torch.full((32, 48, 3), 90, dtype=torch.uint8)}
            if (seed, index) == (1, 0)
            else {}
        )
        _, tensors = await client.send(
            image,
            session_id=name,
            chunk_index=index,
            prompt={0: f"a field in season {seed}", 2: "a town at night"}.get(index),
            seed=seed if index == 0 else None,
            output="latents",
        )
        latents.append(tensors["latents"].clone())
    return latents


async def streams(client: EngineClient, prefix: str = "s") -> list[list[torch.Tensor]]:
    return await asyncio.gather(
        *(stream(client, f"{prefix}{seed}", seed) for seed in range(STREAMS))
    )


def largest_difference(a: list[list[torch.Tensor]], b: list[list[torch.Tensor]]) -> float:
    return max(
        (x - y).abs().max().item()
        for p, q in zip(a, b, strict=True)
        for x, y in zip(p, q, strict=True)
    )


def engine(model: Path, omni: dict[str, Any] | None = None, **engine_args: Any) -> Any:
    return running_engine(model, {"model": MODEL, **(omni or {})}, dtype="float32", **engine_args)


@pytest.fixture(scope="module")
def expected(causal_wan: Path) -> list[list[torch.Tensor]]:
    """Run all checks on one engine; return the latents of each stream when it runs by itself."""
    found: list[list[torch.Tensor]] = []

    async def scenario() -> None:
        async with engine(causal_wan) as client:
            found.extend([await stream(client, f"alone{seed}", seed) for seed in range(STREAMS)])
            await side_by_side(client, found)
            await video_to_video(client)
            await operations(client, found[0])

    asyncio.run(scenario())
    return found


async def side_by_side(client: EngineClient, alone: list[list[torch.Tensor]]) -> None:
    """Check that three concurrent streams at different steps are unaffected while a fourth stream
    first fails and is then aborted during a chunk.
    """

    async def failing_stream() -> None:
        await stream(client, "trouble", 5, chunks=1)
        with pytest.raises(RequestFailed) as failure:
            await client.send(session_id="trouble", actions=[["w"]], output="latents")
        assert failure.value.code == "invalid_request"
        task = asyncio.create_task(
            client.send(session_id="trouble", request_id="gone", output="latents")
        )
        await client.until_at_step("trouble", 1)
        await client.engine.abort("gone")
        task.cancel()

    together, _ = await asyncio.gather(streams(client), failing_stream())
    assert largest_difference(together, alone) == 0.0
    for name in (
        "trouble",
        *(f"{kind}{seed}" for kind in ("alone", "s") for seed in range(STREAMS)),
    ):
        await client.send(session_id=name, op="close")
    assert (await client.stats())["sessions"] == 0


async def video_to_video(client: EngineClient) -> None:
    """Check that video-to-video chunks accept input frames and that the metadata reports the noise
    scale.
    """
    for index, count in ((0, 9), (1, 12)):
        video = torch.zeros(count, 32, 48, 3, dtype=torch.uint8)
        meta, tensors = await client.send(
            {"video": video},
            session_id="v2v",
            prompt="a sketch",
            options={"source": "video"},
            chunk_index=index,
        )
        assert tensors["frames"].shape == (count, 32, 48, 3) and meta[
            "noise_scale"
        ] == pytest.approx(0.8)
    await client.send(session_id="v2v", op="close")


async def operations(client: EngineClient, alone: list[torch.Tensor]) -> None:
    """Check that a fork continues like its source and that a reset restarts the session."""
    first = await stream(client, "source", 0, chunks=1)
    await client.send(session_id="source", op="fork", fork_to="copy")
    for name in ("source", "copy"):
        _, tensors = await client.send(session_id=name, chunk_index=1, output="latents")
        assert torch.equal(tensors["latents"], alone[1])
    await client.send(session_id="source", op="reset")
    assert torch.equal((await stream(client, "source", 0, chunks=1))[0], first[0])


def test_concurrent_streams_equal_single_ones(expected: list[list[torch.Tensor]]) -> None:
    """Concurrent streams are bit-identical to streams that run by themselves, even while other
    streams fail or are aborted.

    The fixture also checks video-to-video, fork and reset.
    """
    assert len(expected) == STREAMS
    assert all(torch.isfinite(x).all() and x.std() > 0.1 for one in expected for x in one)
    assert largest_difference([expected[0]], [expected[1]]) > 0.1


@pytest.mark.nightly
def test_a_shared_forward_agrees_within_tolerance(
    causal_wan: Path, expected: list[list[torch.Tensor]]
) -> None:
    async def scenario() -> None:
        async with engine(causal_wan, {"batch_invariant": False}) as client:
            assert largest_difference(await streams(client), expected) < TOLERANCE

    asyncio.run(scenario())


@pytest.mark.nightly
def test_the_stock_scheduler_gives_identical_chunks(
    causal_wan: Path, expected: list[list[torch.Tensor]]
) -> None:
    async def scenario() -> None:
        async with engine(causal_wan, scheduler_cls=STOCK_SCHEDULER) as client:
            assert largest_difference(await streams(client), expected) == 0.0

    asyncio.run(scenario())


@pytest.mark.nightly
@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"pipeline_parallel_size": 2}, id="pipeline"),
        pytest.param({"tensor_parallel_size": 2}, id="tensor"),
        pytest.param({"tensor_parallel_size": 2, "sequence_parallel": True}, id="sequence"),
    ],
)
def test_two_ranks_agree_with_one(
    causal_wan: Path, expected: list[list[torch.Tensor]], parallel: dict[str, Any]
) -> None:
    """Two ranks return the same latents as one rank to within the tolerance. With pipeline stages,
    the latents are bit-identical, although two batches are in flight.
    """
    engine_args = dict(parallel)
    omni: dict[str, Any] = {"model": dict(MODEL)}
    if engine_args.pop("sequence_parallel", False):
        omni["model"]["sequence_parallel"] = True

    async def scenario() -> None:
        async with engine(causal_wan, omni, **engine_args) as client:
            difference = largest_difference(await streams(client), expected)
            assert difference <= (0.0 if "pipeline_parallel_size" in parallel else TOLERANCE)

    asyncio.run(scenario())


@pytest.mark.nightly
@pytest.mark.parametrize("parallel", ["pipeline_parallel_size", "tensor_parallel_size"])
def test_two_ranks_recompute_a_window_like_one(
    causal_wan: Path, expected: list[list[torch.Tensor]], parallel: str
) -> None:
    """With `prompt_switch` "recompute", two ranks return the same latents as one rank.

    From the new prompt onwards, the streams differ from those with the default `prompt_switch`.
    """
    omni = {"model": {**MODEL, "prompt_switch": "recompute"}}
    found: list[list[list[torch.Tensor]]] = []

    async def scenario() -> None:
        for ranks in (1, 2):
            async with engine(causal_wan, omni, **{parallel: ranks}) as client:
                found.append(await streams(client))

    asyncio.run(scenario())
    one, two = found
    assert largest_difference(one, two) <= (
        0.0 if parallel == "pipeline_parallel_size" else TOLERANCE
    )
    for ours, retained in zip(one, expected, strict=True):
        assert [torch.equal(x, y) for x, y in zip(ours, retained, strict=True)] == [
            True,
            True,
            False,
            False,
        ]


@pytest.mark.cuda
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs CUDA: elsewhere there are no graphs to compare"
)
@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"pipeline_parallel_size": 2}, id="pipeline"),
        pytest.param(
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, id="pipeline x Ulysses"
        ),
    ],
)
def test_graphs_of_several_stages_change_nothing(
    causal_wan: Path, parallel: dict[str, int]
) -> None:
    """With several pipeline stages, two long streams that capture and replay each forward pass
    return the same latents as without CUDA graphs.
    """

    async def made(cuda_graphs: bool) -> list[list[torch.Tensor]]:
        omni = {
            "model": {
                **MODEL,
                "sequence_parallel": "tensor_parallel_size" in parallel,
                "cuda_graphs": cuda_graphs,
            }
        }
        async with engine(causal_wan, omni, **parallel) as client:
            return await asyncio.gather(
                *(stream(client, f"s{seed}", seed, chunks=24) for seed in range(2))
            )

    plain, graphs = asyncio.run(made(False)), asyncio.run(made(True))
    assert largest_difference(plain, graphs) == 0.0
