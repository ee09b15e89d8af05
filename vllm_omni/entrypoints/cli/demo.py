# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni demo`: a world served by stock vLLM, walked through over its WebSocket, written as a video to look at.

Starts `vllm serve ... --omni` as a child, streams a camera walk chunk by chunk, writes `demo.mp4` and `demo.png`, and
leaves the server running until Ctrl-C (`--once`: stops it). It succeeds only if frames arrived, every one of them is
in the file again, and they are not all the same. Held by tests/entrypoints/cli/test_demo.py.
"""

import argparse
import contextlib
import importlib.resources
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.entrypoints.webui.address import page_url

if TYPE_CHECKING:
    import numpy as np

# N pixel frames, T frames, H height, W width, C = 3 channels

DOOR = "/v1/realtime/world/camera"
TINY_MODEL = "lingbot_world"
_HOST = "127.0.0.1"
_LOG_LINES_SHOWN = 20
_EXCEPTION = re.compile(r"\b[A-Za-z_.]*(?:Error|Exception|error): \S.*")
_STOP_S = 20.0
_CHUNK_TIMEOUT_S = 300.0
_TURNS = ("", "", "l", "l", "", "", "j", "j")
"""Beside `w`, latent frame for latent frame."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("demo", help="serve a world, walk through it, write demo.mp4 and demo.png")
    parser.add_argument("--once", action="store_true", help="stop the server after the files are written")
    parser.add_argument("--model", type=Path, help="checkpoint directory (default: writes a tiny random one)")
    parser.add_argument("--out", type=Path, default=Path(), help="directory for the files (default: here)")
    parser.add_argument("--chunks", type=int, default=5, help="chunks to stream (default: 5)")
    parser.add_argument("--size", default="160x96", help="video size, WIDTHxHEIGHT (default: 160x96)")
    parser.add_argument("--image", type=Path, help="start image (default: a drawn landscape)")
    parser.add_argument("--prompt", default="A path through green hills towards the evening sun", help="scene prompt")
    parser.add_argument("--port", type=int, default=8000, help="port; if busy, any free one is taken (default: 8000)")
    parser.add_argument("--start-timeout", type=float, default=600.0, help="seconds the server may take to start")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from vllm_omni.entrypoints.cli.make_tiny import write_tiny

    width, height = parse_size(args.size)
    if args.chunks < 1:
        raise CommandError(f"--chunks must be >= 1, got {args.chunks}")
    console = Console()
    args.out.mkdir(parents=True, exist_ok=True)
    model = args.model
    if model is None:
        model = args.out / "demo_world"
        if not (model.is_dir() and any(model.iterdir())):
            write_tiny(TINY_MODEL, model)
            console.print(f"wrote the tiny random world {model}")
    image = args.image.read_bytes() if args.image else start_image()
    port = free_port(args.port)
    if port != args.port:
        console.print(f"port {args.port} is in use or 0; taking {port}")
    for number in (signal.SIGTERM, signal.SIGHUP):  # a closed terminal must not leave a server behind
        signal.signal(number, _interrupt)
    with server(model, port, height, width, args.out / "demo_server.log") as process:
        wait_until_healthy(process, args.start_timeout, console)
        url = f"ws://{_HOST}:{port}{DOOR}"
        chunks = stream(url, image, args.prompt, height, width, args.chunks, console)
        write_files(chunks, args.out, console)
        if not args.once:
            page = page_url(_HOST, port)
            console.print(f"\nopen {page} in a browser to walk through it yourself", soft_wrap=True, highlight=False)
            console.print(f"serving {model} at {url} (log: {process.log}); Ctrl-C stops it", soft_wrap=True)
            wait_for_interrupt(process)
    return 0


# ---- the server -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerProcess:
    """A running `vllm serve`: the process (leader of its own group), its port and its log."""

    popen: "subprocess.Popen[bytes]"
    port: int
    log: Path

    def excerpt(self) -> str:
        """What the log says went wrong: the named exceptions of all processes, else its last lines."""
        lines = self.log.read_text(errors="replace").splitlines()
        serious = [line for line in lines if " WARNING " not in line and " INFO " not in line]
        causes = dict.fromkeys(match[0] for line in serious if (match := _EXCEPTION.search(line)))
        return "\n".join([*causes][:_LOG_LINES_SHOWN] or lines[-_LOG_LINES_SHOWN:])

    def failure(self, what: str) -> CommandError:
        """Show what the log says and return the error to raise."""
        print(f"---- from {self.log} ----\n{self.excerpt()}\n----", file=sys.stderr)
        return CommandError(f"{what}; the lines above are from its log {self.log}")

    def stop(self) -> None:
        """End the server and its children; they get time to clean up."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(_STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


@contextlib.contextmanager
def server(model: Path, port: int, height: int, width: int, log: Path) -> Iterator[ServerProcess]:
    """Run `vllm serve MODEL --omni` on the loopback address while the block runs."""
    command = serve_command(model, port, height, width)
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **os.environ}
    with log.open("wb") as output:
        popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
    process = ServerProcess(popen, port, log)
    try:
        print("started:", shlex.join(command), flush=True)
        yield process
    finally:
        process.stop()


def serve_command(model: Path, port: int, height: int, width: int) -> list[str]:
    """The documented command, with the `vllm` of this environment."""
    vllm = Path(sys.executable).with_name("vllm")
    options = json.dumps({"omni": {"height": height, "width": width}})
    return [
        *([str(vllm)] if vllm.exists() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]),
        *("serve", str(model), "--omni", "--host", _HOST, "--port", str(port), "--additional-config", options),
    ]


def wait_until_healthy(process: ServerProcess, timeout_s: float, console: Any) -> None:
    """Return when `/health` answers 200. Raises CommandError with the log's end when the server dies or is late."""
    url = f"http://{_HOST}:{process.port}/health"
    started = time.monotonic()
    with console.status("starting vLLM") as status:
        while (elapsed_s := time.monotonic() - started) < timeout_s:
            if (code := process.popen.poll()) is not None:
                raise process.failure(f"the server ended with status {code} while starting")
            if answers(url):
                console.print(f"server is up after {elapsed_s:.0f} s")
                return
            status.update(f"starting vLLM, {elapsed_s:.0f} s (a first start takes about half a minute)")
            time.sleep(0.25)
    raise process.failure(f"the server was not ready within {timeout_s:.0f} s")


def answers(url: str) -> bool:
    """Whether an HTTP GET gets 200 now."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status) == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def wait_for_interrupt(process: ServerProcess) -> None:
    try:
        code = process.popen.wait()
    except KeyboardInterrupt:
        print("\nstopping")
        return
    raise process.failure(f"the server ended with status {code}")


def free_port(wanted: int) -> int:
    """Return `wanted` if it is free on the loopback address, else any free port."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError, OverflowError):
                probe.bind((_HOST, port))
                return int(probe.getsockname()[1])
    raise CommandError("no free TCP port on the loopback address")


# ---- the walk ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunk:
    """One answered chunk: frames `[T, H, W, 3]` as decoded, seconds from request to last byte, bytes on the wire."""

    frames: "np.ndarray"
    wall_s: float
    wire_bytes: int
    timing: dict[str, float]


def stream(url: str, image: bytes, prompt: str, height: int, width: int, num_chunks: int, console: Any) -> list[Chunk]:
    """Walk through the world chunk by chunk and return what came back; prints a line for each chunk."""
    import msgspec
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from websockets.exceptions import WebSocketException
    from websockets.sync.client import connect

    chunks: list[Chunk] = []
    columns = (TextColumn("walking"), BarColumn(), MofNCompleteColumn(), TextColumn("chunks"), TimeElapsedColumn())
    try:
        with (
            connect(url, max_size=None, compression=None, open_timeout=30) as socket_,
            Progress(*columns, console=console) as progress,
        ):
            task = progress.add_task("", total=num_chunks)
            hello = msgspec.msgpack.decode(_binary(socket_.recv(timeout=30)))
            start = 0
            for index in range(num_chunks):
                count = hello["chunk_frames" if index else "first_chunk_frames"]
                stop = start + -(-count // hello["vae_stride"][0])
                request: dict[str, Any] = {
                    "endpoint": "infer",
                    "actions": walk(range(start, stop)),
                    "extra_body": {"height": height, "width": width, "seed": 7, "video_format": "mp4"},
                }
                if index == 0:
                    request |= {"image": image, "prompt": prompt}
                chunk = _infer(socket_, request)
                if len(chunk.frames) != count:
                    raise CommandError(f"chunk {index} has {len(chunk.frames)} frames, {count} were asked for")
                chunks.append(chunk)
                progress.console.print(describe(index, chunk), soft_wrap=True, highlight=False)
                progress.advance(task)
                start = stop
    except (WebSocketException, OSError, TimeoutError, msgspec.DecodeError, KeyError, ValueError) as error:
        raise CommandError(f"streaming from {url} failed: {type(error).__name__}: {error}") from error
    return chunks


def _infer(socket_: Any, request: dict[str, Any]) -> Chunk:
    """Send one request and collect its messages. Raises CommandError with the server's own error."""
    import msgspec
    import numpy as np

    from vllm_omni.entrypoints.media import decode_mp4

    started = time.monotonic()
    socket_.send(msgspec.msgpack.encode(request))
    parts: list[np.ndarray] = []
    timing: dict[str, float] = {}
    wire_bytes = 0
    while True:
        data = _binary(socket_.recv(timeout=_CHUNK_TIMEOUT_S))
        message = msgspec.msgpack.decode(data)
        if message.get("type") == "error":
            raise CommandError(f"the server refused the request: {message}")
        if message.get("type") != "frame":
            continue
        wire_bytes += len(data)
        timing |= message.get("timing", {})
        parts.append(decode_mp4(message["video"])[0])
        if message["index"] + 1 >= message["total"]:
            return Chunk(np.concatenate(parts), time.monotonic() - started, wire_bytes, timing)


def _binary(message: str | bytes) -> bytes:
    if isinstance(message, str):
        raise ValueError(f"expected a binary message, got text {message[:200]!r}")
    return message


def describe(index: int, chunk: Chunk) -> str:
    """One line: frames, time from request to last byte, rate, size, and where the server spent it."""
    count = len(chunk.frames)
    stages = [
        f"{name.removesuffix('_ms')} {ms:.0f}" for name, ms in chunk.timing.items() if name != "total_ms" and ms >= 0.5
    ]
    return (
        f"chunk {index}: {count} frames in {1000 * chunk.wall_s:.0f} ms ({count / chunk.wall_s:.0f}/s), "
        f"{chunk.wire_bytes / 1000:.0f} kB" + (f"; ms: {', '.join(stages)}" if stages else "")
    )


def walk(latent_frames: range) -> list[list[str]]:
    """Keys held in each latent frame: forward all the time, looking right, then left again."""
    return [["w", *_TURNS[frame % len(_TURNS)]] for frame in latent_frames]


def start_image() -> bytes:
    """The bundled start image, PNG (drawn by scripts/draw_start_image.py)."""
    return (importlib.resources.files("vllm_omni.entrypoints.cli") / "data" / "start.png").read_bytes()


# ---- the files --------------------------------------------------------------------------------------------------


def write_files(chunks: Sequence[Chunk], out: Path, console: Any, fps: float = 16) -> None:
    """Write `demo.mp4` and `demo.png`, then read the video back. Raises CommandError unless it is what arrived."""
    import numpy as np

    from vllm_omni.entrypoints.media import contact_sheet, decode_mp4, encode_mp4

    frames_THWC = np.concatenate([chunk.frames for chunk in chunks])
    video, sheet = out / "demo.mp4", out / "demo.png"
    video.write_bytes(encode_mp4(frames_THWC, fps))
    shown = np.linspace(0, len(frames_THWC) - 1, min(12, len(frames_THWC))).round().astype(int)
    contact_sheet(frames_THWC[shown], columns=4).save(sheet)
    written_THWC, _ = decode_mp4(video.read_bytes())
    if len(written_THWC) != len(frames_THWC):
        raise CommandError(f"{video} holds {len(written_THWC)} frames, {len(frames_THWC)} arrived")
    if (written_THWC == written_THWC[0]).all():
        raise CommandError(f"all {len(written_THWC)} frames of {video} are the same picture; the world does not move")
    console.print(
        f"wrote {video} ({len(frames_THWC)} frames, {len(frames_THWC) / fps:.1f} s) and {sheet}; read back and checked",
        soft_wrap=True,
    )


def parse_size(text: str) -> tuple[int, int]:
    """`832x480` -> (832, 480), both multiples of 16."""
    width, x, height = text.partition("x")
    if not (x and width.isdecimal() and height.isdecimal()) or any(int(n) % 16 or not int(n) for n in (width, height)):
        raise CommandError(f"--size must be WIDTHxHEIGHT in multiples of 16, such as 160x96, got {text!r}")
    return int(width), int(height)
