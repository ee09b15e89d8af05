# SPDX-License-Identifier: Apache-2.0
"""Real servers: a session moves from one to another over HTTP, and SIGTERM ends one gracefully.

Two servers of the null world run one after the other: the first is drained, the second takes its sessions over.
"""

import json
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from fake_engine import FIRST, LATER, camera, close_code, infer, wait_until
from served import AUTHORIZED, HEIGHT, MAX_SESSIONS, WIDTH, Served
from websockets.exceptions import InvalidStatus

from vllm_omni.snapshot import read_header


def request(num_frames: int = LATER, **fields: Any) -> dict[str, Any]:
    extra = {"height": HEIGHT, "width": WIDTH, "video_format": "ndarray_u8", "seed": 3}
    options = {"options": fields.pop("options")} if "options" in fields else {}
    return infer(num_frames, extra_body={**extra, **options}, **fields)


def signatures(messages: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """(first frame, signature of the latents) of every chunk."""
    return [(int(message["video"][0, 5, 5, 0]), int(message["video"][0, 0, 0, 1])) for message in messages]


def call(
    server: Served, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, bytes, dict[str, str]]:
    """One HTTP call; `(status, body, headers)`, also of a refusal."""
    url = f"http://127.0.0.1:{server.port}{path}"
    sent = urllib.request.Request(url, body, headers or AUTHORIZED, method=method)
    try:
        with urllib.request.urlopen(sent, timeout=60) as answer:
            return answer.status, answer.read(), dict(answer.headers)
    except HTTPError as refused:
        return refused.code, refused.read(), dict(refused.headers)


def code_of(body: bytes) -> str:
    return str(json.loads(body)["error"]["code"])


def options(kept: Path) -> list[str]:
    omni = {"height": HEIGHT, "width": WIDTH, "max_sessions": MAX_SESSIONS, "drain_snapshot_dir": str(kept)}
    return ["--additional-config", json.dumps({"omni": {**omni, "drain_timeout_s": 20}})]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def first(null_world: Path, kept: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(null_world, tmp_path_factory.mktemp("first"), *options(kept))
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.stop()


def test_a_session_comes_and_goes_over_http(first: Served) -> None:
    """Downloaded, uploaded under two ids, continued over the WebSocket: the same frames as the original."""
    with first.client() as client:
        client.send(request(FIRST + LATER, session_id="origin"))
        client.frames()
        status, snapshot, headers = call(first, "GET", "/v1/sessions/origin/snapshot")
        assert (status, headers["content-type"], headers["x-next-chunk-index"]) == (
            200,
            "application/octet-stream",
            "2",
        )
        assert len(snapshot) == int(headers["content-length"])
        status, body, _ = call(first, "PUT", "/v1/sessions/copy", snapshot)
        reply = json.loads(body)
        assert (status, reply["id"], reply["next_chunk_index"], reply["seed"]) == (201, "copy", 2, 3)
        status, body, _ = call(first, "POST", "/v1/sessions", snapshot)
        third = json.loads(body)["id"]
        assert status == 201
        following = []
        for session_id in ("origin", "copy", third):
            client.send(request(2 * LATER, session_id=session_id, image=None))
            following.append(signatures(client.frames()))
        assert following[0] == following[1] == following[2]
        assert [number for number, _ in following[0]] == [FIRST + LATER, FIRST + 2 * LATER]
        resumed = client.ask({"endpoint": "resume", "session_id": "copy", "last_chunk_id": 3})
        assert (resumed["type"], resumed["next_chunk_index"]) == ("resumed", 4)
        for session_id in ("origin", "copy", third):
            assert call(first, "DELETE", f"/v1/sessions/{session_id}")[0] == 204


def test_refusals_over_http_name_their_reason(first: Served) -> None:
    """Status and code: key, unknown ids, ids in use, damage, other models, sizes; nothing is left behind."""
    with first.client() as client:
        client.send(request(FIRST, session_id="one"))
        client.frames()
        snapshot = call(first, "GET", "/v1/sessions/one/snapshot")[1]
        head = 8 + int.from_bytes(snapshot[:8], "little")
        header = snapshot[8:head]
        foreign = snapshot[:8] + header.replace(b"null_world", b"lost_world") + snapshot[head:]
        newer = snapshot[:8] + header.replace(rb"\"format_version\":1", rb"\"format_version\":9") + snapshot[head:]
        for method, path, body, status, code in (
            ("GET", "/v1/sessions/nobody/snapshot", None, 404, "unknown_session"),
            ("GET", "/v1/sessions/a%20b/snapshot", None, 404, "unknown_session"),
            ("PUT", "/v1/sessions/one", snapshot, 409, "session_exists"),
            ("PUT", "/v1/sessions/two", snapshot[:-1], 400, "invalid_snapshot"),
            ("PUT", "/v1/sessions/two", b"", 400, "invalid_snapshot"),
            ("PUT", "/v1/sessions/two", b"\x80\x04K\x01.", 400, "invalid_snapshot"),
            ("PUT", "/v1/sessions/two", foreign, 409, "foreign_snapshot"),
            ("PUT", "/v1/sessions/two", newer, 400, "snapshot_version"),
            ("DELETE", "/v1/sessions/two", None, 404, "unknown_session"),
        ):
            got, answer, _ = call(first, method, path, body)
            assert (got, code_of(answer)) == (status, code), (path, answer)
        for headers in ({"X": "y"}, {"Authorization": "Bearer wrong"}):
            assert call(first, "GET", "/v1/sessions/one/snapshot", headers=headers)[0] == 401
        assert call(first, "DELETE", "/v1/sessions/one")[0] == 204


def test_sigterm_finishes_the_chunk_saves_and_the_next_server_goes_on(
    first: Served, kept: Path, null_world: Path, tmp_path: Path
) -> None:
    """A walk of four slow chunks is cut after the chunk in flight; an idle session is kept, too. Then both go on."""
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
    first.process.send_signal(signal.SIGTERM)
    wait_until(lambda: call(first, "GET", "/omni/ready")[0] == 503)
    assert json.loads(call(first, "GET", "/omni/ready")[1])["status"] == "draining"
    assert call(first, "GET", "/health")[0] == 200
    assert code_of(call(first, "POST", "/v1/videos", b"{}")[1]) == "draining"
    with pytest.raises(InvalidStatus) as refused:
        first.client()
    assert refused.value.response.status_code == 503
    late = idler.ask(request(LATER, session_id="idle", image=None))
    assert (late["type"], late["code"], late["retryable"]) == ("error", "draining", True)
    assert close_code(idler) == 1013
    while (message := walker.receive())["type"] == "frame":
        frames.append(message)
    assert (message["code"], message["next_chunk_index"]) == ("draining", len(frames))
    assert close_code(walker) == 1013
    assert 2 <= len(frames) <= 3  # the one that was delivered, and what was in the engine
    assert first.process.wait(20) == 0
    headers = {file.name: read_header(file) for file in kept.glob("*.session.safetensors")}
    assert sorted(header.owner["session_id"] for header in headers.values() if header.owner) == ["idle", "walk"]

    second = Served(null_world, tmp_path, *options(kept))
    try:
        second.wait_until_healthy()
        assert list(kept.iterdir()) == []
        with second.client() as client:
            resumed = client.ask({"endpoint": "resume", "session_id": "walk", "last_chunk_id": len(frames) - 1})
            assert resumed["next_chunk_index"] == len(frames)
            rest = {**path, "poses": path["poses"][FIRST + LATER * (len(frames) - 1) :]}
            client.send(request(session_id="walk", cameras=rest, image=None))
            assert signatures(frames) + signatures(client.frames()) == whole
            client.send(request(LATER, session_id="idle", image=None))
            assert signatures(client.frames())[0][0] == FIRST
            second.process.send_signal(signal.SIGTERM)
    finally:
        second.stop()
