# SPDX-License-Identifier: Apache-2.0
"""Matrix-Game 2.0 (tiny) through the real engine: keys and mouse, refusals, several ranks."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine_client import EngineClient, SharedEngine, running_engine, shared_engine

from vllm_omni.model_executor.models.registry import get_family
from vllm_omni.outputs import RequestFailed

TOLERANCE = 1e-4
"""For fp32 latents of order 1 after three chunks, because several ranks sum in another order."""
HELD = ([["w", "l"]] * 3, [["a"], [], ["i"]], None)


def image() -> torch.Tensor:
    y, x = torch.meshgrid(torch.arange(40), torch.arange(64), indexing="ij")
    return torch.stack((y * 6, x * 3, x + y), dim=-1).to(torch.uint8)


async def play(client: EngineClient, name: str, held: Any = HELD, **fields: Any) -> torch.Tensor:
    """Return the latents of a session with a chunk for each entry of `held`."""
    latents = []
    for index, actions in enumerate(held):
        start = {"image": image()} if index == 0 else None
        _, tensors = await client.send(
            start, session_id=name, actions=actions, output="latents", **fields
        )
        latents.append(tensors["latents"].clone())
    return torch.cat(latents, dim=1)


def played(checkpoint: Path, **engine_args: Any) -> torch.Tensor:
    async def scenario() -> torch.Tensor:
        async with running_engine(checkpoint, dtype="float32", **engine_args) as client:
            return await play(client, "s")

    return asyncio.run(scenario())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("matrix_game")
    get_family("matrix_game").make_tiny(out, 0, "original")
    return out


@pytest.fixture(scope="module")
def one_rank(checkpoint: Path) -> Iterator[SharedEngine]:
    with shared_engine(checkpoint, dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(one_rank: SharedEngine) -> torch.Tensor:
    return one_rank.run(play(one_rank.client, "alone"))


def test_a_game_is_played_through_the_engine(one_rank: SharedEngine, alone: torch.Tensor) -> None:
    """Concurrent sessions equal single ones, controls have an effect, and unsupported inputs are
    refused.
    """
    client = one_rank.client

    async def scenario() -> None:
        ours, theirs, idle = await asyncio.gather(
            play(client, "a"), play(client, "b"), play(client, "c", (None, None, None))
        )
        assert torch.equal(ours, alone) and torch.equal(theirs, alone)
        assert (idle - alone).abs().max() > 0.01
        for fields, reason in (
            (
                {"prompt": "a beach"},
                "takes no prompt; it takes an image and buttons w, s, a, d",
            ),
            (
                {"actions": [["jump"]]},
                "this model takes buttons w, s, a, d, i, k, j, l; axes pitch, yaw",
            ),
            ({"actions": [["w"]] * 4}, "at most 3 entries"),
        ):
            with pytest.raises(RequestFailed, match=reason):
                await client.send(session_id="a", output="latents", **fields)
        with pytest.raises(RequestFailed, match="takes no prompt"):
            await client.send({"image": image()}, session_id="new", prompt="a beach")
        await client.send(session_id="a", op="fork", fork_to="d")
        buttons = torch.zeros(12, 8)
        buttons[:, 0] = 1
        _, dense = await client.send({"buttons": buttons}, session_id="a", output="latents")
        _, entries = await client.send(session_id="d", actions=[["w"]] * 3, output="latents")
        assert torch.equal(dense["latents"], entries["latents"])
        await client.send(session_id="b", op="reset")
        assert torch.equal(await play(client, "b"), alone)

    one_rank.run(scenario())


@pytest.mark.parametrize("parallel", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_ranks_agree_with_one(checkpoint: Path, alone: torch.Tensor, parallel: str) -> None:
    """A pipeline computes the same sums."""
    difference = (played(checkpoint, **{parallel: 2}) - alone).abs().max()
    assert difference <= (0.0 if parallel == "pipeline_parallel_size" else TOLERANCE)
