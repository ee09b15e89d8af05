# SPDX-License-Identifier: Apache-2.0
"""`RequestIds`: adds `X-Request-Id` to HTTP responses, WebSocket handshakes and log lines.

The client's id is used if it consists of at most 128 printable ASCII characters without spaces,
double quotes or backslashes. Otherwise, the server generates an id. The id is written to the
request's headers, so stock vLLM uses it for `--enable-request-id-headers` and for its own request
ids. The middleware also records the client's trace context. The middleware wraps the whole
application, including error pages.

vLLM's `--enable-request-id-headers` is not sufficient because it adds the header to HTTP responses,
but not to WebSocket handshakes or log lines.
"""

import re
import uuid
from typing import Final

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni.entrypoints.lifespan import run_before_serving
from vllm_omni.entrypoints.telemetry import logs
from vllm_omni.runtime import log_context, trace_context

HEADER: Final = "X-Request-Id"
_ACCEPTABLE: Final = re.compile(r"[!#-\[\]-~]{1,128}")
"""Pattern of request ids that are safe to repeat in log lines and headers."""
_TRACE_HEADERS: Final = ("traceparent", "tracestate")
_STARTS: Final = frozenset(
    {"http.response.start", "websocket.accept", "websocket.http.response.start"}
)


class RequestIds:
    """ASGI middleware that wraps the whole application and assigns an id to every request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if _ACCEPTABLE.fullmatch(given) else uuid.uuid4().hex
        name = HEADER.lower().encode()
        headers = [item for item in scope["headers"] if item[0] != name] + [
            (name, request_id.encode())
        ]
        trace_context.set_parent(
            {key: value for key in _TRACE_HEADERS if (value := Headers(scope=scope).get(key))}
            or None
        )
        # The server runs each request and each WebSocket in a separate task.
        log_context.bind(request_id=request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] in _STARTS:
                message.setdefault("headers", [])
                message["headers"] = list(message["headers"])
                MutableHeaders(raw=message["headers"])[HEADER] = request_id
                if message["type"] == "websocket.http.response.start":
                    logs.answered_by_denial.set(True)
            await send(message)

        await self._app({**scope, "headers": headers}, receive, send_with_id)


def add_request_ids(app: FastAPI) -> None:
    """Wrap the application before vLLM's server listens, and add ids to the log lines."""

    def wrap(starting: FastAPI) -> None:
        logs.add_ids(custom_config=logs.has_custom_config(starting.state.args))
        config = starting.state.server.config
        config.loaded_app = RequestIds(config.loaded_app)

    run_before_serving(app, wrap)
