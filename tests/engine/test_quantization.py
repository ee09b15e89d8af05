# SPDX-License-Identifier: Apache-2.0
"""`--quantization fp8_per_channel` in the real engine: latent error, reload, and several ranks."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine_client import EngineClient, SharedEngine, running_engine, shared_engine

IMAGE = {"image": torch.arange(32 * 48 * 3).reshape(32, 48, 3).to(torch.uint8)}
FP8 = {"quantization": "fp8_per_channel"}


async def two_chunks(client: EngineClient, session: str) -> list[torch.Tensor]:
    chunks = []
    for index in range(2):
        fields: dict[str, Any] = {
            "chunk_index": index,
            "actions": [["w"]] * 3,
            "output": "latents",
            "seed": 1,
        }
        first = {"prompt": "a field"} if index == 0 else {}
        _, tensors = await client.send(
            IMAGE if index == 0 else None, session_id=session, **fields, **first
        )
        chunks.append(tensors["latents"].float().clone())
    return chunks


def relative_error(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(got, expected, strict=True))


@pytest.fixture(scope="module")
def fp8_engine(lingbot_world: Path) -> Iterator[SharedEngine]:
    with shared_engine(lingbot_world, dtype="bfloat16", **FP8) as shared:
        yield shared


def test_fp8_weights_are_close_to_bf16_and_reload(
    lingbot_world: Path, fp8_engine: SharedEngine
) -> None:
    """FP8 weights yield latents close to those of bf16 weights, and a reload quantizes the new
    weights.

    The measured error on a CPU is 0.02. This is less than FP8's step size of 1/16 of a value,
    because the errors of many products average out.
    """
    client = fp8_engine.client

    async def without() -> list[torch.Tensor]:
        async with running_engine(lingbot_world, dtype="bfloat16") as client:
            return await two_chunks(client, "a")

    async def scenario() -> None:
        quantized = await two_chunks(client, "a")
        assert 0.002 < relative_error(quantized, exact) < 0.06
        await client.engine.collective_rpc("reload_weights")
        for again, before in zip(await two_chunks(client, "b"), quantized, strict=True):
            assert torch.equal(again, before)
        with pytest.raises(Exception, match=r"."):
            await client.engine.collective_rpc(
                "reload_weights", kwargs={"weights_path": "/nowhere"}
            )
        for again, before in zip(await two_chunks(client, "c"), quantized, strict=True):
            assert torch.equal(again, before)

    exact = asyncio.run(without())
    fp8_engine.run(scenario())


@pytest.mark.parametrize("split", ["tensor", pytest.param("sequence", marks=pytest.mark.nightly)])
def test_two_ranks_with_fp8_weights_agree_with_one(
    lingbot_world: Path, fp8_engine: SharedEngine, split: str
) -> None:
    """With FP8 weights, two ranks agree with one rank.

    Row-parallel ranks share one scale per channel. The tolerance allows for different summation
    orders in bf16.
    """
    model = {"sequence_parallel": True} if split == "sequence" else {}
    options: dict[str, Any] = {"dtype": "bfloat16", "tensor_parallel_size": 2, **FP8}

    async def scenario() -> list[torch.Tensor]:
        async with running_engine(lingbot_world, {"model": model}, **options) as client:
            return await two_chunks(client, "a")

    alone = fp8_engine.run(two_chunks(fp8_engine.client, f"alone-{split}"))
    assert relative_error(asyncio.run(scenario()), alone) < 0.03
