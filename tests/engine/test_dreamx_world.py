# SPDX-License-Identifier: Apache-2.0
"""DreamX-World in the real engine: concurrent sessions, poses, several ranks, FP8 and the camera
endpoint.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.engine_client import EngineClient, SharedEngine, running_engine, shared_engine
from helpers.fake_engine import camera, infer
from helpers.served import mortal_servers

from vllm_omni.model_executor.models.registry import get_family
from vllm_omni.outputs import RequestFailed

SIZE = {"height": 64, "width": 96}
SHORT = {"model": {"window_frames": 6}}
TOLERANCE = 1e-4
"""Absolute tolerance for fp32 latents, required because several ranks sum in a different order than
one rank.
"""
HELD: list[Any] = [[["w", "l"]] * 3, [["a"], [], ["i"]], None, [["s"]]]


def image() -> torch.Tensor:
    y, x = torch.meshgrid(torch.arange(36), torch.arange(64), indexing="ij")
    return torch.stack((y * 6, x * 3, x + y), dim=-1).to(torch.uint8)


async def play(client: EngineClient, name: str, held: list[Any]) -> torch.Tensor:
    """Return the latents of a session that runs one chunk for each entry of `held`."""
    latents = []
    for index, actions in enumerate(held):
        start = {"image": image()} if index == 0 else None
        first = {"prompt": "a path in a forest"} if index == 0 else {}
        _, tensors = await client.send(
            start, session_id=name, actions=actions, output="latents", **first
        )
        latents.append(tensors["latents"].clone())
    return torch.cat(latents, dim=1)


def played(checkpoint: Path, model: dict[str, Any] | None = None, **engine_args: Any) -> Any:
    async def scenario() -> torch.Tensor:
        omni = {**SIZE, "model": {**SHORT["model"], **(model or {})}}
        async with running_engine(checkpoint, omni, **engine_args) as client:
            return await play(client, "s", HELD)

    return asyncio.run(scenario())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dreamx_world")
    get_family("dreamx_world").make_tiny(out, 0, "original")
    return out


@pytest.fixture(scope="module")
def one_rank(checkpoint: Path) -> Iterator[SharedEngine]:
    with shared_engine(checkpoint, {**SIZE, **SHORT}, dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(one_rank: SharedEngine) -> torch.Tensor:
    return one_rank.run(play(one_rank.client, "alone", HELD))


def test_concurrent_sessions_forks_and_resets_are_exact(
    one_rank: SharedEngine, alone: torch.Tensor
) -> None:
    client = one_rank.client

    async def scenario() -> None:
        ours, theirs, idle = await asyncio.gather(
            play(client, "a", HELD), play(client, "b", HELD), play(client, "c", [None] * 4)
        )
        assert torch.equal(ours, alone) and torch.equal(theirs, alone)
        assert (idle - alone).abs().max() > 0.01
        await client.send(session_id="a", op="fork", fork_to="d")
        held: dict[str, Any] = {"actions": [["w"]] * 3, "output": "latents"}
        _, one = await client.send(session_id="a", **held)
        _, other = await client.send(session_id="d", **held)
        assert torch.equal(one["latents"], other["latents"])
        await client.send(session_id="b", op="reset")
        assert torch.equal(await play(client, "b", HELD), alone)
        meta, frames = await client.send(
            {"image": image()}, session_id="f", prompt="a lake", actions=[]
        )
        assert meta["num_frames"] == 9 and frames["frames"].shape == (9, 64, 96, 3)

    one_rank.run(scenario())


def test_poses_steer_and_bad_ones_are_refused(one_rank: SharedEngine) -> None:
    client, poses = one_rank.client, torch.eye(4).repeat(9, 1, 1)
    poses[:, 2, 3] = 0.075 * torch.arange(1, 10)

    async def scenario() -> None:
        first = {"prompt": "a path", "output": "latents"}
        keys = await client.send(
            {"image": image()}, session_id="keys", actions=[["w"]] * 3, **first
        )
        path = await client.send({"image": image(), "poses": poses}, session_id="path", **first)
        torch.testing.assert_close(keys[1]["latents"], path[1]["latents"], atol=TOLERANCE, rtol=0)
        bad = torch.eye(4).repeat(12, 1, 1)
        bad[5, 0, 0] = 2
        with pytest.raises(RequestFailed, match=r"poses\[5\]\[:3, :3\] is not a rotation"):
            await client.send({"poses": bad}, session_id="path", output="latents")

    one_rank.run(scenario())


@pytest.mark.parametrize("parallel", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_ranks_agree_with_one(checkpoint: Path, alone: torch.Tensor, parallel: str) -> None:
    """Two ranks return the same latents as one rank to within the tolerance. With pipeline stages,
    the latents are bit-identical, because every sum is computed in the same order.
    """
    ranks: dict[str, Any] = {parallel: 2}
    difference = (played(checkpoint, dtype="float32", **ranks) - alone).abs().max()
    assert difference <= (0.0 if parallel == "pipeline_parallel_size" else TOLERANCE)


@pytest.mark.nightly
def test_ulysses_agrees_with_one_rank(checkpoint: Path, alone: torch.Tensor) -> None:
    options = {"sequence_parallel": True}
    latents = played(checkpoint, options, dtype="float32", tensor_parallel_size=2)
    assert (latents - alone).abs().max() <= TOLERANCE


def test_fp8_weights_and_kv_are_close_to_bf16(checkpoint: Path) -> None:
    exact = played(checkpoint, dtype="bfloat16")
    fp8 = played(checkpoint, dtype="bfloat16", quantization="fp8_per_channel", kv_cache_dtype="fp8")
    assert 0 < (fp8[:, 1] - exact[:, 1]).norm() < 0.3 * exact[:, 1].norm()


def test_a_client_of_the_camera_endpoint_sends_poses_and_keys(
    checkpoint: Path, tmp_path: Path
) -> None:
    """A client sends poses and keys to the camera endpoint over a real socket.

    A pose with an invalid rotation is refused, and the session continues.
    """
    body = {"height": 64, "width": 96, "video_format": "ndarray_u8"}
    with mortal_servers(checkpoint, tmp_path, {}) as start, start().client() as client:
        names = [button["name"] for button in client.hello["actions"]["buttons"]]
        assert names == list("wasdijkl") and client.hello["actions"]["pose"]
        client.send(infer(9, extra_body=body))
        assert sum(len(message["video"]) for message in client.frames()) == 9
        bad = camera(12)
        bad["poses"][5, 0, 0] = 2
        assert client.error(infer(12, image=None, cameras=bad, extra_body=body)) == "invalid_camera"
        later = infer(12, image=None, cameras=None, actions=[["w"]] * 3, extra_body=body)
        client.send(later)
        frames = [frame for message in client.frames() for frame in message["video"]]
        assert len(frames) == 12 and np.std(frames) > 1
