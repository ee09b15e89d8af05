# SPDX-License-Identifier: Apache-2.0
"""Two real servers behind the real HAProxy: ids, a server that is stopped and restarted, and a
server that is killed.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from helpers.fake_engine import FIRST, LATER, Client
from helpers.haproxy import Proxy, needs_haproxy, running_proxy
from helpers.quick_programs import kill_all
from helpers.served import AUTHORIZED, HEIGHT, MAX_SESSIONS, WIDTH, Served, family
from helpers.waits import seconds, wait_until
from session_calls import call, request, signatures
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

pytestmark = [needs_haproxy, pytest.mark.nightly]


class Fleet:
    """Servers `a` and `b`, and a proxy in front of them."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._stack = ExitStack()
        self.servers: dict[str, Served] = {}
        for name in "ab":
            self.start(name)
        addresses = {name: f"127.0.0.1:{each.port}" for name, each in self.servers.items()}
        self.proxy: Proxy = self._stack.enter_context(running_proxy(folder, addresses))
        self.proxy.wait_until_checked(2)

    def start(self, name: str) -> None:
        """Start a server, at the same port if it was started before."""
        omni = {"height": HEIGHT, "width": WIDTH, "max_sessions": MAX_SESSIONS}
        omni |= {"server_name": name, "drain_snapshot_dir": str(self._folder / f"kept-{name}")}
        before = self.servers.get(name)
        folder = self._folder / f"{name}-{'first' if before is None else 'next'}"
        folder.mkdir()
        self.servers[name] = server = Served(
            self._model,
            folder,
            "--additional-config",
            json.dumps({"omni": omni}),
            real=True,
            port=None if before is None else before.port,
        )
        self._stack.callback(server.stop)
        server.wait_until_healthy()
        self._stack.callback(kill_all, family(server))

    def stop(self) -> None:
        self._stack.close()

    def client(self, query: str) -> Client:
        url = f"ws://127.0.0.1:{self.proxy.port}/v1/realtime/world/camera?{query}"
        return Client(connect(url, compression=None, max_size=None, additional_headers=AUTHORIZED))

    def call(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any, str]:
        """Send a request through the proxy and return `(status, JSON or bytes, server)`."""
        edge: Any = SimpleNamespace(port=self.proxy.port)
        is_json = (body or b"").startswith(b"{")
        sent = {**AUTHORIZED, **({"Content-Type": "application/json"} if is_json else {})}
        status, data, headers = call(edge, method, path, body, sent)
        is_json = "json" in headers.get("content-type", headers.get("Content-Type", ""))
        return status, json.loads(data) if is_json else data, headers.get("x-omni-server", "")


@pytest.fixture
def fleet(null_world: Path, tmp_path: Path) -> Iterator[Fleet]:
    running = Fleet(null_world, tmp_path)
    try:
        yield running
    finally:
        running.stop()


def play(client: Client, session_id: str, num_frames: int, **fields: Any) -> list[tuple[int, int]]:
    client.send(request(num_frames, session_id=session_id, **fields))
    return signatures(client.frames())


def test_a_fleet_finds_sessions_and_videos_through_restart_and_death(fleet: Fleet) -> None:
    """The session of a stopped server continues when the server is back, whereas the session of a
    killed server is lost.
    """
    # Ids chosen by a server lead back to that server.
    videos = [fleet.call("POST", "/v1/videos", b'{"prompt": "a field"}') for _ in range(4)]
    assert {reply["id"].split(".")[0] for _, reply, _ in videos} == {"video_a", "video_b"}
    for _, video, home in videos:
        assert video["id"].startswith(f"video_{home}.")
        status, again, server = fleet.call("GET", f"/v1/videos/{video['id']}")
        assert (status, again["id"], server) == (200, video["id"], home)

    # Expected frames of the walk on a single server.
    with fleet.client("session=expected&server=b") as client:
        expected = play(client, "expected", FIRST)
        expected += play(client, "expected", 2 * LATER, image=None)
    assert fleet.call("DELETE", "/v1/sessions/expected")[0] == 204

    # On SIGTERM, the server saves its session while the other server serves clients.
    with fleet.client("session=walk&server=a") as client:
        walked = play(client, "walk", FIRST)
    status, snapshot, server = fleet.call("GET", "/v1/sessions/walk/snapshot")
    assert (status, server) == (200, "a")
    fleet.servers["a"].process.terminate()
    fleet.proxy.wait_until_checked(1)
    with fleet.client("session=other") as client:
        assert play(client, "other", FIRST) == expected[:1]
    assert fleet.call("GET", "/v1/sessions/other/snapshot")[2] == "b"
    wait_until(lambda: fleet.servers["a"].process.poll() is not None, 60)
    assert fleet.servers["a"].process.returncode == 0
    fleet.start("a")
    fleet.proxy.wait_until_checked(2)
    with fleet.client("session=walk&server=a") as client:
        resumed = client.request({"endpoint": "resume", "session_id": "walk", "last_chunk_id": 0})
        assert (resumed["type"], resumed["next_chunk_index"]) == ("resumed", 1)
        walked += play(client, "walk", 2 * LATER, image=None)
    assert walked == expected

    # A snapshot sent through the proxy creates a session with an id that leads to its server.
    status, created, server = fleet.call("POST", "/v1/sessions", snapshot)
    assert status == 201 and created["id"].startswith(f"{server}.")
    for _ in range(3):
        status, _, found = fleet.call("GET", f"/v1/sessions/{created['id']}/snapshot")
        assert (status, found) == (200, server)

    # After kill -9, the socket ends immediately, and the session's name leads to a live server.
    with fleet.client("session=other") as client:
        killed = fleet.servers["b"]
        kill_all([psutil.Process(killed.process.pid), *family(killed)])
        with pytest.raises(ConnectionClosed):
            client.connection.recv(timeout=seconds(5))
    with fleet.client("session=other") as client:
        error = client.request({"endpoint": "resume", "session_id": "other", "last_chunk_id": 0})
        assert error["code"] == "session_evicted"
        assert play(client, "other", FIRST) == expected[:1]
    fleet.proxy.wait_until_checked(1, 1)
    assert fleet.call("GET", "/v1/sessions/other/snapshot")[2] == "a"
