# SPDX-License-Identifier: Apache-2.0
"""After SIGTERM, a real `vllm serve` finishes the chunks in flight and saves its sessions, and the
next server restores them.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.fake_engine import FIRST, LATER, camera, close_code
from helpers.served import HEIGHT, MAX_SESSIONS, WIDTH, Served
from helpers.waits import seconds, wait_until
from session_calls import call, code_of, request, signatures
from websockets.exceptions import InvalidStatus

from vllm_omni.session_files.snapshot import read_header


def options(retained: Path) -> list[str]:
    omni = {
        "height": HEIGHT,
        "width": WIDTH,
        "max_sessions": MAX_SESSIONS,
        "drain_snapshot_dir": str(retained),
    }
    return ["--additional-config", json.dumps({"omni": {**omni, "drain_timeout_s": 20}})]


@pytest.fixture(scope="module")
def retained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("retained")


@pytest.fixture(scope="module")
def first(
    null_world: Path, retained: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    server = Served(null_world, tmp_path_factory.mktemp("first"), *options(retained))
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.stop()


@pytest.mark.nightly
def test_sigterm_finishes_the_chunk_saves_and_the_next_server_continues(
    first: Served, retained: Path, null_world: Path, tmp_path: Path
) -> None:
    """SIGTERM ends a walk of four slow chunks once the chunks in flight are finished. The server
    saves the walk's session and an idle session. Both sessions continue on the next server.
    """
    slow = {"step_ms": 150.0}
    path = camera(FIRST + 3 * LATER)
    with first.client() as expected:
        expected.send(request(session_id="expected", cameras=path))
        whole = signatures(expected.frames())
        call(first, "DELETE", "/v1/sessions/expected")
    walker, idler = first.client(), first.client()
    idler.send(request(FIRST, session_id="idle"))
    idler.frames()
    walker.send(request(session_id="walk", cameras=path, options=slow))
    frames = [walker.receive()]
    first.process.terminate()
    wait_until(lambda: call(first, "GET", "/omni/ready")[0] == 503)
    assert json.loads(call(first, "GET", "/omni/ready")[1])["status"] == "draining"
    assert call(first, "GET", "/health")[0] == 200
    assert code_of(call(first, "POST", "/v1/videos", b"{}")[1]) == "draining"
    with pytest.raises(InvalidStatus) as refused:
        first.client()
    assert refused.value.response.status_code == 503
    late = idler.request(request(LATER, session_id="idle", image=None))
    assert (late["type"], late["code"], late["retryable"]) == ("error", "draining", True)
    assert close_code(idler) == 1013
    while (message := walker.receive())["type"] == "frame":
        frames.append(message)
    assert (message["code"], message["next_chunk_index"]) == ("draining", len(frames))
    assert close_code(walker) == 1013
    assert 2 <= len(frames) <= 3  # the delivered chunk and those in flight
    assert first.process.wait(seconds(20)) == 0
    headers = {file.name: read_header(file) for file in retained.glob("*.session.safetensors")}
    assert sorted(header.owner["session_id"] for header in headers.values() if header.owner) == [
        "idle",
        "walk",
    ]

    second = Served(null_world, tmp_path, *options(retained))
    try:
        second.wait_until_healthy()
        assert list(retained.iterdir()) == []
        with second.client() as client:
            resumed = client.request(
                {"endpoint": "resume", "session_id": "walk", "last_chunk_id": len(frames) - 1}
            )
            assert resumed["next_chunk_index"] == len(frames)
            rest = {**path, "poses": path["poses"][FIRST + LATER * (len(frames) - 1) :]}
            client.send(request(session_id="walk", cameras=rest, image=None))
            assert signatures(frames) + signatures(client.frames()) == whole
            client.send(request(LATER, session_id="idle", image=None))
            assert signatures(client.frames())[0][0] == FIRST
            second.process.terminate()
    finally:
        second.stop()
