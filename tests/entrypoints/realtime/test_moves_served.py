# SPDX-License-Identifier: Apache-2.0
"""Sessions that move between two real servers on real sockets."""

import base64
import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers.fake_engine import FIRST, LATER, camera
from helpers.fleets import (
    OPERATOR,
    OPERATOR_KEY,
    TestFleet,
    end_session,
    live_sessions,
    migrate,
    wait_for_engine_sessions,
)
from helpers.live_clients import png
from helpers.quick_programs import run_python
from helpers.served import AUTHORIZED, HEIGHT, KEY, WIDTH, Served
from helpers.waits import pause, seconds, wait_until
from session_calls import call, code_of, request, signatures
from websockets.exceptions import ConnectionClosedOK
from websockets.sync.client import ClientConnection, connect

from vllm_omni.entrypoints.media.mp4 import decode_mp4

EXAMPLES = Path(__file__).parents[3] / "examples" / "online_serving"
SCRIPT = EXAMPLES / "world_camera.py"
SLOW = {"step_ms": 60.0}


@pytest.fixture(scope="module", params=["sent", pytest.param("shared", marks=pytest.mark.nightly)])
def fleet(
    null_world: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[TestFleet]:
    """Start servers that send snapshots to each other, or servers that share a directory."""
    shared = tmp_path_factory.mktemp("shared") if request.param == "shared" else None
    fleet = TestFleet(null_world, tmp_path_factory.mktemp("fleet"), shared_dir=shared)
    try:
        yield fleet
        left = [] if shared is None else [*shared.glob("*.safetensors")]
        assert left == []
    finally:
        fleet.stop()


def test_a_session_continues_bit_for_bit_on_another_server(fleet: TestFleet) -> None:
    """A session moves during a request for five chunks. The client receives every finished chunk,
    then `moved`, and requests the remaining chunks from the other server.
    """
    path = camera(FIRST + 4 * LATER)
    a, b = fleet["a"], fleet["b"]
    with a.client() as client:
        client.send(request(session_id="whole", cameras=path))
        whole = signatures(client.frames())
        end_session(client, "whole")
        client.send(request(session_id="walk", cameras=path, options=SLOW, request_id="one"))
        frames = [client.receive()]
        status, reply = migrate(a, "walk", "b")
        assert status == 200, reply
        assert reply["server"] == "b"
        while (message := client.receive())["type"] == "frame":
            frames.append(message)
        assert message["type"] == "moved"
        assert message["server"] == "b"
        assert message["url"] == f"http://127.0.0.1:{b.port}"
        assert message["request_id"] == "one"
        assert message["next_chunk_index"] == len(frames) == reply["next_chunk_index"]
        assert 1 <= len(frames) < 5
        assert "walk" not in live_sessions(a)
        assert "walk" in live_sessions(b)
        # A later request to the first server gets `moved` with the other server's name.
        late = client.request(request(LATER, session_id="walk", image=None))
        assert (late["type"], late["server"]) == ("moved", "b")
    wait_for_engine_sessions(a, 0)
    with b.client() as client:
        resumed = client.request(
            {"endpoint": "resume", "session_id": "walk", "last_chunk_id": len(frames) - 1}
        )
        assert (resumed["type"], resumed["next_chunk_index"]) == ("resumed", len(frames))
        rest = {**path, "poses": path["poses"][FIRST + LATER * (len(frames) - 1) :]}
        client.send(request(session_id="walk", cameras=rest, image=None))
        assert signatures(frames) + signatures(client.frames()) == whole
        end_session(client, "walk")


def test_an_idle_session_moves_there_and_back(fleet: TestFleet) -> None:
    """A client is notified of a move even if it has no request running, and a session can return to
    its first server.
    """
    a, b = fleet["a"], fleet["b"]
    with a.client() as client, b.client() as other:
        client.send(request(FIRST, session_id="idle"))
        client.frames()
        assert migrate(a, "idle", f"http://127.0.0.1:{b.port}")[0] == 200
        moved = client.receive()
        assert (moved["type"], moved["session_id"], moved["server"]) == ("moved", "idle", "b")
        other.send(request(LATER, session_id="idle", image=None))
        assert signatures(other.frames())[0][0] == FIRST
        assert migrate(b, "idle", "a")[0] == 200
        assert other.receive()["server"] == "a"
        client.send(request(LATER, session_id="idle", image=None))
        assert signatures(client.frames())[0][0] == FIRST + LATER
        end_session(client, "idle")


def test_a_client_that_was_away_receives_what_it_missed(fleet: TestFleet) -> None:
    """When a session moves while its client is disconnected, undelivered replies stay on the first
    server until the client returns.
    """
    a = fleet["a"]
    with a.client() as client:
        client.send(request(FIRST + LATER, session_id="away"))
        client.frames()
    assert migrate(a, "away", "b")[0] == 200
    with a.client() as client:
        resumed = client.request(
            {"endpoint": "resume", "session_id": "away", "last_chunk_id": 0, "request_id": "r"}
        )
        assert (resumed["type"], resumed["replayed"]) == ("resumed", 1)
        assert client.receive()["chunk_index"] == 1
        assert client.receive()["type"] == "moved"
    with fleet["b"].client() as client:
        end_session(client, "away")


def test_refused_moves_leave_the_session(fleet: TestFleet) -> None:
    """A move is refused, and the session stays where it is, if the target server is not listed or
    does not respond, the key is wrong, the session is unknown, or its id is in use on the target.
    """
    a, b = fleet["a"], fleet["b"]
    with a.client() as client, b.client() as other:
        client.send(request(FIRST, session_id="stays"))
        client.frames()
        other.send(request(FIRST, session_id="stays"))
        other.frames()
        for to in ("http://127.0.0.1:1", "http://example.com", "c", "a"):
            status, reply = migrate(a, "stays", to)
            assert (status, reply["error"]["code"]) == (400, "unknown_server"), to
        for headers in ({}, AUTHORIZED, {"Authorization": "Bearer wrong"}):
            assert migrate(a, "stays", "b", headers)[0] == 401
        assert migrate(a, "unknown", "b")[1]["error"]["code"] == "unknown_session"
        assert migrate(a, "stays", "gone")[1]["error"]["code"] == "move_failed"
        status, reply = migrate(a, "stays", "b")
        assert status == 502
        assert "live" in reply["error"]["message"]
        client.send(request(LATER, session_id="stays", image=None))
        assert signatures(client.frames())[0][0] == FIRST
        end_session(client, "stays")
        end_session(other, "stays")
    wait_for_engine_sessions(b, 0)


GENERATE = "/v1/realtime_video/generate"
VIDEO = "/v1/realtime/video"
FPS = 48
"""Frame rate at which the server sends four chunks per second, slow enough for a session to move
before its stream ends.
"""
SCRIPT_KEYS = [["w"], ["w", "j"], [], ["l"], ["s", "i"]] * 5
"""Keys for 25 latent frames, which are more than the chunks before the first move consume."""


def stream_url(server: Served, path: str) -> str:
    return f"ws://127.0.0.1:{server.port}{path}"


@pytest.mark.parametrize("path", [GENERATE, VIDEO])
def test_a_session_whose_client_cannot_follow_stays(fleet: TestFleet, path: str) -> None:
    """A session stays on its server if its client uses the endpoint's original protocol, which has
    no message for a move.
    """
    a = fleet["a"]
    with connect(stream_url(a, path), additional_headers=AUTHORIZED, max_size=None) as socket:
        socket.send(first_message(path, 500, follows=False))
        while not live_sessions(a):
            socket.recv(timeout=seconds(20))
        (name,) = live_sessions(a)
        status, reply = migrate(a, name, "b")
        assert (status, reply["error"]["code"]) == (409, "not_movable")
    wait_until(lambda: not live_sessions(a))


def first_message(
    path: str,
    num_chunks: int,
    follows: bool = True,
    session_id: str | None = None,
    is_paced: bool = True,
) -> bytes | str:
    """Return the first message of a client that steers a new or a continued session with a
    script.
    """
    if path == GENERATE:
        message = {"type": "init", "prompt": "a path", "size": f"{WIDTH}x{HEIGHT}", "seed": 3}
        message |= {"first_frame": png(), "max_chunks": num_chunks, "session_id": session_id}
        message |= {"realtime_output_pacing": is_paced, "fps": FPS}
        message |= {"condition_inputs": {"camera_actions": SCRIPT_KEYS}}
        message |= {"prompts": [{"prompt": "at night", "seconds": 1.6}]}
        return msgspec.msgpack.encode({**message, "extensions": ["moves"] if follows else None})
    start = {"type": "session.start", "prompt": "a path", "width": WIDTH, "height": HEIGHT}
    start |= {"seed": 3, "num_frames": FIRST + (num_chunks - 1) * LATER, "fps": FPS}
    image = "data:image/png;base64," + base64.b64encode(png()).decode()
    extra = {"camera_action_script": SCRIPT_KEYS, "follow_moves": follows}
    extra |= {"pace_to_media_time": is_paced}
    extra |= {"prompts": [{"prompt": "at night", "seconds": 1.6}], "session_id": session_id}
    return json.dumps({**start, "image_reference": {"image_url": image}, "extra_params": extra})


class Stream:
    """A client of a live endpoint that follows its session to other servers."""

    def __init__(self, fleet: TestFleet, path: str, num_chunks: int, is_paced: bool = True) -> None:
        self._fleet, self._path, self._num_chunks = fleet, path, num_chunks
        self._is_paced = is_paced
        self.server, self.session_id = "a", ""
        self.chunks: list[tuple[int, bytes]] = []
        """Number and encoded frames of each chunk received."""
        self._moves: list[threading.Thread] = []
        self.replies: list[tuple[int, dict[str, Any]]] = []
        """Status and body of the replies to requests that move the session."""

    def move(self, to: str) -> None:
        """Start moving the session in a thread while the client continues to read."""

        def call(source: str = self.server) -> None:
            self.replies.append(migrate(self._fleet[source], self.session_id, to))

        self._moves.append(threading.Thread(target=call))
        self._moves[-1].start()

    def messages(self) -> Iterator[tuple[dict[str, Any], ClientConnection]]:
        """Yield every message with its connection, from the first message to the planned end of the
        stream.
        """
        is_over = False
        while not is_over:
            url = stream_url(self._fleet[self.server], self._path)
            with connect(url, additional_headers=AUTHORIZED, max_size=None) as socket:
                named = self.session_id or None
                options: dict[str, Any] = {"session_id": named, "is_paced": self._is_paced}
                socket.send(first_message(self._path, self._num_chunks, **options))
                server, is_over = self.server, True
                for message in self._received(socket):
                    assert message["type"] != "error", message
                    yield message, socket
                    if message["type"] in ("moved", "session.moved"):
                        self.server, is_over = message["server"], False
                        port = self._fleet.ports[self.server]
                        assert message["url"] == f"http://127.0.0.1:{port}"
                        assert message["session_id"] == self.session_id
                        assert message["next_chunk_index"] == len(self.chunks)
                assert is_over == (server == self.server)
        for move in self._moves:
            move.join()

    def _received(self, socket: ClientConnection) -> Iterator[dict[str, Any]]:
        data = b""
        with contextlib.suppress(ConnectionClosedOK):
            while True:
                text = socket.recv(timeout=seconds(20))
                is_json = isinstance(text, str)
                message = json.loads(text) if is_json else msgspec.msgpack.decode(text)
                kind, config = message["type"], message.get("config", message)
                if kind in ("session", "video.start"):
                    self.session_id = config["session_id"]
                elif kind in ("frame_batch_header", "video.chunk_metadata"):
                    data += bytes(socket.recv(timeout=seconds(20)))
                elif kind == "frame_batch":
                    data += message["payload"]
                if kind == "video.chunk_metadata":
                    frames = b"".join(media(data))
                    self.chunks.append((message["generation_chunk_index"], frames))
                elif kind == "chunk_stats":
                    self.chunks.append((message["chunk_index"], data))
                data = data if kind.startswith("frame_batch") else b""
                yield message


def media(data: bytes) -> Iterator[bytes]:
    """Yield the `mdat` boxes of an MP4."""
    while data:
        size = int.from_bytes(data[:4])
        if data[4:8] == b"mdat":
            yield data[:size]
        data = data[size:]


@pytest.mark.parametrize("path", [GENERATE, VIDEO])
def test_a_live_stream_continues_bit_for_bit(fleet: TestFleet, path: str) -> None:
    """A live stream continues bit for bit, including its script and its timed prompt, when it moves
    to another server and back.
    """
    still = Stream(fleet, path, 12, is_paced=False)  # the same frames, generated faster
    for _ in still.messages():
        pass
    assert [index for index, _ in still.chunks] == list(range(12))
    moved, moves = Stream(fleet, path, 12), {2: "b", 7: "a"}
    for _ in moved.messages():
        if to := moves.pop(len(moved.chunks), None):
            moved.move(to)
    assert [(status, reply.get("server")) for status, reply in moved.replies] == [
        (200, "b"),
        (200, "a"),
    ]
    assert moved.chunks == still.chunks
    for name in "ab":
        wait_for_engine_sessions(fleet[name], 0)


def test_an_interaction_with_receipt_acts_on_the_other_server(fleet: TestFleet) -> None:
    """An interaction that arrives while the session moves is either confirmed and takes effect on
    the other server, or ignored.
    """
    stream, numbers = Stream(fleet, VIDEO, 20), itertools.count()
    confirmed, acted, servers = set(), set(), set()
    for message, socket in stream.messages():
        match message["type"]:
            case "video.chunk_metadata":
                acted |= {*message["started_event_ids"], *message["completed_event_ids"]}
                if len(stream.chunks) in (3, 9):
                    stream.move("b" if stream.server == "a" else "a")
                if len(stream.chunks) < 14:  # later chunks may already be in flight
                    number = next(numbers)
                    actions = {"mode": "state", "transitions": [{"buttons": ["jl"[number % 2]]}]}
                    interaction: dict[str, Any] = {"event_id": f"event-{number}"}
                    interaction["event"] = {"multi_modal_data": {"actions": actions}}
                    sent = {"type": "session.interaction", "interaction": interaction}
                    with contextlib.suppress(ConnectionClosedOK):  # `moved` has not been read yet
                        socket.send(json.dumps(sent))
            case "session.interaction.queued":
                confirmed.add(message["event_id"])
                servers.add(stream.server)
    assert [status for status, _ in stream.replies] == [200, 200]
    assert servers == {"a", "b"}
    assert confirmed <= acted


def test_rebalance_empties_a_server_and_evens_out(fleet: TestFleet) -> None:
    """`rebalance` spreads a client's four sessions evenly over two servers. With `--empty`, it
    moves them all to one server, on which each session continues.
    """
    command = ("-m", "vllm_omni.entrypoints.cli.main", "rebalance", fleet.file, "--once")
    environ = {"VLLM_OMNI_OPERATOR_KEY": OPERATOR_KEY}
    names = {"r0", "r1", "r2", "r3"}
    a, b = fleet["a"], fleet["b"]
    with a.client() as client:
        for name in sorted(names):
            client.send(request(FIRST, session_id=name))
            client.frames()
        result = run_python(*command, environ=environ, limit_s=60)
        assert result.returncode == 0, result.stderr
        assert len(live_sessions(a)) == len(live_sessions(b)) == 2
        result = run_python(*command, "--empty", "a", environ=environ, limit_s=60)
        assert (result.returncode, live_sessions(a)) == (0, set()), result.stderr
        assert live_sessions(b) == names
    with b.client() as client:
        for name in sorted(names):
            client.send(request(LATER, session_id=name, image=None))
            assert signatures(client.frames())[0][0] == FIRST
            end_session(client, name)
    wait_for_engine_sessions(b, 0)


def test_the_routes_of_other_servers_require_the_operators_key(fleet: TestFleet) -> None:
    b = fleet["b"]
    for method, path in (
        ("GET", "/omni/sessions"),
        ("PUT", "/omni/migrations/x"),
        ("POST", "/omni/migrations/x/commit"),
        ("DELETE", "/omni/migrations/x"),
    ):
        for headers in ({}, AUTHORIZED):
            assert call(b, method, path, None, {"Accept": "*/*", **headers})[0] == 401, path
    for method, path in (
        ("POST", "/omni/migrations/x/commit"),
        ("DELETE", "/omni/migrations/x"),
    ):
        status, body, _ = call(b, method, path, None, OPERATOR)
        assert (status, code_of(body)) == (404, "unknown_migration")


def test_a_prepared_session_is_hidden_and_ends_without_a_commit(fleet: TestFleet) -> None:
    """If the snapshot that is sent for a move is invalid, no session becomes live, and a commit of
    that move is refused.
    """
    a, b = fleet["a"], fleet["b"]
    with a.client() as client:
        client.send(request(FIRST, session_id="half"))
        client.frames()
        end_session(client, "half")
    wait_for_engine_sessions(a, 0)
    status, body, _ = call(b, "PUT", "/omni/migrations/none", b"not a snapshot", OPERATOR)
    assert (status, code_of(body)) == (400, "invalid_snapshot")
    status, body, _ = call(b, "POST", "/omni/migrations/none/commit", None, OPERATOR)
    assert (status, code_of(body)) == (404, "unknown_migration")
    pause(0.1)
    assert live_sessions(b) == set()


def test_the_example_client_follows_its_session(fleet: TestFleet, tmp_path: Path) -> None:
    """The example client follows its session to other servers, and its frames are bit-identical to
    those of a session that does not move.
    """
    a, b = fleet["a"], fleet["b"]
    arguments = ["--image", start_image(tmp_path), "--keys", "w*24", "--codec", "ndarray_u8"]
    sizes = ["--width", WIDTH, "--height", HEIGHT]
    still, moved = tmp_path / "still.npy", tmp_path / "moved.npy"
    common = [SCRIPT, "--server", f"ws://127.0.0.1:{a.port}", "--api-key", KEY, *arguments, *sizes]
    result = run_python(*common, "--output", still, "--num-calls", 12, limit_s=120)
    assert result.returncode == 0, result.stderr
    with moving_about(fleet) as moves:
        result = run_python(*common, "--output", moved, "--num-calls", 12, limit_s=120)
    assert result.returncode == 0, result.stderr
    assert len(moves) >= 1
    assert "the session moves to the server b" in result.stderr
    assert np.array_equal(np.load(still), np.load(moved))
    for server in (a, b):
        for name in live_sessions(server):
            call(server, "DELETE", f"/v1/sessions/{name}")


@pytest.mark.parametrize("endpoint", [pytest.param("generate", marks=pytest.mark.nightly), "video"])
def test_the_live_example_follows_its_session(
    fleet: TestFleet, tmp_path: Path, endpoint: str
) -> None:
    """The live example follows its session to other servers, and its video file has the same frames
    as the video file of a session that does not move.
    """
    url = f"ws://127.0.0.1:{fleet['a'].port}"
    arguments = [EXAMPLES / "realtime_video.py", "--server", url, "--api-key", KEY, "--keys", "w*9"]
    arguments += ["--image", start_image(tmp_path), "--size", f"{WIDTH}x{HEIGHT}", "--chunks", 60]
    arguments += ["--endpoint", endpoint, "--format", "raw"]
    files = [tmp_path / "still.mp4", tmp_path / "moved.mp4"]
    result = run_python(*arguments, "--output", files[0], limit_s=120)
    assert result.returncode == 0, result.stderr
    with moving_about(fleet) as moves:
        result = run_python(*arguments, "--output", files[1], limit_s=120)
    assert result.returncode == 0, result.stderr
    assert len(moves) >= 1
    assert "the session moves to the server b" in result.stderr
    still_THWC, moved_THWC = (decode_mp4(file.read_bytes())[0] for file in files)
    assert np.array_equal(still_THWC, moved_THWC)


@contextlib.contextmanager
def moving_about(fleet: TestFleet) -> Iterator[list[int]]:
    """While the `with` block runs, repeatedly move every playing session. Yield the list of chunk
    indices at which sessions moved.
    """
    stop = threading.Event()
    moves: list[int] = []
    mover = threading.Thread(target=move_about, args=(fleet, stop, moves))
    mover.start()
    try:
        yield moves
    finally:
        stop.set()
        mover.join()


def move_about(fleet: TestFleet, stop: threading.Event, moves: list[int]) -> None:
    """Repeatedly move every playing session to the other server."""
    while not stop.is_set():
        for name, other in (("a", "b"), ("b", "a")):
            for session in live_sessions(fleet[name]):
                status, reply = migrate(fleet[name], session, other)
                if status == 200:
                    moves.append(reply["next_chunk_index"])
        pause(0.05)


def start_image(folder: Path) -> Path:
    path = folder / "start.png"
    path.write_bytes(png(WIDTH, HEIGHT))
    return path
