# SPDX-License-Identifier: Apache-2.0
"""Flood a server with WebSocket frames and meanwhile measure a second client's delays."""

import contextlib
import http.client
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from helpers.fake_engine import Client
from helpers.served import Served
from helpers.waits import pause, seconds
from websockets.exceptions import ConnectionClosed

PING = b"\x89\x80\0\0\0\0"
BINARY_START = b"\x02\x81\0\0\0\0x"
FRAGMENT = b"\x00\x81\0\0\0\0x"
EMPTY_FRAGMENT = b"\x00\x80\0\0\0\0"


@dataclass
class Felt:
    """Delays that a second client measures: of `/health` responses on a persistent connection, and
    of pongs on an idle socket.
    """

    health_ms: list[float] = field(default_factory=list)
    ping_ms: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"health max {max(self.health_ms):.0f} ms, ping max {max(self.ping_ms):.0f} ms "
            f"({len(self.ping_ms)})"
        )


def _timed(work: Callable[[], Any], into: list[float], stop: threading.Event) -> None:
    while not stop.is_set():
        started_s = time.perf_counter()
        work()
        into.append((time.perf_counter() - started_s) * 1e3)
        stop.wait(0.01)


@contextlib.contextmanager
def neighbour(served: Served) -> Iterator[Felt]:
    """While the `with` block runs, repeatedly request `/health` and send pings over an otherwise
    idle world-camera socket.
    """
    felt, stop = Felt(), threading.Event()
    health = http.client.HTTPConnection("127.0.0.1", served.port, timeout=seconds(60))

    def send() -> None:
        health.request("GET", "/health")
        assert health.getresponse().read() is not None

    with served.client() as quiet:
        threads = [
            threading.Thread(target=_timed, args=(work, into, stop), daemon=True)
            for work, into in (
                (send, felt.health_ms),
                (lambda: quiet.connection.ping().wait(seconds(60)), felt.ping_ms),
            )
        ]
        for thread in threads:
            thread.start()
        pause(0.2)
        try:
            yield felt
        finally:
            stop.set()
            for thread in threads:
                thread.join(seconds(60))
            health.close()


def flood(client: Client, data: bytes, timeout_s: float = 8.0) -> tuple[int, str] | None:
    """Send raw bytes and return the close frame's code and reason, or None if no close frame
    arrives.
    """
    with contextlib.suppress(OSError):
        client.connection.socket.sendall(data)
    try:
        while True:
            client.connection.recv(timeout=timeout_s)
    except TimeoutError:
        return None
    except ConnectionClosed as closed:
        return None if closed.rcvd is None else (closed.rcvd.code, closed.rcvd.reason)
