# SPDX-License-Identifier: Apache-2.0
"""`BodyTimeout`: ASGI middleware that ends requests whose bodies arrive too slowly.

A body may take `body_grace_s` seconds plus one second for every `min_body_bytes_per_s` bytes
received. Only the time spent waiting for the client counts. When this time is used up, the client
receives 408 `timeout`, the connection is closed, and the route receives a disconnect.

If a route does not read a body completely, the rest is read at a limited rate before the response
ends. Closing a connection with unread bytes would reset it, and a client that sends its whole
request before it reads would not receive the response.

Middleware is required because uvicorn and Starlette have no timeout for bodies. nginx's timeout
(client_body_timeout) applies to each read separately, so a client can send one byte per minute.
"""

import asyncio
import logging
import time
from collections import Counter
from typing import Annotated

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni.entrypoints.errors import ApiError

logger = logging.getLogger("vllm." + __name__)

_MOST_DISCARDED_BYTES = 1 << 28
"""Maximum number of unread body bytes that are read and discarded. If more remain, the connection
is closed.
"""
DISCARDED_BYTES_PER_S = 16 << 20
"""Maximum total rate at which the unread bodies from one client address are discarded. Discarding
at this rate takes 4 % of a core.
"""


class BodyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on HTTP bodies, read from environment variables like `EndpointLimits`."""

    body_grace_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 10.0
    """Time in seconds that every HTTP body may take, regardless of its size. Default: 10."""
    min_body_bytes_per_s: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)] = 16 << 10
    """Number of received bytes that extend the time limit by one second. Default: 16384."""


class BodyTimeout:
    def __init__(self, app: ASGIApp, limits: BodyLimits) -> None:
        self._app, self._limits = app, limits
        self._discards: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = _PacedRequest(scope, receive, send, self._limits, self._discards)
            await self._app(scope, request.receive, request.send)
        else:
            await self._app(scope, receive, send)


class _PacedRequest:
    """An HTTP request whose body has a time limit.

    `discards` counts the bodies that are being discarded, by client address.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, limits: BodyLimits, discards: Counter[str]
    ) -> None:
        self._scope, self._receive, self._send, self._limits = scope, receive, send, limits
        self._discards = discards
        self._left_s = limits.body_grace_s
        self._has_more = True
        self._has_response = False
        self._is_over = False

    async def receive(self) -> Message:
        if self._is_over:
            return {"type": "http.disconnect"}
        if not self._has_more:
            return await self._receive()  # the body is complete, so only a disconnect can follow
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(self._left_s):
                message = await self._receive()
        except TimeoutError:
            await self._refuse()
            return {"type": "http.disconnect"}
        self._left_s -= time.monotonic() - started_s
        self._left_s += len(message.get("body", b"")) / self._limits.min_body_bytes_per_s
        self._has_more = bool(message.get("more_body", False))
        return message

    async def send(self, message: Message) -> None:
        if self._is_over:
            return
        self._has_response = True
        ends = message["type"] == "http.response.body" and not message.get("more_body", False)
        if ends and self._has_more and _body_follows(self._scope):
            await self._send({**message, "more_body": True})
            await self._discard()
            message = {"type": "http.response.body", "body": b""}
        await self._send(message)

    async def _discard(self) -> None:
        """Read the rest of the body, up to a limit and at a limited rate."""
        left, address = _MOST_DISCARDED_BYTES, (self._scope.get("client") or ("local",))[0]
        self._discards[address] += 1
        try:
            while self._has_more and not self._is_over and left > 0:
                nbytes = len((await self.receive()).get("body", b""))
                left -= nbytes
                if self._has_more:
                    await asyncio.sleep(nbytes * self._discards[address] / DISCARDED_BYTES_PER_S)
        finally:
            self._discards[address] -= 1
            self._discards += Counter()  # remove addresses whose count is zero

    async def _refuse(self) -> None:
        self._is_over = True
        logger.info("http_body_too_slow path=%.200r", self._scope["path"])
        if self._has_response:
            return
        limits = self._limits
        text = (
            f"the request's body came too slowly: it has {limits.body_grace_s:g} s, and a second "
            f"more for every {limits.min_body_bytes_per_s} bytes"
        )
        response = ApiError(408, text, code="timeout").response()
        response.headers["Connection"] = "close"
        await response(self._scope, self._receive, self._send)


def _body_follows(scope: Scope) -> bool:
    """Return whether the client sends a body without waiting for `100 Continue`."""
    headers = dict(scope["headers"])
    has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
    return has_body and b"expect" not in headers
