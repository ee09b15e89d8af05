# SPDX-License-Identifier: Apache-2.0
"""A real HAProxy with `deploy/haproxy/haproxy.cfg`, in front of small servers that respond with
their names.
"""

import asyncio
import contextlib
import itertools
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import WSMsgType
from helpers.echo_server import EchoServer
from helpers.haproxy import CHECK_S, Proxy, needs_haproxy, running_proxy
from helpers.http2 import http2_client
from helpers.ports import port_for_a_server
from helpers.proxied_servers import COOKIE, ECHO, SERVER_HEADER, ProxiedServers, proxied
from helpers.waits import exactly_in_task, seconds, until
from websockets.frames import Frame, Opcode
from yarl import URL

pytestmark = needs_haproxy

SESSION_HEADER = "X-Session-Id"


def test_requests_pass_through_unchanged(tmp_path: Path) -> None:
    """The proxy forwards a request's method, path, query, headers and body, and the response's
    status, without changing them.

    The server also receives the client's address, which a client cannot forge.
    """

    async def scenario() -> None:
        async with proxied(tmp_path) as cluster:
            body = bytes(3 << 20)
            url = URL(f"{cluster.url}/v1/any%20thing?a=1&b=%2F", encoded=True)
            sent = {"Authorization": "Bearer k", "X-Forwarded-For": "1.2.3.4"}
            async with cluster.client.put(url, data=body, headers=sent) as response:
                assert response.status == 201
                assert (await response.json())["bytes"] == len(body)
            request = next(server.seen[0] for server in cluster.servers if server.seen)
            assert (request.method, request.raw_path) == ("PUT", "/v1/any%20thing?a=1&b=%2F")
            assert request.headers["Authorization"] == "Bearer k"
            assert request.headers.getall("X-Forwarded-For") == ["127.0.0.1"]
            assert request.headers["X-Forwarded-Proto"] == "http"
            assert request.headers["Host"] == cluster.url.removeprefix("http://")

    asyncio.run(scenario())


def test_streams_arrive_as_they_are_made(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            proxied(tmp_path) as cluster,
            cluster.client.get(cluster.url + "/v1/stream") as response,
        ):
            parts = [part async for part in response.content.iter_any()]
            assert b"".join(parts) == b"data: 0\n\ndata: 1\n\ndata: 2\n\n" and len(parts) >= 3

    asyncio.run(scenario())


def test_requests_without_a_session_spread(tmp_path: Path) -> None:
    """A request without a session goes to the server with the fewest requests.

    A full server receives no request while another server has free capacity. When a client
    disconnects, its request ends on the server.
    """

    async def scenario() -> None:
        async with proxied(tmp_path, 3) as cluster:
            slow = [
                asyncio.create_task(cluster.client.get(cluster.url + "/v1/slow").__aenter__())
                for _ in range(6)
            ]
            await until(lambda: [len(server.seen) for server in cluster.servers] == [2, 2, 2])
            cluster.servers[0].status, cluster.servers[2].status = "capacity", "draining"
            await cluster.checked(1, 3)
            assert {await cluster.who() for _ in range(4)} == {"b"}
            for task in slow:
                task.cancel()
            await asyncio.wait(slow)
            await until(lambda: [server.cancelled for server in cluster.servers] == [2, 2, 2])

    asyncio.run(scenario())


def test_a_named_session_returns_to_its_server(tmp_path: Path) -> None:
    """A request or WebSocket that names a session reaches the session's server, even if that server
    is full.

    The session can be named in the query, in a header or in the path.
    """

    async def scenario() -> None:
        async with proxied(tmp_path, 3) as cluster:
            homes = {f"s:{n}": await cluster.home(f"?session=s:{n}") for n in range(12)}
            assert len(set(homes.values())) == 3
            for server in cluster.servers:
                server.status = "capacity"
            await cluster.checked(0, 3)
            for session, home in homes.items():
                assert await cluster.home(**{SESSION_HEADER: session}) == home
                assert await cluster.who(**{SESSION_HEADER: session}) == home
                encoded = f"?session={session.replace(':', '%3A')}"
                assert await cluster.home(encoded) == home
                for path in (f"/v1/sessions/{session}/snapshot", f"/omni/sessions/{session}/x"):
                    assert await cluster.who(path) == home
            # A new session is refused, because no server has free capacity.
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await cluster.home("?session=another")
            assert refused.value.status == 503

    asyncio.run(scenario())


def test_a_new_name_starts_on_a_server_with_room(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with proxied(tmp_path, 3) as cluster:
            cluster.servers[0].status = "capacity"
            await cluster.checked(2, 3)
            assert {await cluster.home(f"?session=s{n}") for n in range(20)} == {"b", "c"}

    asyncio.run(scenario())


def test_a_restarted_proxy_chooses_the_same_server(tmp_path: Path) -> None:
    """All proxies choose the same server for a session name that they have not seen before, even
    after a restart.
    """

    async def scenario() -> None:
        async with proxied(tmp_path, 4) as cluster:
            names = [f"?session=s{number}" for number in range(40)]
            homes = [await cluster.home(name) for name in names]
            assert min(homes.count(server.name) for server in cluster.servers) >= 3
            await asyncio.to_thread(cluster.proxy.restart)
            await cluster.checked(4)
            assert cluster.proxy.table("named") == 0
            assert [await cluster.home(name) for name in names] == homes
            # When a server dies, only its own sessions move to another server.
            await asyncio.to_thread(cluster.proxy.restart)
            await cluster.servers[2].die()
            await cluster.checked(3)
            found = [await cluster.home(name) for name in names]
            assert all(new == old for new, old in zip(found, homes, strict=True) if old != "c")

    asyncio.run(scenario())


def test_a_reload_keeps_the_servers_of_sessions_and_the_sockets(tmp_path: Path) -> None:
    """After a reload, the old HAProxy process serves its WebSockets until they close, and the new
    process takes over the session table.
    """

    async def scenario() -> None:
        async with (
            proxied(tmp_path, 3) as cluster,
            cluster.socket("?session=held") as (held, _),
        ):
            homes = {}
            for number, name in enumerate("abcabc"):
                moved = f"?session=m{number}&server={name}"
                assert await cluster.home(moved) == name
                homes[f"m{number}"] = name
            old = cluster.proxy.process
            await asyncio.to_thread(cluster.proxy.reload)
            await cluster.checked(3)
            await until(lambda: cluster.proxy.table("named") == 7)
            for session, home in homes.items():
                assert await cluster.home(f"?session={session}") == home
            await held.send_str("still here")
            assert await held.receive_str() == "still here"
            old.kill()
            old.wait()

    asyncio.run(scenario())


def test_proxies_share_the_servers_of_sessions(tmp_path: Path) -> None:
    """After a session has moved, every proxy routes the session's requests to the new server."""

    async def scenario() -> None:
        servers = [EchoServer(name) for name in "ab"]
        for server in servers:
            await server.start()
        addresses = {server.name: server.address for server in servers}
        peers = {f"proxy-{n}": f"127.0.0.1:{port_for_a_server()}" for n in (1, 2)}
        with contextlib.ExitStack() as stack:
            proxies = [
                stack.enter_context(running_proxy(tmp_path, addresses, None, peers, name))
                for name in peers
            ]
            async with aiohttp.ClientSession() as client:
                first, second = (ProxiedServers(proxy, servers, client) for proxy in proxies)
                await first.checked(2)
                await second.checked(2)
                home = await first.home("?session=walk")
                other = "b" if home == "a" else "a"
                assert await first.home("?session=walk", **{SERVER_HEADER: other}) == other
                key = f"server_key={other}\n"
                await until(lambda: key in proxies[1].command("show table named"))
                assert await second.home("?session=walk") == other
        for server in servers:
            await server.runner.cleanup()

    # `running_proxy` does not wait for health checks of the servers in this event loop; only
    # `checked` waits for them.
    asyncio.run(scenario())


def test_a_client_returns_to_the_server_of_its_handshake(tmp_path: Path) -> None:
    """A client is routed back to the server that accepted its handshake: programs send a header or
    a query parameter, browsers send a cookie.
    """

    async def scenario() -> None:
        async with proxied(tmp_path, 4) as cluster:
            async with cluster.socket() as (socket, name):
                assert socket._response.headers[SERVER_HEADER] == name
                cookie = socket._response.headers["Set-Cookie"]
                assert cookie.startswith(f"{COOKIE}={name};") and "HttpOnly" in cookie
                for headers in ({SERVER_HEADER: name}, {"Cookie": f"{COOKIE}={name}"}):
                    for _ in range(3):
                        assert await cluster.home(**headers) == name
                assert await cluster.home(f"?server={name}") == name
            async with cluster.client.post(cluster.url + "/v1/omni/ticket") as response:
                assert response.headers["Set-Cookie"].startswith(
                    f"{COOKIE}={response.headers[SERVER_HEADER]};"
                )
            # Responses to other requests set no cookie, and the cookie does not bind image requests
            # to a server.
            async with cluster.client.post(cluster.url + "/v1/images/generations") as response:
                assert "Set-Cookie" not in response.headers
            spread = {await cluster.who(Cookie=f"{COOKIE}={name}") for _ in range(8)}
            assert len(spread) > 1

    asyncio.run(scenario())


def test_a_request_addresses_exactly_one_server(tmp_path: Path) -> None:
    """A request that names a server reaches only that server, even if the server is full or the
    session belongs to another server.

    If the server is dead, the request fails instead of reaching another server.
    """

    async def scenario() -> None:
        async with proxied(tmp_path, 3) as cluster:
            cluster.servers[1].status = "capacity"
            await cluster.checked(2, 3)
            for server in cluster.servers:
                assert await cluster.who(**{SERVER_HEADER: server.name}) == server.name
                assert await cluster.who(f"/v1/x?server={server.name}") == server.name
                url = cluster.url + "/omni/ready"
                async with cluster.client.get(url, headers={SERVER_HEADER: server.name}) as reply:
                    assert (await reply.json())["name"] == server.name
            for headers in ({SERVER_HEADER: "zzz"}, {SERVER_HEADER: ""}):
                assert await cluster.status("/v1/models", **headers) == 404
            await cluster.servers[0].die()
            assert await cluster.status("/v1/models", **{SERVER_HEADER: "a"}) == 503
            await cluster.checked(1, 2)
            assert await cluster.status("/v1/models", **{SERVER_HEADER: "a"}) == 503
            assert await cluster.status("/health", **{SERVER_HEADER: "a"}) == 503

    asyncio.run(scenario())


def test_a_session_that_moved_is_found_on_its_new_server(tmp_path: Path) -> None:
    """A request that names both a session and a server assigns the session to that server for all
    later requests.
    """

    async def scenario() -> None:
        async with proxied(tmp_path, 3) as cluster:
            for number in range(6):
                session = f"a.walk-{number}"
                home = await cluster.home(f"?session={session}")
                other = next(server.name for server in cluster.servers if server.name != home)
                assert await cluster.home(f"?session={session}&server={other}") == other
                for _ in range(2):
                    assert await cluster.home(f"?session={session}") == other
                    assert await cluster.who(f"/v1/sessions/{session}/snapshot") == other

    asyncio.run(scenario())


def test_an_id_leads_to_the_server_that_made_it(tmp_path: Path) -> None:
    """A request that contains the id of a video, file, WebRTC connection or session reaches the
    server that created the id.
    """

    async def scenario() -> None:
        async with proxied(tmp_path, 3) as cluster:
            cluster.servers[2].videos.add("video_c.x")
            for _ in range(3):
                async with cluster.client.get(cluster.url + "/v1/videos/video_c.x") as response:
                    assert (await response.json())["name"] == "c"
            async with cluster.client.delete(cluster.url + "/v1/videos/video_c.x") as response:
                assert response.status == 200
            assert await cluster.status("/v1/videos/video_c.x") == 404
            for server, letter in itertools.product(cluster.servers, "pqr"):
                token = letter * 22
                for path in (
                    f"/v1/files/file_{server.name}.{token}",
                    f"/v1/videos/video_{server.name}.{token}/content",
                    f"/v1/realtime/webrtc/{server.name}.{token}",
                    f"/v1/environments/{server.name}.{token}",
                    f"/v1/sessions/{server.name}.{token}/snapshot",
                ):
                    assert await cluster.who(path) == server.name, path
            assert await cluster.status("/v1/videos/video_zzz.x") == 404

    asyncio.run(scenario())


def test_sockets_pass_everything_both_ways(tmp_path: Path) -> None:
    """The proxy passes WebSocket text, large binary messages, pings, the chosen subprotocol and
    close codes in both directions.
    """

    async def scenario() -> None:
        async with proxied(tmp_path) as cluster:
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
            server = next(each for each in cluster.servers if each.name == name).sockets[-1]
            await until(lambda: server.close_code == 3001)
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await cluster.client.ws_connect(cluster.url + "/v1/realtime/private")
            assert refused.value.status == 401

    asyncio.run(scenario())


def test_a_draining_server_keeps_its_sockets(tmp_path: Path) -> None:
    """A draining server finishes its chunks, and clients of its sessions still reach it."""

    async def scenario() -> None:
        async with proxied(tmp_path) as cluster, cluster.socket("?session=s&server=a") as (held, _):
            cluster.servers[0].status = "draining"
            await cluster.checked(1, 2)
            await exactly_in_task(5 * CHECK_S)
            await held.send_str("still here")
            assert await held.receive_str() == "still here"
            assert await cluster.home("?session=s") == "a"
            assert {await cluster.who() for _ in range(4)} == {"b"}

    asyncio.run(scenario())


def test_frames_that_arrive_with_the_handshake_reach_the_server(tmp_path: Path) -> None:
    """The proxy forwards frames that arrive together with the handshake.

    RFC 6455 forbids such frames, but the proxy does not parse frames and therefore loses none. The
    server limits them.
    """
    head = (
        f"GET {ECHO.replace('echo', 'slow')} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\n"
        "Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        "Sec-WebSocket-Version: 13\r\n\r\n"
    ).encode()

    def send(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=seconds(10)) as raw:
            raw.sendall(head + b"\x89\x80\0\0\0\0")  # an empty ping frame
            response = b""
            while not response.endswith(b"\x8a\0"):  # the pong to the empty ping
                part = raw.recv(1 << 16)
                assert part, response
                response += part
            return response

    async def scenario() -> None:
        async with proxied(tmp_path, 1) as cluster:
            reply = await asyncio.to_thread(send, cluster.proxy.port)
            assert reply.startswith(b"HTTP/1.1 101 ")
            assert cluster.servers[0].num_pings == 1

    asyncio.run(scenario())


def test_metrics_and_operators_routes_are_for_private_networks(tmp_path: Path) -> None:
    """`/metrics` and the operators' routes return 403 to clients outside private networks.

    In a private network, Prometheus scrapes each server's metrics by server name, and the proxy's
    metrics on a separate port.
    """

    async def scenario() -> None:
        edits: dict[str, Any] = {"src 127.0.0.0/8 10.0.0.0/8": "src 10.0.0.0/8"}
        async with proxied(tmp_path, edits=edits) as cluster:
            for path in (
                "/metrics",
                "/metrics/",
                "/%6detrics",
                "/omni/sessions",
                "/omni/%73essions/walk/migrate",
                "/omni/migrations/x?server=a",
            ):
                url = URL(cluster.url + path, encoded=True)
                for headers in ({}, {SERVER_HEADER: "a"}):
                    async with cluster.client.get(url, headers=headers) as response:
                        assert response.status == 403, path
            url = f"http://127.0.0.1:{cluster.proxy.statistics_port}/metrics"
            async with cluster.client.get(url) as response:
                assert "haproxy_server_status" in await response.text()

    asyncio.run(scenario())


def test_http_2_carries_requests_and_websockets(tmp_path: Path) -> None:
    """Several requests and WebSockets share one HTTP/2 connection, and each reaches its own
    server.
    """

    def talk(proxy: Proxy) -> None:
        with http2_client(proxy.tls_port, proxy.client_tls("h2", "http/1.1")) as client:
            assert client.serves_websockets
            sockets = {name: client.open_websocket(f"{ECHO}?server={name}") for name in "ab"}
            for name, stream in sockets.items():
                assert client.statuses[stream] == 200
                assert client.headers[stream]["x-omni-server"] == name
                assert client.headers[stream]["set-cookie"].startswith(f"{COOKIE}={name};")
                assert client.read_until(stream, name.encode())
            for name, stream in sockets.items():
                client.write(stream, Frame(Opcode.TEXT, f"to {name}".encode()).serialize(mask=True))
                assert client.read_until(stream, f"to {name}".encode())
            request = client.send("POST", "/v1/images/generations", ("x-omni-server", "b"))
            status, body = client.read_response(request)
            assert status == 201 and b'"name": "b"' in body
            assert client.read_response(client.send("GET", "/omni/ready"))[0] == 200

    async def scenario() -> None:
        async with proxied(tmp_path) as cluster:
            await asyncio.to_thread(talk, cluster.proxy)
            first = cluster.servers[0].seen[0]
            assert first.headers["X-Forwarded-Proto"] == "https"
            await asyncio.to_thread(cluster.proxy.wait_until_idle)

    asyncio.run(scenario())


def test_tls_without_http_2_carries_websockets(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with proxied(tmp_path) as cluster:
            url = f"wss://localhost:{cluster.proxy.tls_port}{ECHO}"
            tls = cluster.proxy.client_tls("http/1.1")
            async with cluster.client.ws_connect(url, ssl=tls) as socket:
                assert await socket.receive_str() in "ab"
                await socket.send_str("hällo")
                assert await socket.receive_str() == "hällo"

    asyncio.run(scenario())
