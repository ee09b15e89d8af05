# SPDX-License-Identifier: Apache-2.0
"""`RequestIds`: every HTTP answer and every WebSocket handshake carries `X-Request-Id`, and so does every log line.

A client's own id is kept if it is printable ASCII of up to 128 characters without spaces, quotes and backslashes;
otherwise one is made. The id is put into the request's headers, so that stock vLLM, which looks there, uses the same
one: for its `--enable-request-id-headers` and for the ids of its own requests. The client's trace, if it names one, is
noted at the same place. This wraps the whole application, error pages included, where uvicorn finds it.
Why not vLLM's `--enable-request-id-headers` alone: it adds the header to HTTP responses, but not to
WebSocket handshakes or log lines.
Held by tests/entrypoints/realtime/test_operators_served.py.
"""

import re
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni import log_context, trace_context
from vllm_omni.entrypoints import logs

HEADER: Final = "X-Request-Id"
_ACCEPTABLE: Final = re.compile(r"[!#-\[\]-~]{1,128}")
"""Request ids that log lines and headers may repeat unchanged."""
_TRACE_HEADERS: Final = ("traceparent", "tracestate")
_STARTS: Final = frozenset({"http.response.start", "websocket.accept", "websocket.http.response.start"})


class RequestIds:
    """ASGI middleware around everything."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if _ACCEPTABLE.fullmatch(given) else uuid.uuid4().hex
        name = HEADER.lower().encode()
        headers = [item for item in scope["headers"] if item[0] != name] + [(name, request_id.encode())]
        trace_context.set_parent(
            {key: value for key in _TRACE_HEADERS if (value := Headers(scope=scope).get(key))} or None
        )
        log_context.bind(request_id=request_id)  # the server runs each request, each WebSocket, in a task of its own

        async def send_with_id(message: Message) -> None:
            if message["type"] in _STARTS:
                message.setdefault("headers", [])
                message["headers"] = list(message["headers"])
                MutableHeaders(raw=message["headers"])[HEADER] = request_id
                if message["type"] == "websocket.http.response.start":
                    logs.answered_by_denial.set(True)
            await send(message)

        await self._app({**scope, "headers": headers}, receive, send_with_id)


def attach(app: FastAPI) -> None:
    """Wrap the application as vLLM's server starts, and have this process's log lines carry ids.

    uvicorn takes `loaded_app` of its config for each new connection and runs the lifespan before it listens.
    """
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(starting: FastAPI) -> AsyncIterator[Any]:
        logs.add_ids(custom_config=logs.has_custom_config(starting.state.args))
        config = starting.state.server.config
        config.loaded_app = RequestIds(config.loaded_app)
        async with inner(starting) as state:
            yield state

    app.router.lifespan_context = lifespan
