# SPDX-License-Identifier: Apache-2.0
"""The example client `world_camera.py` after its connection was lost, run as a program against a
real server with a fake engine.
"""

import asyncio
import contextlib
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from helpers.fake_engine import FIRST, LATER, EndpointServer, FakeEngine, camera
from helpers.quick_programs import run_python
from PIL import Image

from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.realtime.sessions.run import SessionJob, SessionRun
from vllm_omni.entrypoints.realtime.sessions.session import Session
from vllm_omni.inputs import DiffusionParams

SCRIPT = Path(__file__).parents[3] / "examples" / "online_serving" / "world_camera.py"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "start.png"
    Image.new("RGB", (96, 64), (90, 120, 60)).save(path)
    return path


def run(port: int, *arguments: object) -> "subprocess.CompletedProcess[str]":
    return run_python(SCRIPT, "--server", f"ws://127.0.0.1:{port}", *arguments, limit_s=600)


class Port:
    """A port that forwards to a server and can be closed and reopened, as happens when a server
    restarts.

    Attributes:
        handshakes: Request line of each connection.
        refusals: HTTP statuses with which the next connections are refused.
    """

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self.handshakes: list[str] = []
        self.refusals: list[int] = []
        self._sockets: list[socket.socket] = []
        self.port = 0
        self.give_back()

    def give_back(self) -> None:
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        self._sockets = [listener]
        self._in_thread(self._accept, listener)

    def take_away(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):  # the connection has already ended
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    @staticmethod
    def _in_thread(work: Callable[..., None], *arguments: socket.socket) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the listener has already been closed
            while True:
                client, _ = listener.accept()
                request = client.recv(65536)
                self.handshakes.append(request.split(b"\r\n")[0].decode())
                if self.refusals:
                    client.sendall(f"HTTP/1.1 {self.refusals.pop(0)} -\r\n\r\n".encode())
                    client.close()
                    continue
                server = socket.create_connection(("127.0.0.1", self._server_port))
                server.sendall(request)
                self._sockets += [client, server]
                self._in_thread(self._copy, client, server)
                self._in_thread(self._copy, server, client)

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_server_that_is_restarted_is_waited_for(
    make_endpoint: Callable[..., EndpointServer],
    engine: FakeEngine,
    image: Path,
    tmp_path: Path,
    comes_back: bool,
) -> None:
    """The client waits while a restarting server refuses connections. The walk then continues at
    the next frame, or ends with a one-line error at the time limit.
    """
    endpoint = make_endpoint()
    front = Port(endpoint.port)
    gone: list[DiffusionParams] = []

    def restart_once(params: DiffusionParams) -> None:
        if params.chunk_index == 2 and not gone:
            gone.append(params)
            front.take_away()
            if comes_back:
                asyncio.get_running_loop().call_later(1.0, front.give_back)

    engine.fail, engine.delay_s = restart_once, 0.1
    output = tmp_path / "walk.npy"
    patience = ("--retry-s", 20 if comes_back else 1)
    finished = run(
        front.port,
        *patience,
        "--image",
        image,
        "--keys",
        "w*15",
        "--codec",
        "ndarray_u8",
        "--output",
        output,
    )
    front.take_away()
    assert gone
    if comes_back:
        assert finished.returncode == 0, finished.stderr
        np.testing.assert_array_equal(np.load(output)[:, 16, 24, 0], np.arange(FIRST + 4 * LATER))
    else:
        assert finished.returncode == 1
        (error,) = [line for line in finished.stderr.splitlines() if line.startswith("error:")]
        assert "no server answers" in error and "did not return within 1 s" in error


@pytest.mark.parametrize("steering", ["keys", "path"])
def test_a_walk_continues_from_the_periodic_snapshot_of_a_restarted_server(
    make_endpoint: Callable[..., EndpointServer],
    engine: FakeEngine,
    image: Path,
    tmp_path: Path,
    steering: str,
) -> None:
    """A walk continues from the periodic snapshot of a restarted server. The restored session is
    two chunks behind, so the client requests the missing chunks without the image, and the video
    contains every frame once.
    """
    endpoint = make_endpoint()
    restarted = []

    def restart() -> None:
        (session,) = endpoint.manager.sessions()
        session.delivery_log.runs.clear()
        session.next_chunk, session.in_step = 2, True
        engine.worlds[session.engine_id].chunk_index = 2
        restarted.append(len(engine.chunks))

    def die_once(params: DiffusionParams) -> None:
        if params.chunk_index == 4 and not restarted:
            for protocol in list(endpoint.server.server_state.connections):
                protocol.transport.abort()
            asyncio.get_running_loop().call_later(0.1, restart)

    engine.fail, engine.delay_s = die_once, 0.1
    output = tmp_path / "walk.npy"
    how = ["--keys", "w*18"]
    if steering == "path":
        poses = camera(FIRST + 5 * LATER)
        folder = tmp_path / "path"
        folder.mkdir()
        np.save(folder / "poses.npy", poses["poses"])
        np.save(folder / "intrinsics.npy", poses["intrinsics"])
        how = ["--camera-path", str(folder)]
    finished = run(
        endpoint.port, "--image", image, *how, "--codec", "ndarray_u8", "--output", output
    )
    assert finished.returncode == 0, finished.stderr
    assert "from its snapshot, chunk 2" in " ".join(finished.stderr.split())
    after = engine.chunks[restarted[0] :]
    assert [call.params.chunk_index for call in after] == [2, 3, 4, 5]
    assert "image" not in after[0].arrays
    np.testing.assert_array_equal(np.load(output)[:, 16, 24, 0], np.arange(FIRST + 5 * LATER))


def cut_once(front: Port, engine: FakeEngine, chunk: int, num_late: int = 0) -> list[int]:
    """Cut the connections when the engine starts a chunk.

    Args:
        num_late: Number of chunks that the engine finishes although the server cancels them.

    Returns:
        List that contains, after the cut, the number of chunks requested before it.
    """
    cuts: list[int] = []

    def finish_late(session_id: str) -> None:
        engine.worlds[session_id].chunk_index = chunk + num_late

    def cut(params: DiffusionParams) -> None:
        if params.chunk_index == chunk and not cuts:
            cuts.append(len(engine.chunks))
            front.take_away()
            front.give_back()
            if num_late:
                asyncio.get_running_loop().call_later(0.1, finish_late, params.session_id)

    engine.fail, engine.delay_s = cut, 0.15
    return cuts


@pytest.mark.parametrize("name", [None, "a.b:c_1"])
def test_each_connection_names_the_session(
    endpoint: EndpointServer, engine: FakeEngine, image: Path, tmp_path: Path, name: str | None
) -> None:
    """The first connection and each later one have the session's name in their query, so that a
    proxy forwards all of them to the session's server.
    """
    front = Port(endpoint.port)
    cuts = cut_once(front, engine, chunk=2)
    named = () if name is None else ("--session-id", name)
    finished = run(
        front.port,
        *named,
        "--image",
        image,
        "--keys",
        "w*9",
        "--output",
        tmp_path / "x.npy",
    )
    front.take_away()
    assert cuts and finished.returncode == 0, finished.stderr
    session_id = finished.stderr.split("session ")[1].split()[0]
    assert name in (None, session_id)
    expected = f"GET /v1/realtime/world/camera?session={quote(session_id)} HTTP/1.1"
    assert front.handshakes == [expected] * 2


@pytest.mark.parametrize("status", [408, 429, 503])
def test_a_refusal_that_may_pass_is_tried_again(
    endpoint: EndpointServer, engine: FakeEngine, image: Path, tmp_path: Path, status: int
) -> None:
    """A client that reconnects tries again after the HTTP statuses 408, 429 and 5xx."""
    front = Port(endpoint.port)
    cuts = cut_once(front, engine, chunk=1)

    def cut_and_refuse(params: DiffusionParams, cut: Callable[..., None] = engine.fail) -> None:
        if params.chunk_index == 1 and not cuts:
            front.refusals.append(status)
        cut(params)

    engine.fail = cut_and_refuse
    output = tmp_path / "x.npy"
    finished = run(front.port, "--image", image, "--keys", "w*6", "--output", output)
    front.take_away()
    assert finished.returncode == 0, finished.stderr
    assert len(front.handshakes) == 3
    assert len(np.load(output)) == FIRST + LATER


@pytest.mark.parametrize("num_late", [1, 2])
@pytest.mark.parametrize("steering", ["keys", "calls", "path"])
def test_a_walk_is_complete_although_the_engine_finished_a_cancelled_chunk(
    endpoint: EndpointServer,
    engine: FakeEngine,
    image: Path,
    tmp_path: Path,
    steering: str,
    num_late: int,
) -> None:
    """The engine finishes a chunk while the server cancels it because the connection was lost. The
    server drops this chunk's frames. The client starts the session again, and the video contains
    every frame once.
    """
    front = Port(endpoint.port)
    cuts = cut_once(front, engine, chunk=3, num_late=num_late)
    how = ["--keys", "w*18"] if steering == "keys" else ["--keys", "w*9", "--num-calls", "2"]
    if steering == "calls":
        how += ["--frames-per-chunk", "5"]
    if steering == "path":
        path = camera(FIRST + 5 * LATER)
        np.save(tmp_path / "poses.npy", path["poses"])
        np.save(tmp_path / "intrinsics.npy", path["intrinsics"])
        how = ["--camera-path", str(tmp_path), "--num-frames", "24", "--num-calls", "9"]
    output = tmp_path / "walk.npy"
    finished = run(front.port, "--image", image, *how, "--codec", "ndarray_u8", "--output", output)
    front.take_away()
    assert cuts and finished.returncode == 0, finished.stderr
    assert "starting the session again" in " ".join(finished.stderr.split())
    np.testing.assert_array_equal(np.load(output)[:, 16, 24, 0], np.arange(FIRST + 5 * LATER))


def test_a_session_of_another_program_continues_after_the_lost_chunk(
    endpoint: EndpointServer, engine: FakeEngine, image: Path, tmp_path: Path
) -> None:
    """If another program started the session, the client cannot start it again. The video then
    lacks the frames that the server has dropped, which the client reports, and each chunk is
    generated with its own actions.
    """
    walk = ("--session-id", "shared", "--codec", "ndarray_u8", "--output", tmp_path / "walk.npy")
    finished = run(endpoint.port, "--image", image, "--keys", "w*6", *walk)
    assert finished.returncode == 0, finished.stderr
    front = Port(endpoint.port)
    cuts = cut_once(front, engine, chunk=3, num_late=1)
    finished = run(front.port, "--keys", "w*3 a*3 s*3 d*3", *walk)
    front.take_away()
    assert cuts and finished.returncode == 0, finished.stderr
    assert f"{LATER} frames are missing from the video" in finished.stderr
    first = FIRST + LATER
    frames = [*range(first, first + LATER), *range(first + 2 * LATER, first + 4 * LATER)]
    np.testing.assert_array_equal(np.load(tmp_path / "walk.npy")[:, 16, 24, 0], frames)
    done = [call.params for call in engine.chunks[-2:]]
    assert [(each.chunk_index, each.actions) for each in done] == [
        (4, [["s"]] * 3),
        (5, [["d"]] * 3),
    ]


@pytest.mark.parametrize("parts", [(), ("--frames-per-chunk", 5)], ids=["chunks", "parts"])
def test_a_walk_continues_although_the_server_has_dropped_its_first_frames(
    make_endpoint: Callable[..., EndpointServer],
    engine: FakeEngine,
    image: Path,
    tmp_path: Path,
    parts: tuple[object, ...],
) -> None:
    """If the delivery log is too small for the whole request, the client continues with a new
    request. No finished chunk is generated again.
    """
    endpoint = make_endpoint(delivery_log_bytes=2 * LATER * 32 * 48 * 3)
    front = Port(endpoint.port)
    cuts = cut_once(front, engine, chunk=4)
    output = tmp_path / "walk.npy"
    walk = ("--keys", "w*18", "--codec", "ndarray_u8", "--output", output)
    finished = run(front.port, "--image", image, *walk, *parts)
    front.take_away()
    assert finished.returncode == 0, finished.stderr
    assert min(call.params.chunk_index or 0 for call in engine.chunks[cuts[0] :]) >= 4
    np.testing.assert_array_equal(np.load(output)[:, 16, 24, 0], np.arange(FIRST + 5 * LATER))


def test_a_request_that_the_server_is_still_cancelling_is_repeated(
    endpoint: EndpointServer,
    engine: FakeEngine,
    image: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that reconnects while the server still cancels the request gets `cancelled`, and
    sends the request again.
    """
    front = Port(endpoint.port)
    cuts = cut_once(front, engine, chunk=2)
    refused: list[SessionJob] = []
    submit = Session.submit

    def submit_later(session: Session, job: SessionJob) -> SessionRun:
        if cuts and not refused:
            refused.append(job)
            raise EndpointError("cancelled", "the request was cancelled")
        return submit(session, job)

    monkeypatch.setattr(Session, "submit", submit_later)
    output = tmp_path / "walk.npy"
    finished = run(front.port, "--image", image, "--keys", "w*9", "--output", output)
    front.take_away()
    assert refused and finished.returncode == 0, finished.stderr
    assert len(np.load(output)) == FIRST + 2 * LATER
