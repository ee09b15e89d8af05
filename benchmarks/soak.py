# SPDX-License-Identifier: Apache-2.0
"""Run clients against a real server for hours, and check that no server process's memory grows.

    python benchmarks/soak.py --hours 2

The server is `vllm serve --omni` with a tiny causal Wan model. Clients open a live stream, steer
it, receive one chunk per second and leave. Half of the clients drop the connection during a chunk.
`/metrics` is read repeatedly, as a monitoring system would read it. The resident memory of every
server process is recorded twice per minute. `slope_mb_per_h` is the Theil-Sen estimate: the median
slope between all pairs of records after the first quarter of the run. Therefore, neither the start
of the run nor a single jump can determine the result.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
from websockets.asyncio.client import connect

sys.path.insert(0, str(Path(__file__).parent))
from common import add_output_arguments, save
from realtime_clients import GENERATE_PATH

from vllm_omni.entrypoints.loopback import open_loopback

HEIGHT, WIDTH = 64, 96
NOTE_EVERY_S = 30.0
NUM_PROMPTS = 64
"""Number of different prompts in all visits. The server caches text embeddings (3 kB per prompt in
the tiny model) up to a byte limit.
"""
SETTLES_IN = 0.25
"""Share of the run that is excluded at the start, because caches and heaps are still filling."""


class Viewers:
    """Keeps a fixed number of viewers playing at the same time until `end_s`. Each viewer that
    leaves is replaced by a new viewer.
    """

    def __init__(self, port: int, at_once: int, end_s: float, seed: int) -> None:
        self._port, self._at_once, self._end_s = port, at_once, end_s
        self._random = random.Random(seed)
        self.num_visits = self.num_chunks = self.num_cut = 0
        self.errors: list[str] = []

    async def run(self) -> None:
        await asyncio.gather(*(self._one_after_the_other() for _ in range(self._at_once)))

    async def _one_after_the_other(self) -> None:
        while time.monotonic() < self._end_s:
            try:
                await self._visit(
                    num_chunks=self._random.randint(2, 20), cut=self._random.random() < 0.5
                )
            except Exception as error:  # boundary: every viewer error is counted and reported
                self.errors.append(repr(error))
                await asyncio.sleep(1.0)

    async def _visit(self, num_chunks: int, cut: bool) -> None:
        pack = msgspec.msgpack.encode
        async with connect(
            f"ws://127.0.0.1:{self._port}{GENERATE_PATH}", max_size=None, proxy=None
        ) as socket:
            prompt = f"visit {self._random.randrange(NUM_PROMPTS)}"
            init = {"type": "init", "prompt": prompt, "size": f"{WIDTH}x{HEIGHT}"}
            await socket.send(pack({**init, "extensions": ["credit", "receipts"]}))
            for number in range(num_chunks):
                await socket.send(pack({"type": "credit", "chunks": 1}))
                if cut and number == num_chunks - 1:
                    await asyncio.sleep(0.02)
                    socket.transport.abort()
                    self.num_cut += 1
                    break
                await self._chunk(socket)
                event = {
                    "type": "event",
                    "kind": "prompt",
                    "payload": f"turn {number}",
                    "event_id": number,
                }
                await socket.send(pack(event))
                await asyncio.sleep(1.0)
        self.num_visits += 1

    async def _chunk(self, socket: Any) -> None:
        async with asyncio.timeout(60):
            while True:
                message = await socket.recv()
                head = message[:200]
                if b"chunk_stats" in head:
                    self.num_chunks += 1
                    return
                if b"content" in head and b"error" in head:
                    raise RuntimeError(f"the server says {message!r}")


class Memory:
    """Records of the resident memory of a process and all its descendants, by process name and
    id.
    """

    def __init__(self, pid: int, port: int) -> None:
        self._root, self._port = psutil.Process(pid), port
        self.notes: dict[str, list[tuple[float, float]]] = {}

    async def run(self) -> None:
        started_s = time.monotonic()
        while True:
            for process in (self._root, *self._root.children(recursive=True)):
                try:
                    name, rss_mb = (
                        f"{process.name()} {process.pid}",
                        process.memory_info().rss / 1e6,
                    )
                except psutil.NoSuchProcess:
                    continue
                self.notes.setdefault(name, []).append(
                    (time.monotonic() - started_s, round(rss_mb, 2))
                )
            await asyncio.to_thread(self._read_metrics)
            await asyncio.sleep(NOTE_EVERY_S)

    def _read_metrics(self) -> None:
        with open_loopback(f"http://127.0.0.1:{self._port}/metrics", timeout_s=30) as response:
            response.read()


def slope_mb_per_h(notes: list[tuple[float, float]]) -> float:
    """Return the median slope between all pairs of `(seconds, MB)`, in MB per hour."""
    slopes = [
        (b_mb - a_mb) / (b_s - a_s) for (a_s, a_mb), (b_s, b_mb) in itertools.combinations(notes, 2)
    ]
    return statistics.median(slopes) * 3600


async def soak(pid: int, port: int, args: argparse.Namespace) -> dict[str, Any]:
    viewers = Viewers(port, args.visitors, time.monotonic() + args.hours * 3600, args.seed)
    memory = Memory(pid, port)
    noting = asyncio.create_task(memory.run())
    await viewers.run()
    noting.cancel()
    rows = []
    for name, notes in memory.notes.items():
        settled = notes[int(SETTLES_IN * len(notes)) :]
        if len(settled) > 2:
            mb = [note_mb for _, note_mb in settled]
            slope = round(slope_mb_per_h(settled), 2)
            rows.append(
                {"process": name, "slope_mb_per_h": slope, "first_mb": mb[0], "last_mb": mb[-1]}
            )
    return {
        "hours": args.hours,
        "visits": viewers.num_visits,
        "cut": viewers.num_cut,
        "chunks": viewers.num_chunks,
        "errors": len(viewers.errors),
        "first_errors": viewers.errors[:3],
        "processes": rows,
        "notes_mb": {
            name: [note_mb for _, note_mb in notes[::20]] for name, notes in memory.notes.items()
        },
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--visitors", type=int, default=4, help="at once (default: 4)")
    parser.add_argument("--seed", type=int, default=0)
    add_output_arguments(parser)
    return parser


def main() -> None:

    from vllm_omni.entrypoints.cli import demo
    from vllm_omni.entrypoints.cli.checkpoints.make_tiny import write_tiny

    args = make_parser().parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        write_tiny("causal_wan", model)
        port = demo.free_port(0)
        with demo.server(
            model, port, HEIGHT, WIDTH, Path(name) / "server.log", extra=["--enforce-eager"]
        ) as process:
            demo.wait_until_healthy(process, 300)
            row = asyncio.run(soak(process.popen.pid, port, args))
    save("soak", {"rows": [row]}, args)


if __name__ == "__main__":
    main()
