# SPDX-License-Identifier: Apache-2.0
"""The demo succeeds only if the camera has really moved through a world, and every failure has its
own error.
"""

import contextlib
import io
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from helpers.waits import pause, seconds
from PIL import Image
from websockets.sync.server import ServerConnection, serve

from vllm_omni.entrypoints.cli import demo
from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.entrypoints.media.mp4 import decode_mp4, encode_mp4
from vllm_omni.worlds.description import description_file, read_description

WALK = demo.DemoWalk(b"picture", {0: "hills", 7: "hills in the snow"})
HELLO = {"first_chunk_frames": 9, "chunk_frames": 12, "vae_stride": [4, 8, 8]}


def noise(num_frames: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (num_frames, 32, 48, 3), np.uint8)


def chunk(frames_THWC: np.ndarray) -> demo.ReceivedChunk:
    return demo.ReceivedChunk(
        frames_THWC, 0.1, 1000, {"queue_ms": 1.0, "denoise_ms": 60.0, "total_ms": 90.0}
    )


def running(belongs: Callable[[psutil.Process], bool]) -> list[str]:
    """Return the command lines of the matching processes that are still alive after up to 5 s,
    because a killed process may need a moment to end.
    """
    deadline = time.monotonic() + 5
    while True:
        left = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.status() != psutil.STATUS_ZOMBIE and belongs(process):
                    left.append(" ".join(process.cmdline()))
        if not left or time.monotonic() > deadline:
            return left
        pause(0.1)


# ---- the walk


def test_the_walk_returns_to_its_direction() -> None:
    """The walk always goes forward and turns left as often as right, no matter how it is divided
    into chunks.
    """
    walk = demo.DemoWalk(b"", {0: "hills"})
    keys = walk.held_keys(range(16))
    assert keys == walk.held_keys(range(3)) + walk.held_keys(range(3, 16))
    assert all("w" in held for held in keys)
    turns = [key for held in keys for key in held if key != "w"]
    assert turns.count("l") == turns.count("j") == 4


def test_the_demo_takes_the_tour_of_the_trained_world(village: Path) -> None:
    """The demo's tour of the trained world has a start image, keys, and a prompt for each point
    where the prompt changes.
    """
    model, description = demo.find_world(None)
    assert model == village
    assert description is not None
    assert description.tour is not None
    walk = demo.plan_walk(model, description)
    assert Image.open(io.BytesIO(walk.image)).size == description.sizes[0]
    assert [
        walk.prompt(range(i, i + 3)) is not None for i in range(0, len(description.tour.keys), 3)
    ].count(True) == 2
    assert walk.prompt(range(3)) == description.prompt("day")
    assert [
        "".join(held) for held in walk.held_keys(range(len(description.tour.keys)))
    ] == description.tour.keys
    assert walk.num_chunks(3, 3) == len(description.tour.keys) // 3
    assert walk.num_chunks(1, 1) == len(description.tour.keys)


def test_a_world_without_a_description_is_walked_forward(tmp_path: Path) -> None:
    walk = demo.plan_walk(tmp_path, None)
    assert (walk.image, walk.num_chunks(3, 3)) == (demo.start_image(), 5)


class Endpoint:
    """A WebSocket server that uses the endpoint's protocol. `response` creates the reply to each
    request.
    """

    def __init__(self, response: Callable[[int, dict[str, Any]], list[Any]]) -> None:
        self.requests: list[dict[str, Any]] = []
        self._response = response
        self._server = serve(self._handle, "127.0.0.1", 0)
        self.url = f"ws://127.0.0.1:{self._server.socket.getsockname()[1]}{demo.ENDPOINT}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def _handle(self, connection: ServerConnection) -> None:
        connection.send(msgspec.msgpack.encode(HELLO))
        for data in connection:
            request = msgspec.msgpack.decode(data)
            self.requests.append(request)
            for message in self._response(len(self.requests) - 1, request):
                connection.send(
                    message if isinstance(message, str) else msgspec.msgpack.encode(message)
                )

    def __enter__(self) -> "Endpoint":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()


def frame(video: bytes, index: int = 0, total: int = 1) -> dict[str, Any]:
    return {
        "type": "frame",
        "index": index,
        "total": total,
        "video": video,
        "timing": {"denoise_ms": 5.0},
    }


def test_each_request_has_its_part_of_the_walk() -> None:
    """The first request contains the image and the prompt, later requests continue with keys, and a
    chunk may arrive in two messages.
    """

    def response(index: int, request: dict[str, Any]) -> list[Any]:
        count = 4 * len(request["actions"]) - 3 * (index == 0)
        frames = noise(count, index)
        half = count // 2
        return [
            {"type": "started"},
            frame(encode_mp4(frames[:half], 16), 0, 2),
            frame(encode_mp4(frames[half:], 16), 1, 2),
        ]

    with Endpoint(response) as endpoint:
        chunks = demo.stream_walk(endpoint.url, WALK, 32, 48, 3)
    assert [len(part.frames) for part in chunks] == [9, 12, 12]
    assert not any({"camera", "cameras"} & request.keys() for request in endpoint.requests), (
        "keys: the view is the model's"
    )
    assert [("image" in request, request.get("prompt")) for request in endpoint.requests] == [
        (True, "hills"),
        (False, None),
        (False, "hills in the snow"),
    ]
    assert [held for request in endpoint.requests for held in request["actions"]] == WALK.held_keys(
        range(9)
    )
    assert all(part.wall_s > 0 and part.wire_bytes > 0 and part.timing for part in chunks)


@pytest.mark.parametrize(
    ("response", "complaint"),
    [
        (
            [{"type": "error", "code": "capacity", "error": "full"}],
            r"refused the request: .*capacity",
        ),
        ([frame(encode_mp4(noise(5), 16))], r"chunk 0 has 5 frames, 9 were requested"),
        ([frame(b"not a video")], r"streaming from .* failed: ValueError: not a readable video"),
        (["hello in text"], r"expected a binary message, got text"),
        ([{"type": "frame", "index": 0}], r"streaming from .* failed: KeyError"),
    ],
)
def test_a_wrong_response_is_a_failure_with_a_reason(response: list[Any], complaint: str) -> None:
    with (
        Endpoint(lambda index, request: response) as endpoint,
        pytest.raises(CommandError, match=complaint),
    ):
        demo.stream_walk(endpoint.url, WALK, 32, 48, 2)


def test_no_server_is_a_failure() -> None:
    """If no server is running, the error contains the server address."""
    with pytest.raises(
        CommandError, match=r"streaming from ws://127.0.0.1:1/x failed: ConnectionRefusedError"
    ):
        demo.stream_walk("ws://127.0.0.1:1/x", WALK, 32, 48, 1)


# ---- the files


def test_the_video_holds_every_frame(tmp_path: Path) -> None:
    """The video contains every frame, and the contact sheet shows the first and last frames."""
    chunks = [chunk(noise(9, 0)), chunk(noise(12, 1))]
    demo.write_files(chunks, tmp_path)
    frames_THWC, fps = decode_mp4((tmp_path / "demo.mp4").read_bytes())
    assert (len(frames_THWC), fps) == (21, 16)
    sheet = np.asarray(Image.open(tmp_path / "demo.png"))
    np.testing.assert_array_equal(sheet[4:36, 4:52], chunks[0].frames[0])
    np.testing.assert_array_equal(
        sheet[2 * 36 + 4 : 2 * 36 + 36, 3 * 52 + 4 : 4 * 52], chunks[1].frames[-1]
    )


def test_a_world_that_does_not_move_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"all 9 frames .* are equal"):
        demo.write_files([chunk(np.full((9, 32, 48, 3), 90, np.uint8))], tmp_path)


def test_a_video_that_lost_frames_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo decodes the written file, counts its frames, and fails if frames are missing."""
    import vllm_omni.entrypoints.media.mp4 as media

    monkeypatch.setattr(
        media, "encode_mp4", lambda frames_THWC, fps: encode_mp4(frames_THWC[:-1], fps)
    )
    with pytest.raises(CommandError, match=r"has 8 frames, 9 were received"):
        demo.write_files([chunk(noise(9))], tmp_path)


# ---- the server


@pytest.fixture
def fake_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return a function that makes the demo run a Python snippet instead of `vllm serve`."""

    def run(code: str) -> Any:
        monkeypatch.setattr(demo, "serve_command", lambda *args: [sys.executable, "-c", code])
        return demo.server(tmp_path, 1, 32, 48, tmp_path / "server.log")

    return run


def test_a_server_that_dies_is_reported_with_the_cause(
    fake_server: Callable[[str], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """When the server dies, the demo shows the exceptions in the server's log, without the end of
    the traceback and without warnings.
    """
    code = (
        "print('WARNING x'); print('(A) WARNING may cause OSError: files')\n"
        "print('(E) ERROR ValueError: no such key'); print('  File x'); raise SystemExit(3)"
    )
    with (
        pytest.raises(CommandError, match="ended with status 3 while starting"),
        fake_server(code) as process,
    ):
        demo.wait_until_healthy(process, 30)
    shown = capsys.readouterr().err
    assert "ValueError: no such key" in shown
    assert "OSError" not in shown
    assert "File x" not in shown


def test_a_server_that_does_not_start_in_time_is_stopped(fake_server: Callable[[str], Any]) -> None:
    """A server that does not start in time is stopped together with its child processes."""
    sleep = "import time; time.sleep(600)"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleep!r}]); {sleep}"
    with pytest.raises(CommandError, match="not ready within 1 s"), fake_server(code) as process:
        demo.wait_until_healthy(process, 1)
    assert process.popen.returncode is not None
    assert running(lambda child: os.getpgid(child.pid) == process.popen.pid) == []


def test_a_terminated_demo_ends_its_server(tmp_path: Path) -> None:
    """The server also stops when the terminal is closed or the demo receives SIGTERM from
    `kill`.
    """
    code = (
        "import sys\n"
        "from vllm_omni.entrypoints.cli import demo\n"
        "from vllm_omni.entrypoints.cli.main import main\n"
        "demo.serve_command = lambda *args: [sys.executable, '-c', 'import time; "
        "time.sleep(600)']\n"
        f"main(['demo', '--model', {str(tmp_path)!r}, '--out', {str(tmp_path)!r}, '--port', '0'])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    while not process.stdout.readline().startswith("started: "):
        assert process.poll() is None
    process.terminate()
    assert process.wait(seconds(60)) == 130  # the demo gives its server 20 s to stop
    process.stdout.close()
    assert running(lambda child: child.cwd() == str(tmp_path)) == []


def test_a_busy_port_is_replaced() -> None:
    """If the requested port is in use, the demo uses another port."""
    with socket.create_server(("127.0.0.1", 0)) as busy:
        taken = busy.getsockname()[1]
        other = demo.free_port(taken)
    assert other != taken
    assert demo.free_port(other) == other


# ---- all of it


@pytest.mark.engine
def test_the_demo_walks_through_the_trained_world(tmp_path: Path, village: Path) -> None:
    """`make demo ONCE=1` starts a real server on the shipped world, writes all files, exits with
    status 0, and leaves no process running.

    The first chunk must match the renderer's output. The goal is a PSNR of 24 dB, but 18 dB is
    enough to distinguish the village from anything else.
    """
    result = subprocess.run(
        [
            Path(sys.executable).with_name("vllm-omni"),
            "demo",
            "--once",
            "--chunks",
            "6",
            "--port",
            "0",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=seconds(600),
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    frames_THWC, _ = decode_mp4((tmp_path / "demo.mp4").read_bytes())
    assert frames_THWC.shape == (21, 96, 160, 3)
    assert Image.open(tmp_path / "demo.png").size == (4 * 164 + 4, 3 * 100 + 4)
    assert result.stdout.count("chunk ") >= 6
    assert re.search(r"first frame after \d+ s", result.stdout)
    description = read_description(village)
    assert description is not None and description.tour is not None
    assert description.tour.truth is not None
    truth_THWC, _ = decode_mp4(description_file(village, description.tour.truth).read_bytes())
    error = (frames_THWC[:7].astype(np.float32) - truth_THWC[:7]) ** 2
    assert 10 * np.log10(255**2 / error.mean()) > 18
    assert running(lambda child: child.cwd() == str(tmp_path)) == []
