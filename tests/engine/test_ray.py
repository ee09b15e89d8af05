# SPDX-License-Identifier: Apache-2.0
"""The diffusion worker and the AR worker on a two-node Ray cluster: results match those of one
process, and the loss of a node ends the server.

The nodes are real Ray nodes on this machine (`ray_cluster.py`). Each node can hold one worker, so
two ranks run on two nodes and communicate over TCP.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.engine_client import running_engine
from helpers.fake_engine import LATER, Client, infer
from helpers.ray_cluster import TwoNodes
from helpers.served import Served
from helpers.waits import seconds, wait_until
from ray_walk import CHUNKS, SESSIONS
from safetensors.torch import load_file
from websockets.exceptions import ConnectionClosed

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

ERROR_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[TwoNodes]:
    with TwoNodes() as nodes:
        yield nodes


def walk(cluster: TwoNodes, *arguments: object) -> set[str]:
    """Run ray_walk.py on the cluster; return the nodes on which workers ran."""
    script = Path(__file__).with_name("ray_walk.py")
    command = [sys.executable, str(script), *map(str, arguments)]
    # The worker processes import `helpers`, so its parent folder must be in their PYTHONPATH.
    path = os.pathsep.join(filter(None, (str(script.parents[1]), os.environ.get("PYTHONPATH"))))
    environ = {**cluster.environ, "PYTHONPATH": path}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=seconds(400), check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return set(json.loads(done.stdout.splitlines()[-1])["nodes"])


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        ("null_world", "tensor_parallel_size"),
        ("null_world", "pipeline_parallel_size"),
        ("causal_wan", "pipeline_parallel_size"),
    ],
)
def test_two_nodes_equal_one_process(
    cluster: TwoNodes, model: str, tmp_path: Path, parallel: str, request: pytest.FixtureRequest
) -> None:
    """Three concurrent sessions on two nodes return latents that are bit-identical to those of one
    process. Causal Wan's text encoder runs on one of the nodes.
    """
    checkpoint: Path = request.getfixturevalue(model)

    async def one_process() -> list[list[torch.Tensor]]:
        async with running_engine(checkpoint) as client:
            return [await client.chunks(f"s{seed}", CHUNKS, seed=seed) for seed in range(SESSIONS)]

    out = tmp_path / "latents.safetensors"
    assert len(walk(cluster, "diffusion", checkpoint, out, json.dumps({parallel: 2}))) == 2
    expected, got = asyncio.run(one_process()), load_file(str(out))
    assert len(got) == SESSIONS * CHUNKS
    for number, chunks in enumerate(expected):
        assert all(
            torch.equal(got[f"{number}.{index}"], chunk) for index, chunk in enumerate(chunks)
        )


@pytest.mark.parametrize("parallel", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_hidden_states_over_two_nodes(
    cluster: TwoNodes, tiny_language_model: Path, parallel: str
) -> None:
    """On two nodes, the AR worker's hidden states match those of Hugging Face Transformers,
    including the hidden states of layers on the first stage.
    """
    arguments = (
        {parallel: 2, "max_num_batched_tokens": 16}
        if parallel.startswith("pipeline")
        else {parallel: 2}
    )
    assert len(walk(cluster, "ar", tiny_language_model, "-", json.dumps(arguments))) == 2


def request(num_frames: int, **options: Any) -> dict[str, Any]:
    extra = {
        "height": 96,
        "width": 160,
        "video_format": "ndarray_u8",
        "seed": 3,
        "options": options,
    }
    return infer(num_frames, extra_body=extra)


def image(client: Client) -> np.ndarray:
    client.send(request(9))
    return np.concatenate([message["video"] for message in client.frames()])


def test_a_lost_node_ends_the_server_and_a_restart_works(
    cluster: TwoNodes, null_world: Path, tmp_path: Path
) -> None:
    """When a node is killed during a chunk, the client receives an error and the server exits.

    After a restart on a new node, the server yields the same frames.
    """
    flags = ("--distributed-executor-backend", "ray", "--tensor-parallel-size", "2")
    server = Served(null_world, tmp_path, *flags, environ=cluster.environ)
    try:
        server.wait_until_healthy()
        with server.client() as client:
            before = image(client)
            client.send(request(LATER, steps=200, step_ms=200.0) | {"image": None})
            wait_until(lambda: server.running_requests() == 1)
            cluster.lose()
            lost_s = time.monotonic()
            error = client.receive(2 * ERROR_WITHIN_S)
            reported_s = time.monotonic() - lost_s
            assert (error["type"], error["code"]) == ("error", "engine_error")
            with pytest.raises(ConnectionClosed):
                client.receive()
        print(f"error after {reported_s:.1f} s")
        assert reported_s < ERROR_WITHIN_S
        wait_until(lambda: not server.is_healthy(), ERROR_WITHIN_S)
    finally:
        server.stop()
    cluster.replace()
    again = Served(null_world, tmp_path, *flags, environ=cluster.environ)
    try:
        again.wait_until_healthy()
        with again.client() as client:
            assert np.array_equal(image(client), before)
    finally:
        again.stop()
