# SPDX-License-Identifier: Apache-2.0
"""Restart three servers behind HAProxy one after another while sessions play.

    python benchmarks/rolling_restart.py

The model is the null world, which takes almost no time per chunk. The servers send each chunk when
it is due at 16 frames per second. Each client plays one stream of `/v1/realtime_video/generate` and
reconnects when its session moves to another server. One server at a time receives SIGTERM, moves
its sessions to the other servers, exits and is restarted. The next server follows once HAProxy has
detected the new process.

A gap is the time between two consecutive chunks of one client. A session is lost if its stream ends
for any reason other than a move. A chunk is wrong if its number or its frames differ from those of
the other sessions, which all have the same seed.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlencode

import msgspec
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

sys.path.insert(0, str(Path(__file__).parent))
from common import add_output_arguments, quantiles, save
from haproxy_latency import proxy
from moves import HEIGHT, WIDTH, Servers
from realtime_clients import GENERATE_PATH

from vllm_omni.entrypoints.loopback import open_loopback

CADENCE_S = 12 / 16
TARGET_S = 2.0


class Restartable(Protocol):
    """Servers that can be stopped and started again."""

    ports: dict[str, int]
    """Port of each server, by name."""

    def drain(self, name: str) -> float:
        """Stop a server with SIGTERM, and return the number of seconds that it takes to exit."""
        ...

    def start(self, name: str, /) -> None:
        """Start a server, and wait until it is healthy."""
        ...


class Player:
    """A client that plays a stream and follows its session to other servers.

    Args:
        port: Port of the proxy.
        headers: Headers for each connection, for example an API key.
    """

    def __init__(self, port: int, headers: Mapping[str, str]) -> None:
        self._headers = headers
        self._url = f"ws://127.0.0.1:{port}{GENERATE_PATH}"
        self._query, self._session_id = "", None
        self.arrived_s: list[float] = []
        """Monotonic arrival time of each chunk, in seconds."""
        self.digests: list[str] = []
        """Digest of each chunk's frames."""
        self.moves = 0
        """Number of moves that the client has followed."""
        self.end: str | None = None
        """Reason why the stream ended. None: the stream has not ended."""

    async def play(self) -> None:
        """Play until the stream ends or this task is cancelled."""
        try:
            while True:
                async with connect(
                    self._url + self._query,
                    max_size=None,
                    compression=None,
                    proxy=None,
                    additional_headers=self._headers,
                ) as socket:
                    await self._play(socket)
        except (ConnectionClosed, OSError, RuntimeError) as error:
            self.end = f"{type(error).__name__}: {error}"

    async def _play(self, socket: Any) -> None:
        init = {"type": "init", "prompt": "a path", "size": f"{WIDTH}x{HEIGHT}", "seed": 7}
        init |= {"realtime_output_pacing": True, "fps": 16, "extensions": ["moves"]}
        init |= {"first_frame": start_image(), "session_id": self._session_id}
        await socket.send(msgspec.msgpack.encode(init))
        digest = hashlib.sha256()
        while True:
            message = msgspec.msgpack.decode(await socket.recv())
            match message["type"]:
                case "session":
                    self._session_id = message["session_id"]
                case "frame_batch":
                    digest.update(message["payload"])
                case "frame_batch_header":
                    digest.update(await socket.recv())
                case "chunk_stats":
                    if message["chunk_index"] != len(self.digests):
                        raise RuntimeError(f"chunk {message['chunk_index']} is not the next one")
                    self.arrived_s.append(time.monotonic())
                    self.digests.append(digest.hexdigest())
                    digest = hashlib.sha256()
                case "moved":
                    named = {"server": message["server"], "session": self._session_id}
                    self._query, self.moves = "?" + urlencode(named), self.moves + 1
                    return
                case "error":
                    raise RuntimeError(json.dumps(message))


def start_image() -> bytes:
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (WIDTH, HEIGHT), (7, 7, 7)).save(buffer, "PNG")
    return buffer.getvalue()


def wait_until_used(port: int, num_servers: int) -> None:
    """Wait until HAProxy sends new sessions to all servers."""
    while True:
        with (
            contextlib.suppress(OSError),
            open_loopback(f"http://127.0.0.1:{port}/omni/ready", 5) as reply,
        ):
            if json.load(reply)["servers_with_room"] == num_servers:
                return
        time.sleep(0.1)


async def measure(
    servers: Restartable,
    port: int,
    num_sessions: int,
    settle_s: float,
    headers: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Play sessions, restart each server, and return what the clients observed.

    Args:
        servers: Servers to restart, one after another.
        port: Port of the proxy.
        num_sessions: Number of sessions that play at the same time.
        settle_s: Number of seconds that the sessions play before the first restart and after each
            restart.
        headers: Headers for each client connection.
    """
    players = [Player(port, headers or {}) for _ in range(num_sessions)]
    tasks = []
    for player in players:
        tasks.append(asyncio.create_task(player.play()))
        await asyncio.sleep(CADENCE_S / num_sessions)
    await asyncio.sleep(settle_s)
    start_s, drains = time.monotonic(), []
    for name in servers.ports:
        drain_s = await asyncio.to_thread(servers.drain, name)
        drains.append({"server": name, "drain_s": round(drain_s, 2)})
        print(drains[-1], Counter(player.end for player in players), flush=True)
        await asyncio.to_thread(servers.start, name)
        await asyncio.to_thread(wait_until_used, port, len(servers.ports))
        await asyncio.sleep(settle_s)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    longest = max((player.digests for player in players), key=len)
    gaps_ms = [
        1e3 * (after - before)
        for player in players
        for before, after in zip(player.arrived_s, player.arrived_s[1:], strict=False)
        if after > start_s
    ]
    longest_ms = [
        1e3 * max(b - a for a, b in zip(player.arrived_s, player.arrived_s[1:], strict=False))
        for player in players
    ]
    return {
        "servers": len(servers.ports),
        "sessions": num_sessions,
        "restarts": drains,
        "lost": [player.end for player in players if player.end is not None],
        "moves": sum(player.moves for player in players),
        "chunks": sum(len(player.digests) for player in players),
        "wrong_chunks": sum(
            mine != theirs
            for player in players
            for mine, theirs in zip(player.digests, longest, strict=False)
        ),
        "gap_ms": quantiles(gaps_ms),
        "longest_gap_of_a_session_ms": quantiles(longest_ms),
        "target_ms": 1e3 * TARGET_S,
    }


def run(num_servers: int, num_sessions: int, settle_s: float) -> dict[str, Any]:
    """Start the servers and HAProxy, and run the measurement."""
    from vllm_omni.model_executor.models.registry import get_family

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = Path(folder) / "model"
        get_family("null_world").make_tiny(model, 0, "original")
        names = [chr(ord("a") + number) for number in range(num_servers)]
        servers = Servers(Path(folder), model, names, is_proxied=True)
        stack.callback(servers.stop)
        servers.start(*names)
        port, _ = stack.enter_context(proxy(servers.ports))
        wait_until_used(port, num_servers)
        return asyncio.run(measure(servers, port, num_sessions, settle_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--servers", type=int, default=3, help="servers (default: %(default)s)")
    parser.add_argument("--sessions", type=int, default=24, help="sessions (default: %(default)s)")
    parser.add_argument(
        "--settle-s", type=float, default=5.0, help="play after each restart (default: %(default)s)"
    )
    parser.add_argument("--note", help="a remark about the machine, for the result")
    add_output_arguments(parser)
    args = parser.parse_args()
    result: dict[str, Any] = {} if args.note is None else {"note": args.note}
    result["restarted"] = run(args.servers, args.sessions, args.settle_s)
    save("rolling_restart", result, args)


if __name__ == "__main__":
    main()
