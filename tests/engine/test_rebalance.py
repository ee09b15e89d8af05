# SPDX-License-Identifier: Apache-2.0
"""Layers that move between the stages of a running engine: sessions go on, bit for bit."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_client import EngineClient, running_engine
from faulty_worker import SLOW
from test_stage_hybrids import LEVELS, PP2, PP3, TP2, U2, VAE, WINDOW, stream_chunk, world_chunk
from test_stage_hybrids import engine as engine_of

from vllm_omni.model_executor.models.registry import get_family

pytestmark = pytest.mark.nightly

PARTITIONS: tuple[list[int], ...] = ([3, 1], [1, 3], [2, 2])


async def chunk(client: EngineClient, index: int, chunks: Callable[[int, int], Any]) -> torch.Tensor:
    fields, tensors = chunks(index, 4)
    _, result = await client.send(tensors, session_id="walk", chunk_index=index, **fields)
    return result["frames"].clone()


async def walk(client: EngineClient, chunks: Callable[[int, int], Any], moves: bool) -> list[torch.Tensor]:
    """Chunks before, between and after three moves."""
    frames = [await chunk(client, index, chunks) for index in range(3)]
    for number, partition in enumerate(PARTITIONS):
        if moves:
            answers = await client.engine.collective_rpc("rebalance_pipeline", args=(partition,))
            assert answers == [{"ok": partition}] * len(answers)
        frames += [await chunk(client, 3 + 2 * number + step, chunks) for step in range(2)]
    return frames


async def refused(client: EngineClient) -> None:
    for partition, code in (([4, 1], "invalid_request"), ([4, 0], "invalid_request"), ([4], "invalid_request")):
        for answer in await client.engine.collective_rpc("rebalance_pipeline", args=(partition,)):
            assert answer["error"][0] == code
    # A chunk as fast as the others is over before a loaded machine has asked twice.
    task = asyncio.create_task(client.send(session_id="busy", prompt=SLOW, output="latents"))
    answers: list[Any] = []
    while not task.done():
        answers += await client.engine.collective_rpc("rebalance_pipeline", args=([2, 2],))
    await task
    assert {answer["error"][0] for answer in answers if "error" in answer} == {"session_busy"}


@pytest.mark.parametrize("family", ["causal_wan", "lingbot_world"])
def test_sessions_go_on_after_a_move(tmp_path: Path, family: str) -> None:
    model, chunks = tmp_path / "model", {"causal_wan": stream_chunk, "lingbot_world": world_chunk}[family]
    get_family(family).make_tiny(model, 0, "original")

    async def scenario() -> None:
        async with running_engine(model, {"model": WINDOW}, dtype="float32") as client:
            expected = await walk(client, chunks, moves=False)
        omni = {"model": WINDOW, "pipeline_partition": "measured"}
        flags: dict[str, Any] = {"pipeline_parallel_size": 2, "worker_cls": "faulty_worker.FaultyWorker"}
        async with running_engine(model, omni, dtype="float32", **flags) as client:
            got = await walk(client, chunks, moves=True)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
            if family == "causal_wan":
                await refused(client)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("flags", "levels"),
    [(PP3 | VAE, 0), (PP2 | TP2, LEVELS), (PP2 | U2, LEVELS)],
    ids=["VAE stage", "TP 2", "Ulysses 2"],
)
def test_layers_move_beside_a_vae_stage_and_on_ranks_that_share_them(
    causal_wan: Path, flags: dict[str, Any], levels: int
) -> None:
    """Moved by measured time at start, then by hand."""

    async def scenario() -> None:
        async with running_engine(causal_wan, {"model": WINDOW}, dtype="float32") as client:
            expected = await walk(client, stream_chunk, moves=False)
        async with engine_of(causal_wan, flags | {"pipeline_partition": "measured"}) as client:
            got = await walk(client, stream_chunk, moves=True)
        for ours, theirs in zip(got, expected, strict=True):
            assert (ours.int() - theirs.int()).abs().max().item() <= levels

    asyncio.run(scenario())
