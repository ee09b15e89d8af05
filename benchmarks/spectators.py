# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of spectators: one player alone and with 20 spectators, in alternating segments.

    python benchmarks/spectators.py
    python benchmarks/spectators.py --spectators 64 --pairs 10

The server, the player and the spectators are three processes. A fake engine takes `--chunk-ms` for
a chunk of 12 frames. The frames are noise, which no codec can compress well. The player requests
chunks at playback speed. A pair consists of a segment without spectators and a segment with
spectators, in an order that alternates from pair to pair. The following values are measured for the
player in each segment:

    interval_ms  time between the arrivals of two consecutive chunks
    chunk_ms     time from the request for a chunk to its last frame
    cpu_ms       the server's CPU time per frame, including encoding and sending

`ratios` are medians over all pairs: the value of the segment with spectators divided by the value
of the segment without spectators.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # the fake engine
import itertools

from common import add_output_arguments, quantiles, save

SETTLE_CHUNKS = 4
"""Number of chunks that are not counted at the start of each segment, because spectators connect
and receive a key frame during these chunks.
"""


# -- the three processes ---------------------------------------------------------------------------


def serve(args: argparse.Namespace) -> None:
    """Print the port and run the server until its standard input ends."""
    from helpers.fake_engine import EndpointServer, FakeEngine

    from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
    from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo

    engine = FakeEngine()
    engine.noise, engine.delay_s = True, args.chunk_ms / 1000
    info = StreamInfo(height=args.height, width=args.width, model="noise", fps=args.fps)
    with EndpointServer(engine, EndpointLimits(), info) as server:
        print(server.port, flush=True)
        sys.stdin.read()


async def watch(port: int, token: str, number: int) -> None:
    """Receive frames with `number` spectators until standard input ends, and print the number of
    frames that each spectator received.
    """
    from websockets.asyncio.client import connect

    counts = [0] * number

    async def one(at: int) -> None:
        async with connect(f"ws://127.0.0.1:{port}/omni/watch", compression=None) as socket:
            await socket.send(json.dumps({"type": "watch", "token": token}))
            async for _ in socket:
                counts[at] += 1

    tasks = [asyncio.create_task(one(at)) for at in range(number)]
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    print(json.dumps(counts), flush=True)


@contextlib.contextmanager
def process(*words: str) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, __file__, *words]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as popen:
        try:
            yield popen
        finally:
            assert popen.stdin is not None
            popen.stdin.close()


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- the player ------------------------------------------------------------------------------------


class Player:
    """Player that requests chunks at playback speed."""

    def __init__(self, port: int, args: argparse.Namespace, server_pid: int) -> None:
        from helpers.fake_engine import FIRST, LATER, EndpointServer, infer

        self._infer, self._first, self._later = infer, FIRST, LATER
        self._args, self._server_pid = args, server_pid
        server: Any = type("Remote", (), {"port": port})
        self.client = EndpointServer.client(server)
        self.session_id = self.client.hello["session_id"]
        self._num_chunks = 0
        self._due_s = time.perf_counter()

    def play_chunk(self) -> tuple[float, float]:
        """Play a chunk. Return the time of its request and the arrival time of its last frame."""
        is_first = self._num_chunks == 0
        body = {"height": self._args.height, "width": self._args.width} if is_first else {}
        image: dict[str, Any] = {"image": None}
        if is_first:
            import numpy as np

            image["image"] = np.zeros((self._args.height, self._args.width, 3), np.uint8)
        time.sleep(max(0.0, self._due_s - time.perf_counter()))
        num_frames = self._first if is_first else self._later
        self._due_s = max(self._due_s, time.perf_counter()) + num_frames / self._args.fps
        started_s = time.perf_counter()
        self.client.send(
            self._infer(
                num_frames,
                request_id=f"chunk-{self._num_chunks}",
                extra_body={"video_format": "h264", **body},
                **image,
            )
        )
        self.client.frames()
        self._num_chunks += 1
        return started_s, time.perf_counter()

    def segment(self, seconds: float) -> dict[str, Any]:
        for _ in range(SETTLE_CHUNKS):
            self.play_chunk()
        before_s, chunks = cpu_s(self._server_pid), []
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            chunks.append(self.play_chunk())
        frames = len(chunks) * self._later
        arrivals_s = [arrived_s for _, arrived_s in chunks]
        return {
            "interval_ms": quantiles([1000 * (b - a) for a, b in itertools.pairwise(arrivals_s)]),
            "chunk_ms": quantiles([1000 * (came_s - sent_s) for sent_s, came_s in chunks]),
            "cpu_ms": round(1000 * (cpu_s(self._server_pid) - before_s) / frames, 3),
            "frames": frames,
        }

    def create_token(self, port: int) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("POST", f"/v1/sessions/{self.session_id}/spectators")
        token: str = json.loads(connection.getresponse().read())["token"]
        connection.close()
        return token


def with_spectators(player: Player, port: int, args: argparse.Namespace) -> dict[str, Any]:
    token = player.create_token(port)
    words = ("--watch", str(port), token, "--spectators", str(args.spectators))
    with process(*words) as popen:
        assert popen.stdin is not None
        assert popen.stdout is not None
        settling = threading.Event()
        threading.Timer(args.start_s, settling.set).start()
        while not settling.is_set():  # wait until the spectators' interpreter has started
            player.play_chunk()
        result = player.segment(args.seconds)
        popen.stdin.close()
        counts = json.loads(popen.stdout.readline())
    return {**result, "frames_of_slowest_spectator": min(counts)}


def ratio(pairs: list[tuple[dict[str, Any], dict[str, Any]]], *names: str) -> dict[str, float]:
    ratios = []
    for alone, watched in pairs:
        values = [alone, watched]
        for name in names:
            values = [value[name] for value in values]
        ratios.append(values[1] / values[0])
    return {
        "median": round(statistics.median(ratios), 3),
        "min": round(min(ratios), 3),
        "max": round(max(ratios), 3),
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    names = ("fps", "width", "height", "chunk_ms")
    words = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]
    pairs = []
    with process("--serve", *words) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        player = Player(port, args, server.pid)
        for number in range(args.pairs):
            if number % 2:
                watched = with_spectators(player, port, args)
                alone = player.segment(args.seconds)
            else:
                alone = player.segment(args.seconds)
                watched = with_spectators(player, port, args)
            pairs.append((alone, watched))
            print(alone, watched, sep="\n", file=sys.stderr, flush=True)
    return {
        "spectators": args.spectators,
        "size": f"{args.width}x{args.height}",
        "fps": args.fps,
        "load_average": os.getloadavg()[0],
        "ratios": {
            "interval_p50": ratio(pairs, "interval_ms", "p50"),
            "interval_p90": ratio(pairs, "interval_ms", "p90"),
            "chunk_p50": ratio(pairs, "chunk_ms", "p50"),
            "cpu": ratio(pairs, "cpu_ms"),
        },
        "pairs": [{"alone": alone, "with_spectators": watched} for alone, watched in pairs],
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spectators", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=10.0, help="of a segment")
    parser.add_argument("--start-s", type=float, default=3.0, help="until spectators have joined")
    parser.add_argument("--fps", type=float, default=24.0)
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--height", type=int, default=96)
    parser.add_argument("--chunk-ms", type=float, default=200.0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--watch", nargs=2, help=argparse.SUPPRESS)
    add_output_arguments(parser)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    if args.serve:
        serve(args)
    elif args.watch:
        asyncio.run(watch(int(args.watch[0]), args.watch[1], args.spectators))
    else:
        save("spectators", run(args), args)


if __name__ == "__main__":
    main()
