# SPDX-License-Identifier: Apache-2.0
"""LingBot World v2 (tiny) in the real engine, in each released layout."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine_client import EngineClient, running_engine

from vllm_omni.model_executor.models.lingbot_world.checkpoint import find_layout
from vllm_omni.model_executor.models.registry import get_family
from vllm_omni.testing.tiny.wan import write_component

TOLERANCE = 2e-4
"""Absolute tolerance for fp32 latents of order 1 after two chunks, required because several ranks
sum in a different order than one rank.
"""


def image() -> torch.Tensor:
    y, x = torch.meshgrid(torch.arange(32), torch.arange(48), indexing="ij")
    return torch.stack((y * 7, x * 5, x + y), dim=-1).to(torch.uint8)


async def walk(client: EngineClient, name: str = "s", **fields: Any) -> torch.Tensor:
    """Return the latents of two key-controlled chunks."""
    latents = []
    for index, keys in enumerate(("w", "j")):
        start = {"image": image()} if index == 0 else None
        prompt = "a field" if index == 0 else None
        _, tensors = await client.send(
            start, session_id=name, prompt=prompt, actions=[[keys]] * 3, output="latents", **fields
        )
        latents.append(tensors["latents"].clone())
    return torch.cat(latents, dim=1)


def served(checkpoint: Path, **engine_args: Any) -> torch.Tensor:
    async def scenario() -> torch.Tensor:
        async with running_engine(checkpoint, dtype="float32", **engine_args) as client:
            return await walk(client)

    return asyncio.run(scenario())


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 1.3B model in its released layout, with a link to the separate text encoder, VAE and
    tokenizer.
    """
    folder = tmp_path_factory.mktemp("bare")
    get_family("lingbot_world").make_tiny(folder / "world", 0, "v2_1_3b")
    (folder / "world" / "assets").rename(folder / "shared")
    (folder / "world" / "assets").symlink_to(folder / "shared")
    return folder / "world"


@pytest.fixture(scope="module")
def alone(bare: Path) -> torch.Tensor:
    return served(bare)


def test_a_repository_without_config_takes_sizes_from_its_tensors(
    bare: Path, alone: torch.Tensor, tmp_path: Path
) -> None:
    """If a repository has no config, the network dimensions are derived from its tensors.

    A checkpoint with its shards in the root folder and a link to shared components yields the same
    latents as a v2 folder whose config states these dimensions.
    """
    shutil.copytree(bare.parent / "shared", tmp_path, dirs_exist_ok=True)
    config = {"_class_name": "WanModelFast", **find_layout(bare).transformer_config()}
    write_component(tmp_path / "transformers", config, "config.json")
    for file in bare.glob("model*"):
        shutil.copy(file, tmp_path / "transformers")
    assert alone.std() > 0.1
    assert torch.equal(served(tmp_path), alone)


def test_held_keys_change_the_world_of_layout_act(tmp_path: Path) -> None:
    """In the `act` layout, held keys change the latents. If a request contains no `action` tensor,
    no key is held.
    """
    get_family("lingbot_world").make_tiny(tmp_path, 0, "act")

    async def scenario() -> None:
        async with running_engine(tmp_path, dtype="float32") as client:
            path = {
                "poses": torch.eye(4).repeat(9, 1, 1),
                "intrinsics": torch.tensor([660.0, 660.0, 416.0, 240.0]),
            }
            latents = []
            for number, action in enumerate((None, torch.zeros(9, 4), torch.ones(9, 4))):
                flags = {} if action is None else {"action": action}
                tensors = {"image": image(), **path, **flags}
                _, result = await client.send(
                    tensors, session_id=f"s{number}", prompt="a field", output="latents"
                )
                latents.append(result["latents"].clone())
            assert torch.equal(latents[0], latents[1])
            assert (latents[2] - latents[0]).abs().max() > 0.01

    asyncio.run(scenario())


@pytest.mark.nightly
def test_the_model_before_distillation(tmp_path: Path) -> None:
    """The undistilled model runs with guidance and 40 steps. Two pipeline stages return latents
    that are bit-identical to those of one rank.
    """
    get_family("lingbot_world").make_tiny(tmp_path, 0, "v2_pretrain")
    one = served(tmp_path)
    assert torch.isfinite(one).all() and one.std() > 0.1
    assert torch.equal(served(tmp_path, pipeline_parallel_size=2), one)


@pytest.mark.nightly
@pytest.mark.parametrize("parallel", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_ranks_agree_with_one(bare: Path, alone: torch.Tensor, parallel: str) -> None:
    """Two ranks return the same latents as one rank to within the tolerance. With pipeline stages,
    the latents are bit-identical, because every sum is computed in the same order.

    The front end reads the checkpoint's sizes only once.
    """
    difference = (served(bare, **{parallel: 2}) - alone).abs().max()
    assert difference <= (0.0 if parallel == "pipeline_parallel_size" else TOLERANCE)
