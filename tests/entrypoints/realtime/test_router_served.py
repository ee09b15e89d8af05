# SPDX-License-Identifier: Apache-2.0
"""Several ranks behind one address, with real servers, sockets and a real `kill -9`.

First two `vllm serve` processes behind `vllm-omni router`: a dead rank takes its own sessions and
no others. Then one `vllm serve --data-parallel-size 2`, where stock vLLM ends every rank with the
first that dies.
"""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from helpers.fake_engine import LATER, Client, close_code, infer
from helpers.ports import port_for_a_server
from helpers.served import AUTHORIZED, MAX_SESSIONS, Served
from helpers.waits import pause, seconds, wait_until
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

NO_BINDING = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""Stock vLLM would bind the workers of both servers to the same core."""

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


def kill_engine(server: Served, name: str = "EngineCore") -> None:
    """`kill -9` of the engine process that calls itself `name`."""
    for child in psutil.Process(server.process.pid).children(recursive=True):
        if " ".join(child.cmdline()).strip().removeprefix("VLLM::") == name:
            child.kill()
            return
    raise AssertionError(f"no process calls itself {name}")


def ready(port: int) -> dict[str, Any]:
    """What `/omni/ready` says, with any status."""
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/omni/ready", timeout=seconds(10)
        ) as response:
            return json.load(response)
    except urllib.error.HTTPError as refusal:
        return json.load(refusal)


class Routed:
    """Two servers, each with room for `MAX_SESSIONS`, and the router in front of them."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.servers = [Served(model, folder, environ=NO_BINDING) for _ in range(2)]
        self.port = port_for_a_server()
        command = [
            sys.executable,
            "-m",
            "vllm_omni.entrypoints.cli.main",
            "router",
            "--host",
            "127.0.0.1",
        ]
        command += ["--port", str(self.port), "--check-interval-s", "0.2"]
        for server in self.servers:
            command += ["--backend", f"http://127.0.0.1:{server.port}"]
        self.process = subprocess.Popen(command)

    def wait_until_up(self) -> None:
        for server in self.servers:
            server.wait_until_healthy()
        wait_until(lambda: [rank["up"] for rank in ready(self.port)["ranks"]] == [True, True], 30)

    def client(self, query: str = "") -> Client:
        url = f"ws://127.0.0.1:{self.port}/v1/realtime/world/camera{query}"
        return Client(connect(url, compression=None, max_size=None, additional_headers=AUTHORIZED))

    def stop(self) -> None:
        for server in self.servers:
            server.stop()
        self.process.terminate()
        self.process.wait(seconds(10))


@pytest.fixture(scope="module")
def routed(null_world: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    running = Routed(null_world, tmp_path_factory.mktemp("routed"))
    try:
        running.wait_until_up()
        yield running
    finally:
        running.stop()


def hold_sessions(connect_client: Any, most: int) -> int:
    """Begin sessions, each on a connection of its own, until one is refused; returns how many
    there were.
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
            client.ask({"endpoint": "close", "session_id": f"held-{number}"})
        return len(clients)


def test_two_servers_hold_twice_as_many_sessions(routed: Routed) -> None:
    """New sockets go where there is room."""
    wait_until(lambda: ready(routed.port)["sessions"] == 0, 10)
    assert hold_sessions(routed.servers[0].client, 9) == MAX_SESSIONS

    def roomy() -> Client:
        # the servers' answers to the router are up to 0.25 s old, the router's own 0.2 s
        pause(0.8)
        return routed.client()

    assert hold_sessions(roomy, 9) == 2 * MAX_SESSIONS


def test_a_killed_rank_loses_its_own_sessions_and_says_so(routed: Routed) -> None:
    """One client hears an error and a close code; the other's chunks are those of a server that
    nobody killed.
    """
    with routed.servers[1].client() as client:
        first = pixels(client, request(session_id="reference"))
        second = pixels(client, request(LATER, session_id="reference", image=None))
        client.request({"endpoint": "close", "session_id": "reference"})
    with (
        routed.client("?rank=rank-0&session=a") as lost,
        routed.client("?rank=rank-1&session=b") as retained,
    ):
        assert np.array_equal(pixels(lost, request(session_id="a")), first)
        assert np.array_equal(pixels(retained, request(session_id="b")), first)
        lost.send(request(LATER, SLOW, session_id="a", image=None))
        wait_until(lambda: routed.servers[0].running_requests() == 1)
        kill_engine(routed.servers[0])
        killed_s = time.monotonic()
        assert lost.receive(30)["code"] == "engine_error"
        assert close_code(lost) in (1011, 1012)
        assert time.monotonic() - killed_s < seconds(5)
        assert np.array_equal(pixels(retained, request(LATER, session_id="b", image=None)), second)
    wait_until(lambda: [rank["up"] for rank in ready(routed.port)["ranks"]] == [False, True], 10)
    assert ready(routed.port)["max_sessions"] == MAX_SESSIONS
    # as a client that comes back: its world is gone, the next one begins
    with routed.client("?session=a") as again:
        response = again.request({"endpoint": "resume", "session_id": "a", "last_chunk_id": 0})
        assert (response["type"], response["code"]) == ("error", "session_evicted")
        assert np.array_equal(pixels(again, request(session_id="a")), first)
    with routed.client("?session=b") as back:  # and one whose server lives finds everything
        assert (
            back.request({"endpoint": "resume", "session_id": "b", "last_chunk_id": 1})["type"]
            == "resumed"
        )


def test_data_parallel_ranks_of_one_server(null_world: Path, tmp_path: Path) -> None:
    """Twice the sessions through one door; when a rank dies, every client of every rank hears it
    within seconds.
    """
    server = Served(null_world, tmp_path, "--data-parallel-size", "2", environ=NO_BINDING)
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
            kill_engine(server, "EngineCore_DP0")
            killed_s = time.monotonic()
            for client in (one, other):
                error = client.receive(30)
                assert (error["type"], error["code"]) == ("error", "engine_error")
                with pytest.raises(ConnectionClosed):
                    client.receive()
            assert time.monotonic() - killed_s < seconds(10)
    finally:
        server.stop()
