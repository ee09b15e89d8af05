# SPDX-License-Identifier: Apache-2.0
"""`omni.kv_growth` in the real engine: results are unaffected, more sessions fit, and no session
fails.

The tests are nightly because each setting needs two engines. tests/worker/test_kv_growth.py covers
the same sessions in the runner.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine_client import EngineClient, running_engine

pytestmark = pytest.mark.nightly

WINDOW = {"window_frames": 36, "sink_frames": 3}
CHUNKS = 13
"""One more chunk than fits into the window."""


async def walk(
    client: EngineClient, name: str, chunks: int = CHUNKS, **fields: Any
) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """Return the metadata and the latents of each chunk of a session."""
    image = torch.arange(32 * 48 * 3, dtype=torch.uint8).view(32, 48, 3)
    results = []
    for index in range(chunks):
        first = {"prompt": "a harbour", "seed": len(name), **fields} if index == 0 else {}
        meta, tensors = await client.send(
            {"image": image} if index == 0 else None,
            session_id=name,
            chunk_index=index,
            actions=[["w"], ["w", "j"], ["i"]],
            output="both",
            **first,
        )
        results.append((meta, tensors["latents"].clone()))
    return results


def equal(ours: list[tuple[dict[str, Any], torch.Tensor]], theirs: list[Any]) -> bool:
    return all(torch.equal(a, b) for (_, a), (_, b) in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param({}, id="one rank"),
        pytest.param({"tensor_parallel_size": 2}, id="tensor parallel"),
        pytest.param(
            {"tensor_parallel_size": 2, "sequence_parallel": True}, id="sequence parallel"
        ),
    ],
)
def test_sessions_grow_and_none_fails(lingbot_world: Path, ranks: dict[str, Any]) -> None:
    """Three growing sessions run to their end in memory that suffices for only two full windows.

    Before that, two sessions in one batch return the same latents as in an engine with full
    windows. Sessions that could not grow report this. One of them returns the same latents as a
    session started with the window size at which growth stopped. Closing the sessions frees all
    memory.
    """
    arguments = dict(ranks)
    model = {**WINDOW, "sequence_parallel": arguments.pop("sequence_parallel", False)}
    names = ["a", "bb", "ccc"]

    async def most_bytes(client: EngineClient) -> int:
        return max(rank["bytes"] for rank in await client.engine.collective_rpc("session_stats"))

    async def close(client: EngineClient, names: list[str]) -> None:
        for name in names:
            await client.send(session_id=name, op="close")
        assert await most_bytes(client) == 0

    async def scenario() -> None:
        async with running_engine(
            lingbot_world, {"model": model}, dtype="float32", **arguments
        ) as client:
            full = await asyncio.gather(*(walk(client, name) for name in names[:2]))
            budget = int(1.4 * await most_bytes(client))  # two full windows, or three short ones
        omni = {"model": model, "kv_growth": True, "max_session_bytes": budget}
        async with running_engine(lingbot_world, omni, dtype="float32", **arguments) as client:
            grown = await asyncio.gather(*(walk(client, name) for name in names[:2]))
            assert not any("degradations" in meta for results in grown for meta, _ in results)
            assert all(equal(*pair) for pair in zip(grown, full, strict=True))
            await close(client, names[:2])
            many = await asyncio.gather(*(walk(client, name) for name in names))
            assert await most_bytes(client) <= budget
            await close(client, names)
            short = [results for results in many if "degradations" in results[-1][0]]
            assert short and all(torch.isfinite(x).all() for results in many for _, x in results)
            assert all(results[-1][0]["degradations"] == ["short_window"] for results in short)
            reached = {key: short[0][-1][0][key] for key in ("window_frames", "sink_frames")}
            assert 6 <= reached["window_frames"] < 36
            name = names[next(n for n, results in enumerate(many) if results is short[0])]
            again = await walk(client, name, **reached)
            assert equal(again, short[0])

    asyncio.run(scenario())
