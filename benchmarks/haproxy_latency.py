# SPDX-License-Identifier: Apache-2.0
"""Measure the latency that HAProxy with `deploy/haproxy/haproxy.cfg` adds to live sessions.

The server and its clients are those of realtime_load.py: an endpoint with a model that does nothing
but return each chunk when it is due, and sessions in another process that request chunks at
playback speed. Clients connect to the same server either directly or through HAProxy. The rounds
alternate: direct, proxied, proxied, direct and so on. Each direct round is paired with the adjacent
proxied round, because other load on the machine changes from minute to minute. `added_ms` contains
the latency difference for each pair. `other_load` is the number of cores that other programs used
during a round, and `waited_for_core_percent` is the share of a round during which a process was
ready to run but had no core.

    python benchmarks/haproxy_latency.py
    python benchmarks/haproxy_latency.py --pairs 3 --seconds 8 --real-time
"""

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "deploy" / "haproxy"))
import realtime_load
from common import quantiles, save
from configure import TEMPLATE, configure
from realtime_load import Server, client_options, process, server_options, waited_s
from served_attacks import OtherLoad

from vllm_omni.entrypoints.loopback import open_loopback

TARGET_P99_MS = 5.0
_QUANTILES = ("p50", "p90", "p99")


def make_parser() -> argparse.ArgumentParser:
    parser = realtime_load.make_parser()
    parser.description = (__doc__ or "").splitlines()[0]
    parser.add_argument("--pairs", type=int, default=6, help="pairs of rounds (default: 6)")
    parser.add_argument(
        "--real-time",
        action="store_true",
        help="run before all other programs of the machine (SCHED_FIFO, needs root)",
    )
    parser.set_defaults(seconds=15.0, warm_up_s=3.0)
    return parser


@contextlib.contextmanager
def proxy(servers: Mapping[str, int]) -> Iterator[tuple[int, psutil.Process]]:
    """Run HAProxy in front of servers, given as name -> port, and yield its `(port, process)`."""
    binary = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")
    if binary is None:
        raise SystemExit("HAProxy is not installed (Debian: apt install haproxy)")
    port, statistics_port, peer_port = free_ports(3)
    with tempfile.TemporaryDirectory() as folder:
        text = configure(
            TEMPLATE.read_text(), {name: f"127.0.0.1:{each}" for name, each in servers.items()}
        )
        for old, new in {
            "bind :8000": f"bind 127.0.0.1:{port}",
            "    bind :8443 ssl crt /etc/haproxy/server.pem alpn h2,http/1.1\n": "",
            "bind 127.0.0.1:8404": f"bind 127.0.0.1:{statistics_port}",
            "127.0.0.1:10000": f"127.0.0.1:{peer_port}",
            "/run/haproxy/admin.sock": f"{folder}/admin.sock",
            "maxconn 40000": "maxconn 4000",
            "maxconn 20000": "maxconn 2000",
            "abns@vllm-omni-router": f"abns@vllm-omni-router-{port}",
            "    user haproxy\n    group haproxy\n": "",
        }.items():
            assert old in text, old
            text = text.replace(old, new)
        file = Path(folder) / "haproxy.cfg"
        file.write_text(text)
        with (Path(folder) / "log").open("wb") as log:
            child = subprocess.Popen([binary, "-db", "-f", str(file)], stdout=log, stderr=log)
        try:
            while not is_ready(port):
                assert child.poll() is None, (Path(folder) / "log").read_text()
                time.sleep(0.1)
            yield port, psutil.Process(child.pid)
        finally:
            child.kill()
            child.wait()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        listeners = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [int(listener.getsockname()[1]) for listener in listeners]


def is_ready(port: int) -> bool:
    try:
        with open_loopback(f"http://127.0.0.1:{port}/omni/ready", timeout_s=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def play(
    args: argparse.Namespace, port: int, watched: dict[str, int], core: int | None
) -> dict[str, Any]:
    """Run one round of sessions that connect to one port."""
    before_s = {name: waited_s(pid) for name, pid in watched.items()}
    other = OtherLoad()
    with process("realtime_clients.py", client_options(args, port), core) as load:
        assert load.stdout is not None
        assert load.stdout.readline() == "open\n"
        time.sleep(args.warm_up_s + args.seconds)
        waits_s = {name: waited_s(pid) - before_s[name] for name, pid in watched.items()}
        response = json.loads(load.stdout.readline())
    lasted_s = args.warm_up_s + args.seconds
    assert not response["errors"], response["errors"]
    return {
        "cadence_percent": round(100 * response["delivered"] / response["due"], 3),
        "latency_ms": quantiles(response["latencies_ms"]),
        "out_of_order": response["out_of_order"],
        "other_load": other.cores(),
        "waited_for_core_percent": {
            name: round(100 * wait_s / lasted_s, 1) for name, wait_s in waits_s.items()
        },
    }


def main() -> None:
    args = make_parser().parse_args()
    load_before = os.getloadavg()
    if args.real_time:  # server, clients and HAProxy inherit the scheduling policy
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    cores = sorted(os.sched_getaffinity(0))
    pinned = not args.no_pin and len(cores) > 1
    server_core, client_core = (cores[0], cores[1]) if pinned else (None, None)
    pairs = []
    with process("realtime_server.py", server_options(args), server_core) as child:
        server = Server(child)
        with proxy({"a": server.port}) as (port, haproxy):
            watched = {"server": server.process.pid, "haproxy": haproxy.pid}
            ways = {"direct": server.port, "proxied": port}
            for number in range(args.pairs):
                order = list(ways) if number % 2 == 0 else list(reversed(ways))
                spent_s = sum(haproxy.cpu_times()[:2])
                pair = {way: play(args, ways[way], watched, client_core) for way in order}
                spent_s = sum(haproxy.cpu_times()[:2]) - spent_s
                times_ms = {way: pair[way]["latency_ms"] for way in ways}
                added = {
                    at: round(times_ms["proxied"][at] - times_ms["direct"][at], 3)
                    for at in _QUANTILES
                }
                pairs.append(
                    {
                        **pair,
                        "added_ms": added,
                        "haproxy_cpu_percent": round(
                            100 * spent_s / (args.warm_up_s + args.seconds), 1
                        ),
                    }
                )
                print(json.dumps(pairs[-1]), file=sys.stderr, flush=True)
    added_ms = {
        at: {
            "median": round(statistics.median(pair["added_ms"][at] for pair in pairs), 3),
            "min": min(pair["added_ms"][at] for pair in pairs),
            "max": max(pair["added_ms"][at] for pair in pairs),
        }
        for at in _QUANTILES
    }
    save(
        "haproxy_latency",
        {
            "load_average_before": load_before,
            "load_average_after": os.getloadavg(),
            "pinned": pinned,
            "real_time": args.real_time,
            "sessions": args.sessions,
            "fps": args.fps,
            "frame_bytes": args.width * args.height * 3,
            "added_ms": added_ms,
            "target_p99_ms": TARGET_P99_MS,
            "pairs": pairs,
        },
        args,
    )


if __name__ == "__main__":
    main()
