# SPDX-License-Identifier: Apache-2.0
"""`Gate`: who may come in at any realtime door, decided before the WebSocket upgrade.

A browser page of a foreign origin is refused with 403, one connection too many with 503. The count is of all doors of
one API server process. API keys are checked before, by vLLM's own middleware. Held by
tests/entrypoints/realtime/test_handshake.py.
"""

import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from starlette.responses import Response
from starlette.websockets import WebSocket

from vllm_omni.entrypoints.realtime.connection import normalize_origin, origin_allowed
from vllm_omni.entrypoints.realtime.limits import DoorLimits

logger = logging.getLogger("vllm." + __name__)


class Gate:
    """The one entrance of all doors in an API server process.

    origins: `scheme://host[:port]` from which browsers may connect besides the server's own; "null" is a file, "*" any.
    """

    def __init__(self, limits: DoorLimits, origins: Iterable[str] = ()) -> None:
        self._limits = limits
        self._origins = frozenset(map(normalize_origin, origins))
        self.num_connections = 0
        self.is_draining = False
        """The server is about to stop: nobody comes in any more."""

    @asynccontextmanager
    async def admit(self, websocket: WebSocket) -> AsyncIterator[bool]:
        """Yield whether this client may come in; one that may not has been answered."""
        refusal = self._refusal(websocket)
        if refusal is not None:
            await websocket.send_denial_response(refusal)
            yield False
            return
        self.num_connections += 1
        try:
            yield True
        finally:
            self.num_connections -= 1

    def _refusal(self, websocket: WebSocket) -> Response | None:
        if not origin_allowed(websocket.headers, self._origins):
            logger.info(
                "origin_refused origin=%.200r; pages of other origins may connect when --allowed-origins lists them",
                websocket.headers.get("origin"),
            )
            return Response("origin not allowed", 403)
        if self.is_draining:
            return Response("the server is stopping", 503, {"Retry-After": "5"})
        if self.num_connections >= self._limits.max_connections:
            return Response("too many connections", 503, {"Retry-After": "1"})
        return None
