# SPDX-License-Identifier: Apache-2.0
"""`--cpu-offload-gb` through the real engine: the bits of an engine without it, ranks, FP8
weights, reload.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine_client import EngineClient, running_engine
from helpers.wan22_driver import HEIGHT, WIDTH

from vllm_omni.model_executor.models.registry import get_family

ALL = {"cpu_offload_gb": 1.0}
SOME = {"cpu_offload_gb": 0.00005}
IMAGE = {"image": torch.arange(32 * 48 * 3).reshape(32, 48, 3).to(torch.uint8)}


@pytest.fixture(scope="module")
def t2v(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wan2_2_t2v")
    get_family("wan2_2").make_tiny(out, 0, "t2v")
    return out


async def videos(client: EngineClient) -> list[torch.Tensor]:
    """Two at once, of other lengths: their steps meet both experts in one engine step."""
    wanted = [{"seed": seed, "num_inference_steps": 4 + seed, "num_frames": 9} for seed in range(2)]
    sent = (
        client.send(session_id=f"s{n}", one_shot=True, prompt="a river", output="latents", **fields)
        for n, fields in enumerate(wanted)
    )
    return [tensors["latents"].clone() for _, tensors in await asyncio.gather(*sent)]


async def chunks(client: EngineClient, session: str) -> list[torch.Tensor]:
    made = []
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
        made.append(tensors["latents"].clone())
    return made


def equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


async def made_by(model: Path, **arguments: Any) -> list[torch.Tensor]:
    omni = {"height": HEIGHT, "width": WIDTH, "model": {"max_num_frames": 9}}
    async with running_engine(model, omni, **arguments) as client:
        return await videos(client)


def test_two_experts_in_host_memory(t2v: Path) -> None:
    expected = asyncio.run(made_by(t2v))
    assert equal(asyncio.run(made_by(t2v, **SOME)), expected)


@pytest.mark.nightly
@pytest.mark.parametrize("split", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_two_experts_in_host_memory_of_two_ranks(t2v: Path, split: dict[str, int]) -> None:
    assert equal(asyncio.run(made_by(t2v, **ALL, **split)), asyncio.run(made_by(t2v, **split)))


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param({}, marks=pytest.mark.nightly),
        {"dtype": "bfloat16", "quantization": "fp8_per_channel"},
    ],
)
def test_a_world_in_host_memory_is_loaded_anew(
    lingbot_world: Path, precision: dict[str, str]
) -> None:
    """Quantized layers get new parameters by a reload, others new values."""

    async def scenario() -> list[torch.Tensor]:
        async with running_engine(lingbot_world, **ALL, **precision) as client:
            first = await chunks(client, "a")
            await client.engine.collective_rpc("reload_weights")
            assert equal(await chunks(client, "b"), first)
            return first

    async def without() -> list[torch.Tensor]:
        async with running_engine(lingbot_world, **precision) as client:
            return await chunks(client, "a")

    assert equal(asyncio.run(scenario()), asyncio.run(without()))
