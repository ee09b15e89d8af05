# SPDX-License-Identifier: Apache-2.0
"""Limits on request headers: `--h11-max-incomplete-event-size` and `--h11-max-header-count`.

A server stores a request's headers before it checks the API key. httptools does not limit the
header size and ignores both options. h11 enforces the size limit. The count limit is vLLM's own
option, so this module enforces it. A WebSocket handshake is an HTTP request, so the same limits
apply to it.

uvicorn prefers httptools if it is installed. httptools also stops reading a request that offers an
unknown upgrade. It would lose the body of every request from Java's HttpClient, which offers
`Upgrade: h2c` by default. RFC 9110 allows servers to ignore the offer, and h11 does so.
"""

from typing import Final

from fastapi import FastAPI
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from vllm_omni.entrypoints.lifespan import run_before_serving

DEFAULT_BYTES: Final = 64 << 10
"""Default limit on the total header size in bytes. It replaces vLLM's default of 4 MiB, because a
few hundred connections with headers of that size would use gigabytes.
"""
VLLM_DEFAULT_BYTES: Final = 4 << 20


class HeaderCount:
    """ASGI middleware around the whole application that refuses requests with too many headers with
    status 431.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and len(scope["headers"]) > self._most:
            response = PlainTextResponse(
                f"a request may have {self._most} headers", 431, {"Connection": "close"}
            )
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)


def limit_headers(app: FastAPI) -> None:
    """Select h11 and limit headers before vLLM's server listens."""

    def apply_limits(starting: FastAPI) -> None:
        config = starting.state.server.config
        config.http_protocol_class = H11Protocol
        if config.h11_max_incomplete_event_size in (None, VLLM_DEFAULT_BYTES):
            config.h11_max_incomplete_event_size = DEFAULT_BYTES
        config.loaded_app = HeaderCount(config.loaded_app, starting.state.args.h11_max_header_count)

    run_before_serving(app, apply_limits)
