# SPDX-License-Identifier: Apache-2.0
"""Attack a real server and measure the effect on the server's other clients.

    vllm-omni make-tiny causal_wan tiny_causal_wan
    python benchmarks/served_attacks.py tiny_causal_wan

The server is `vllm serve --omni`, started as a user would start it. Well-behaved clients
(neighbours) each request one chunk every `--period-s` seconds, at scheduled times. A chunk's time
runs from the scheduled time of its request to the arrival of the chunk, so if the server stalls,
every delayed chunk shows the delay. The neighbours first run alone, and then alongside each attack
in `realtime_attackers.py` in turn. `/health` is requested throughout. `program` is not an attack:
like the attackers, it uses CPU time, but it does nothing else. Added latency is a chunk's time
minus the median time of the chunks before the attacks. The added latency of the chunks before the
attacks shows how noisy the machine and the engine are. The attackers get only the CPU time that
other processes leave (`nice`), because real attackers would run on other machines. With `--apart`,
the server has the first core to itself and all other processes share the other cores, so only the
attack's cost to the server is measured. `other_load` is the number of cores that other programs
used during the measurement.
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
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
from websockets.asyncio.client import ClientConnection, connect

sys.path.insert(0, str(Path(__file__).parent))
from common import add_output_arguments, quantiles, save
from realtime_clients import GENERATE_PATH, init_message

from vllm_omni.entrypoints.cli import demo
from vllm_omni.entrypoints.cli.demo import start_image

ATTACKS = ("program", "fragments", "pings", "values", "tensors", "downloads", "drips")
QUIET = "quiet"
TARGET_MS = {"added_latency_p99": 50.0, "health_p99": 100.0}
_CHUNK_TIMEOUT_S = 60.0
_HEALTH_EVERY_S = 0.02
_REST_S = 2.0
_HERE = Path(__file__).parent
_pack = msgspec.msgpack.encode


class Neighbour:
    """Client for one session. `chunks` contains tuples (scheduled request time, time until the
    chunk arrived), in seconds.
    """

    def __init__(self, port: int, width: int, height: int) -> None:
        self._url = f"ws://127.0.0.1:{port}{GENERATE_PATH}"
        self._init = {**init_message(width, height), "extensions": ["credit"]}
        self._stopped = False
        self.session_id = ""
        self.chunks: list[tuple[float, float]] = []
        self._deadline_s: float | None = None

    def felt(self) -> list[tuple[float, float]]:
        """Return `chunks` and, if a requested chunk has not arrived yet, an entry with the time
        that this chunk has taken so far.
        """
        now_s = time.monotonic()
        late = (
            []
            if self._deadline_s is None or self._deadline_s > now_s
            else [(self._deadline_s, now_s - self._deadline_s)]
        )
        return [*self.chunks, *late]

    def stop(self) -> None:
        self._stopped = True

    async def run(self, deadline_s: float, period_s: float) -> None:
        """Start a session now, and request a chunk every `period_s` seconds from `deadline_s`
        on.
        """
        async with connect(self._url, max_size=None, compression=None, proxy=None) as socket:
            session = await self._send(socket, self._init)
            if session.get("code") == "missing_image":
                session = await self._send(socket, {**self._init, "first_frame": start_image()})
            assert session["type"] == "session", session
            self.session_id = session["session_id"]
            await self._chunk(socket)
            while not self._stopped:
                self._deadline_s = deadline_s
                await asyncio.sleep(deadline_s - time.monotonic())
                await self._chunk(socket)
                self._deadline_s = None
                self.chunks.append((deadline_s, time.monotonic() - deadline_s))
                deadline_s += period_s

    async def _send(self, socket: ClientConnection, init: dict[str, Any]) -> dict[str, Any]:
        await socket.send(_pack(init))
        response: dict[str, Any] = msgspec.msgpack.decode(await socket.recv())  # type: ignore[arg-type]
        return response

    async def _chunk(self, socket: ClientConnection) -> None:
        await socket.send(_pack({"type": "credit", "chunks": 1}))
        async with asyncio.timeout(_CHUNK_TIMEOUT_S):
            while b"chunk_stats" not in (head := (await socket.recv())[:64]):
                assert b"error" not in head, head


class Health:
    """Requests `/health` repeatedly over one connection. `answers` contains tuples (start time,
    duration), in seconds.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.responses: list[tuple[float, float]] = []
        self.stopped = False

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        while not self.stopped:
            requested_s = time.monotonic()
            connection.request("GET", "/health")
            response = connection.getresponse()
            response.read()
            assert response.status == 200, response.status
            self.responses.append((requested_s, time.monotonic() - requested_s))
            time.sleep(_HEALTH_EVERY_S)
        connection.close()


class OtherLoad:
    """Measures how many cores other programs have used since this object was created."""

    def __init__(self) -> None:
        self._started_s, self._before_s = time.monotonic(), self._spent_s()

    def _spent_s(self) -> float:
        machine, own_s = psutil.cpu_times(), 0.0
        for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
            own = process.cpu_times()
            own_s += own.user + own.system
        return machine.user + machine.nice + machine.system + machine.softirq - own_s

    def cores(self) -> float:
        passed_s = time.monotonic() - self._started_s
        return round(max(0.0, self._spent_s() - self._before_s) / passed_s, 2)


def attackers(kind: str, port: int, sockets: int, session_id: str) -> subprocess.Popen[str]:
    options = {
        "kind": kind,
        "port": port,
        "sockets": sockets,
        "path": f"/v1/sessions/{session_id}/snapshot",
    }
    command = [sys.executable, str(_HERE / "realtime_attackers.py"), json.dumps(options)]
    return subprocess.Popen(["nice", "-n", "19", *command], stdout=subprocess.PIPE, text=True)


class Neighbourhood:
    """All clients of the server on `port`: the neighbours, and the client that requests
    `/health`.
    """

    def __init__(self, port: int, args: argparse.Namespace) -> None:
        self._port, self._args = port, args
        self._neighbours = [Neighbour(port, args.width, args.height) for _ in range(args.sessions)]
        self._health = Health(port)
        self._usual_ms = 0.0

    async def measure(self) -> list[dict[str, Any]]:
        """Return one row for the time before the attacks and one row for each attack."""
        args, rows = self._args, []
        first_s = time.monotonic() + args.warm_up_s
        async with asyncio.TaskGroup() as group:
            for number, neighbour in enumerate(self._neighbours):
                deadline_s = first_s + number * args.period_s / args.sessions
                group.create_task(neighbour.run(deadline_s, args.period_s))
            await asyncio.sleep(args.warm_up_s + args.period_s)
            group.create_task(asyncio.to_thread(self._health.run))
            try:
                for kind in (QUIET, *args.attack):
                    rows.append(await self._row(kind))
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                    await asyncio.sleep(_REST_S)
            finally:
                self._health.stopped = True
            for neighbour in self._neighbours:
                neighbour.stop()
        return rows

    async def _row(self, kind: str) -> dict[str, Any]:
        with contextlib.ExitStack() as stack:
            if kind != QUIET:
                attack = attackers(
                    kind, self._port, self._args.attackers, self._neighbours[0].session_id
                )
                stack.callback(attack.kill)
                assert attack.stdout is not None
                assert await asyncio.to_thread(attack.stdout.readline) == "open\n"
            start_s, load = time.monotonic(), OtherLoad()
            await asyncio.sleep(self._args.seconds)
            other_load = load.cores()
        chunks_ms = [
            ms for neighbour in self._neighbours for ms in since(start_s, neighbour.felt())
        ]
        if kind == QUIET:
            self._usual_ms = statistics.median(chunks_ms)
        return {
            "attack": kind,
            "chunks": len(chunks_ms),
            "usual_chunk_ms": round(self._usual_ms, 1),
            "added_latency_ms": quantiles([ms - self._usual_ms for ms in chunks_ms]),
            "health_ms": quantiles(since(start_s, self._health.responses)),
            "other_load": other_load,
        }


def since(start_s: float, noted: list[tuple[float, float]]) -> list[float]:
    """Return the durations in milliseconds of all requests that started at `start_s` or later.
    Earlier requests are excluded, because the attackers were still starting.
    """
    return [spent_s * 1e3 for at_s, spent_s in noted if at_s >= start_s]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--attack", choices=ATTACKS, nargs="+", default=ATTACKS)
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument(
        "--attackers", type=int, default=8, help="sockets of an attack (default: 8)"
    )
    parser.add_argument(
        "--period-s", type=float, default=2.0, help="of a neighbour's chunks (default: 2)"
    )
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--height", type=int, default=64)
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="of each attack, and before them (default: 30)"
    )
    parser.add_argument("--warm-up-s", type=float, default=10.0)
    parser.add_argument(
        "--apart",
        action="store_true",
        help="the server on the first core, everything else on others",
    )
    add_output_arguments(parser)
    return parser


def main() -> None:

    parser = make_parser()
    args = parser.parse_args()
    load_before = os.getloadavg()
    first, *others = sorted(os.sched_getaffinity(0))
    if args.apart and not others:
        parser.error("--apart needs two cores")
    if args.apart:
        os.sched_setaffinity(0, {first})  # the server inherits this affinity
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(first)
    with tempfile.TemporaryDirectory() as folder:
        port, log = demo.free_port(0), Path(folder) / "server.log"
        with demo.server(
            args.model, port, args.height, args.width, log, extra=["--enforce-eager"]
        ) as process:
            demo.wait_until_healthy(process, 300)
            if args.apart:
                os.sched_setaffinity(0, others)
            rows = asyncio.run(Neighbourhood(port, args).measure())
            log_text = log.read_text(errors="replace")
    tracebacks = log_text.count("Traceback (most recent call last)")
    result = {"load_average_before": load_before, "apart": args.apart, "target_ms": TARGET_MS}
    result |= {"tracebacks_in_log": tracebacks, "rows": rows}
    save("served_attacks", result, args)


if __name__ == "__main__":
    main()
