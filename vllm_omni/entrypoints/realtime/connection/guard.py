# SPDX-License-Identifier: Apache-2.0
"""`ConnectionGuard`: admits clients to the realtime endpoints before the WebSocket upgrade.

Requests from browser pages with other origins are refused with 403. A connection that exceeds the
limit is refused with 503. All endpoints of one API server process share the limit. Before a request
reaches this guard, vLLM's own middleware has already checked the request's API key.
"""

import logging
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager

from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.websockets import WebSocket

from vllm_omni.entrypoints.realtime.connection.connection import normalize_origin, origin_allowed
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits

logger = logging.getLogger("vllm." + __name__)


class ConnectionGuard:
    """Admits connections to the realtime endpoints of one API server process.

    Args:
        limits: Limits. The guard applies only `max_connections`.
        origins: Origins (`scheme://host[:port]`) that browsers may connect from, in addition to the
            server's own origin. "null" stands for local files and "*" for any origin.
    """

    def __init__(self, limits: EndpointLimits, origins: Iterable[str] = ()) -> None:
        self._limits = limits
        self._origins = frozenset(map(normalize_origin, origins))
        self.num_connections = 0
        self.is_draining = False
        """Whether the server is shutting down and admits no connections."""

    @asynccontextmanager
    async def admit(self, websocket: WebSocket) -> AsyncIterator[bool]:
        """Yield whether a client is admitted. A client that is not admitted has already received an
        error response.
        """
        refusal = self.refusal(websocket)
        if refusal is not None:
            await websocket.send_denial_response(refusal)
            yield False
            return
        with self.occupy():
            yield True

    @contextmanager
    def occupy(self) -> Iterator[None]:
        """Count a connection as open for the duration of the `with` block."""
        self.num_connections += 1
        try:
            yield
        finally:
            self.num_connections -= 1

    def refusal(self, connection: HTTPConnection) -> Response | None:
        """Return the error response to send, or None if the client is admitted."""
        if not origin_allowed(connection.headers, self._origins):
            logger.info(
                "origin_refused origin=%.200r; pages of other origins may connect when "
                "--allowed-origins lists them",
                connection.headers.get("origin"),
            )
            return Response("origin not allowed", 403)
        if self.is_draining:
            return Response("the server is stopping", 503, {"Retry-After": "5"})
        if self.num_connections >= self._limits.max_connections:
            return Response("too many connections", 503, {"Retry-After": "1"})
        return None
