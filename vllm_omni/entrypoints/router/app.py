# SPDX-License-Identifier: Apache-2.0
"""HTTP and WebSocket handlers of the router: forward everything unchanged to a server.

A WebSocket stays on one server. If that server fails, the socket is closed with 1012 and a reason,
so that the client knows that its sessions are lost; sockets of other servers are not affected. A
client finds the server of its session by the name that it sends (`?session=NAME` or the header
`X-Session-Id`), by the rank from the handshake (`X-Omni-Rank`, as a header or `?rank=`), or, in a
browser, by a cookie. Bodies are streamed in both directions, and a disconnect ends the request on
the server. A client that floods with small frames is closed with 1008, as on a server's own
sockets.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Final

import aiohttp
from aiohttp import WSCloseCode, WSMsgType, web
from multidict import CIMultiDict
from yarl import URL

from vllm_omni.entrypoints.limits.frame_budget import FrameBudget
from vllm_omni.entrypoints.router.backends import READY_PATH, Backend, Backends
from vllm_omni.entrypoints.router.client_frames import ClientFrames

logger = logging.getLogger("vllm_omni.router")

RANK_HEADER: Final = "X-Omni-Rank"
SESSION_HEADER: Final = "X-Session-Id"
COOKIE: Final = "vllm_omni_rank"
_TICKET_PATH: Final = "/v1/omni/ticket"
_KEPT_THINGS: Final = re.compile(r"^/v1/(videos|files)/[^/]+")
"""Files on the disk of one server. All servers are tried until one has the file."""

_HOP_BY_HOP: Final = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
_OF_A_HANDSHAKE: Final = frozenset(
    f"sec-websocket-{name}" for name in ("key", "version", "extensions", "protocol", "accept")
)
_CONNECT_TIMEOUT_S: Final = 5.0
_CLOSE_TIMEOUT_S: Final = 2.0


class Router:
    """Forwards requests and WebSockets.

    Args:
        backends: The servers.
        max_message_bytes: Maximum size of a client's WebSocket message in bytes.
        heartbeat_s: Seconds after which a silent server that does not reply to a ping is considered
            dead.
        send_timeout_s: Seconds in which a client must accept one message.
        frames: Budget of small frames of a client's WebSocket.
    """

    def __init__(
        self,
        backends: Backends,
        max_message_bytes: int = 64 << 20,
        *,
        heartbeat_s: float = 20.0,
        send_timeout_s: float = 30.0,
        frames: FrameBudget | None = None,
    ) -> None:
        self.backends = backends
        self._budget = frames or FrameBudget()
        self._max_bytes = max_message_bytes
        self._heartbeat_s, self._send_timeout_s = heartbeat_s, send_timeout_s
        self._client: aiohttp.ClientSession | None = None

    def application(self) -> web.Application:
        app = web.Application()
        app.cleanup_ctx.append(self._run)
        app.router.add_get("/health", self._health)
        app.router.add_get(READY_PATH, self._ready)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        return app

    @property
    def client(self) -> aiohttp.ClientSession:
        assert self._client is not None, "the application is not running"
        return self._client

    async def _run(self, app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
        # Shorter than the servers' keep-alive, because a connection that the server closes in that
        # moment would cost a request.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
        async with aiohttp.ClientSession(
            timeout=timeout,
            connector=connector,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as self._client:
            await self.backends.poll_backends(self._client)
            watcher = asyncio.create_task(self.backends.watch(self._client))
            yield
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher

    # -- about the servers -------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        """200 while any server is alive."""
        return web.Response(status=200 if self.backends.up else 503)

    async def _ready(self, request: web.Request) -> web.Response:
        """Readiness over all servers: `ready` if one has capacity, `capacity` if all are full."""
        up = self.backends.up
        status = "engine_dead" if not up else "ready" if any(b.has_room for b in up) else "capacity"
        reply = {
            "status": status,
            "sessions": sum(b.info.get("sessions") or 0 for b in up),
            "max_sessions": sum(b.info.get("max_sessions") or 0 for b in up),
            "ranks": [
                {
                    "name": b.name,
                    "up": b.is_up,
                    "open": b.open,
                    **{k: b.info.get(k) for k in ("status", "sessions")},
                }
                for b in self.backends.all
            ],
        }
        return web.json_response(reply, status=200 if status == "ready" else 503)

    # -- requests ----------------------------------------------------------------------------------

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return await self._socket(request)
        requests_all = request.method in ("GET", "HEAD", "DELETE") and bool(
            _KEPT_THINGS.match(request.path)
        )
        response: web.StreamResponse | None = None
        for backend in self._candidates(request):
            try:
                response = await self._http(request, backend, pass_over_404=requests_all)
            except aiohttp.ClientConnectorError as error:  # no part of the request was sent
                backend.unreachable(error)
                continue
            except aiohttp.ClientError as error:
                logger.warning(
                    "%s %.200r failed on %s: %s", request.method, request.path, backend.name, error
                )
                return _unavailable(
                    "the server of this request has failed; send the request again", 502
                )
            if response is not None:
                return response
        if requests_all and self.backends.up:
            return web.json_response(
                {"error": {"message": "no server has this", "code": 404}}, status=404
            )
        return _unavailable("no server is up", 503)

    def _candidates(self, request: web.Request) -> Iterator[Backend]:
        """Yield servers to try, best first, each at most once."""
        tried: list[Backend] = []
        session, rank = _wanted(request)
        while (backend := self.backends.choose(session, rank, but=tried)) is not None:
            tried.append(backend)
            yield backend

    async def _http(
        self, request: web.Request, backend: Backend, *, pass_over_404: bool
    ) -> web.StreamResponse | None:
        """Run one request. Return None if the server does not have the file and others may."""
        body = request.content if request.body_exists else None
        with backend.in_use():
            async with self.client.request(
                request.method,
                _url(backend, request),
                headers=_forwarded(request),
                data=body,
                allow_redirects=False,
            ) as reply:
                if reply.status == 404 and pass_over_404:
                    return None
                headers = _without(reply.headers, _HOP_BY_HOP)
                response = web.StreamResponse(
                    status=reply.status, reason=reply.reason, headers=headers
                )
                response.headers[RANK_HEADER] = backend.name
                # the WebSocket that the ticket is for must reach the same server
                if request.path == _TICKET_PATH:
                    _set_cookie(response, backend)
                await response.prepare(request)
                async for part in reply.content.iter_any():
                    await response.write(part)
                await response.write_eof()
                return response

    # -- sockets -----------------------------------------------------------------------------------

    async def _socket(self, request: web.Request) -> web.StreamResponse:
        frames = ClientFrames(request, self._budget)
        response = await self._find_server(request, frames)
        if not response.prepared:  # refused; the connection cannot be reused for HTTP
            response.force_close()
        return response

    async def _find_server(self, request: web.Request, frames: ClientFrames) -> web.StreamResponse:
        offered = [
            item.strip()
            for item in request.headers.get("Sec-WebSocket-Protocol", "").split(",")
            if item.strip()
        ]
        for backend in self._candidates(request):
            with backend.in_use():
                try:
                    server = await self.client.ws_connect(
                        _url(backend, request),
                        headers=_without(_forwarded(request), _OF_A_HANDSHAKE),
                        protocols=offered,
                        autoclose=False,
                        autoping=False,
                        heartbeat=self._heartbeat_s,
                        max_msg_size=0,
                        compress=0,
                    )
                # 401, 403 or 404: forward the server's response
                except aiohttp.WSServerHandshakeError as refusal:
                    return web.Response(status=refusal.status, text=refusal.message)
                except (aiohttp.ClientError, TimeoutError) as error:
                    backend.unreachable(error)
                    continue
                async with server:
                    if frames.is_early:
                        return web.Response(
                            status=400, text="frames arrived before the end of the handshake"
                        )
                    return await self._join(request, frames, server, backend)
        return _unavailable("no server is up", 503)

    async def _join(
        self,
        request: web.Request,
        frames: ClientFrames,
        server: aiohttp.ClientWebSocketResponse,
        backend: Backend,
    ) -> web.WebSocketResponse:
        """Forward messages in both directions until one side closes. Forward its close code too."""
        client = web.WebSocketResponse(
            protocols=[server.protocol] if server.protocol else [],
            autoclose=False,
            autoping=False,
            compress=False,
            max_msg_size=self._max_bytes,
        )
        client.headers[RANK_HEADER] = backend.name
        _set_cookie(client, backend)
        frames.open()
        await client.prepare(request)
        up = asyncio.create_task(_pump(client, server, self._send_timeout_s))
        down = asyncio.create_task(_pump(server, client, self._send_timeout_s))
        try:
            await asyncio.wait((up, down, frames.over), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (up, down):
                task.cancel()
            ends = await asyncio.gather(up, down, return_exceptions=True)
        client_end, server_end = (None if isinstance(end, BaseException) else end for end in ends)
        if frames.over.done():
            reason = frames.over.result().encode()
            await asyncio.gather(
                *(_close(side, WSCloseCode.POLICY_VIOLATION, reason) for side in (server, client))
            )
        elif any(isinstance(end, TimeoutError) for end in ends):
            await _close(server, WSCloseCode.GOING_AWAY)
            if request.transport is not None:
                # a client that does not read would not receive a close frame either
                request.transport.abort()
        elif client_end is not None:
            code, reason = client_end
            await _close(server, code if _may_be_sent(code) else WSCloseCode.GOING_AWAY, reason)
        elif server_end is not None and _may_be_sent(server_end[0]):
            await _close(client, *server_end)
        else:
            logger.warning("a socket on %s broke", backend.name)
            reason = f"{backend.name} is gone and its sessions with it; connect again".encode()
            await _close(client, WSCloseCode.SERVICE_RESTART, reason)
        return client


_Socket = aiohttp.ClientWebSocketResponse | web.WebSocketResponse


async def _pump(source: _Socket, sink: _Socket, send_timeout_s: float) -> tuple[int, bytes]:
    """Forward messages until `source` ends.

    Returns:
        Its close code and reason; 1006 without a close frame.

    Raises:
        TimeoutError: `sink` did not accept a message in time.
    """
    while True:
        message = await source.receive()
        async with asyncio.timeout(send_timeout_s):
            match message.type:
                case WSMsgType.BINARY:
                    await sink.send_bytes(message.data)
                case WSMsgType.TEXT:
                    await sink.send_str(message.data)
                case WSMsgType.PING:
                    await sink.ping(message.data)
                case WSMsgType.PONG:
                    await sink.pong(message.data)
                case WSMsgType.CLOSE:
                    return int(message.data or WSCloseCode.OK), str(message.extra or "").encode()
                case _:
                    return int(WSCloseCode.ABNORMAL_CLOSURE), b""


async def _close(socket: _Socket, code: int, reason: bytes = b"") -> None:
    """Close with a close frame. A peer that does not respond in time is disconnected."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await socket.close(code=code, message=reason)


def _may_be_sent(code: int) -> bool:
    """Return whether a close frame may contain this code."""
    return (1000 <= code <= 1014 and code not in (1004, 1005, 1006)) or 3000 <= code <= 4999


def _wanted(request: web.Request) -> tuple[str | None, str | None]:
    """Return the `(session, rank)` that a client names.

    The cookie applies to WebSockets only, so that image requests are spread over all servers.
    """
    session = request.query.get("session") or request.headers.get(SESSION_HEADER)
    rank = request.query.get("rank") or request.headers.get(RANK_HEADER)
    if rank is None and session is None and request.headers.get("Upgrade") is not None:
        rank = request.cookies.get(COOKIE)
    return session, rank


def _url(backend: Backend, request: web.Request) -> URL:
    return URL(backend.url + request.raw_path, encoded=True)  # as the client wrote it


def _without(headers: Mapping[str, str], names: frozenset[str]) -> "CIMultiDict[str]":
    return CIMultiDict(
        (name, value) for name, value in headers.items() if name.lower() not in names
    )


def _forwarded(request: web.Request) -> "CIMultiDict[str]":
    """Return a client's headers for the server, with the client's address in `X-Forwarded-For`."""
    headers = _without(request.headers, _HOP_BY_HOP)
    before = headers.get("X-Forwarded-For")
    peer = request.remote or "unknown"
    headers["X-Forwarded-For"] = peer if before is None else f"{before}, {peer}"
    headers.setdefault("X-Forwarded-Proto", request.scheme)
    return headers


def _set_cookie(response: web.StreamResponse, backend: Backend) -> None:
    response.set_cookie(COOKIE, backend.name, httponly=True, samesite="Strict")


def _unavailable(text: str, status: int) -> web.Response:
    body = {"error": {"message": text, "type": "server_error", "code": status}}
    return web.json_response(body, status=status, headers={"Retry-After": "2"})
