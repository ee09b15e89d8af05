# SPDX-License-Identifier: Apache-2.0
"""`vllm serve --data-parallel-size 2` with real sockets and a real `kill -9`. Stock vLLM stops all
ranks when any of them dies.

Tests of separate servers behind HAProxy are in tests/deploy.
"""

import json
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.fake_engine import LATER, Client, infer
from helpers.served import MAX_SESSIONS, Served
from helpers.waits import pause, seconds, wait_until
from websockets.exceptions import ConnectionClosed

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


SLOW = {"steps": 200, "step_ms": 100.0}


def request(
    num_frames: int = 9, options: dict[str, Any] | None = None, **fields: Any
) -> dict[str, Any]:
    extra = {
        "height": 96,
        "width": 160,
        "video_format": "ndarray_u8",
        "seed": 3,
        "options": options or {},
    }
    return infer(num_frames, extra_body=extra, **fields)


def pixels(client: Client, message: dict[str, Any]) -> np.ndarray:
    client.send(message)
    return np.concatenate([reply["video"] for reply in client.frames()])


def ready(port: int) -> dict[str, Any]:
    """Return the body of `/omni/ready`, whatever its status."""
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/omni/ready", timeout=seconds(10)
        ) as response:
            return json.load(response)
    except urllib.error.HTTPError as refusal:
        return json.load(refusal)


def hold_sessions(connect_client: Any, most: int) -> int:
    """Start sessions on separate connections until one is refused, and return the number of
    sessions started.
    """
    with ExitStack() as stack:
        clients = []
        for number in range(most):
            client = stack.enter_context(connect_client())
            client.send(request(session_id=f"held-{number}"))
            response = client.receive()
            if response["type"] == "error":
                assert response["code"] == "capacity"
                break
            clients.append(client)
        for number, client in enumerate(clients):
            client.request({"endpoint": "close", "session_id": f"held-{number}"})
        return len(clients)


def test_data_parallel_ranks_of_one_server(null_world: Path, tmp_path: Path) -> None:
    """One server with two data-parallel ranks holds twice as many sessions as one rank. When a rank
    dies, the clients of all ranks get an error within seconds.
    """
    server = Served(
        null_world,
        tmp_path,
        "--data-parallel-size",
        "2",
        environ={"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "INFO"},
    )
    try:
        server.wait_until_healthy()
        assert hold_sessions(server.client, 9) == 2 * MAX_SESSIONS
        with server.client() as one, server.client() as other:
            images = [
                pixels(client, request(session_id=name))
                for client, name in ((one, "a"), (other, "b"))
            ]
            assert np.array_equal(*images)
            wait_until(lambda: [rank["sessions"] for rank in ready(server.port)["ranks"]] == [1, 1])
            for client, name in ((one, "a"), (other, "b")):
                client.send(request(LATER, SLOW, session_id=name, image=None))
            pause(0.5)
            server.engine("EngineCore_DP0").kill()
            killed_s = time.monotonic()
            for client in (one, other):
                error = client.receive(30)
                assert (error["type"], error["code"]) == ("error", "engine_error")
                with pytest.raises(ConnectionClosed):
                    client.receive()
            assert time.monotonic() - killed_s < seconds(10)
    finally:
        server.stop()
