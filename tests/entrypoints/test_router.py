# SPDX-License-Identifier: Apache-2.0
"""The session-sticky router over real sockets, with small servers that return their names."""

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import WSMsgType, web
from helpers.waits import exactly, exactly_in_task, pause_task, seconds, until
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.sync.client import ClientConnection, connect
from yarl import URL

from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.entrypoints.cli.main import make_parser
from vllm_omni.entrypoints.limits.frame_budget import SMALL_BYTES, FrameBudget
from vllm_omni.entrypoints.router.app import COOKIE, RANK_HEADER, SESSION_HEADER, Router
from vllm_omni.entrypoints.router.backends import Backends
from vllm_omni.entrypoints.router.client_frames import FrameHeaders

CHECK_S = 0.05
BUDGET = FrameBudget(small_frames_per_s=20.0)
PING = Frame(Opcode.PING, b"").serialize(mask=True)
FRAGMENTS = Frame(Opcode.BINARY, b"x", fin=False).serialize(mask=True)
FRAGMENTS += Frame(Opcode.CONT, b"x", fin=False).serialize(mask=True) * 99_999


def read_on(client: ClientConnection) -> None:
    while True:
        client.recv(timeout=seconds(10))


class Server:
    """Returns its name. `status` is its readiness."""

    def __init__(self, name: str) -> None:
        self.name, self.status = name, "ready"
        self.videos: set[str] = set()
        self.seen: list[web.Request] = []
        self.cancelled = 0
        self.sockets: list[web.WebSocketResponse] = []
        self.is_silent, self.num_pings = False, 0
        self.flooded_bytes, self.is_cut_off = 0, False

    async def start(self, port: int = 0) -> str:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/omni/ready", self._ready)
        app.router.add_get("/v1/realtime/echo", self._socket)
        app.router.add_get("/v1/realtime/slow", self._slow_socket)
        app.router.add_get("/v1/realtime/private", self._refuse)
        app.router.add_route("*", "/v1/videos/{id}", self._video)
        app.router.add_get("/v1/slow", self._slow)
        app.router.add_get("/v1/stream", self._stream)
        app.router.add_route("*", "/{path:.*}", self._echo)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", port)
        await site.start()
        self.port = self.runner.addresses[0][1]
        return f"http://127.0.0.1:{self.port}"

    async def die(self) -> None:
        """End as a killed process: the kernel closes its sockets."""
        for each in self.sockets:
            if each._req is not None and each._req.transport is not None:
                each._req.transport.abort()
        await self.runner.cleanup()

    async def _ready(self, request: web.Request) -> web.Response:
        info = {"status": self.status, "sessions": 1, "max_sessions": 4}
        return web.json_response(info, status=200 if self.status == "ready" else 503)

    async def _refuse(self, request: web.Request) -> web.Response:
        return web.Response(status=401)

    async def _video(self, request: web.Request) -> web.Response:
        if request.match_info["id"] not in self.videos:
            return web.json_response({"error": "not here"}, status=404)
        if request.method == "DELETE":
            self.videos.remove(request.match_info["id"])
        return web.json_response({"name": self.name})

    async def _slow(self, request: web.Request) -> web.Response:
        try:
            await exactly_in_task(30)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return web.Response()

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number in range(3):
            await response.write(f"data: {number}\n\n".encode())
            await pause_task(0.1)
        return response

    async def _echo(self, request: web.Request) -> web.Response:
        self.seen.append(request)
        body = await request.read()
        return web.json_response(
            {"name": self.name, "bytes": len(body), "query": request.query_string}, status=201
        )

    async def _slow_socket(self, request: web.Request) -> web.WebSocketResponse:
        await pause_task(0.5)
        return await self._socket(request)

    async def _socket(self, request: web.Request) -> web.WebSocketResponse:
        self.seen.append(request)
        socket = web.WebSocketResponse(protocols=["chosen"], max_msg_size=0, autoping=False)
        await socket.prepare(request)
        self.sockets.append(socket)
        await socket.send_str(self.name)
        async for message in socket:
            if message.type is WSMsgType.BINARY:
                await socket.send_bytes(message.data)
            elif message.type is WSMsgType.PING:
                self.num_pings += 1
                if not self.is_silent:
                    await socket.pong(message.data)
            elif message.data == "flood":
                try:
                    while True:
                        await socket.send_bytes(bytes(1 << 20))
                        self.flooded_bytes += 1 << 20
                except (ConnectionError, asyncio.CancelledError):
                    self.is_cut_off = True
                    raise
            elif message.data == "end":
                await socket.close(code=4009, message=b"taken over")
            else:
                await socket.send_str(message.data)
        return socket


class RoutedServers:
    """A router, its servers, and a client."""

    def __init__(
        self, url: str, backends: Backends, servers: list[Server], client: aiohttp.ClientSession
    ) -> None:
        self.url, self.backends, self.servers, self.client = url, backends, servers, client

    async def poll(self) -> None:
        """Poll the readiness of every server."""
        await self.backends.poll_backends(self.client)

    async def who(self, path: str = "/v1/images/generations", **headers: str) -> str:
        async with self.client.post(self.url + path, json={}, headers=headers) as response:
            return str((await response.json())["name"])

    @contextlib.asynccontextmanager
    async def socket(
        self, query: str = "", **headers: str
    ) -> AsyncIterator[tuple[aiohttp.ClientWebSocketResponse, str]]:
        """Open a socket; yields `(socket, name of the server)`."""
        url = f"{self.url}/v1/realtime/echo{query}"
        async with self.client.ws_connect(
            url, headers=headers, protocols=["other", "chosen"], max_msg_size=0, autoping=False
        ) as socket:
            yield socket, await socket.receive_str()


@contextlib.asynccontextmanager
async def routed(num_servers: int = 2, **options: Any) -> AsyncIterator[RoutedServers]:
    servers = [Server(f"server-{number}") for number in range(num_servers)]
    backends = Backends([await server.start() for server in servers], CHECK_S)
    runner = web.AppRunner(
        Router(backends, **options).application(), handler_cancellation=True, shutdown_timeout=0.0
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as client:
        yield RoutedServers(f"http://127.0.0.1:{runner.addresses[0][1]}", backends, servers, client)
    await runner.cleanup()
    for server in servers:
        await server.runner.cleanup()


def test_requests_pass_through_unchanged() -> None:
    """Method, path, query, body, status and headers are unchanged, and the server gets the client's
    address.
    """

    async def scenario() -> None:
        async with routed() as cluster:
            body = bytes(3 << 20)
            url = URL(f"{cluster.url}/v1/any%20thing?a=1&b=%2F", encoded=True)
            async with cluster.client.put(
                url, data=body, headers={"Authorization": "Bearer k"}
            ) as response:
                assert response.status == 201
                assert (await response.json())["bytes"] == len(body)
            request = next(server.seen[0] for server in cluster.servers if server.seen)
            assert (request.method, request.raw_path) == ("PUT", "/v1/any%20thing?a=1&b=%2F")
            assert request.headers["Authorization"] == "Bearer k"
            assert request.headers["X-Forwarded-For"] == "127.0.0.1"
            assert request.headers["Host"] == cluster.url.removeprefix("http://")

    asyncio.run(scenario())


def test_streams_arrive_as_they_are_made() -> None:
    async def scenario() -> None:
        async with routed() as cluster, cluster.client.get(cluster.url + "/v1/stream") as response:
            parts = [part async for part in response.content.iter_any()]
            assert b"".join(parts) == b"data: 0\n\ndata: 1\n\ndata: 2\n\n" and len(parts) >= 3

    asyncio.run(scenario())


def test_requests_without_a_session_spread() -> None:
    """The next request goes to the server with the fewest, and a full server gets none while
    another has room.
    """

    async def scenario() -> None:
        async with routed(3) as cluster:
            slow = [
                asyncio.create_task(cluster.client.get(cluster.url + "/v1/slow").__aenter__())
                for _ in range(6)
            ]
            await until(lambda: [backend.open for backend in cluster.backends.all] == [2, 2, 2])
            cluster.servers[0].status = cluster.servers[2].status = "capacity"
            await cluster.poll()
            assert {await cluster.who() for _ in range(4)} == {"server-1"}
            for task in slow:
                task.cancel()
            await asyncio.wait(slow)
            # A client that leaves ends its request.
            await until(lambda: [server.cancelled for server in cluster.servers] == [2, 2, 2])

    asyncio.run(scenario())


def test_a_named_session_returns_to_its_server() -> None:
    """The session is in the query or a header, of sockets and requests, and its server may be
    full.
    """

    async def scenario() -> None:
        async with routed(3) as cluster:
            homes = {}
            for number in range(12):
                async with cluster.socket(f"?session=s{number}") as (_, name):
                    homes[f"s{number}"] = name
            assert len(set(homes.values())) > 1
            for server in cluster.servers:
                server.status = "capacity"
            await cluster.poll()
            for session, home in homes.items():
                async with cluster.socket(**{SESSION_HEADER: session}) as (_, name):
                    assert name == home
                assert await cluster.who(**{SESSION_HEADER: session}) == home

    asyncio.run(scenario())


def test_another_router_chooses_the_same_server() -> None:
    """Rendezvous hashing has no state, so a restarted router makes the same choice."""
    urls = [f"http://host-{number}" for number in range(4)]
    first, second = Backends(urls), Backends(urls)
    for backends in (first, second):
        for backend in backends.all:
            backend.is_up = backend.has_room = True
    chosen = {name: first.choose(name) for name in map(str, range(200))}
    assert all(second.choose(name).name == backend.name for name, backend in chosen.items())  # type: ignore[union-attr]
    counts = [sum(backend is each for backend in chosen.values()) for each in first.all]
    assert min(counts) > 25
    lost = first.all[2]
    lost.unreachable("test")
    for name, backend in chosen.items():
        if backend is not lost:
            assert first.choose(name) is backend


def test_a_client_may_return_to_the_rank_of_its_handshake() -> None:
    """Programs use a header, and browsers a cookie."""

    async def scenario() -> None:
        async with routed(4) as cluster:
            async with cluster.socket() as (socket, name):
                rank = socket._response.headers[RANK_HEADER]
                cookie = socket._response.headers["Set-Cookie"]
                assert cookie.startswith(f"{COOKIE}={rank};") and "HttpOnly" in cookie
            for headers in ({RANK_HEADER: rank}, {"Cookie": f"{COOKIE}={rank}"}):
                for _ in range(3):
                    async with cluster.socket(**headers) as (_, again):
                        assert again == name
            async with cluster.client.post(cluster.url + "/v1/omni/ticket") as response:
                assert response.headers["Set-Cookie"].startswith(
                    f"{COOKIE}={response.headers[RANK_HEADER]};"
                )

    asyncio.run(scenario())


def test_sockets_pass_everything_both_ways() -> None:
    """Text, large binaries, pings, the chosen subprotocol, and close codes of either side."""

    async def scenario() -> None:
        async with routed() as cluster:
            async with cluster.socket() as (socket, _):
                assert socket.protocol == "chosen"
                await socket.send_str("hällo")
                assert await socket.receive_str() == "hällo"
                payload = bytes(range(256)) * (40 << 10)
                await socket.send_bytes(payload)
                assert await socket.receive_bytes() == payload
                await socket.ping(b"are you there")
                message = await socket.receive()
                assert (message.type, bytes(message.data)) == (WSMsgType.PONG, b"are you there")
                await socket.send_str("end")
                message = await socket.receive()
                assert (message.type, message.data, message.extra) == (
                    WSMsgType.CLOSE,
                    4009,
                    "taken over",
                )
            async with cluster.socket() as (socket, name):
                await socket.close(code=3001)
            server = cluster.servers[int(name[-1])].sockets[-1]
            await until(lambda: server.close_code == 3001)
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await cluster.client.ws_connect(cluster.url + "/v1/realtime/private")
            assert refused.value.status == 401

    asyncio.run(scenario())


def test_a_message_too_large_for_the_router_closes_the_socket() -> None:
    async def scenario() -> None:
        async with routed(max_message_bytes=1000) as cluster, cluster.socket() as (socket, _):
            await socket.send_bytes(bytes(2000))
            assert (await socket.receive()).data == 1009

    asyncio.run(scenario())


def test_a_dead_server_ends_only_its_own_sockets() -> None:
    """They close with 1012 and a reason, its sessions start on another server, and it may come
    back.
    """

    async def scenario() -> None:
        async with routed() as cluster:
            async with (
                cluster.socket("?rank=rank-0&session=a") as (lost, first),
                cluster.socket("?rank=rank-1&session=b") as (retained, second),
            ):
                assert (first, second) == ("server-0", "server-1")
                await cluster.servers[0].die()
                message = await asyncio.wait_for(lost.receive(), seconds(5))
                assert message.data == 1012 and "rank-0 is gone" in message.extra
                await retained.send_str("still here")
                assert await retained.receive_str() == "still here"
            async with cluster.socket("?session=a") as (_, name):
                assert name == "server-1"
            assert {await cluster.who() for _ in range(4)} == {"server-1"}
            async with cluster.client.get(cluster.url + "/omni/ready") as response:
                info = await response.json()
                assert response.status == 200 and [rank["up"] for rank in info["ranks"]] == [
                    False,
                    True,
                ]
                assert (info["sessions"], info["max_sessions"]) == (1, 4)
            await cluster.servers[0].start(cluster.servers[0].port)
            await cluster.poll()
            async with cluster.socket("?session=a") as (_, name):
                assert name == "server-1"  # its new session is there
            async with cluster.client.get(cluster.url + "/omni/ready") as response:
                assert (await response.json())["max_sessions"] == 8

    asyncio.run(scenario())


def test_a_silent_server_is_disconnected() -> None:
    """A machine without power sends no packet, but a ping gets no answer. An idle server that
    answers stays.
    """

    async def scenario() -> None:
        async with routed(heartbeat_s=0.2) as cluster, cluster.socket("?rank=rank-0") as (quiet, _):
            cluster.servers[1].is_silent = True
            async with cluster.socket("?rank=rank-1") as (lost, _):
                messages = []
                async with asyncio.timeout(seconds(5)):
                    while not messages or messages[-1].type is WSMsgType.PONG:
                        messages.append(await lost.receive())
                assert messages[-1].data == 1012
            await quiet.send_str("still here")
            while (message := await quiet.receive()).type is WSMsgType.PONG:
                pass
            assert message.data == "still here"

    asyncio.run(scenario())


def test_a_client_that_does_not_read_is_disconnected() -> None:
    """The router buffers little, and the server's connection ends."""

    async def scenario() -> None:
        async with routed(send_timeout_s=0.3) as cluster, cluster.socket() as (socket, name):
            backend, server = cluster.backends.all[int(name[-1])], cluster.servers[int(name[-1])]
            before = grown = psutil.Process().memory_info().rss
            await socket.send_str("flood")
            async with asyncio.timeout(seconds(10)):
                while backend.open or not server.is_cut_off:
                    await pause_task(0.05)
                    grown = max(grown, psutil.Process().memory_info().rss)
            assert server.flooded_bytes >= 4 << 20
            assert grown - before < 64 << 20  # router, server and client are all in this process

    asyncio.run(scenario())


@pytest.mark.parametrize("flood", [PING * 100_000, FRAGMENTS], ids=["pings", "fragments"])
def test_a_client_that_floods_with_small_frames_is_closed(flood: bytes) -> None:
    """It closes with 1008 and the limit at the router, and the server's socket ends too."""

    def attack(url: str) -> tuple[int, str]:
        with connect(f"ws{url.removeprefix('http')}/v1/realtime/echo", compression=None) as client:
            with contextlib.suppress(OSError):
                client.socket.sendall(flood)
            with pytest.raises(ConnectionClosed) as closed:
                read_on(client)
        assert closed.value.rcvd is not None
        return closed.value.rcvd.code, closed.value.rcvd.reason

    async def scenario() -> None:
        async with routed(1, frames=BUDGET) as cluster, cluster.socket() as (neighbour, _):
            reported = await asyncio.to_thread(attack, cluster.url)
            assert reported == (1008, "more than 20 frames under 1024 bytes a second")
            await neighbour.send_str("still here")
            assert await neighbour.receive_str() == "still here"
            assert cluster.servers[0].sockets[-1].close_code == 1008

    asyncio.run(scenario())


def test_frames_within_the_budget_pass() -> None:
    """Large frames in any number, and small ones up to the burst."""

    async def scenario() -> None:
        async with routed(1, frames=BUDGET) as cluster, cluster.socket() as (socket, _):
            for size in [SMALL_BYTES] * 200 + [1] * int(BUDGET.burst - 1):
                await socket.send_bytes(bytes(size))
                assert len(await socket.receive_bytes()) == size

    asyncio.run(scenario())


@pytest.mark.parametrize("delay_s", [None, 0.1], ids=["in the same packet", "a moment later"])
def test_frames_before_the_handshakes_response_are_refused(delay_s: float | None) -> None:
    """The status is 400, and the server gets no frame. In the second case the server answers
    slowly.
    """

    def send(port: int) -> bytes:
        head = (
            b"GET /v1/realtime/slow HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: "
            b"Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(head + PING if delay_s is None else head)
            if delay_s is not None:
                exactly(delay_s)
                raw.sendall(PING)
            raw.settimeout(seconds(10))
            response = b""
            while part := raw.recv(1 << 16):
                response += part
            return response

    async def scenario() -> None:
        async with routed(1) as cluster:
            reply = await asyncio.to_thread(send, URL(cluster.url).port or 0)
            assert reply.startswith(b"HTTP/1.1 400 ") and b"end of the handshake" in reply
            assert cluster.servers[0].num_pings == 0

    asyncio.run(scenario())


def test_small_frames_are_counted_in_parts_of_any_size() -> None:
    """Lengths of 7, 16 and 64 bits, with and without a mask, in parts of any size."""
    cut = random.Random(0)
    sizes = [0, 1, 125, 126, SMALL_BYTES - 1, SMALL_BYTES, 65_535, 65_536] * 8
    cut.shuffle(sizes)
    data = b"".join(
        Frame(Opcode.BINARY, bytes(size)).serialize(mask=cut.random() < 0.5) for size in sizes
    )
    for longest in (1, 3, 50, 100_000):
        headers, found, at = FrameHeaders(), 0, 0
        while at < len(data):
            size = cut.randint(1, longest)
            found += headers.count_small(data[at : at + size])
            at += size
        assert found == sum(size < SMALL_BYTES for size in sizes)


def test_without_any_server_requests_get_503() -> None:
    async def scenario() -> None:
        async with routed() as cluster:
            for server in cluster.servers:
                server.status = "engine_dead"
            await cluster.poll()
            for path, status in (("/health", 503), ("/omni/ready", 503), ("/v1/models", 503)):
                async with cluster.client.get(cluster.url + path) as response:
                    assert response.status == status
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await cluster.client.ws_connect(cluster.url + "/v1/realtime/echo")
            assert refused.value.status == 503

    asyncio.run(scenario())


def test_a_video_is_found_on_whichever_server_made_it() -> None:
    async def scenario() -> None:
        async with routed(3) as cluster:
            cluster.servers[2].videos.add("video_x")
            for _ in range(3):
                async with cluster.client.get(cluster.url + "/v1/videos/video_x") as response:
                    assert (await response.json())["name"] == "server-2"
            async with cluster.client.delete(cluster.url + "/v1/videos/video_x") as response:
                assert response.status == 200
            async with cluster.client.get(cluster.url + "/v1/videos/video_x") as response:
                assert response.status == 404

    asyncio.run(scenario())


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://host/path"])
def test_the_command_refuses_other_urls_than_servers(url: str) -> None:
    args = make_parser().parse_args(["router", "--backend", url])
    with pytest.raises(CommandError, match="give the address"):
        args.run(args)
