# SPDX-License-Identifier: Apache-2.0
"""Session snapshots in real engines through `collective_rpc`, restored on another engine and with
several ranks.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine_client import EngineClient, running_engine

from vllm_omni.model_executor.models.registry import get_family
from vllm_omni.outputs import RequestFailed
from vllm_omni.session_files.snapshot import SnapshotHeader
from vllm_omni.session_files.snapshot_exchange import (
    WorkerCall,
    package_version,
    restore_exchange,
    run_exchange_async,
    save_exchange,
)

OPTIONS = {"model": {"window_frames": 7, "sink_frames": 2}}
CHUNKS = 4


async def save(client: EngineClient, session_id: str, path: Path) -> SnapshotHeader:
    return await run_exchange_async(
        save_exchange(session_id, path, package_version()), lambda call: send(client, call)
    )


async def restore(client: EngineClient, session_id: str, path: Path) -> None:
    await run_exchange_async(restore_exchange(session_id, path), lambda call: send(client, call))


async def send(client: EngineClient, call: WorkerCall) -> Any:
    return await client.engine.collective_rpc(call.method, args=call.args)


async def chunk(client: EngineClient, session_id: str, index: int, **fields: Any) -> torch.Tensor:
    image = (
        {"image": torch.arange(32 * 48 * 3, dtype=torch.uint8).view(32, 48, 3)}
        if index == 0
        else None
    )
    first = {"prompt": "a harbour", "seed": 3} if index == 0 else {}
    keys = [["w"], ["w", "j"], ["i"]]
    _, tensors = await client.send(
        image, session_id=session_id, chunk_index=index, actions=keys, **{**first, **fields}
    )
    return next(iter(tensors.values())).clone()


async def walk_and_move(model: Path, folder: Path, **engine_args: Any) -> list[torch.Tensor]:
    """Save a session and restore it on a second engine; check that both engines generate the same
    next chunks, and return these chunks.
    """
    path = folder / "walk.safetensors"
    async with running_engine(model, OPTIONS, dtype="float32", **engine_args) as client:
        for index in range(CHUNKS):
            await chunk(client, "walk", index)
        header = await save(client, "walk", path)
        assert header.chunk_index == CHUNKS
        assert len(header.ranks) == engine_args.get("tensor_parallel_size", 1) * engine_args.get(
            "pipeline_parallel_size", 1
        )
        ours = [await chunk(client, "walk", index) for index in (CHUNKS, CHUNKS + 1)]
    async with running_engine(model, OPTIONS, dtype="float32", **engine_args) as client:
        await restore(client, "moved", path)
        with pytest.raises(RequestFailed, match="expects 4"):
            await chunk(client, "moved", 0)
        theirs = [await chunk(client, "moved", index) for index in (CHUNKS, CHUNKS + 1)]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    return ours


@pytest.mark.nightly
def test_a_session_with_fp8_kv_continues(lingbot_world: Path, tmp_path: Path) -> None:
    """A session with FP8 K/V continues from its snapshot, which is smaller than a snapshot without
    FP8 K/V. An engine without FP8 K/V refuses the snapshot.
    """
    asyncio.run(walk_and_move(lingbot_world, tmp_path, kv_cache_dtype="fp8"))

    async def refused() -> None:
        async with running_engine(lingbot_world, OPTIONS, dtype="float32") as client:
            with pytest.raises(RequestFailed, match="or its dtype differ"):
                await restore(client, "moved", tmp_path / "walk.safetensors")
            for index in range(CHUNKS):
                await chunk(client, "walk", index)
            await save(client, "walk", tmp_path / "plain.safetensors")

    asyncio.run(refused())
    fp8, plain = ((tmp_path / f"{name}.safetensors").stat().st_size for name in ("walk", "plain"))
    assert fp8 < plain


@pytest.mark.nightly
@pytest.mark.parametrize("parallel", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_a_session_of_several_ranks_continues(
    lingbot_world: Path, tmp_path: Path, parallel: str
) -> None:
    """Each rank saves and restores its share of the snapshot file.

    An engine with a different parallel layout or different weights refuses the file.
    """
    asyncio.run(walk_and_move(lingbot_world, tmp_path, **{parallel: 2}))

    async def refused() -> None:
        other = tmp_path / "other"
        get_family("lingbot_world").make_tiny(other, 1, "original")
        for model, engine_args, reason in (
            (lingbot_world, {}, "split over ranks"),
            (other, {parallel: 2}, "weights"),
        ):
            async with running_engine(model, OPTIONS, dtype="float32", **engine_args) as client:
                with pytest.raises(RequestFailed, match=reason) as failure:
                    await restore(client, "moved", tmp_path / "walk.safetensors")
                assert failure.value.code == "foreign_snapshot"
                assert (await client.stats())["sessions"] == 0

    asyncio.run(refused())


@pytest.mark.nightly
def test_a_session_of_ulysses_ranks_continues(lingbot_world: Path, tmp_path: Path) -> None:
    """A session of sequence-parallel ranks, each of which stores different heads, continues after
    a restore. A tensor-parallel engine refuses the file.
    """
    options = {"model": {**OPTIONS["model"], "sequence_parallel": True}}

    async def scenario() -> None:
        path = tmp_path / "walk.safetensors"
        async with running_engine(
            lingbot_world, options, dtype="float32", tensor_parallel_size=2
        ) as client:
            for index in range(CHUNKS):
                await chunk(client, "walk", index)
            await save(client, "walk", path)
            await restore(client, "again", path)
            both = [await chunk(client, name, CHUNKS) for name in ("walk", "again")]
            assert torch.equal(*both)
        async with running_engine(
            lingbot_world, OPTIONS, dtype="float32", tensor_parallel_size=2
        ) as client:
            with pytest.raises(RequestFailed, match="split over ranks"):
                await restore(client, "moved", path)

    asyncio.run(scenario())
