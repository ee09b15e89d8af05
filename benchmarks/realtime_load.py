# SPDX-License-Identifier: Apache-2.0
r"""Measure whether many live sessions receive every frame on time, with and without bad clients.

The server process runs this package's `/v1/realtime_video/generate` endpoint with a model that does
nothing but return each chunk when it is due. A load generator runs in another process on another
core, and bad clients run in a third process. A frame's added latency is the time from when the
model returns the frame to when the client has read it. Cadence is the number of frames read divided
by the number of frames due. `waited_for_core_percent` is the share of time for which the server or
its clients were ready to run but had no core. A value of more than a few percent means that other
load on the machine has delayed frames.

In an attack (`fragments`, `pings`, `values`), sockets flood the server and reconnect when the
server closes them. During an attack, the response time of an HTTP route is also recorded. `cost`
compares the server's CPU time per frame with that of a bare uvicorn server (with `websockets`) that
sends the same messages to the same clients. The two servers are measured alternately, several
times. The ratio should be similar on other machines.

    python benchmarks/realtime_load.py
    python benchmarks/realtime_load.py --scenario cost
    python benchmarks/realtime_load.py --scenario fragments pings values --sessions 8 \
        --bad-clients 8
    python benchmarks/realtime_load.py --scenario frozen --sessions 50
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
from websockets.sync.client import connect

sys.path.insert(0, str(Path(__file__).parent))
from common import add_output_arguments, quantiles, save
from realtime_clients import GENERATE_PATH, init_message

from vllm_omni.entrypoints.loopback import open_loopback

_HERE = Path(__file__).parent
_ATTACKS = ("fragments", "pings", "values")
_SCENARIOS = ("steady", "slow", "trickle", "never-reads", "frozen", *_ATTACKS, "disconnect", "cost")
_GONE_TIMEOUT_S = 60.0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scenario", choices=_SCENARIOS, nargs="+", default=["steady"])
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument(
        "--bad-clients", type=int, default=3, help="badly behaved clients beside them (default: 3)"
    )
    parser.add_argument("--fps", type=float, default=16.0)
    parser.add_argument(
        "--chunk-frames",
        type=int,
        default=4,
        help="frames the model makes at once (default: 4, one latent of Wan's VAE)",
    )
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--height", type=int, default=128, help="160x128 RGB is 60 KiB a frame")
    parser.add_argument(
        "--controls-per-s", type=float, default=2.0, help="key events of each session (default: 2)"
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--warm-up-s", type=float, default=5.0)
    parser.add_argument(
        "--loop", choices=("uvloop", "asyncio"), default="uvloop", help="vLLM serves with uvloop"
    )
    parser.add_argument(
        "--no-pin", action="store_true", help="let server and clients share all cores"
    )
    add_output_arguments(parser)
    return parser


@contextlib.contextmanager
def process(
    script: str, options: dict[str, Any], core: int | None
) -> Iterator[subprocess.Popen[str]]:
    """Run a child process of this benchmark, and stop it when the context exits."""
    command = [sys.executable, str(_HERE / script), json.dumps(options)]
    pin = (lambda: os.sched_setaffinity(0, {core})) if core is not None else None
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=pin)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


class Server:
    def __init__(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        self.port = int(child.stdout.readline())
        self.process = psutil.Process(child.pid)
        wait_for(lambda: self.state() is not None)

    def state(self) -> dict[str, Any] | None:
        try:
            with open_loopback(f"http://127.0.0.1:{self.port}/state", timeout_s=10) as response:
                return json.load(response)
        except OSError:
            return None

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system


def waited_s(pid: int) -> float:
    """Return the seconds for which a process's main thread was ready to run but had no core."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def wait_for(condition: Callable[[], Any], timeout_s: float = _GONE_TIMEOUT_S) -> float | None:
    """Wait until `condition` holds, and return the seconds that this took, or None after
    `timeout_s`.
    """
    started_s = time.monotonic()
    while not condition():
        if time.monotonic() - started_s > timeout_s:
            return None
        time.sleep(0.05)
    return time.monotonic() - started_s


def recorded_messages(args: argparse.Namespace) -> list[bytes]:
    """Record the messages that the endpoint sends to a client for one chunk, in order."""
    with (
        process("realtime_server.py", server_options(args), None) as child,
        contextlib.ExitStack() as stack,
    ):
        socket = stack.enter_context(
            connect(
                f"ws://127.0.0.1:{Server(child).port}{GENERATE_PATH}", max_size=None, proxy=None
            )
        )
        socket.send(msgspec.msgpack.encode(init_message(args.width, args.height)))
        chunks: list[list[bytes]] = []
        while len(chunks) < 3:
            message = socket.recv()
            assert isinstance(message, bytes)
            is_pixels = len(message) == args.chunk_frames * args.width * args.height * 3
            if not is_pixels and msgspec.msgpack.decode(message)["type"].startswith("frame_batch"):
                chunks.append([])
            chunks[-1].append(message)
    return chunks[1]


def cost(args: argparse.Namespace, repeats: int = 5) -> dict[str, Any]:
    """Measure the CPU time per frame, in microseconds, of this package's endpoint and of the bare
    server, in alternating runs.
    """
    spent_us: dict[str, list[float]] = {"bare_server.py": [], "realtime_server.py": []}
    cadences, waits = [], []
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        messages = recorded_messages(args)
        json.dump([message.hex() for message in messages], file)
        file.flush()
        for script in list(spent_us) * repeats:
            row = measure(args, "steady", script, {"messages": file.name})
            spent_us[script].append(row["server_us_per_frame"])
            cadences.append(row["cadence_percent"])
            waits.extend(row["waited_for_core_percent"].values())
    bare_us, endpoint_us = (statistics.median(times) for times in spent_us.values())
    return {
        "scenario": "cost",
        "sessions": args.sessions,
        "fps": args.fps,
        "chunk_frames": args.chunk_frames,
        "message_bytes": [len(message) for message in messages],
        "bare_us_per_frame": spent_us["bare_server.py"],
        "door_us_per_frame": spent_us["realtime_server.py"],
        "median_ratio": round(endpoint_us / bare_us, 2),
        "lowest_cadence_percent": min(cadences),
        "most_waited_for_core_percent": max(waits),
    }


def server_options(args: argparse.Namespace) -> dict[str, Any]:
    names = ("height", "width", "fps", "chunk_frames", "sessions", "loop")
    return {name: getattr(args, name) for name in names}


def client_options(args: argparse.Namespace, port: int, **changes: Any) -> dict[str, Any]:
    names = (
        "sessions",
        "fps",
        "chunk_frames",
        "width",
        "height",
        "controls_per_s",
        "seconds",
        "warm_up_s",
        "loop",
    )
    options = {name: getattr(args, name) for name in names}
    return {**options, "port": port, "read_bytes_per_s": None, "receive_buffer": 0, **changes}


def bad_clients(args: argparse.Namespace, scenario: str, port: int) -> dict[str, Any]:
    """Return the options for a scenario's bad clients, which start after all other clients."""
    rate = args.fps * args.width * args.height * 3
    behaviour = {"slow": rate / 4, "trickle": 4096.0, "never-reads": 0.0, "frozen": None}[scenario]
    small = {"receive_buffer": 65536} if scenario == "trickle" else {}
    return client_options(
        args,
        port,
        sessions=args.bad_clients,
        read_bytes_per_s=behaviour,
        controls_per_s=0,
        seconds=600,
        **small,
    )


def measure(
    args: argparse.Namespace,
    scenario: str,
    script: str = "realtime_server.py",
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))
    server_core, client_core = (
        (None, None) if args.no_pin or len(cores) < 2 else (cores[0], cores[1])
    )
    options = server_options(args) | (extra or {})
    with contextlib.ExitStack() as stack:
        server = Server(stack.enter_context(process(script, options, server_core)))
        load = stack.enter_context(
            process("realtime_clients.py", client_options(args, server.port), client_core)
        )
        assert load.stdout is not None
        assert load.stdout.readline() == "open\n"
        time.sleep(args.warm_up_s)
        pids = {"server": server.process.pid, "clients": load.pid}
        waits_s = {name: waited_s(pid) for name, pid in pids.items()}
        cpu_s, started_s = server.cpu_s(), time.monotonic()
        gone_s: float | None = None
        requested_ms: list[float] = []
        if scenario in _ATTACKS:
            attack = {"kind": scenario, "port": server.port, "sockets": args.bad_clients}
            attackers = stack.enter_context(process("realtime_attackers.py", attack, client_core))
            assert attackers.stdout is not None
            assert attackers.stdout.readline() == "open\n"
            requested_ms = request_chunk(
                server, args.seconds - (time.monotonic() - started_s) - 0.5
            )
        elif scenario != "steady":
            bad = process(
                "realtime_clients.py", bad_clients(args, scenario, server.port), client_core
            )
            gone_s = provoke(args, scenario, server, stack.enter_context(bad))
        wall_s = max(0.1, args.seconds - (time.monotonic() - started_s) - 0.5)
        time.sleep(wall_s)
        lasted_s = time.monotonic() - started_s
        server_load = (server.cpu_s() - cpu_s) / lasted_s
        waits_s = {name: waited_s(pid) - waits_s[name] for name, pid in pids.items()}
        response = json.loads(load.stdout.readline())
        row = {
            "scenario": scenario,
            "sessions": args.sessions,
            "frame_bytes": args.width * args.height * 3,
            "fps": args.fps,
            "chunk_frames": args.chunk_frames,
            "cadence_percent": round(100 * response["delivered"] / response["due"], 3),
            "added_latency_ms": quantiles(response["latencies_ms"]),
            "gap_ms": quantiles(response["gaps_ms"]),
            "out_of_order": response["out_of_order"],
            "server_cpu_percent": round(100 * server_load, 1),
            "server_us_per_frame": round(
                1e6 * server_load * args.seconds / response["delivered"], 1
            ),
            "client_cpu_percent": round(response["cpu_percent"], 1),
            "waited_for_core_percent": {
                name: round(100 * wait_s / lasted_s, 1) for name, wait_s in waits_s.items()
            },
            "server_rss_mib": round(server.process.memory_info().rss / 2**20, 1),
            "errors": response["errors"],
        }
        if scenario in _ATTACKS:
            row |= {
                "attacking_sockets": args.bad_clients,
                "http_answer_ms": quantiles(requested_ms),
            }
        elif scenario != "steady":
            row |= {
                "bad_clients": args.bad_clients,
                "bad_gone_s": None if gone_s is None else round(gone_s, 2),
            }
        return row


def request_chunk(server: Server, seconds: float) -> list[float]:
    """Request the server's state repeatedly, and return each response time in milliseconds."""
    took_ms, end_s = [], time.monotonic() + seconds
    while time.monotonic() < end_s:
        requested_s = time.monotonic()
        server.state()
        took_ms.append((time.monotonic() - requested_s) * 1e3)
        time.sleep(0.05)
    return took_ms


def provoke(
    args: argparse.Namespace, scenario: str, server: Server, bad: subprocess.Popen[str]
) -> float | None:
    """Wait until the bad clients are connected, and suspend them in the `frozen` scenario. Return
    the seconds until the server has disconnected them, or None if the server does not disconnect
    them in time.
    """
    assert bad.stdout is not None
    assert bad.stdout.readline() == "open\n"
    if scenario == "frozen":
        time.sleep(1.0)
        bad.send_signal(signal.SIGSTOP)
    try:
        left_s = args.seconds - 2.0
        return wait_for(lambda: (server.state() or {}).get("connections") == args.sessions, left_s)
    finally:
        if scenario == "frozen":
            bad.send_signal(signal.SIGCONT)


def disconnects(args: argparse.Namespace, repeats: int = 20) -> dict[str, Any]:
    """Measure the time from a client's disappearance to the abort of its long-running chunk."""
    options = server_options(args) | {"fps": 0.1}
    times_ms = []
    with process("realtime_server.py", options, None) as child:
        server = Server(child)
        for number in range(repeats):
            slow = client_options(
                args, server.port, sessions=1, fps=0.1, controls_per_s=0, seconds=600, warm_up_s=600
            )
            with process("realtime_clients.py", slow, None) as client:
                assert client.stdout is not None
                client.stdout.readline()
                wait_for(lambda: (server.state() or {}).get("running") == 1)
                killed_s = time.monotonic()
                client.kill()  # the kernel closes its socket
                wait_for(
                    lambda wanted=number + 1: len((server.state() or {})["aborted_s"]) == wanted,
                    10.0,
                )
                times_ms.append(((server.state() or {})["aborted_s"][-1] - killed_s) * 1e3)
        state = server.state() or {}
    return {
        "scenario": "disconnect",
        "repeats": repeats,
        "until_engine_is_free_ms": quantiles(times_ms),
        "left_behind": {
            name: state[name] for name in ("sessions", "worlds", "running", "held_bytes")
        },
    }


_OWN_WAY: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "disconnect": disconnects,
    "cost": cost,
}


def main() -> None:
    args = make_parser().parse_args()
    load_before = os.getloadavg()
    rows = []
    for scenario in args.scenario:
        rows.append(_OWN_WAY[scenario](args) if scenario in _OWN_WAY else measure(args, scenario))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    name = "realtime_load" + ("" if args.scenario == ["steady"] else "_" + "_".join(args.scenario))
    save(name, {"load_average_before": load_before, "pinned": not args.no_pin, "rows": rows}, args)


if __name__ == "__main__":
    main()
