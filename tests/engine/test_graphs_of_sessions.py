# SPDX-License-Identifier: Apache-2.0
"""Sessions that replay CUDA graphs captured by sessions that have ended.

Without CUDA, a mocked graph repeats the forward pass with the host-side decisions fixed at capture
time. The tests are nightly because each needs two engines. test_causal_wan_graphs.py covers streams
that replay the graphs of other streams, without an engine.
"""

import asyncio
from typing import Any

import pytest
import torch
from helpers.engine_client import EngineClient, running_engine

pytestmark = pytest.mark.nightly

SMALL_WINDOW = {"window_frames": 7, "sink_frames": 2}
"""The window is full after the third chunk. Its length is not a multiple of the chunk size."""
CHUNKS = 7
IMAGE = {"image": torch.arange(32 * 48 * 3).reshape(32, 48, 3).to(torch.uint8)}


async def session(client: EngineClient, family: str, seed: int) -> list[torch.Tensor]:
    """Run a session with a unique prompt, close it, and return its latents."""
    plays = family == "lingbot_world"
    latents = []
    for index in range(CHUNKS):
        first = index == 0
        fields: dict[str, Any] = (
            {"prompt": f"a field in season {seed}", "seed": seed} if first else {}
        )
        if plays:
            fields["actions"] = [["w", "j"] if (index + seed) % 2 else ["s"]] * 3
        _, tensors = await client.send(
            IMAGE if first and plays else {},
            session_id=f"s{seed}",
            chunk_index=index,
            output="latents",
            **fields,
        )
        latents.append(tensors["latents"].clone())
    await client.send(session_id=f"s{seed}", op="close")
    return latents


IN_FLIGHT = {"chunks_in_flight": 3, "model": {**SMALL_WINDOW, "cache": "noise_matched"}}
ONE_STEP = {"model": {**SMALL_WINDOW, "max_steps": 1}}
"""Each kind of pass runs only once per chunk, so its first position is captured by the warm-up's
second session.
"""
ULYSSES = {"model": {**SMALL_WINDOW, "sequence_parallel": True}}


@pytest.mark.parametrize(
    ("family", "omni", "flags"),
    [
        pytest.param("causal_wan", {}, {}, id="causal Wan"),
        pytest.param("causal_wan", ONE_STEP, {}, id="one step"),
        pytest.param(
            "lingbot_world",
            {},
            {"kv_cache_dtype": "fp8"},
            id="LingBot World, FP8 K/V",
        ),
        pytest.param("causal_wan", {}, {"pipeline_parallel_size": 2}, id="stages"),
        pytest.param(
            "lingbot_world",
            ULYSSES,
            {"tensor_parallel_size": 2},
            id="Ulysses",
        ),
        pytest.param("causal_wan", IN_FLIGHT, {}, id="chunks in flight"),
    ],
)
def test_sessions_with_graphs_equal_sessions_without(
    family: str, omni: dict[str, Any], flags: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """Sessions that replay graphs return the same latents as sessions without graphs.

    The first session reuses the warm-up's ring buffer, and each later session reuses the ring
    buffer of its predecessor. Two concurrent sessions each have their own ring buffer.
    """
    model = request.getfixturevalue(family)
    arguments: dict[str, Any] = {"dtype": "float32", **flags}
    omni = {"model": SMALL_WINDOW, **omni}
    counts: list[list[int]] = []

    async def made(**more: Any) -> list[list[torch.Tensor]]:
        async with running_engine(model, omni, **arguments, **more) as client:

            async def count() -> None:
                if more:
                    counts.append((await client.engine.collective_rpc("graph_counts"))[0])

            await count()
            latents = [await session(client, family, seed) for seed in range(2)]
            await count()
            latents += await asyncio.gather(*(session(client, family, seed) for seed in (2, 3)))
            await count()
            return [*latents, await session(client, family, 4)]

    plain, by_graphs = (
        asyncio.run(made()),
        asyncio.run(made(worker_cls="graphs_worker.GraphsWorker")),
    )
    for want, got in zip(plain, by_graphs, strict=True):
        for one, other in zip(want, got, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=0)
    rings = 4 if "chunks_in_flight" in omni else 1
    assert [retained for _, retained in counts] == [rings, rings, 2 * rings]
    if rings == 1:
        assert counts[0][0] == 2 * 2, "steps and clean-context passes of the two warm-up chunks"
