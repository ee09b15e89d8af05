# SPDX-License-Identifier: Apache-2.0
"""ABot-World-0 (tiny) in the real engine: keys, reference images, prompts, refusals, two ranks and
FP8.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine_client import EngineClient, SharedEngine, running_engine, shared_engine

from vllm_omni.actions import image_tensor
from vllm_omni.model_executor.models.registry import get_family
from vllm_omni.outputs import RequestFailed

TOLERANCE = 1e-4
"""Absolute tolerance for fp32 latents of order 1, required because several ranks sum in a different
order than one rank.
"""
OMNI = {"height": 32, "width": 64}
HELD: list[Any] = [[["w", "l"]] * 3, [["a"], [], ["i"]], None, None]


def image(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (40, 64, 3), dtype=torch.uint8, generator=generator)


def images(*names: str) -> dict[str, torch.Tensor]:
    named = {image_tensor(name): image(1 + len(name)) for name in names}
    return {"image": image(), **named}


REFERENCES = images("head", "left", "right", "front", "back")


async def play(client: EngineClient, name: str, start: Any = None, **fields: Any) -> torch.Tensor:
    """Return the latents of a session that runs one chunk for each entry of `HELD`."""
    latents = []
    for index, actions in enumerate(HELD):
        tensors = (REFERENCES if start is None else start) if index == 0 else None
        _, result = await client.send(
            tensors, session_id=name, actions=actions, output="latents", **fields
        )
        latents.append(result["latents"].clone())
    return torch.cat(latents, dim=1)


def played(checkpoint: Path, **engine_args: Any) -> torch.Tensor:
    async def scenario() -> torch.Tensor:
        async with running_engine(
            checkpoint, OMNI, **{"dtype": "float32", **engine_args}
        ) as client:
            return await play(client, "s")

    return asyncio.run(scenario())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("abot")
    get_family("abot_world").make_tiny(out, 0, "original")
    return out


@pytest.fixture(scope="module")
def one_rank(checkpoint: Path) -> Iterator[SharedEngine]:
    with shared_engine(checkpoint, OMNI, dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(one_rank: SharedEngine) -> torch.Tensor:
    return one_rank.run(play(one_rank.client, "alone"))


def test_a_world_is_played_through_the_engine(one_rank: SharedEngine, alone: torch.Tensor) -> None:
    """Concurrent sessions return the same latents as sessions that run by themselves, both in their
    first chunk and in later chunks.

    Reference images and prompts affect the latents, forks and resets are exact, and a refused
    request affects no session.
    """
    client = one_rank.client

    async def scenario() -> None:
        ours, theirs, other = await asyncio.gather(
            play(client, "a"), play(client, "b"), play(client, "c", images("head"))
        )
        assert torch.equal(ours, alone) and torch.equal(theirs, alone)
        assert (other - alone).abs().max() > 0.01
        for fields, reason in (
            ({"actions": [["jump"]]}, "takes buttons w, a, s, d, i, j, k, l"),
            ({"actions": [["w"]] * 4}, "at most 3 entries"),
        ):
            with pytest.raises(RequestFailed, match=reason):
                await client.send(session_id="a", output="latents", **fields)
        six = images("head", "left", "right", "front", "back", "side")
        with pytest.raises(RequestFailed, match="unknown images side; this model takes head"):
            await client.send(six, session_id="new")
        await client.send(session_id="a", op="fork", fork_to="d")
        _, ours_next = await client.send(session_id="a", output="latents")
        _, switched = await client.send(session_id="d", output="latents", prompt="night")
        assert not torch.equal(ours_next["latents"], switched["latents"])
        await client.send(session_id="b", op="reset")
        assert torch.equal(await play(client, "b"), alone)
        meta, frames = await client.send(REFERENCES, session_id="f")
        assert meta["num_frames"] == 9 and frames["frames"].shape[0] == 9

    one_rank.run(scenario())


@pytest.mark.parametrize("parallel", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_ranks_agree_with_one(checkpoint: Path, alone: torch.Tensor, parallel: str) -> None:
    """Two ranks return the same latents as one rank to within the tolerance. With pipeline stages,
    the latents are bit-identical, because every sum is computed in the same order.
    """
    difference = (played(checkpoint, **{parallel: 2}) - alone).abs().max()
    assert difference <= (0.0 if parallel == "pipeline_parallel_size" else TOLERANCE)


def test_fp8_weights_and_kv_are_close_to_bf16(checkpoint: Path) -> None:
    exact = played(checkpoint, dtype="bfloat16")
    fp8 = played(
        checkpoint,
        dtype="bfloat16",
        quantization="fp8_per_channel",
        kv_cache_dtype="fp8",
    )
    assert 0 < (fp8[:, :3] - exact[:, :3]).norm() < 0.3 * exact[:, :3].norm()
