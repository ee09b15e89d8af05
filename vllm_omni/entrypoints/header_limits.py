# SPDX-License-Identifier: Apache-2.0
"""Bounds of a request's headers, by vLLM's own options: `--h11-max-incomplete-event-size`, `--h11-max-header-count`.

Headers are held before any key is checked. httptools holds any amount of them and reads neither option; h11
(`http_parser.py`) ends the connection at the first one. The second one is vLLM's alone, so it is checked here. The
handshake of a WebSocket is an HTTP request, with the same bounds.
Held by tests/entrypoints/test_header_limits.py.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from fastapi import FastAPI
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

DEFAULT_BYTES: Final = 64 << 10
"""Instead of vLLM's default of 4 MiB, which a few hundred connections would make gigabytes of."""
VLLM_DEFAULT_BYTES: Final = 4 << 20


class HeaderCount:
    """ASGI middleware around everything: a request with more headers is answered with 431."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and len(scope["headers"]) > self._most:
            response = PlainTextResponse(f"a request may have {self._most} headers", 431, {"Connection": "close"})
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)


def attach(app: FastAPI) -> None:
    """Bound headers as vLLM's server starts.

    uvicorn reads its config for each new connection and runs the application's lifespan before it listens.
    """
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(starting: FastAPI) -> AsyncIterator[Any]:
        config = starting.state.server.config
        if config.h11_max_incomplete_event_size in (None, VLLM_DEFAULT_BYTES):
            config.h11_max_incomplete_event_size = DEFAULT_BYTES
        config.loaded_app = HeaderCount(config.loaded_app, starting.state.args.h11_max_header_count)
        async with inner(starting) as state:
            yield state

    app.router.lifespan_context = lifespan
