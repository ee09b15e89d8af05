# SPDX-License-Identifier: Apache-2.0
"""Echo servers behind a real HAProxy, for tests that run in one event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from helpers.echo_server import EchoServer
from helpers.haproxy import Proxy
from yarl import URL

COOKIE, ECHO, SERVER_HEADER = "vllm_omni_server", "/v1/realtime/echo", "X-Omni-Server"
_NAMES = "abcdefgh"


class ProxiedServers:
    """A proxy, its servers (`a`, `b` and so on) and an HTTP client."""

    def __init__(
        self, proxy: Proxy, servers: list[EchoServer], client: aiohttp.ClientSession
    ) -> None:
        self.proxy, self.url, self.servers, self.client = proxy, proxy.url, servers, client

    async def checked(self, up: int, total: int | None = None) -> None:
        """Wait until the proxy's health checks have found `up` servers with free capacity and
        `total` live servers.
        """
        await asyncio.to_thread(self.proxy.wait_until_checked, up, total)

    async def who(self, path: str = "/v1/images/generations", **headers: str) -> str:
        async with self.client.post(self.url + path, json={}, headers=headers) as response:
            reply = await response.json()
            assert response.status == 201, f"{reply}\n{self.proxy.log[-2000:]}"
            assert response.headers[SERVER_HEADER] == reply["name"]
            return str(reply["name"])

    async def status(self, path: str, **headers: str) -> int:
        async with self.client.get(self.url + path, headers=headers) as response:
            return response.status

    @contextlib.asynccontextmanager
    async def socket(
        self, query: str = "", **headers: str
    ) -> AsyncIterator[tuple[aiohttp.ClientWebSocketResponse, str]]:
        """Open a WebSocket and yield `(socket, server name)`."""
        async with self.client.ws_connect(
            URL(f"{self.url}{ECHO}{query}", encoded=True),
            headers=headers,
            protocols=["other", "chosen"],
            max_msg_size=0,
            autoping=False,
        ) as socket:
            yield socket, await socket.receive_str()

    async def home(self, query: str = "", **headers: str) -> str:
        """Open a new WebSocket and return the name of the server that accepts it."""
        async with self.socket(query, **headers) as (_, name):
            return name


@contextlib.asynccontextmanager
async def proxied(
    folder: Path, num_servers: int = 2, edits: dict[str, str] | None = None
) -> AsyncIterator[ProxiedServers]:
    servers = [EchoServer(name) for name in _NAMES[:num_servers]]
    for server in servers:
        await server.start()
    addresses = {server.name: server.address for server in servers}
    # The servers run in this event loop, so calls that block until the servers respond run in a
    # thread.
    proxy = await asyncio.to_thread(Proxy, folder, addresses, edits)
    try:
        async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as client:
            cluster = ProxiedServers(proxy, servers, client)
            await cluster.checked(num_servers)
            yield cluster
    finally:
        proxy.stop()
        for server in servers:
            await server.runner.cleanup()
