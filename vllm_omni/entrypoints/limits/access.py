# SPDX-License-Identifier: Apache-2.0
"""Access control: API keys for all routes except the public ones, origin checks for routes that
change state or occupy the engine, and tickets for browsers.

Stock vLLM requires the `Authorization` header for the prefixes `/v1`, `/v2`, `/inference` and
`/cohere`. This module adds three mechanisms as routes and middleware:

- `KeyGuard` also requires an API key for all other routes, except for `OPEN_PATHS`, the paths that
  endpoints declare open (the web page's files and `/omni/watch`), `/omni/ws/...`, the fleet routes,
  which require the operator's key, and `OPTIONS` requests.
- A browser cannot set headers on a WebSocket, so it exchanges its key for a ticket
  (`POST /v1/omni/ticket`) and connects to `/omni/ws/...`. This route replaces the ticket with an
  `Authorization` header and passes the connection through the whole application again as `/v1/...`,
  so stock vLLM itself checks the key.
- `OriginGuard` refuses requests that a browser sends on behalf of a page from another origin.
"""

import hashlib
import hmac
import logging
import os
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode

from fastapi import FastAPI, Request
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, Response
from starlette.routing import WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from vllm_omni.entrypoints.errors import ApiError
from vllm_omni.entrypoints.limits.tickets import TicketError, TicketOffice, derive_secret
from vllm_omni.entrypoints.realtime.connection.connection import (
    ANONYMOUS,
    normalize_origin,
    origin_allowed,
    principal_of,
)

logger = logging.getLogger("vllm." + __name__)

TICKET_PATH: Final = "/v1/omni/ticket"
SOCKET_PREFIX: Final = "/omni/ws/"
TICKET_SUBPROTOCOL: Final = "ticket."

SESSIONS_PATH: Final = "/v1/sessions"
_WORKING_READS: Final = (f"{SESSIONS_PATH}/", "/v1/hidden_states/")
"""Prefixes of `GET` routes that have side effects: taking a snapshot occupies the engine, and
hidden states are returned only once.
"""
_OWNER: Final = "vllm_omni.owner"

OPERATOR_SESSIONS_PATH: Final = "/omni/sessions"
MIGRATIONS_PATH: Final = "/omni/migrations"
_OPERATOR_PATHS: Final = (OPERATOR_SESSIONS_PATH, MIGRATIONS_PATH)
"""Paths that require the operator's key instead of an API key (`entrypoints/fleet/routes.py`)."""

READY_PATH: Final = "/omni/ready"
OPEN_PATHS: Final = frozenset(
    {"/health", READY_PATH, "/ping", "/version", "/load", "/metrics", "/metrics/"}
)
"""Paths that require no key, because probes and Prometheus use them, as in stock vLLM."""


def configured_keys(args: Namespace) -> tuple[str, ...]:
    """Return the server's API keys: those set by `--api-key`, or otherwise VLLM_API_KEY, as in
    stock vLLM.
    """
    from vllm import envs

    return tuple(key for key in (args.api_key or [envs.VLLM_API_KEY]) if key)


class BrowserAccess:
    """One API server process's API keys, and the tickets that clients can use instead of keys."""

    def __init__(self, keys: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        self._keys = tuple(keys)
        self._digests = [
            hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest() for key in keys
        ]
        secret = derive_secret(keys, os.environ if environ is None else environ) if keys else b""
        self._office = TicketOffice(secret, len(self._keys))
        self.open_paths = OPEN_PATHS

    def attach_to_app(self, app: FastAPI, open_paths: Iterable[str] = ()) -> None:
        """Add the middleware and the two routes.

        Args:
            app: The application.
            open_paths: Additional paths that require no key.
        """
        self.open_paths = OPEN_PATHS.union(open_paths)
        app.add_middleware(KeyGuard, access=self)
        app.add_api_route(TICKET_PATH, self._ticket, methods=["POST"], include_in_schema=False)
        app.router.routes.append(WebSocketRoute(SOCKET_PREFIX + "{endpoint:path}", self._socket))

    @property
    def needs_key(self) -> bool:
        return bool(self._keys)

    def key_index(self, headers: Headers) -> int | None:
        """Return the index of the API key in a request's headers, or None if the key is unknown.

        The comparison takes the same time for every key, to prevent timing attacks.
        """
        scheme, _, token = headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        found = None
        for index, known in enumerate(self._digests):
            if hmac.compare_digest(digest, known) and scheme.lower() == "bearer":
                found = index
        return found

    async def _ticket(self, request: Request) -> Response:
        """Exchange a key for a ticket, which is valid for one WebSocket from the same origin."""
        headers = {"Cache-Control": "no-store"}
        if not self._keys:
            return JSONResponse({"required": False}, headers=headers)
        index = self.key_index(request.headers)
        # stock vLLM's middleware has already checked the key, except behind a proxy that rewrites
        # paths
        if index is None:
            return _unauthorized()
        ticket = self._office.issue(index, request.headers.get("origin"))
        response = {"required": True, "ticket": ticket, "expires_in_s": self._office.ttl_s}
        return JSONResponse(response, headers=headers)

    async def _socket(self, websocket: WebSocket) -> None:
        """Replace the ticket with its API key, and pass the connection on to the `/v1/...` path."""
        headers, rest = list(websocket.scope["headers"]), websocket.scope
        if self._keys and self.key_index(websocket.headers) is None:
            try:
                index = self._office.redeem_ticket(
                    _offered_ticket(websocket), websocket.headers.get("origin")
                )
            except TicketError as error:
                logger.info("a WebSocket was refused: ticket %s", error)
                await websocket.send_denial_response(Response("a new ticket is needed", 401))
                return
            headers = [item for item in headers if item[0] != b"authorization"]
            # Headers are Latin-1. The key arrived in a header, so it can be encoded as Latin-1.
            headers.append((b"authorization", b"Bearer " + self._keys[index].encode("latin-1")))
        await websocket.app(_without_ticket(rest, headers), websocket.receive, websocket.send)


def owner_of(connection: HTTPConnection) -> str:
    """Return the owner of the files and jobs that a request creates, derived from the client's API
    key.

    If the server has no API keys, all clients share one owner.
    """
    return str(connection.scope.get(_OWNER, ANONYMOUS))


class KeyGuard:
    """ASGI middleware that requires an API key.

    Paths that require no key, operator paths, `OPTIONS` requests and the WebSockets that require a
    ticket instead are exempt. The middleware also records the owner of the files and jobs that a
    request creates; `owner_of` returns it.
    """

    def __init__(self, app: ASGIApp, access: BrowserAccess) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._needs_key(scope) and self._access.key_index(Headers(scope=scope)) is None:
            await _unauthorized()(scope, receive, send)
            return
        if self._access.needs_key and scope["type"] in ("http", "websocket"):
            scope = {**scope, _OWNER: principal_of(HTTPConnection(scope))}
        await self._app(scope, receive, send)

    def _needs_key(self, scope: Scope) -> bool:
        if not self._access.needs_key or scope["type"] not in ("http", "websocket"):
            return False  # no keys are configured, or the scope is a lifespan rather than a request
        path = route_path(scope)
        is_open = path in self._access.open_paths or path.startswith(SOCKET_PREFIX)
        is_open = is_open or any(
            path == operators or path.startswith(f"{operators}/") for operators in _OPERATOR_PATHS
        )
        return scope.get("method") != "OPTIONS" and not is_open


class OriginGuard:
    """ASGI middleware that refuses requests from pages with other origins.

    The WebSocket endpoints also refuse connections from pages with other origins. A browser sends a
    form, or JSON without its content type, to any server without a preflight request. A server with
    API keys refuses such requests, but a server at 127.0.0.1 often has no keys. Clients other than
    browsers send neither `Origin` nor `Sec-Fetch-Site`, so this check does not affect them.

    Args:
        app: The application.
        origins: Origins (`scheme://host[:port]`) that are allowed in addition to the server's own,
            from `--allowed-origins`.
    """

    def __init__(self, app: ASGIApp, origins: Iterable[str]) -> None:
        self._app = app
        self._origins = frozenset(map(normalize_origin, origins))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _works(scope) or self._is_allowed(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        logger.info(
            "origin_refused origin=%.200r path=%.200r",
            Headers(scope=scope).get("origin"),
            route_path(scope),
        )
        refusal = ApiError(403, "origin not allowed", code="origin")
        await refusal.response()(scope, receive, send)

    def _is_allowed(self, headers: Headers) -> bool:
        """Return whether the page from which the request originates may send it.

        The browser's `same-origin` value is correct even behind a proxy that changes `Host`. A page
        cannot set `Sec-Fetch-Site` itself.
        """
        site = headers.get("sec-fetch-site")
        if "origin" in headers:
            return site == "same-origin" or origin_allowed(headers, self._origins)
        return site not in ("cross-site", "same-site") or "*" in self._origins


def _works(scope: Scope) -> bool:
    """Return whether a request changes state or occupies the engine.

    Most `GET` requests do neither, so pages with other origins can show images and videos.
    """
    reads_work = route_path(scope).startswith(_WORKING_READS)
    return scope["method"] not in ("GET", "HEAD", "OPTIONS") or (
        reads_work and scope["method"] != "OPTIONS"
    )


def route_path(scope: Scope) -> str:
    """Return a request's path without the server's root path."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def _unauthorized() -> Response:
    return JSONResponse({"error": "Unauthorized"}, 401)  # the same text as in stock vLLM


def _offered_ticket(websocket: WebSocket) -> str:
    """Return the ticket from the WebSocket subprotocols (`ticket.XXX`) or the query string
    (`?ticket=XXX`).

    The subprotocols take precedence, because the query string may appear in access logs.
    """
    for offered in websocket.scope.get("subprotocols") or []:
        if offered.startswith(TICKET_SUBPROTOCOL):
            return str(offered.removeprefix(TICKET_SUBPROTOCOL))
    return websocket.query_params.get("ticket", "")


def _without_ticket(scope: Scope, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    """Return a copy of the scope with the endpoint's path and without the ticket."""
    path = scope.get("root_path", "") + "/v1/" + route_path(scope).removeprefix(SOCKET_PREFIX)
    subprotocols = [
        item for item in scope.get("subprotocols") or [] if not item.startswith(TICKET_SUBPROTOCOL)
    ]
    query = [
        item for item in parse_qsl(scope["query_string"].decode("latin-1")) if item[0] != "ticket"
    ]
    retained = (
        "type",
        "asgi",
        "http_version",
        "scheme",
        "server",
        "client",
        "root_path",
        "extensions",
        "state",
    )
    return {
        **{name: scope[name] for name in retained if name in scope},
        "path": path,
        "raw_path": path.encode(),
        "query_string": urlencode(query).encode(),
        "headers": headers,
        "subprotocols": subprotocols,
    }
