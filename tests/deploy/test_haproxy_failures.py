# SPDX-License-Identifier: Apache-2.0
"""A real HAProxy with `deploy/haproxy/haproxy.cfg`, in front of servers that die or stop
responding.
"""

import asyncio
import signal
import socket
from pathlib import Path

import aiohttp
import pytest
from aiohttp import WSMsgType
from helpers.haproxy import Proxy, needs_haproxy
from helpers.http2 import http2_client
from helpers.proxied_servers import ECHO, SERVER_HEADER, ProxiedServers, proxied
from helpers.waits import pause, pause_task, seconds, until, wait_until

pytestmark = needs_haproxy


def abort_slow_request(cluster: ProxiedServers) -> None:
    """Close the connection of the slow request, as if its server had died."""
    hit = next(server for server in cluster.servers if server.slow)
    hit.slow[0].transport.abort()  # type: ignore[union-attr]


def test_a_dead_server_ends_only_its_own_sockets(tmp_path: Path) -> None:
    """When a server dies, its WebSockets close immediately, and its sessions start again on another
    server.

    Once the server is running again, it receives requests again.
    """

    async def scenario() -> None:
        async with proxied(tmp_path) as cluster:
            async with (
                cluster.socket("?server=a&session=s") as (lost, first),
                cluster.socket("?server=b&session=t") as (retained, second),
            ):
                assert (first, second) == ("a", "b")
                await cluster.servers[0].die()
                message = await asyncio.wait_for(lost.receive(), seconds(5))
                assert message.type in (WSMsgType.CLOSED, WSMsgType.ERROR)
                await retained.send_str("still here")
                assert await retained.receive_str() == "still here"
            # The session starts on server b even before the next health check.
            assert await cluster.home("?session=s") == "b"
            assert {await cluster.who() for _ in range(4)} == {"b"}
            await cluster.checked(1, 1)
            async with cluster.client.get(cluster.url + "/omni/ready") as response:
                info = await response.json()
                assert (response.status, info) == (
                    200,
                    {"status": "ready", "servers_with_room": 1},
                )
            await cluster.servers[0].start()
            await cluster.checked(2)
            assert await cluster.home("?session=s") == "b"  # The new session is on server b.
            assert {await cluster.who() for _ in range(4)} == {"a", "b"}
            async with cluster.client.get(cluster.url + "/omni/ready") as response:
                assert (await response.json())["servers_with_room"] == 2

    asyncio.run(scenario())


@pytest.mark.parametrize("is_first", [True, False])
def test_a_request_that_reached_a_server_is_not_repeated(tmp_path: Path, is_first: bool) -> None:
    """If a server dies during a request, the client gets 502, and no other server gets the request,
    because this could generate a chunk twice.

    This also applies to a connection that the client has used before. If the proxy closed it
    without a response, browsers would send the request again.
    """

    async def scenario() -> None:
        async with proxied(tmp_path) as cluster:
            if not is_first:
                await cluster.who()
            request = asyncio.create_task(
                cluster.client.post(cluster.url + "/v1/slow", json={}).__aenter__()
            )
            await until(lambda: any(server.slow for server in cluster.servers))
            abort_slow_request(cluster)
            response = await request
            assert response.status == 502
            assert (await response.json())["error"]["code"] == "server_failed"
            assert sum(len(server.slow) for server in cluster.servers) == 1
            response.close()

    asyncio.run(scenario())


def test_an_http_2_request_that_reached_a_server_is_not_repeated(tmp_path: Path) -> None:
    """The client gets 502 on the request's stream. It would repeat a stream that is refused."""

    def talk(proxy: Proxy, cluster: ProxiedServers) -> None:
        with http2_client(proxy.tls_port, proxy.client_tls("h2")) as client:
            assert client.read_response(client.send("POST", "/v1/images/generations"))[0] == 201
            for _ in range(2):
                slow = client.send("POST", "/v1/slow")
                wait_until(lambda: any(server.slow for server in cluster.servers))
                loop.call_soon_threadsafe(abort_slow_request, cluster)
                status, body = client.read_response(slow)
                assert status == 502 and b"server_failed" in body
                assert sum(len(server.slow) for server in cluster.servers) == 1
                for server in cluster.servers:
                    server.seen.clear()
            assert not client.reset

    async def scenario() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        async with proxied(tmp_path) as cluster:
            await asyncio.to_thread(talk, cluster.proxy, cluster)

    loop: asyncio.AbstractEventLoop
    asyncio.run(scenario())


@pytest.mark.parametrize(
    "path", ["/v1/models?server=b", "/v1/videos/video_b.x", "/health?server=b"]
)
def test_a_request_for_a_server_that_is_down_gets_503(tmp_path: Path, path: str) -> None:
    """The request does not reach the server, because a hung server would not respond."""

    async def scenario() -> None:
        async with proxied(tmp_path) as cluster:
            cluster.servers[1].status = "engine_dead"
            await cluster.checked(1, 1)
            for _ in range(2):
                async with cluster.client.get(cluster.url + path) as response:
                    assert response.status == 503
                    assert (await response.json())["error"]["code"] == "server_down"
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await cluster.home("?session=s&server=b")
            assert refused.value.status == 503
            assert not cluster.servers[1].seen

    asyncio.run(scenario())


def test_requests_for_a_server_that_has_just_died_get_a_response(tmp_path: Path) -> None:
    """Until health checks fail, the proxy tries to connect. When they fail, it ends these attempts.

    Each request still gets a response, also on a connection that the client has used before.
    """

    async def scenario() -> None:
        async with proxied(tmp_path) as cluster:
            await cluster.who(**{SERVER_HEADER: "a"})
            await cluster.servers[1].die()
            seen = set()
            for _ in range(8):
                url = cluster.url + "/v1/images/generations?server=b"
                async with cluster.client.post(url, json={}) as response:
                    seen.add((response.status, (await response.json())["error"]["code"]))
                await pause_task(0.05)
            assert seen <= {(503, "capacity"), (503, "server_down")}
            assert (503, "server_down") in seen

    asyncio.run(scenario())


def test_a_request_that_meets_a_stopping_proxy_is_told_to_try_again(tmp_path: Path) -> None:
    """A proxy that is told to stop (SIGUSR1) has closed the socket between its two parts. The
    response says that the proxy is stopping, and the proxy logs the request.
    """

    def ask(proxy: Proxy) -> bytes:
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=seconds(10)) as raw:
            raw.sendall(b"POST /v1/half HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nhe")
            pause(0.1)
            proxy.process.send_signal(signal.SIGUSR1)
            wait_until(lambda: "Stopping" in proxy.log or "stopped" in proxy.log)
            raw.sendall(b"re")
            return raw.recv(1 << 16)

    async def scenario() -> None:
        async with proxied(tmp_path) as cluster:
            response = await asyncio.to_thread(ask, cluster.proxy)
            assert response.startswith(b"HTTP/1.1 503 ") and b'"draining"' in response
            await until(lambda: "POST /v1/half" in cluster.proxy.log)

    asyncio.run(scenario())


def test_a_request_that_takes_too_long_gets_504(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with proxied(
            tmp_path, edits={"timeout server 1h": "timeout server 300ms"}
        ) as cluster:
            for _ in range(2):
                async with cluster.client.post(cluster.url + "/v1/slow", json={}) as response:
                    assert response.status == 504
                    assert (await response.json())["error"]["code"] == "timeout"
            await until(lambda: sum(server.cancelled for server in cluster.servers) == 2)

    asyncio.run(scenario())


def test_a_server_that_stopped_answering_is_disconnected(tmp_path: Path) -> None:
    """When a server fails its health checks, the proxy closes the connections of the server's
    clients.

    Otherwise the connections would stay open, because neither a frozen process nor a machine that
    lost power closes them.
    """

    async def scenario() -> None:
        edits = {"timeout check 5s": "timeout check 200ms"}
        async with (
            proxied(tmp_path, edits=edits) as cluster,
            cluster.socket("?server=a") as (quiet, _),
            cluster.socket("?server=b") as (lost, _),
        ):
            cluster.servers[1].status = "engine_dead"
            message = await asyncio.wait_for(lost.receive(), seconds(5))
            assert message.type in (WSMsgType.CLOSED, WSMsgType.ERROR)
            await quiet.send_str("still here")
            assert await quiet.receive_str() == "still here"

    asyncio.run(scenario())


def test_without_any_server_requests_get_503(tmp_path: Path) -> None:
    """`/health` returns 200 while any server is alive, and `/omni/ready` returns 200 while any
    server has free capacity.
    """

    async def scenario() -> None:
        async with proxied(tmp_path) as cluster:
            assert await cluster.status("/health") == 200

            async def statuses() -> dict[str, int]:
                paths = ("/health", "/omni/ready", "/v1/files")
                return {path: await cluster.status(path) for path in paths}

            for server in cluster.servers:
                server.status = "capacity"
            await cluster.checked(0, 2)
            assert await statuses() == {"/health": 200, "/omni/ready": 503, "/v1/files": 503}
            # The web page comes from a full server.
            for path in ("/", "/omni/", "/omni/app.js?v=1", "/v1/models", "/v1/omni/ticket"):
                assert await cluster.status(path) == 201
            for server in cluster.servers:
                server.status = "engine_dead"
            await cluster.checked(0, 0)
            assert await statuses() == {"/health": 503, "/omni/ready": 503, "/v1/files": 503}
            assert await cluster.status("/omni/") == 503
            async with cluster.client.get(cluster.url + "/omni/ready") as response:
                assert (await response.json())["status"] == "engine_dead"
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await cluster.client.ws_connect(cluster.url + ECHO)
            assert refused.value.status == 503

    asyncio.run(scenario())
