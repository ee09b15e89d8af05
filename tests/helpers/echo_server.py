# SPDX-License-Identifier: Apache-2.0
"""Small servers that respond with their names. Reverse proxy tests put them behind the proxy."""

import asyncio
from typing import Any

from aiohttp import WSMsgType, web
from helpers.waits import exactly_in_task, pause_task


class EchoServer:
    """A server that responds with its name. It reports `status` as its readiness, as a real server
    does at `/omni/ready`.
    """

    def __init__(self, name: str) -> None:
        self.name, self.status = name, "ready"
        self.videos: set[str] = set()
        self.seen: list[web.Request] = []
        self.cancelled = 0
        self.sockets: list[web.WebSocketResponse] = []
        self.num_pings, self.num_refused = 0, 0
        self.flooded_bytes, self.is_cut_off = 0, False
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def slow(self) -> list[web.Request]:
        """Requests to `/v1/slow` that the server has received."""
        return [request for request in self.seen if request.path == "/v1/slow"]

    async def start(self) -> None:
        """Start listening. After `die`, the server listens on the same port again."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/omni/ready", self._ready)
        app.router.add_get("/v1/realtime/echo", self._socket)
        app.router.add_get("/v1/realtime/slow", self._slow_socket)
        app.router.add_get("/v1/realtime/private", self._refuse)
        app.router.add_route("*", "/v1/videos/{id}", self._video)
        app.router.add_route("*", "/v1/slow", self._slow)
        app.router.add_get("/v1/stream", self._stream)
        app.router.add_post("/v1/refused", self._refuse_body)
        app.router.add_route("*", "/{path:.*}", self._echo)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()
        self.port = self.runner.addresses[0][1]

    async def die(self) -> None:
        """Stop the server and abort its connections, as if its process had been killed."""
        for each in self.sockets:
            if each._req is not None and each._req.transport is not None:
                each._req.transport.abort()
        await self.runner.cleanup()

    async def _ready(self, request: web.Request) -> web.Response:
        info = {"status": self.status, "sessions": 1, "max_sessions": 4, "name": self.name}
        return web.json_response(info, status=200 if self.status == "ready" else 503)

    async def _refuse(self, request: web.Request) -> web.Response:
        return web.Response(status=401)

    async def _refuse_body(self, request: web.Request) -> web.Response:
        """Refuse a request without reading its body. The unread bytes cause the kernel to reset the
        connection when it is closed.
        """
        self.num_refused += 1
        response = web.Response(status=507, text="no room")
        response.force_close()
        return response

    async def _video(self, request: web.Request) -> web.Response:
        if request.match_info["id"] not in self.videos:
            return web.json_response({"error": "not here"}, status=404)
        if request.method == "DELETE":
            self.videos.remove(request.match_info["id"])
        return web.json_response({"name": self.name})

    async def _slow(self, request: web.Request) -> web.Response:
        try:
            self.seen.append(request)
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
        reply: dict[str, Any] = {"name": self.name, "bytes": len(body)}
        return web.json_response({**reply, "query": request.query_string}, status=201)

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
