# SPDX-License-Identifier: Apache-2.0
"""Combinations of pipeline stages, a VAE stage, tensor parallelism and Ulysses, compared with one
rank.

The engines have up to four ranks. Three sessions run concurrently, and one of them returns decoded
frames. Pipeline stages compute the same sums as one rank, so their results are bit-identical. Ranks
that split a layer sum in a different order.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine_client import EngineClient, running_engine
from helpers.snapshot_steps import rewrite

from vllm_omni.outputs import RequestFailed
from vllm_omni.session_files.snapshot_exchange import (
    package_version,
    restore_exchange,
    run_exchange_async,
    save_exchange,
)

pytestmark = pytest.mark.nightly

CHUNKS = 4
WINDOW = {"window_frames": 7, "sink_frames": 2}
TOLERANCE = 2e-4
"""Absolute tolerance for fp32 latents of order 1 after four chunks of five forward passes each."""
LEVELS = 2
"""Tolerance for pixel values from 0 to 255, in frames decoded from latents that are equal to within
`TOLERANCE`.
"""
TP2, U2, PP2, PP3 = (
    {"tensor_parallel_size": 2},
    {"tensor_parallel_size": 2, "sequence_parallel": True},
    {"pipeline_parallel_size": 2},
    {"pipeline_parallel_size": 3},
)
VAE: dict[str, Any] = {"vae_stage": True}
BANDS: dict[str, Any] = {"vae_parallel": True}
SETTINGS: dict[str, tuple[dict[str, Any], bool]] = {
    # engine arguments, and whether the results are bit-identical
    "vae_stage": (PP2 | VAE, True),
    "PP2 + vae_stage": (PP3 | VAE, True),
    "vae_stage, late results": (PP2 | VAE | {"overlap_decode": True}, True),
    "PP3, partition": (PP3 | {"pipeline_partition": [1, 1, 2]}, True),
    "PP2 x TP2": (PP2 | TP2, False),
    "PP2 x U2": (PP2 | U2, False),
    "vae_stage x U2": (PP2 | U2 | VAE, False),
    "vae_stage x TP2": (PP2 | TP2 | VAE, False),
    "TP2, decode in parallel": (TP2 | BANDS, False),
    "U2, decode in parallel": (U2 | BANDS, False),
    "U2, decode in parallel, late results": (U2 | BANDS | {"overlap_decode": True}, False),
    "PP2 x U2, decode in parallel": (PP2 | U2 | BANDS, False),
    "vae_stage x U2, decode in parallel": (PP2 | U2 | VAE | BANDS, False),
}
Results = dict[str, list[torch.Tensor]]


def stream_chunk(index: int, seed: int) -> tuple[dict[str, Any], Any]:
    """Return a text-to-video chunk. The prompt changes at chunk 2."""
    prompts = {0: f"a field in season {seed}", 2: "a town at night"}
    return {"prompt": prompts.get(index), "seed": seed if index == 0 else None}, None


def video_chunk(index: int, seed: int) -> tuple[dict[str, Any], Any]:
    generator = torch.Generator().manual_seed(100 * seed + index)
    video = torch.randint(
        0, 256, (12 if index else 9, 32, 48, 3), dtype=torch.uint8, generator=generator
    )
    first = {"prompt": "a sketch", "seed": seed} if index == 0 else {}
    return {**first, "options": {"source": "video"}}, {"video": video}


def world_chunk(index: int, seed: int) -> tuple[dict[str, Any], Any]:
    image = {
        "image": (torch.arange(32 * 48 * 3) * (seed + 1) % 256).to(torch.uint8).view(32, 48, 3)
    }
    first = {"prompt": "a harbour", "seed": seed} if index == 0 else {}
    return {**first, "actions": [["w"], ["w", "j"], ["i"]]}, image if index == 0 else None


Chunks = Callable[[int, int], tuple[dict[str, Any], Any]]


async def session(
    client: EngineClient,
    name: str,
    seed: int,
    chunks: Chunks,
    output: str,
    indices: range = range(CHUNKS),
) -> list[torch.Tensor]:
    results = []
    for index in indices:
        fields, tensors = chunks(index, seed)
        _, result = await client.send(
            tensors, session_id=name, chunk_index=index, output=output, **fields
        )
        results.append(next(iter(result.values())).clone())
    return results


async def side_by_side(client: EngineClient, kinds: dict[str, tuple[Chunks, str]]) -> Results:
    found = await asyncio.gather(
        *(
            session(client, name, seed, chunks, output)
            for seed, (name, (chunks, output)) in enumerate(kinds.items())
        )
    )
    return dict(zip(kinds, found, strict=True))


STREAMS = {
    "latents": (stream_chunk, "latents"),
    "frames": (stream_chunk, "rgb"),
    "video": (video_chunk, "rgb"),
}
WORLDS = {
    "latents": (world_chunk, "latents"),
    "frames": (world_chunk, "rgb"),
    "more": (world_chunk, "rgb"),
}


def engine(model: Path, flags: dict[str, Any], **arguments: Any) -> Any:
    omni: dict[str, Any] = {"model": dict(WINDOW)}
    for key, value in flags.items():
        if key == "sequence_parallel":
            omni["model"][key] = value
        elif key.endswith("_size"):
            arguments[key] = value
        else:
            omni[key] = value
    return running_engine(model, omni, dtype="float32", **arguments)


async def one_rank(model: Path, kinds: dict[str, tuple[Chunks, str]]) -> Results:
    async with engine(model, {}) as client:
        return await side_by_side(client, kinds)


@pytest.fixture(scope="module")
def streams(causal_wan: Path) -> Results:
    return asyncio.run(one_rank(causal_wan, STREAMS))


@pytest.fixture(scope="module")
def worlds(lingbot_world: Path) -> Results:
    return asyncio.run(one_rank(lingbot_world, WORLDS))


async def check_aborts(client: EngineClient, name: str, chunks: Chunks) -> None:
    """Abort a chunk at several points in time. Every rank must drop the chunk; otherwise, later
    chunks could differ from those of one rank.
    """
    for number, delay_s in enumerate((0.0, 0.02, 0.1, 0.3)):
        fields, tensors = chunks(CHUNKS, 1)
        request_id = f"left-{number}"
        left = asyncio.create_task(
            client.send(tensors, request_id, session_id=name, output="rgb", **fields)
        )
        await asyncio.sleep(delay_s)
        await client.engine.abort(request_id)
        left.cancel()
        await asyncio.wait([left])
    await client.send(session_id=name, op="close")


def check(got: Results, expected: Results, exact: bool) -> None:
    for name, theirs in expected.items():
        for ours, one in zip(got[name], theirs, strict=True):
            allowed = 0.0 if exact else TOLERANCE if ours.is_floating_point() else LEVELS
            assert (ours.double() - one.double()).abs().max().item() <= allowed, name


def enlarge_decoder_cache(header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Forge a snapshot: enlarge the decoder cache of the last rank that decodes. More than one rank
    decodes only with `vae_parallel`.
    """
    name = max(name for name in tensors if name.endswith("decoder.conv00"))
    tensors[name] = torch.cat((tensors[name], tensors[name][..., :1, :]), dim=-2)


async def check_continuation(client: EngineClient, name: str, chunks: Chunks, path: Path) -> None:
    """Check that a fork and a restored session continue like their source, and that all ranks
    refuse a forged snapshot.
    """
    await client.send(session_id=name, op="fork", fork_to="forked")
    calls = (
        save_exchange(name, path, package_version()),
        restore_exchange("restored", path),
    )
    for exchange in calls:
        await run_exchange_async(
            exchange, lambda call: client.engine.collective_rpc(call.method, args=call.args)
        )
    forged = path.with_suffix(".forged")
    forged.write_bytes(path.read_bytes())
    rewrite(forged, enlarge_decoder_cache)
    with pytest.raises(RequestFailed, match=r"decoder\.conv00 is") as failure:
        await run_exchange_async(
            restore_exchange("forged", forged),
            lambda call: client.engine.collective_rpc(call.method, args=call.args),
        )
    assert failure.value.code == "invalid_snapshot"
    after = [
        await session(client, each, 1, chunks, "rgb", range(CHUNKS, CHUNKS + 1))
        for each in (name, "forked", "restored")
    ]
    assert torch.equal(after[0][0], after[1][0]) and torch.equal(after[0][0], after[2][0])


@pytest.mark.parametrize("setting", SETTINGS)
def test_causal_wan(causal_wan: Path, streams: Results, setting: str, tmp_path: Path) -> None:
    flags, exact = SETTINGS[setting]

    async def scenario() -> None:
        async with engine(causal_wan, flags) as client:
            check(await side_by_side(client, STREAMS), streams, exact)
            await check_continuation(
                client, "frames", stream_chunk, tmp_path / "stream.safetensors"
            )
            await check_aborts(client, "video", video_chunk)
            again = await session(client, "again", 1, stream_chunk, "rgb")
            check({"frames": again}, {"frames": streams["frames"]}, exact)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "setting",
    [
        *("vae_stage", "PP2 + vae_stage", "PP3, partition"),
        *("PP2 x TP2", "PP2 x U2", "vae_stage x TP2", "vae_stage x U2"),
        *("U2, decode in parallel", "vae_stage x U2, decode in parallel"),
    ],
)
def test_lingbot_world(lingbot_world: Path, worlds: Results, setting: str, tmp_path: Path) -> None:
    flags, exact = SETTINGS[setting]

    async def scenario() -> None:
        async with engine(lingbot_world, flags) as client:
            check(await side_by_side(client, WORLDS), worlds, exact)
            await check_continuation(client, "frames", world_chunk, tmp_path / "world.safetensors")

    asyncio.run(scenario())
