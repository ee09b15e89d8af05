# SPDX-License-Identifier: Apache-2.0
"""The VAE as a separate pipeline stage: real engines with one process per rank return results that
are bit-identical to those of one rank.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine_client import STOCK_SCHEDULER, EngineClient, SharedEngine, running_engine

from vllm_omni.outputs import RequestFailed

CHUNKS, SESSIONS = 3, 3


async def frames(
    client: EngineClient, name: str, chunks: range = range(CHUNKS), **fields: Any
) -> list[torch.Tensor]:
    """Return the decoded frames of a session's chunks. Each chunk is requested while the previous
    chunk is running.
    """
    first = {"prompt": "a field", **fields}
    tasks = [
        asyncio.create_task(
            client.send(session_id=name, chunk_index=index, **(first if index == 0 else {}))
        )
        for index in chunks
    ]
    return [(await task)[1]["frames"].clone() for task in tasks]


async def sessions(client: EngineClient) -> list[list[torch.Tensor]]:
    return list(
        await asyncio.gather(*(frames(client, f"s{seed}", seed=seed) for seed in range(SESSIONS)))
    )


def assert_equal(got: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


async def check_failures(client: EngineClient) -> None:
    """Send requests that fail on some rank before the commit, and check their error codes."""
    for options, code in (
        ({"fail_in": "prepare"}, "engine_error"),
        ({"nan_at": 4}, "non_finite"),
        ({"nan_at": 3, "clean_pass": True}, "non_finite"),
        ({"fail_in": "decode", "clean_pass": True}, "engine_error"),
        ({"stepz": 1}, "invalid_request"),
    ):
        with pytest.raises(RequestFailed) as failure:
            await client.send(session_id="s0", chunk_index=CHUNKS, options=options)
        assert failure.value.code == code


async def check_abort(client: EngineClient) -> None:
    options = {"step_ms": 20, "steps": 50}
    slow = asyncio.create_task(
        client.send(session_id="s1", chunk_index=CHUNKS, request_id="slow", options=options)
    )
    await client.until_at_step("s1", 3)
    await client.engine.abort("slow")
    slow.cancel()


async def check_lost_session(client: EngineClient) -> None:
    """Check that a session refuses requests if decoding fails after the other ranks have committed.

    The session accepts requests again after it is reset or closed.
    """
    await frames(client, "lost", range(1), seed=9)
    with pytest.raises(RequestFailed, match="engine_error"):
        await client.send(session_id="lost", chunk_index=1, options={"fail_in": "decode"})
    await client.send(session_id="lost", op="fork", fork_to="copy")
    for name in ("lost", "lost", "copy"):
        with pytest.raises(RequestFailed, match="session_lost"):
            await client.send(session_id=name)
    for stats in await client.engine.collective_rpc("session_stats"):
        assert {"lost", "copy"} <= set(stats["chunks"])
    await client.send(session_id="copy", op="close")
    await client.send(session_id="lost", op="reset")
    fresh = await frames(client, "fresh", seed=9)
    assert_equal([await frames(client, "lost", seed=9)], [fresh])
    first = {"session_id": "new", "chunk_index": 0, "prompt": "a field"}
    for options, code in (({"fail_in": "decode"}, "engine_error"), ({}, "session_lost")):
        with pytest.raises(RequestFailed, match=code):
            await client.send(**first, options=options)
    await client.send(session_id="new", op="close")
    for stats in await client.engine.collective_rpc("session_stats"):
        assert "new" not in stats["chunks"]


@pytest.mark.parametrize(
    "overlap",
    [False, pytest.param(True, marks=pytest.mark.nightly)],
    ids=["at once", "with a later step"],
)
def test_a_decoding_stage_equals_one_rank(
    null_engine: SharedEngine, null_world: Path, overlap: bool
) -> None:
    """With a VAE stage, concurrent sessions, a fork and every kind of failure lead to the same
    results and states as on one rank.
    """

    async def all_of_it(client: EngineClient) -> list[list[torch.Tensor]]:
        before = await sessions(client)
        await check_failures(client)
        await check_abort(client)
        await client.send(session_id="s2", op="fork", fork_to="forked")
        names = [*(f"s{seed}" for seed in range(SESSIONS)), "forked"]
        after = await asyncio.gather(
            *(frames(client, name, range(CHUNKS, CHUNKS + 2)) for name in names)
        )
        return before + list(after)

    async def scenario() -> None:
        expected = await all_of_it(null_engine.client)
        omni = {"vae_stage": True, "overlap_decode": overlap, "max_sessions": 16}
        async with running_engine(null_world, omni, pipeline_parallel_size=2) as client:
            assert_equal(await all_of_it(client), expected)
            await check_lost_session(client)
            _, stage = await client.engine.collective_rpc("session_stats")
            assert stage["chunks"]["s0"] == CHUNKS + 2

    null_engine.run(scenario())


@pytest.mark.parametrize(
    ("options", "arguments", "reason"),
    [
        ({"vae_stage": True}, {}, "--pipeline-parallel-size 2 or more"),
        (
            {"vae_stage": True},
            {"pipeline_parallel_size": 2, "scheduler_cls": STOCK_SCHEDULER},
            "one denoise step per",
        ),
        (
            {"pipeline_partition": [1, 2, 1]},
            {"pipeline_parallel_size": 2},
            "lists 3 stages, but 2 hold layers",
        ),
        (
            {"pipeline_partition": [2, 2], "vae_stage": True},
            {"pipeline_parallel_size": 2},
            "1 hold layers",
        ),
    ],
)
def test_impossible_vae_stages_are_refused_at_startup(
    null_world: Path, options: dict[str, Any], arguments: dict[str, Any], reason: str
) -> None:
    async def scenario() -> None:
        async with running_engine(null_world, options, **arguments):
            pass

    with pytest.raises(ValueError, match=reason):
        asyncio.run(scenario())
