# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni demo`: serve a world, walk through it over its WebSocket, and write a video.

The command starts `vllm serve ... --omni` as a child process, streams a walk chunk by chunk, and
writes `demo.mp4` and `demo.png`. Without `--once`, the server then keeps running until Ctrl-C. By
default, the demo serves this package's trained world and follows the tour in its world description.
The demo succeeds only if frames arrive, the video contains all of them, and they are not all
identical.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_omni.entrypoints.cli.doctor import check_vllm
from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.entrypoints.cli.output_paths import check_file, create_directory
from vllm_omni.entrypoints.cli.parsers import add_command
from vllm_omni.entrypoints.loopback import open_loopback, websocket_proxy
from vllm_omni.entrypoints.webui.address import page_url

if TYPE_CHECKING:
    import numpy as np

    from vllm_omni.worlds.description import WorldDescription

# N pixel frames, T frames, H height, W width, C = 3 channels

ENDPOINT = "/v1/realtime/world/camera"
_HOST = "127.0.0.1"
_LOG_LINES_SHOWN = 20
_EXCEPTION = re.compile(r"\b[A-Za-z_.]*(?:Error|Exception|error): \S.*")
_STOP_S = 20.0
_CHUNK_TIMEOUT_S = 300.0
_TURNS = ("", "", "l", "l", "", "", "j", "j")
"""For a world without a tour, the keys held in addition to `w` in each latent frame, repeated
cyclically.
"""
_SIZE = (160, 96)
"""Width and height of the frames in pixels, for a world without a world description."""
PROMPT = "A path through green hills towards the evening sun"
_CHUNKS = 5
_LOG, _VIDEO, _SHEET = "demo_server.log", "demo.mp4", "demo.png"
"""Names of the files that the demo writes."""


def add_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "demo",
        "serve a world, walk through it, write demo.mp4 and demo.png",
        (
            "Start `vllm serve ... --omni` with a world, stream a walk through it over its "
            "WebSocket, and write the frames to demo.mp4 and demo.png. The server keeps running "
            "until Ctrl-C, and the address of its page is printed."
        ),
        [
            "vllm-omni demo",
            "vllm-omni demo --once --out walks",
            "vllm-omni demo --model my_world --chunks 8",
        ],
    )
    parser.add_argument(
        "--once", action="store_true", help="stop the server after the files are written"
    )
    parser.add_argument(
        "--model",
        type=Path,
        help="checkpoint directory (default: the trained world of this package)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path(), help="directory for the files (default: here)"
    )
    parser.add_argument(
        "--chunks",
        type=int,
        help="chunks to stream (default: the length of the world's tour, else 5)",
    )
    parser.add_argument(
        "--port", type=int, default=8000, help="port; if it is in use, any free one (default: 8000)"
    )
    parser.add_argument(
        "--start-timeout", type=float, default=600.0, help="seconds the server may take to start"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    started_s = time.monotonic()
    if args.chunks is not None and args.chunks < 1:
        raise CommandError(f"--chunks must be >= 1, got {args.chunks}")
    create_directory("--out", args.out)
    for name in (_LOG, _VIDEO, _SHEET):
        check_file("--out", args.out / name)
    repair_installation()
    model, description = find_world(args.model)
    width, height = description.sizes[0] if description else _SIZE
    walk = plan_walk(model, description)
    port = free_port(args.port)
    if port != args.port:
        print(f"port {args.port} is in use or 0; using {port}")
    interrupt_on_signals()
    with server(model, port, height, width, args.out / _LOG) as process:
        wait_until_healthy(process, args.start_timeout)
        url = f"ws://{_HOST}:{port}{ENDPOINT}"
        write_files(stream_walk(url, walk, height, width, args.chunks, started_s), args.out)
        if not args.once:
            print(f"\nopen {page_url(_HOST, port)} in a browser to walk through it yourself")
            print(f"serving {model} at {url} (log: {process.log}); Ctrl-C stops it", flush=True)
            wait_for_interrupt(process)
    return 0


def repair_installation() -> None:
    """Run `vllm-omni doctor --fix` if vLLM is not usable, for example after installing its CPU
    build.

    Raises:
        CommandError: The installation still has a fault, which the user must repair.
    """
    if check_vllm().status == "ok":
        return
    print("a new installation: running `vllm-omni doctor --fix`", flush=True)
    # Run the doctor in another process because it imports torch and vLLM.
    command = [sys.executable, "-m", "vllm_omni.entrypoints.cli.main", "doctor", "--fix"]
    if subprocess.run(command, check=False).returncode != 0:
        raise CommandError("the installation has the faults that are marked `fail` above")


def find_world(model: Path | None) -> "tuple[Path, WorldDescription | None]":
    """Return the checkpoint directory to serve, and its world description if it has one.

    Args:
        model: Checkpoint directory. None: this package's trained world.

    Raises:
        CommandError: The checkpoint does not exist.
    """
    from vllm_omni.worlds import village_checkpoint
    from vllm_omni.worlds.description import read_description

    try:
        model = model or village_checkpoint()
        return model, read_description(model)
    except ValueError as error:
        raise CommandError(str(error)) from error


# ---- the server


@dataclass(frozen=True)
class ServerProcess:
    """A running `vllm serve` process."""

    popen: "subprocess.Popen[bytes]"
    """The server process, which is the leader of its process group."""
    port: int
    """Port of the server."""
    log: Path
    """File that receives the server's output."""

    def excerpt(self) -> str:
        """Return the exceptions logged by any process, or the last lines of the log if there are
        none.
        """
        lines = self.log.read_text(errors="replace").splitlines()
        serious = [line for line in lines if " WARNING " not in line and " INFO " not in line]
        causes = dict.fromkeys(match[0] for line in serious if (match := _EXCEPTION.search(line)))
        return "\n".join([*causes][:_LOG_LINES_SHOWN] or lines[-_LOG_LINES_SHOWN:])

    def failure(self, what: str) -> CommandError:
        """Print the excerpt of the log, and return the error for the caller to raise."""
        print(f"---- from {self.log} ----\n{self.excerpt()}\n----", file=sys.stderr)
        return CommandError(f"{what}; the lines above are from its log {self.log}")

    def stop(self) -> None:
        """Stop the server and its child processes, and give them time to clean up."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(_STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


@contextlib.contextmanager
def server(
    model: Path | str,
    port: int,
    height: int | None,
    width: int | None,
    log: Path,
    model_options: Mapping[str, Any] | None = None,
    extra: Sequence[str] = (),
) -> Iterator[ServerProcess]:
    """Run `vllm serve MODEL --omni` on the loopback address for the duration of the `with` block.

    Args:
        model: Checkpoint directory, or the id of a Hugging Face repository.
        port: Port of the server.
        height: Height of the frames in pixels. None: the model's default height.
        width: Width of the frames in pixels. None: the model's default width.
        log: File that receives the server's output.
        model_options: Value of `omni.model`.
        extra: Additional arguments for `vllm serve`.
    """
    command = [*serve_command(model, port, height, width, model_options), *extra]
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **os.environ}
    with log.open("wb") as output:
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
    process = ServerProcess(popen, port, log)
    try:
        print("started:", shlex.join(command), flush=True)
        yield process
    finally:
        process.stop()


def serve_command(
    model: Path | str,
    port: int,
    height: int | None,
    width: int | None,
    model_options: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return the documented `vllm serve` command, run with the `vllm` executable from this Python
    environment.
    """
    vllm = Path(sys.executable).with_name("vllm")
    omni: dict[str, Any] = {"model": dict(model_options)} if model_options else {}
    omni |= {} if height is None else {"height": height, "width": width}
    return [
        *([str(vllm)] if vllm.exists() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]),
        *(
            "serve",
            str(model),
            "--omni",
            "--host",
            _HOST,
            "--port",
            str(port),
        ),
        *(["--additional-config", json.dumps({"omni": omni})] if omni else []),
    ]


def wait_until_healthy(process: ServerProcess, timeout_s: float) -> None:
    """Wait until `/health` returns 200.

    Raises:
        CommandError: The server exits or does not start in time. An excerpt from its log is
            printed.
    """
    url = f"http://{_HOST}:{process.port}/health"
    started_s = time.monotonic()
    print("starting vLLM (a first start takes about half a minute)", flush=True)
    while (elapsed_s := time.monotonic() - started_s) < timeout_s:
        if (code := process.popen.poll()) is not None:
            raise process.failure(f"the server ended with status {code} while starting")
        if is_healthy(url):
            print(f"the server started in {elapsed_s:.0f} s", flush=True)
            return
        time.sleep(0.25)
    raise process.failure(f"the server was not ready within {timeout_s:.0f} s")


def is_healthy(url: str) -> bool:
    """Return whether an HTTP GET request returns status 200."""
    try:
        with open_loopback(url, timeout_s=5) as response:
            return int(response.status) == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def interrupt_on_signals() -> None:
    """Handle SIGTERM and SIGHUP like Ctrl-C, so the server also stops when the terminal is
    closed.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


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
    """Return `wanted` if it is free on the loopback address, otherwise any free port."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError, OverflowError):
                probe.bind((_HOST, port))
                return int(probe.getsockname()[1])
    raise CommandError("no free TCP port on the loopback address")


# ---- the walk


@dataclass(frozen=True)
class ReceivedChunk:
    """A chunk that the demo has received."""

    frames: "np.ndarray"
    """Decoded frames of the chunk. Shape: `[T, H, W, 3]`."""
    wall_s: float
    """Time in seconds from sending the request to receiving the last byte."""
    wire_bytes: int
    """Total size of the chunk's messages in bytes."""
    timing: dict[str, float]
    """Time in milliseconds that the server spent in each stage."""


@dataclass(frozen=True)
class DemoWalk:
    """Inputs for the demo's walk."""

    image: bytes
    """Contents of the start image file."""
    prompts: dict[int, str]
    """Prompts, by the latent frame at which each one takes effect."""
    keys: list[list[str]] | None = None
    """Keys held in each latent frame. None: walk forward indefinitely."""
    seed: int = 7
    """Noise seed. Default: 7."""

    def held_keys(self, latent_frames: range) -> list[list[str]]:
        """Return the keys held in a range of latent frames."""
        if self.keys is not None:
            return self.keys[latent_frames.start : latent_frames.stop]
        return [["w", *_TURNS[frame % len(_TURNS)]] for frame in latent_frames]

    def prompt(self, latent_frames: range) -> str | None:
        """Return the prompt that takes effect in a range of latent frames, or None if there is
        none.
        """
        return next((text for frame, text in self.prompts.items() if frame in latent_frames), None)

    def num_chunks(self, first: int, later: int) -> int:
        """Return the number of chunks for which the walk has keys."""
        return _CHUNKS if self.keys is None else 1 + max(0, len(self.keys) - first) // later


def plan_walk(model: Path, description: "WorldDescription | None") -> DemoWalk:
    """Return the tour from the world description, or a walk forward if the world has no tour."""
    from vllm_omni.worlds.description import description_file

    if description is None or description.tour is None:
        return DemoWalk(start_image(), {0: PROMPT})
    tour = description.tour
    return DemoWalk(
        image=description_file(model, tour.start).read_bytes(),
        prompts={frame: description.prompt(name) for frame, name in tour.prompts},
        keys=[list(held) for held in tour.keys],
        seed=tour.seed,
    )


def stream_walk(
    url: str,
    walk: DemoWalk,
    height: int,
    width: int,
    num_chunks: int | None,
    started_s: float | None = None,
) -> list[ReceivedChunk]:
    """Walk through the world chunk by chunk, and print a line for each chunk.

    Args:
        url: WebSocket URL.
        walk: Inputs for the walk.
        height: Height of the frames in pixels.
        width: Width of the frames in pixels.
        num_chunks: Number of chunks. None: the whole walk.
        started_s: Monotonic time at which the command started. The time to the first frame is
            printed relative to it.

    Returns:
        The received chunks.

    Raises:
        CommandError: The stream failed, or a chunk had an unexpected number of frames.
    """
    import msgspec
    from websockets.exceptions import WebSocketException
    from websockets.sync.client import connect

    chunks: list[ReceivedChunk] = []
    try:
        with connect(
            url, max_size=None, compression=None, open_timeout=30, proxy=websocket_proxy(url)
        ) as socket_:
            hello = msgspec.msgpack.decode(_binary(socket_.recv(timeout=30)))
            stride = hello["vae_stride"][0]
            latents = [-(-hello[name] // stride) for name in ("first_chunk_frames", "chunk_frames")]
            first_latent = 0
            for index in range(num_chunks or walk.num_chunks(*latents)):
                count = hello["chunk_frames" if index else "first_chunk_frames"]
                part = range(first_latent, first_latent + latents[min(index, 1)])
                request: dict[str, Any] = {
                    "endpoint": "infer",
                    "actions": walk.held_keys(part),
                    "extra_body": {
                        "height": height,
                        "width": width,
                        "seed": walk.seed,
                        "video_format": "mp4",
                    },
                }
                if index == 0:
                    request["image"] = walk.image
                if (prompt := walk.prompt(part)) is not None:
                    request["prompt"] = prompt
                chunk = _infer(socket_, request)
                if len(chunk.frames) != count:
                    raise CommandError(
                        f"chunk {index} has {len(chunk.frames)} frames, {count} were requested"
                    )
                chunks.append(chunk)
                if index == 0 and started_s is not None:
                    print(f"first frame after {time.monotonic() - started_s:.0f} s")
                print(describe_chunk(index, chunk), flush=True)
                first_latent = part.stop
    except (
        WebSocketException,
        OSError,
        TimeoutError,
        msgspec.DecodeError,
        KeyError,
        ValueError,
    ) as error:
        raise CommandError(
            f"streaming from {url} failed: {type(error).__name__}: {error}"
        ) from error
    return chunks


def _infer(socket_: Any, request: dict[str, Any]) -> ReceivedChunk:
    """Send one request and collect the messages of its chunk.

    Raises:
        CommandError: The server replied with an error.
    """
    import msgspec
    import numpy as np

    from vllm_omni.entrypoints.media.mp4 import decode_mp4

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
            return ReceivedChunk(
                np.concatenate(parts), time.monotonic() - started, wire_bytes, timing
            )


def _binary(message: str | bytes) -> bytes:
    if isinstance(message, str):
        raise ValueError(f"expected a binary message, got text {message[:200]!r}")
    return message


def describe_chunk(index: int, chunk: ReceivedChunk) -> str:
    """Return one line with a chunk's frame count, time, rate and size, and the server's stage
    times.
    """
    count = len(chunk.frames)
    stages = [
        f"{name.removesuffix('_ms')} {ms:.0f}"
        for name, ms in chunk.timing.items()
        if name != "total_ms" and ms >= 0.5
    ]
    return (
        f"chunk {index}: {count} frames in {1000 * chunk.wall_s:.0f} ms "
        f"({count / chunk.wall_s:.0f}/s), {chunk.wire_bytes / 1000:.0f} "
        "kB" + (f"; ms: {', '.join(stages)}" if stages else "")
    )


def start_image() -> bytes:
    """Return the bundled start image, a PNG drawn by scripts/draw_start_image.py."""
    return (
        importlib.resources.files("vllm_omni.entrypoints.cli") / "data" / "start.png"
    ).read_bytes()


# ---- the files


def write_files(chunks: Sequence[ReceivedChunk], out: Path, fps: float = 16) -> None:
    """Write `demo.mp4` and `demo.png`, then read the video back.

    Raises:
        CommandError: The video has an unexpected number of frames, or all its frames are identical.
    """
    import numpy as np

    from vllm_omni.entrypoints.media.mp4 import contact_sheet, decode_mp4, encode_mp4

    frames_THWC = np.concatenate([chunk.frames for chunk in chunks])
    video, sheet = out / _VIDEO, out / _SHEET
    video.write_bytes(encode_mp4(frames_THWC, fps))
    shown = np.linspace(0, len(frames_THWC) - 1, min(12, len(frames_THWC))).round().astype(int)
    contact_sheet(frames_THWC[shown], columns=4).save(sheet)
    written_THWC, _ = decode_mp4(video.read_bytes())
    if len(written_THWC) != len(frames_THWC):
        raise CommandError(
            f"{video} has {len(written_THWC)} frames, {len(frames_THWC)} were received"
        )
    if (written_THWC == written_THWC[0]).all():
        raise CommandError(f"all {len(written_THWC)} frames of {video} are equal")
    print(
        f"wrote {video} ({len(frames_THWC)} frames, {len(frames_THWC) / fps:.1f} s) and {sheet}",
        flush=True,
    )
