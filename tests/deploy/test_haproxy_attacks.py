# SPDX-License-Identifier: Apache-2.0
"""Attacks on an HAProxy that uses `deploy/haproxy/haproxy.cfg`. Most of them never reach its
servers.

Most tests also verify that another client is served during the attack.
"""

import asyncio
import contextlib
import re
import socket
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from helpers.echo_server import EchoServer
from helpers.haproxy import Proxy, needs_haproxy, running_proxy
from helpers.uvicorn_thread import serving
from helpers.waits import exactly, seconds, wait_until
from websockets.exceptions import InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.sync.client import ClientConnection, connect

from vllm_omni.entrypoints.limits.body_timeout import BodyLimits, BodyTimeout

pytestmark = [needs_haproxy, pytest.mark.nightly]

LIMIT_S = 1.0
QUICK_TIMEOUTS = {
    f"timeout {name}": f"timeout {name.split()[0]} {LIMIT_S * 1e3:.0f}ms"
    for name in ("http-request 10s", "http-keep-alive 10s", "client 30s")
} | {"wait-for-body time 10s": f"wait-for-body time {LIMIT_S * 1e3:.0f}ms"}
ATTACKER, NEIGHBOUR = "127.0.0.2", "127.0.0.3"
REQUEST = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
HANDSHAKE = (
    b"GET /v1/realtime/echo HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


class Edge:
    """A proxy whose servers run in another thread, so an attack that blocks the test's thread does
    not block them.
    """

    def __init__(self, proxy: Proxy, servers: list[EchoServer]) -> None:
        self.proxy, self.servers = proxy, servers

    def dial(self, source: str = ATTACKER) -> socket.socket:
        raw = socket.create_connection(("127.0.0.1", self.proxy.port), source_address=(source, 0))
        raw.settimeout(seconds(10))
        return raw

    def ask(self, request: bytes, source: str = ATTACKER) -> bytes:
        """Send bytes; return all bytes received until the proxy closes the connection or sends
        nothing for a second.
        """
        with self.dial(source) as raw:
            with contextlib.suppress(OSError):
                raw.sendall(request)
            raw.settimeout(seconds(1))
            return read_all(raw)

    def websocket(self) -> ClientConnection:
        url = f"ws://127.0.0.1:{self.proxy.port}/v1/realtime/echo"
        return connect(url, source_address=(NEIGHBOUR, 0), compression=None)

    def requests_seen(self) -> int:
        return sum(len(server.seen) for server in self.servers)


@contextlib.contextmanager
def edge(
    folder: Path, edits: Mapping[str, str] | None = None, num_servers: int = 1
) -> Iterator[Edge]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result(seconds(20))

    servers = [EchoServer(name) for name in "ab"[:num_servers]]
    for server in servers:
        run(server.start())
    try:
        with running_proxy(folder, {each.name: each.address for each in servers}, edits) as proxy:
            proxy.wait_until_checked(num_servers)
            yield Edge(proxy, servers)
    finally:
        for server in servers:
            run(server.die())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextlib.contextmanager
def served_neighbour(target: Edge) -> Iterator[None]:
    """Verify that an open WebSocket and new requests are still served during an attack."""
    with target.websocket() as neighbour:
        assert neighbour.recv(timeout=seconds(10)) == "a"
        yield
        neighbour.send("still here")
        assert neighbour.recv(timeout=seconds(10)) == "still here"
        assert target.ask(REQUEST, NEIGHBOUR).startswith(b"HTTP/1.1 201 ")


def read_all(raw: socket.socket) -> bytes:
    response = b""
    with contextlib.suppress(OSError):
        while part := raw.recv(1 << 16):
            response += part
    return response


def is_closed(raw: socket.socket) -> bool:
    """Read all available bytes; return whether the other side has closed the connection."""
    raw.setblocking(False)
    try:
        while raw.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def num_open(sockets: list[socket.socket]) -> int:
    return sum(not is_closed(raw) for raw in sockets)


def is_complete(reply: bytes) -> bool:
    head, end, _ = reply.partition(b"\r\n\r\n")
    return bool(end) and re.match(rb"HTTP/1\.[01] \d{3} ", head) is not None


def test_silent_clients_are_cut_off(tmp_path: Path) -> None:
    """A client that does not finish its request in time is disconnected.

    Four groups of 50 clients send nothing, half a request line, half of the headers, or half of a
    second request. Sending a header line from time to time does not extend a client's time limit.
    """
    with edge(tmp_path, QUICK_TIMEOUTS) as target, served_neighbour(target):
        opened_s = time.monotonic()
        starts = (b"", b"GET /heal", REQUEST[:-2] + b"X-One: 1\r\n", REQUEST + b"GET /heal")
        held = []
        for start in starts:
            for _ in range(50):
                held.append(target.dial())
                held[-1].sendall(start)
        drip = [target.dial() for _ in range(20)]
        for raw in drip:
            raw.sendall(REQUEST[:-2])

        def all_cut() -> bool:
            for raw in drip:
                with contextlib.suppress(OSError):
                    raw.sendall(b"X-More: 1\r\n")
            return num_open([*held, *drip]) == 0

        wait_until(all_cut, within=LIMIT_S + 5, every_s=0.1)
        print(f"all {len(held) + len(drip)} were closed after {time.monotonic() - opened_s:.1f} s")
        wait_until(lambda: target.proxy.num_connections <= 2)
        for raw in [*held, *drip]:
            raw.close()


def test_a_silent_tls_handshake_is_cut_off(tmp_path: Path) -> None:
    with edge(tmp_path, QUICK_TIMEOUTS) as target, served_neighbour(target):
        address = ("127.0.0.1", target.proxy.tls_port)
        held = [socket.create_connection(address) for _ in range(50)]
        for raw in held[25:]:
            raw.sendall(b"\x16\x03\x01\x02\x00\x01")
        wait_until(lambda: num_open(held) == 0, within=LIMIT_S + 5, every_s=0.1)


@pytest.mark.parametrize("expects", [False, True], ids=["plain", "expect"])
def test_slow_bodies_end_with_408(tmp_path: Path, expects: bool) -> None:
    """A body of ordinary size must arrive within 10 s, in any number of packets. Otherwise the
    request never reaches the server.
    """
    with edge(tmp_path, QUICK_TIMEOUTS) as target, served_neighbour(target):
        before = target.requests_seen()
        head = b"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n"
        held = [target.dial() for _ in range(50)]
        for raw in held:
            raw.sendall(head + (b"Expect: 100-continue\r\n\r\n" if expects else b"\r\n"))
        replies: dict[int, bytes] = dict.fromkeys(range(len(held)), b"")

        def all_answered() -> bool:
            for number, raw in enumerate(held):
                with contextlib.suppress(OSError):
                    raw.sendall(b"x")
                raw.settimeout(0.001)
                with contextlib.suppress(OSError):
                    replies[number] += raw.recv(1 << 16)
            return all(b" 408 " in reply for reply in replies.values())

        wait_until(all_answered, within=LIMIT_S + 5, every_s=0.1)
        assert all(b'"code":"timeout"' in reply for reply in replies.values())
        assert target.requests_seen() == before
        for raw in held:
            raw.close()


def test_a_long_body_that_stops_is_ended_by_the_server(tmp_path: Path) -> None:
    """When a client stops sending in the middle of a long body, the server ends the request, and
    the proxy delivers the server's 408.

    HAProxy itself has no time limit for the part of a body after the first 16 KiB.
    """
    app = FastAPI()

    @app.get("/omni/ready")
    async def ready() -> dict[str, str]:
        return {"status": "ready"}

    @app.post("/v1/sessions")
    async def receive(request: Request) -> int:
        return len(await request.body())

    app.add_middleware(BodyTimeout, limits=BodyLimits(body_grace_s=LIMIT_S))
    head = b"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
    with (
        serving(uvicorn.Config(app, log_level="warning")) as port,
        running_proxy(tmp_path, {"a": f"127.0.0.1:{port}"}) as proxy,
    ):
        proxy.wait_until_checked(1)
        for sent in (100, 20_000, 100_000):
            with socket.create_connection(("127.0.0.1", proxy.port), seconds(20)) as raw:
                started_s = time.monotonic()
                raw.sendall(head + b"x" * sent)
                limit_s = 10 if sent < 16_384 else LIMIT_S + sent / (16 << 10)
                assert raw.recv(1 << 16).startswith(b"HTTP/1.1 408 "), sent
                assert time.monotonic() - started_s < limit_s + seconds(3)


def test_a_client_that_sends_all_before_it_reads_gets_its_response(tmp_path: Path) -> None:
    """The proxy delivers the server's error response to a client that sends its whole request body
    before it reads.
    """
    with edge(tmp_path) as target:
        length = 16 << 20
        for _ in range(5):
            head = b"POST /v1/refused HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % length
            reply = target.ask(head + b"x" * length)
            assert reply.startswith(b"HTTP/1.1 507 ") and reply.endswith(b"no room")


def test_headers_are_bounded_on_every_request_of_a_connection(tmp_path: Path) -> None:
    """HAProxy limits the header size of every request on a connection, not only the first.

    Three clients each try to send 600 MB of headers: in a first request, in a second request, and
    in one endless line.
    """
    lines = b"".join(b"X-%07d: " % number + b"a" * 1000 + b"\r\n" for number in range(1000))
    with edge(tmp_path) as target, served_neighbour(target):
        before = target.proxy.memory_bytes
        for start, part in ((b"", lines), (REQUEST, lines), (b"", b"X-Long: " + b"a" * 1_000_000)):
            with target.dial() as raw:
                raw.sendall(start)
                if start:
                    assert raw.recv(1 << 16).startswith(b"HTTP/1.1 201 ")
                raw.sendall(REQUEST[:-2])
                sent = 0
                with contextlib.suppress(OSError):
                    while sent < 600_000_000:
                        raw.sendall(part)
                        sent += len(part)
                assert sent < 20_000_000
        assert target.proxy.memory_bytes - before < 20 << 20


def test_a_hundred_thousand_names_of_sessions_are_forgotten(tmp_path: Path) -> None:
    """HAProxy evicts old session names, so 110,000 names of 8 KB each from one client use a bounded
    amount of memory.

    Requests for a session that is in use still reach the server that the session has moved to.
    """
    total, size = 110_000, 8000
    with edge(tmp_path, num_servers=2) as target:
        homes = {}
        for number in range(20):  # moves the session to a server other than the hash's choice
            path = f"/v1/models?session=used-{number}"
            other = {"a": "b", "b": "a"}[home_of(target, path)]
            assert home_of(target, f"{path}&server={other}") == other
            homes[path] = other
        before = target.proxy.memory_bytes

        def send(first: int) -> None:
            with target.dial() as raw:
                for number in range(first, total, 8):
                    name = f"{number}-".encode() + b"n" * size
                    raw.sendall(REQUEST[:-2] + b"X-Session-Id: " + name + b"\r\n\r\n")
                    reply = b""
                    while b'"name"' not in reply:
                        part = raw.recv(1 << 16)
                        assert part, reply
                        reply += part

        threads = [threading.Thread(target=send, args=(first,)) for first in range(8)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for path, home in homes.items():
                assert home_of(target, path) == home
            exactly(1.0)
        grown = target.proxy.memory_bytes - before
        used = target.proxy.table("named")
        print(f"{total} names of {size} bytes: {used} kept, memory grew by {grown >> 20} MiB")
        assert 90_000 < used <= 102_400
        assert grown < 64 << 20
        assert {path: home_of(target, path) for path in homes} == homes


def home_of(target: Edge, path: str) -> str:
    """Return the name of the server that serves a request for `path`."""
    with target.dial(NEIGHBOUR) as raw:
        head = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        raw.sendall(head.encode())
        reply = read_all(raw)
    return str(re.search(rb'"name": "(\w+)"', reply)[1].decode())  # type: ignore[index]


def test_absolute_urls_are_served_or_refused(tmp_path: Path) -> None:
    """An absolute URL reaches the server as a path. A URL with a host that differs from `Host` is
    rejected.
    """
    with edge(tmp_path) as target:
        reply = target.ask(b"GET http://x/v1/models?a=1 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert reply.startswith(b"HTTP/1.1 201 ")
        assert target.servers[0].seen[-1].raw_path == "/v1/models?a=1"
        seen = target.requests_seen()
        reply = target.ask(b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert reply.startswith(b"HTTP/1.1 400 ") and target.requests_seen() == seen


POST = b"POST /v1/x HTTP/1.1\r\nHost: x\r\n"
SMUGGLED = b"0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\0\0\0\0\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 200,
        b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
        b"GET /v1/\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET  /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nBad Name: y\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX: a\0b\r\n\r\n",
        b"GET /" + b"a" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nContent-Length: 50\r\n\r\n"
        + SMUGGLED,
        b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n" + SMUGGLED,
        b"POST /v1/x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: x, chunked, x\r\n\r\n" + SMUGGLED,
        b"POST /v1/x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/models?session=%00%ff&server=%0d%0a HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/sessions/%0d%0aX-Evil:%201/snapshot HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nCookie: vllm_omni_server=\r\n\r\n",
        HANDSHAKE.replace(b"\r\n\r\n", b"\r\nCookie: vllm_omni_server=zzz\r\n\r\n"),
    ],
)
def test_malformed_requests_get_no_status_5xx(tmp_path: Path, request_bytes: bytes) -> None:
    """HAProxy either rejects a malformed request without a 5xx status, or forwards it to exactly
    one server as a single valid request.
    """
    with edge(tmp_path) as target, served_neighbour(target):
        seen = target.requests_seen()
        reply = target.ask(request_bytes)
        assert is_complete(reply) or reply == b""
        assert not re.search(rb"^HTTP/1\.[01] 5", reply), reply[:300]
        assert target.requests_seen() - seen <= 1
        assert not any("smuggled" in each.path for each in target.servers[0].seen)
        assert not any("X-Evil" in each.headers for each in target.servers[0].seen)


def test_a_body_with_content_length_and_chunked_encoding_is_one_request(tmp_path: Path) -> None:
    """If a request has both a `Content-Length` header and a chunked body, the chunked encoding
    takes precedence (RFC 9112, 6.3), and the connection is closed.
    """
    head = POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
    with edge(tmp_path) as target:
        reply = target.ask(head + SMUGGLED)
        assert reply.count(b"HTTP/1.1 ") == 1
        assert target.requests_seen() <= 1


def test_websockets_that_reconnect_are_limited_by_address(tmp_path: Path) -> None:
    """A client that keeps reconnecting gets 429, while clients at other addresses are served."""
    edits = {"sc0_gpc0_rate gt 200": "sc0_gpc0_rate gt 20"}
    with edge(tmp_path, edits) as target, served_neighbour(target):
        replies = [target.ask(HANDSHAKE + b"\x88\x80\0\0\0\0") for _ in range(50)]
        opened = sum(reply.startswith(b"HTTP/1.1 101 ") for reply in replies)
        assert 20 <= opened <= 25
        assert all(b" 429 " in reply and b"retry-after" in reply for reply in replies[25:])
        url = f"ws://127.0.0.1:{target.proxy.port}/v1/realtime/echo"
        with pytest.raises(InvalidStatus) as refused:
            connect(url, source_address=(ATTACKER, 0)).close()
        assert refused.value.response.status_code == 429


def test_connections_are_limited_by_address(tmp_path: Path) -> None:
    """Connections beyond the limit per address are closed immediately, while earlier connections
    from the same address stay open.
    """
    with edge(tmp_path) as target, served_neighbour(target):
        held = [target.dial() for _ in range(300)]
        wait_until(lambda: num_open(held) <= 260)
        assert num_open(held) >= 250
        assert target.ask(REQUEST, "127.0.0.4").startswith(b"HTTP/1.1 201 ")
        for raw in held:
            raw.close()
        wait_until(lambda: target.ask(REQUEST).startswith(b"HTTP/1.1 201 "), every_s=0.2)


def test_a_client_that_does_not_read_is_disconnected(tmp_path: Path) -> None:
    """A client that does not read its stream is disconnected, because the proxy buffers only a
    small amount of data. The proxy's connection to the server is closed too.
    """
    with edge(tmp_path, {"timeout tunnel 60s": "timeout tunnel 1s"}) as target:
        before = grown = target.proxy.memory_bytes
        with target.dial() as raw:
            raw.sendall(HANDSHAKE)
            assert raw.recv(1024).startswith(b"HTTP/1.1 101 ")
            raw.sendall(Frame(Opcode.TEXT, b"flood").serialize(mask=True))

            def is_over() -> bool:
                nonlocal grown
                grown = max(grown, target.proxy.memory_bytes)
                return target.servers[0].is_cut_off

            wait_until(is_over, within=15)
        assert target.servers[0].flooded_bytes >= 1 << 20
        assert grown - before < 16 << 20
        assert target.ask(REQUEST, NEIGHBOUR).startswith(b"HTTP/1.1 201 ")
