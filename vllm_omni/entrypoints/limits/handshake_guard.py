# SPDX-License-Identifier: Apache-2.0
"""`HandshakeGuard`: closes a socket if its first request does not arrive in time.

uvicorn waits for a connection's first request without a time limit, so clients without a key could
occupy all file descriptors.

Why not an option of uvicorn: `timeout_keep_alive` starts after a response, and no option limits the
first request. A reverse proxy does, but a server must also be safe without one.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vllm_omni.entrypoints.lifespan import run_while_serving

logger = logging.getLogger("vllm." + __name__)


class HandshakeGuard:
    """Closes sockets without a complete first request.

    Later requests of a connection are covered by uvicorn's keep-alive timeout.

    Args:
        timeout_s: Seconds in which the headers of the first request, or of a WebSocket's upgrade,
            must arrive. 0: no limit.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def attach_to_app(self, app: FastAPI) -> None:
        """Watch the server of this application (vLLM sets `app.state.server`) while it runs."""
        if self._timeout_s == 0:
            return
        run_while_serving(app, self._watching)

    @asynccontextmanager
    async def _watching(self, starting: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(self._watch(starting.state.server))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _watch(self, server: Any) -> None:
        since_s: dict[Any, float] = {}
        while True:
            await asyncio.sleep(min(1.0, self._timeout_s / 4))
            now_s = time.monotonic()
            since_s = {
                protocol: since_s.get(protocol, now_s)
                for protocol in server.server_state.connections
                if isinstance(protocol, H11Protocol | HttpToolsProtocol) and protocol.cycle is None
            }
            late = [
                protocol
                for protocol, first_s in since_s.items()
                if now_s - first_s >= self._timeout_s
            ]
            for protocol in late:
                protocol.transport.abort()
            if late:
                logger.info("handshakes_given_up count=%d", len(late))
