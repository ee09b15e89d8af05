# SPDX-License-Identifier: Apache-2.0
"""At startup, layers move between pipeline stages according to measured times.

The resulting streams are bit-identical to those of one rank.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine_client import EngineClient, running_engine
from test_stage_hybrids import LEVELS, PP2, PP3, TP2, U2, VAE, WINDOW, stream_chunk, world_chunk
from test_stage_hybrids import engine as engine_of

from vllm_omni.model_executor.models.registry import get_family

pytestmark = pytest.mark.nightly

Chunks = Callable[[int, int], Any]
MEASURED: dict[str, Any] = {"pipeline_partition": "measured"}


def slow(stage: int) -> dict[str, Any]:
    """Return the arguments for an engine with one slow pipeline stage.

    The stage is slow however many layers it has, so all but one of its layers move to the other
    stage.
    """
    return {"worker_cls": f"faulty_worker.SlowStage{stage}Worker"}


async def walk(client: EngineClient, chunks: Chunks) -> list[torch.Tensor]:
    frames = []
    for index in range(5):
        fields, tensors = chunks(index, 4)
        _, result = await client.send(tensors, session_id="walk", chunk_index=index, **fields)
        frames.append(result["frames"].clone())
    return frames


async def layers_held(client: EngineClient) -> list[int]:
    """Return the number of layers on each rank, in rank order. A VAE stage has no layers."""
    held: list[int] = await client.engine.collective_rpc("layers_held")
    return held


@pytest.mark.parametrize(("stage", "held"), [(0, [1, 3]), (1, [3, 1])])
@pytest.mark.parametrize("family", ["causal_wan", "lingbot_world"])
def test_layers_leave_a_slow_stage(
    tmp_path: Path, family: str, stage: int, held: list[int]
) -> None:
    model, chunks = (
        tmp_path / "model",
        {"causal_wan": stream_chunk, "lingbot_world": world_chunk}[family],
    )
    get_family(family).make_tiny(model, 0, "original")

    async def scenario() -> None:
        async with running_engine(model, {"model": WINDOW}, dtype="float32") as client:
            expected = await walk(client, chunks)
        omni = {"model": WINDOW} | MEASURED
        async with running_engine(
            model, omni, dtype="float32", pipeline_parallel_size=2, **slow(stage)
        ) as client:
            assert await layers_held(client) == held
            got = await walk(client, chunks)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("flags", "levels", "held"),
    [
        (PP3 | VAE, 0, [1, 3, 0]),
        (PP2 | TP2, LEVELS, [1, 1, 3, 3]),
        (PP2 | U2, LEVELS, [1, 1, 3, 3]),
    ],
    ids=["VAE stage", "TP 2", "Ulysses 2"],
)
def test_layers_move_with_a_vae_stage_and_with_tensor_parallel_ranks(
    causal_wan: Path, flags: dict[str, Any], levels: int, held: list[int]
) -> None:
    async def scenario() -> None:
        async with running_engine(causal_wan, {"model": WINDOW}, dtype="float32") as client:
            expected = await walk(client, stream_chunk)
        async with engine_of(causal_wan, flags | MEASURED, **slow(0)) as client:
            assert await layers_held(client) == held
            got = await walk(client, stream_chunk)
        for ours, theirs in zip(got, expected, strict=True):
            assert (ours.int() - theirs.int()).abs().max().item() <= levels

    asyncio.run(scenario())
