# SPDX-License-Identifier: Apache-2.0
"""LingBot World (tiny) in the real engine: concurrent sessions, several ranks and the `pr3701`
convention.

The tests run on the platform that vLLM selects: on a CPU with gloo, or on GPUs with NCCL.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine_client import (
    EngineClient,
    SharedEngine,
    running_engine,
    shared_engine,
)

from vllm_omni.model_executor.models.lingbot_world.checkpoint import find_layout, hf_config
from vllm_omni.model_executor.models.wan.checkpoint.loading import load_vae
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE, VAEConfig, to_uint8
from vllm_omni.outputs import RequestFailed

CHUNKS, SESSIONS = 4, 2
TOLERANCE = 2e-4
"""Absolute tolerance for fp32 latents of order 1 after four chunks of five forward passes each.

A tolerance is required because several ranks sum in a different order than one rank.
"""
SMALL_WINDOW = {"window_frames": 7, "sink_frames": 2}
"""The window is full after the third chunk. Its length is not a multiple of the chunk size, so the
ring buffer wraps.
"""


def image() -> torch.Tensor:
    y, x = torch.meshgrid(torch.arange(32), torch.arange(48), indexing="ij")
    return torch.stack((y * 7, x * 5, x + y), dim=-1).to(torch.uint8)


async def walk(
    client: EngineClient, name: str, seed: int, chunks: int = CHUNKS, **fields: Any
) -> list[torch.Tensor]:
    """Return the latents of a short walk. The seed determines the held keys."""
    keys = [["w"], ["w", "j"]] if seed % 2 else [["d"], ["l"]]
    latents = []
    for index in range(chunks):
        first = index == 0
        _, tensors = await client.send(
            {"image": image()} if first else None,
            session_id=name,
            chunk_index=index,
            prompt=f"a field in season {seed}" if first else None,
            seed=seed if first else None,
            actions=[keys[index % 2]] * 3,
            output="latents",
            **fields,
        )
        latents.append(tensors["latents"].clone())
    return latents


def largest_difference(a: list[list[torch.Tensor]], b: list[list[torch.Tensor]]) -> float:
    return max(
        (x - y).abs().max().item()
        for p, q in zip(a, b, strict=True)
        for x, y in zip(p, q, strict=True)
    )


async def walks(client: EngineClient) -> list[list[torch.Tensor]]:
    return await asyncio.gather(*(walk(client, f"s{seed}", seed) for seed in range(SESSIONS)))


@pytest.fixture(scope="module")
def one_rank(lingbot_world: Path) -> Iterator[SharedEngine]:
    with shared_engine(lingbot_world, {"model": SMALL_WINDOW}, dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(one_rank: SharedEngine) -> list[list[torch.Tensor]]:
    """Latents of each session when it runs by itself, on one rank in fp32."""

    async def run() -> list[list[torch.Tensor]]:
        return [await walk(one_rank.client, f"alone{seed}", seed) for seed in range(SESSIONS)]

    latents = one_rank.run(run())
    assert all(torch.isfinite(x).all() and x.std() > 0.1 for session in latents for x in session)
    assert largest_difference([latents[0]], [latents[1]]) > 0.1
    return latents


def test_concurrent_worlds_equal_single_ones(
    one_rank: SharedEngine, alone: list[list[torch.Tensor]]
) -> None:
    """Two concurrent sessions at different steps return the same latents as sessions that run by
    themselves, although a third session fails and is then aborted.
    """

    client = one_rank.client

    async def scenario() -> None:
        async def failing_session() -> None:
            await walk(client, "trouble", 5, chunks=1)
            bad_poses = torch.full((12, 4, 4), float("nan"))
            with pytest.raises(RequestFailed) as failure:
                await client.send(
                    {"poses": bad_poses, "intrinsics": torch.ones(4)},
                    session_id="trouble",
                    output="latents",
                )
            assert failure.value.code == "non_finite_pose"
            task = asyncio.create_task(
                client.send(
                    session_id="trouble", request_id="gone", actions=[["w"]] * 3, output="latents"
                )
            )
            await client.until_at_step("trouble", 1)
            await client.engine.abort("gone")
            task.cancel()

        together, _ = await asyncio.gather(walks(client), failing_session())
        assert largest_difference(together, alone) == 0.0

    one_rank.run(scenario())


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param({"pipeline_parallel_size": 2}, id="pipeline"),
        pytest.param({"tensor_parallel_size": 2}, id="tensor", marks=pytest.mark.nightly),
        pytest.param(
            {"tensor_parallel_size": 2, "sequence_parallel": True},
            id="sequence",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_two_ranks_agree_with_one(
    lingbot_world: Path, alone: list[list[torch.Tensor]], parallel: dict[str, Any]
) -> None:
    """Two ranks return the same latents as one rank to within the tolerance. With pipeline stages,
    the latents are bit-identical, although two batches are in flight.
    """
    engine_args = dict(parallel)
    omni: dict[str, Any] = {"model": dict(SMALL_WINDOW)}
    if engine_args.pop("sequence_parallel", False):
        omni["model"]["sequence_parallel"] = True

    async def scenario() -> None:
        async with running_engine(lingbot_world, omni, dtype="float32", **engine_args) as client:
            difference = largest_difference(await walks(client), alone)
            assert difference <= (0.0 if "pipeline_parallel_size" in parallel else TOLERANCE)

    asyncio.run(scenario())


@pytest.mark.nightly
@pytest.mark.parametrize("vae_stage", [False, True], ids=["one rank", "a stage for the VAE"])
def test_convention_pr3701_decodes_with_two_earlier_latents(
    lingbot_world: Path, alone: list[list[torch.Tensor]], vae_stage: bool
) -> None:
    """With the `pr3701` convention, a chunk is decoded together with the two preceding latent
    frames.

    The frames equal those obtained by decoding the engine's latents in this way. A session that
    returns frames receives another prompt after its first chunk, which has no effect, and its size
    stays constant.
    """
    vae = StreamingWanVAE(VAEConfig.from_dict(hf_config(lingbot_world)["lingbot_world"]["vae"]))
    weights = find_layout(lingbot_world).vae
    assert weights is not None
    load_vae(vae, weights)

    async def frames(client: EngineClient, name: str, seed: int) -> list[torch.Tensor]:
        images = []
        for index in range(CHUNKS):
            fields = (
                {"prompt": f"a field in season {seed}", "seed": seed}
                if index == 0
                else {"prompt": "ignored"}
            )
            keys = [["w"], ["w", "j"]] if seed % 2 else [["d"], ["l"]]
            start = {"image": image()} if index == 0 else None
            _, tensors = await client.send(
                start, session_id=name, chunk_index=index, actions=[keys[index % 2]] * 3, **fields
            )
            images.append(tensors["frames"].clone())
        return images

    async def scenario() -> None:
        omni = {"model": {**SMALL_WINDOW, "convention": "pr3701"}, "vae_stage": vae_stage}
        arguments: dict[str, Any] = {"pipeline_parallel_size": 2} if vae_stage else {}
        async with running_engine(lingbot_world, omni, dtype="float32", **arguments) as client:
            latents = await walk(client, "latents", 1)
            assert largest_difference([latents], [alone[1]]) > 0.01
            imgs, others = await asyncio.gather(
                frames(client, "frames", 1), frames(client, "others", 2)
            )
            held = [rank["bytes"] for rank in await client.engine.collective_rpc("session_stats")]
            clip = torch.cat(latents, dim=1)[None]
            for index, ours in enumerate(imgs):
                again = 2 if index else 0
                pixels, _ = vae.decode(clip[:, :, 3 * index - again : 3 * index + 3], None)
                expected = to_uint8(pixels)[5 if index else 0 :]
                assert (ours.int() - expected.int()).abs().max() <= 1
            assert not torch.equal(others[1], imgs[1])
            await client.send(session_id="frames", op="fork", fork_to="copy")
            both = [
                (await client.send(session_id=name, chunk_index=CHUNKS, actions=[["w"]] * 3))[1][
                    "frames"
                ].clone()
                for name in ("frames", "copy")
            ]
            assert torch.equal(*both)
            await client.send(session_id="copy", op="close")
            assert [
                rank["bytes"] for rank in await client.engine.collective_rpc("session_stats")
            ] == held

    asyncio.run(scenario())


def test_an_unknown_choice_is_refused_at_start(lingbot_world: Path) -> None:
    """Before any process starts, the front end rejects an unknown value with a one-line error that
    lists the allowed values.
    """

    async def scenario() -> None:
        async with running_engine(
            lingbot_world, {"model": {"convention": "resume"}}, dtype="float32"
        ):
            pass

    with pytest.raises(
        ValueError, match=r"convention.*allowed values: 'original', 'pr3701', 'realtime', 'sglang'"
    ):
        asyncio.run(scenario())
