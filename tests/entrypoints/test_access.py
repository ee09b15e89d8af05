# SPDX-License-Identifier: Apache-2.0
"""Keys, tickets and origins, tested without sockets: the tests call the application as a server
would and check the scope that reaches the endpoint.

Tests over real sockets with stock vLLM's key check are in
tests/entrypoints/webui/test_browser_access.py.
"""

import asyncio
import json
from argparse import Namespace
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import pytest
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.routing import WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket

from vllm_omni.entrypoints.limits.access import (
    OPEN_PATHS,
    TICKET_PATH,
    BrowserAccess,
    OriginGuard,
    configured_keys,
)

KEYS = ["first key", "second key"]
ORIGIN = "https://world.example"
SECRET = {"VLLM_OMNI_TICKET_SECRET": "of this start"}
ENDPOINT = "/omni/ws/walk/along"


class GuardedApp:
    """An application with an endpoint at `/v1/walk/along`, pages, and the guard. `seen` records the
    scopes that reach the endpoint.
    """

    def __init__(
        self,
        keys: list[str] | None = None,
        open_paths: tuple[str, ...] = (),
        environ: Mapping[str, str] | None = SECRET,
    ) -> None:
        self.app, self.seen = FastAPI(), list[dict[str, Any]]()
        self.app.router.routes.append(WebSocketRoute("/v1/walk/along", self._endpoint))
        for path in ("/work", "/page", "/health"):
            self.app.add_api_route(
                path, _work, methods=["GET", "POST", "OPTIONS"], include_in_schema=False
            )
        self.access = BrowserAccess(KEYS if keys is None else keys, environ)
        self.access.attach_to_app(self.app, open_paths)

    async def _endpoint(self, websocket: WebSocket) -> None:
        self.seen.append(dict(websocket.scope))
        await websocket.accept()
        await websocket.close()

    def call(self, scope: dict[str, Any]) -> list[dict[str, Any]]:
        """Return every message that the application sends for a connection with this scope."""
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "websocket.connect" if scope["type"] == "websocket" else "http.request"}

        async def send(message: Any) -> None:
            sent.append(message)

        asyncio.run(self.app(scope, receive, send))
        return sent

    def send(
        self, path: str, method: str = "GET", root: str | None = None, **headers: str
    ) -> tuple[int, Any, Headers]:
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": b"",
            "headers": raw(headers),
        }
        start, body = self.call(scope if root is None else {**scope, "root_path": root})[:2]
        text = body["body"]
        shown = json.loads(text) if text[:1] == b"{" else text.decode()
        return start["status"], shown, Headers(raw=start["headers"])

    def ticket(self, key: str = KEYS[0], **headers: str) -> str:
        status, body, _ = self.send(TICKET_PATH, "POST", authorization=f"Bearer {key}", **headers)
        assert status == 200
        return body["ticket"]

    def connect(self, path: str = ENDPOINT, **fields: Any) -> str | int:
        """Return the application's first message in response to a WebSocket handshake:
        `websocket.accept`, or the status of the refusal.
        """
        first = self.call(socket_scope(path, **fields))[0]
        return first.get("status", first["type"])


def raw(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]


def socket_scope(
    path: str, protocols: tuple[str, ...] = (), query: bytes = b"", **fields: Any
) -> dict[str, Any]:
    """Return a WebSocket scope as uvicorn creates it.

    Args:
        fields: `root_path`, `headers` (a dictionary), or any other key of the scope.
    """
    headers = raw(fields.pop("headers", {}))
    return {
        "type": "websocket",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "scheme": "wss",
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 50000),
        "root_path": "",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "headers": headers,
        "subprotocols": list(protocols),
        "extensions": {"websocket.http.response": {}},
        "state": {"started": True},
        **fields,
    }


async def _work() -> PlainTextResponse:
    return PlainTextResponse("done")


@pytest.fixture
def guarded() -> GuardedApp:
    return GuardedApp()


def test_keys_come_from_the_command_line_or_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Empty keys are ignored, so `VLLM_API_KEY=` does not define an empty key."""
    monkeypatch.setenv("VLLM_API_KEY", "of the environment")
    assert configured_keys(Namespace(api_key=["a", "", "b"])) == ("a", "b")
    assert configured_keys(Namespace(api_key=None)) == ("of the environment",)
    monkeypatch.setenv("VLLM_API_KEY", "")
    assert configured_keys(Namespace(api_key=None)) == ()
    monkeypatch.delenv("VLLM_API_KEY")
    assert configured_keys(Namespace(api_key=None)) == ()


@pytest.mark.parametrize(
    ("header", "index"),
    [
        ("Bearer first key", 0),
        ("bearer second key", 1),
        ("BEARER second key", 1),
        ("Basic first key", None),
        ("first key", None),
        ("Bearer first key ", None),
        ("Bearer  first key", None),
        ("Bearer", None),
        ("Bearer ", None),
        ("", None),
        ("Bearer \xff", None),
    ],
)
def test_a_header_identifies_its_key(guarded: GuardedApp, header: str, index: int | None) -> None:
    """The key in an authorization header is identified regardless of the scheme's letter case, and
    no header bytes from a client cause an exception.
    """
    assert guarded.access.key_index(Headers(raw=raw({"authorization": header}))) == index
    assert guarded.access.key_index(Headers({})) is None


def test_a_key_that_is_no_text_is_taken_as_its_bytes() -> None:
    """A server starts even if a key is not valid UTF-8. Python decodes such a key to a string with
    surrogate escapes, and the server uses the original bytes.
    """
    access = BrowserAccess(["k\udcff", "plain"], SECRET)
    assert access.needs_key and access.key_index(Headers({"authorization": "Bearer plain"})) == 1


def test_without_keys_there_is_nothing_to_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without keys, no secret is derived, because derivation takes time, and no secret is read from
    the environment.
    """
    # The test fails if `derive_secret` is called.
    monkeypatch.setattr("vllm_omni.entrypoints.limits.access.derive_secret", None)
    assert not BrowserAccess([], {}).needs_key
    assert GuardedApp([]).send("/work")[:2] == (200, "done")


def test_the_default_secret_is_in_the_environment_of_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_OMNI_TICKET_SECRET", SECRET["VLLM_OMNI_TICKET_SECRET"])
    ticket = GuardedApp().ticket()
    assert GuardedApp(environ=None).connect(protocols=(f"ticket.{ticket}",)) == "websocket.accept"
    assert GuardedApp(environ={}).connect(protocols=(f"ticket.{ticket}",)) == 401


def test_a_ticket_represents_its_key(guarded: GuardedApp) -> None:
    """The endpoint receives the key for which the ticket was issued."""
    for key in KEYS:
        assert guarded.connect(protocols=(f"ticket.{guarded.ticket(key)}",)) == "websocket.accept"
        assert (b"authorization", f"Bearer {key}".encode()) in guarded.seen[-1]["headers"]


def test_a_key_may_have_characters_beyond_ascii() -> None:
    """A key may contain non-ASCII characters. A browser sends the character `ü` in a header as one
    byte, and a ticket requested with that header is valid for the key.
    """
    guarded = GuardedApp(["schlüssel"])
    assert guarded.send("/work", authorization="Bearer schlüssel")[0] == 200
    assert (
        guarded.connect(protocols=(f"ticket.{guarded.ticket('schlüssel')}",)) == "websocket.accept"
    )


def test_open_paths_are_the_probes_and_those_of_the_page() -> None:
    """Without a key, a client can use only the probes and the open paths added for the page."""
    guarded = GuardedApp(open_paths=("/page",))
    assert guarded.access.open_paths == OPEN_PATHS | {"/page"}
    assert [guarded.send(path)[0] for path in ("/page", "/health", "/work")] == [200, 200, 401]
    assert BrowserAccess(KEYS, SECRET).open_paths == OPEN_PATHS


def test_the_ticket_route_takes_posts_only_and_is_not_advertised(guarded: GuardedApp) -> None:
    key = {"authorization": f"Bearer {KEYS[0]}"}
    assert guarded.send(TICKET_PATH, "GET", **key)[0] == 405
    assert guarded.send(TICKET_PATH, "POST", **key)[0] == 200
    assert TICKET_PATH not in guarded.app.openapi()["paths"]


def test_the_ticket_response_is_complete_and_not_cached(guarded: GuardedApp) -> None:
    """The response contains the ticket and its lifetime, or states that no ticket is required.
    Either response carries `Cache-Control: no-store`.
    """
    status, body, headers = guarded.send(TICKET_PATH, "POST", authorization=f"Bearer {KEYS[1]}")
    assert status == 200 and headers["cache-control"] == "no-store"
    assert (
        body == {"required": True, "ticket": body["ticket"], "expires_in_s": 30}
        and len(body["ticket"]) == 47
    )
    status, body, headers = GuardedApp([]).send(TICKET_PATH, "POST")
    assert (status, body) == (200, {"required": False}) and headers["cache-control"] == "no-store"


def test_a_refusal_has_the_text_of_stock_vllm(guarded: GuardedApp) -> None:
    """A refused request or WebSocket gets the same text that stock vLLM returns."""
    assert guarded.send("/work")[:2] == (401, {"error": "Unauthorized"})
    start, body = guarded.call(socket_scope("/v1/walk/along"))[:2]
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 401)
    assert json.loads(body["body"]) == {"error": "Unauthorized"}
    assert guarded.seen == []


def test_tickets_are_refused_even_if_the_guard_was_passed(guarded: GuardedApp) -> None:
    """The ticket route checks the key itself, even if a request has passed the guard, because a
    proxy may rewrite paths.
    """
    app = FastAPI()
    app.add_api_route("/rewritten", guarded.access._ticket, methods=["POST"])
    guarded.app = app
    assert guarded.send("/rewritten", "POST")[:2] == (401, {"error": "Unauthorized"})
    assert guarded.send("/rewritten", "POST", authorization="Bearer wrong")[0] == 401


def test_a_preflight_request_needs_no_key(guarded: GuardedApp) -> None:
    """A preflight request reaches the application without a key, because browsers send `OPTIONS`
    requests without credentials.
    """
    assert guarded.send("/work", "OPTIONS")[:2] == (200, "done")
    assert guarded.send("/work", "options")[0] == 401


@pytest.mark.parametrize(
    ("path", "root", "status"),
    [
        ("/at/health", "/at", 200),
        ("/at/work", "/at", 401),
        ("/at/health", "", 401),
        ("/at/health", None, 401),
    ],
)
def test_paths_are_compared_without_the_root_path(
    guarded: GuardedApp, path: str, root: str | None, status: int
) -> None:
    """With `--root-path /at`, the probes are open only below that path."""
    assert guarded.send(path, root=root)[0] == status


@pytest.mark.parametrize("root", ["", "/at"])
def test_the_endpoint_gets_its_path_and_no_ticket(guarded: GuardedApp, root: str) -> None:
    """The endpoint sees its own path, and the ticket has been removed from the request. The origin
    and the other headers, subprotocols and query parameters reach the endpoint unchanged and in
    order.
    """
    ticket = guarded.ticket(KEYS[1], origin=ORIGIN)
    scope = socket_scope(
        root + ENDPOINT,
        ("omni.v1", f"ticket.{ticket}", "omni.v2"),
        b"a=ticket&ticket=stale&b=%C3%BC+x&a=2",
        root_path=root,
        headers={"origin": ORIGIN, "authorization": "Basic stale", "x-more": "1", "x-last": "2"},
    )
    assert guarded.call(scope)[0]["type"] == "websocket.accept"
    endpoint = f"{root}/v1/walk/along"
    retained = {
        name: scope[name]
        for name in ("type", "asgi", "http_version", "scheme", "server", "client", "extensions")
    }
    expected = {
        **retained,
        "root_path": root,
        "path": endpoint,
        "raw_path": endpoint.encode(),
        "query_string": urlencode([("a", "ticket"), ("b", "ü x"), ("a", "2")]).encode(),
        "headers": [
            *raw({"origin": ORIGIN, "x-more": "1", "x-last": "2"}),
            (b"authorization", b"Bearer second key"),
        ],
        "subprotocols": ["omni.v1", "omni.v2"],
        "state": {"started": True},
    }
    (seen,) = guarded.seen
    assert {name: seen[name] for name in expected} == expected


def test_optional_keys_of_a_scope_may_be_absent(guarded: GuardedApp) -> None:
    """The guard works even if the scope's optional keys are absent."""
    scope = socket_scope(ENDPOINT, headers={"authorization": f"Bearer {KEYS[0]}"})
    for name in (
        "root_path",
        "subprotocols",
        "state",
        "client",
        "server",
        "extensions",
        "http_version",
        "asgi",
    ):
        del scope[name]
    assert guarded.call(scope)[0]["type"] == "websocket.accept"
    assert guarded.seen[0]["path"] == "/v1/walk/along" and guarded.seen[0]["subprotocols"] == []
    assert not {"client", "server", "http_version", "asgi"} & set(guarded.seen[0])


def test_a_key_on_the_browser_path_is_passed_on(guarded: GuardedApp) -> None:
    """A program may send its key on the browser path, and the guard passes it on to the
    application. A ticket sent together with the key is not used up.
    """
    ticket = guarded.ticket()
    headers = {"authorization": f"Bearer {KEYS[1]}", "x-more": "1"}
    assert guarded.connect(protocols=(f"ticket.{ticket}",), headers=headers) == "websocket.accept"
    assert guarded.seen[0]["headers"] == raw(headers)
    assert guarded.connect(protocols=(f"ticket.{ticket}",)) == "websocket.accept"


def test_without_keys_the_browsers_path_is_open() -> None:
    """On a server without keys, a ticket is ignored and no header is added."""
    guarded = GuardedApp([])
    assert (
        guarded.connect(protocols=("ticket.nonsense",), headers={"x-more": "1"})
        == "websocket.accept"
    )
    assert (
        guarded.seen[0]["headers"] == raw({"x-more": "1"}) and guarded.seen[0]["subprotocols"] == []
    )


def test_a_ticket_in_a_subprotocol_precedes_one_in_the_query(guarded: GuardedApp) -> None:
    """A ticket in a subprotocol takes precedence over a ticket in the query. If there are several
    tickets, the first is used. Other subprotocols are not tickets.
    """
    good, query = guarded.ticket(), guarded.ticket()
    assert (
        guarded.connect(protocols=("omni.v1", f"ticket.{good}"), query=b"ticket=wrong")
        == "websocket.accept"
    )
    assert guarded.connect(protocols=("ticket.wrong",), query=f"ticket={query}".encode()) == 401
    assert guarded.connect(protocols=("ticket.wrong", f"ticket.{query}")) == 401
    assert guarded.connect(protocols=(f"xticket.{query}",)) == 401
    assert guarded.connect(query=f"ticket={query}".encode()) == "websocket.accept"


@pytest.mark.parametrize("bought", [ORIGIN, None])
@pytest.mark.parametrize("shown", [ORIGIN, "https://elsewhere.example", None])
def test_a_ticket_opens_connections_from_its_origin_only(
    guarded: GuardedApp, bought: str | None, shown: str | None
) -> None:
    """A ticket opens a connection only from the origin that requested it. A page cannot use a
    ticket that was requested without an origin.
    """
    ticket = guarded.ticket(**({"origin": bought} if bought else {}))
    result = guarded.connect(
        protocols=(f"ticket.{ticket}",), headers={"origin": shown} if shown else {}
    )
    assert result == ("websocket.accept" if bought == shown else 401)
    assert len(guarded.seen) == (bought == shown)


def test_a_refused_ticket_is_reported_and_logged(
    guarded: GuardedApp, caplog: pytest.LogCaptureFixture
) -> None:
    """The error for a refused ticket tells the client to get a new one, and the log contains the
    reason.
    """
    with caplog.at_level("INFO", logger="vllm.vllm_omni.entrypoints.limits.access"):
        start, body = guarded.call(socket_scope(ENDPOINT, ("ticket.x",)))
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 401)
    assert body["body"] == b"a new ticket is needed"
    assert [record.getMessage() for record in caplog.records] == [
        "a WebSocket was refused: ticket not base64"
    ]


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        (
            "POST",
            "/work",
            {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"},
            403,
        ),
        ("POST", "/work", {"Origin": "http://evil.example"}, 403),
        ("POST", "/work", {"Origin": "null", "Sec-Fetch-Site": "cross-site"}, 403),
        ("POST", "/work", {"Sec-Fetch-Site": "cross-site"}, 403),
        ("POST", "/work", {"Sec-Fetch-Site": "same-site"}, 403),
        (
            "POST",
            "/work",
            {"Origin": "http://server.example:81", "Sec-Fetch-Site": "same-site"},
            403,
        ),
        ("DELETE", "/anything", {"Origin": "http://evil.example"}, 403),
        ("GET", "/v1/sessions/walk/snapshot", {"Sec-Fetch-Site": "cross-site"}, 403),
        ("POST", "/work", {}, 200),
        ("POST", "/work", {"Sec-Fetch-Site": "none"}, 200),
        ("POST", "/work", {"Origin": "http://server.example:80"}, 200),
        (
            "POST",
            "/work",
            {"Origin": "https://listed.example", "Sec-Fetch-Site": "cross-site"},
            200,
        ),
        (
            "POST",
            "/work",
            {"Origin": "https://behind.a.proxy", "Sec-Fetch-Site": "same-origin"},
            200,
        ),
        ("GET", "/page", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 200),
        ("OPTIONS", "/work", {"Origin": "http://evil.example"}, 200),
    ],
)
def test_a_page_of_another_origin_cannot_use_the_server(
    method: str, path: str, headers: dict[str, str], status: int
) -> None:
    """`Origin` and `Sec-Fetch-Site` determine whether a page may use the server. A page of another
    origin may not use it, but links to pages, listed origins and programs are accepted.
    """
    app = FastAPI()
    for route in ("/work", "/page"):
        app.add_api_route(route, _work, methods=["GET", "POST", "OPTIONS"])
    app.add_middleware(OriginGuard, origins=["https://Listed.example/"])
    assert (
        TestClient(app, base_url="http://server.example")
        .request(method, path, headers=headers)
        .status_code
        == status
    )
