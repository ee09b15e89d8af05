# SPDX-License-Identifier: Apache-2.0
"""The HTTP parser of the server: h11, in uvicorn's own protocol class.

uvicorn takes httptools where it is installed. That one stops reading a request that offers an upgrade which the server
does not know, so the body of every request of Java's HttpClient is lost: it offers `Upgrade: h2c` by default. RFC 9110
lets a server ignore such an offer, and the request stays as it is. Only h11 does so, and only h11 bounds the bytes of
headers (`header_limits.py`). Held by tests/entrypoints/test_http_parser.py.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol


def use_h11(app: FastAPI) -> None:
    """Wrap the application's lifespan, which uvicorn runs before it listens; it reads the class for each connection."""
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(starting: FastAPI) -> AsyncIterator[Any]:
        starting.state.server.config.http_protocol_class = H11Protocol
        async with inner(starting) as state:
            yield state

    app.router.lifespan_context = lifespan
