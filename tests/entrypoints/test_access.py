# SPDX-License-Identifier: Apache-2.0
"""Keys and tickets without sockets: the application is called as a server would, and the scope a
door sees is compared.

How it behaves behind stock vLLM's own check, over real sockets:
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
    KeyGuard,
    OriginGuard,
    configured_keys,
)

KEYS = ["first key", "second key"]
ORIGIN = "https://world.example"
SECRET = {"VLLM_OMNI_TICKET_SECRET": "of this start"}
Endpoint = "/omni/ws/walk/along"


class Site:
    """An application with a door at `/v1/walk/along`, pages, and the guard. seen: scopes at the
    door.
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
        """Every message that the application sends for one connection."""
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

    def connect(self, path: str = Endpoint, **fields: Any) -> str | int:
        """The first thing that a WebSocket is told: `websocket.accept`, or the status of a
        refusal.
        """
        first = self.call(socket_scope(path, **fields))[0]
        return first.get("status", first["type"])


def raw(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]


def socket_scope(
    path: str, protocols: tuple[str, ...] = (), query: bytes = b"", **fields: Any
) -> dict[str, Any]:
    """As uvicorn makes it. fields: `root_path`, `headers` (a dictionary), or any other key of a
    scope.
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
def site() -> Site:
    return Site()


def test_the_keys_are_those_of_the_command_line_else_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Empty ones are none: `VLLM_API_KEY=` does not make the empty key one that opens."""
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
def test_which_key_a_header_carries(site: Site, header: str, index: int | None) -> None:
    """The scheme's case does not matter, everything else does; no bytes of a client upset it."""
    assert site.access.key_index(Headers(raw=raw({"authorization": header}))) == index
    assert site.access.key_index(Headers({})) is None


def test_a_key_that_is_no_text_is_taken_as_its_bytes() -> None:
    """The operating system hands over bytes that are not UTF-8 as surrogates; the server starts
    with such a key.
    """
    access = BrowserAccess(["k\udcff", "plain"], SECRET)
    assert access.needs_key and access.key_index(Headers({"authorization": "Bearer plain"})) == 1


def test_without_keys_there_is_nothing_to_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """No secret is derived (that takes a while), and the environment is not read for one."""
    # calling it would fail
    monkeypatch.setattr("vllm_omni.entrypoints.limits.access.derive_secret", None)
    assert not BrowserAccess([], {}).needs_key
    assert Site([]).send("/work")[:2] == (200, "done")


def test_the_secret_comes_from_this_process_environment_unless_notified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_OMNI_TICKET_SECRET", SECRET["VLLM_OMNI_TICKET_SECRET"])
    ticket = Site().ticket()
    assert Site(environ=None).connect(protocols=(f"ticket.{ticket}",)) == "websocket.accept"
    assert Site(environ={}).connect(protocols=(f"ticket.{ticket}",)) == 401


def test_a_ticket_may_stand_for_any_of_the_keys(site: Site) -> None:
    """The door sees the key that the ticket was bought with, the last one included."""
    for key in KEYS:
        assert site.connect(protocols=(f"ticket.{site.ticket(key)}",)) == "websocket.accept"
        assert (b"authorization", f"Bearer {key}".encode()) in site.seen[-1]["headers"]


def test_a_key_beyond_ascii_opens_a_websocket_as_it_opens_a_request() -> None:
    """A browser sends `ü` in a header as one byte; the ticket that this buys is good for that
    key.
    """
    site = Site(["schlüssel"])
    assert site.send("/work", authorization="Bearer schlüssel")[0] == 200
    assert site.connect(protocols=(f"ticket.{site.ticket('schlüssel')}",)) == "websocket.accept"


def test_open_paths_are_the_probes_and_what_the_page_adds() -> None:
    """One that is added opens; nothing else does, and the probes stay open."""
    site = Site(open_paths=("/page",))
    assert site.access.open_paths == OPEN_PATHS | {"/page"}
    assert [site.send(path)[0] for path in ("/page", "/health", "/work")] == [200, 200, 401]
    assert BrowserAccess(KEYS, SECRET).open_paths == OPEN_PATHS


def test_the_ticket_route_takes_posts_only_and_is_not_advertised(site: Site) -> None:
    key = {"authorization": f"Bearer {KEYS[0]}"}
    assert site.send(TICKET_PATH, "GET", **key)[0] == 405
    assert site.send(TICKET_PATH, "POST", **key)[0] == 200
    assert TICKET_PATH not in site.app.openapi()["paths"]


def test_what_a_ticket_is_served_with(site: Site) -> None:
    """The whole answer, never kept by a cache on its way."""
    status, body, headers = site.send(TICKET_PATH, "POST", authorization=f"Bearer {KEYS[1]}")
    assert status == 200 and headers["cache-control"] == "no-store"
    assert (
        body == {"required": True, "ticket": body["ticket"], "expires_in_s": 30}
        and len(body["ticket"]) == 47
    )
    status, body, headers = Site([]).send(TICKET_PATH, "POST")
    assert (status, body) == (200, {"required": False}) and headers["cache-control"] == "no-store"


def test_a_refusal_says_nothing_but_that(site: Site) -> None:
    """In stock vLLM's words, for a request and for a WebSocket."""
    assert site.send("/work")[:2] == (401, {"error": "Unauthorized"})
    start, body = site.call(socket_scope("/v1/walk/along"))[:2]
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 401)
    assert json.loads(body["body"]) == {"error": "Unauthorized"}
    assert site.seen == []


def test_tickets_are_refused_even_if_the_guard_was_passed(site: Site) -> None:
    """Where a proxy rewrites paths the route asks for the key itself."""
    app = FastAPI()
    app.add_api_route("/rewritten", site.access._ticket, methods=["POST"])
    site.app = app
    assert site.send("/rewritten", "POST")[:2] == (401, {"error": "Unauthorized"})
    assert site.send("/rewritten", "POST", authorization="Bearer wrong")[0] == 401


def test_a_preflight_request_needs_no_key(site: Site) -> None:
    """A browser sends `OPTIONS` without headers; the answer to it is the application's."""
    assert site.send("/work", "OPTIONS")[:2] == (200, "done")
    assert site.send("/work", "options")[0] == 401


def test_the_servers_start_and_stop_pass() -> None:
    """Only HTTP and WebSocket scopes have a path to guard."""
    passed: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append((scope, receive, send))

    guard = KeyGuard(app, BrowserAccess(KEYS, SECRET))
    receive, send = object(), object()
    asyncio.run(guard({"type": "lifespan"}, receive, send))  # type: ignore[arg-type]
    assert passed == [({"type": "lifespan"}, receive, send)]


@pytest.mark.parametrize(
    ("path", "root", "status"), [("/at/health", "/at", 200), ("/at/work", "/at", 401)]
)
def test_paths_are_compared_without_where_the_application_is_mounted(
    site: Site, path: str, root: str, status: int
) -> None:
    """`--root-path /at`: the probes are open there."""
    assert site.send(path, root=root)[0] == status


def test_a_mounted_path_is_not_open_elsewhere(site: Site) -> None:
    """`/at/health` is a probe only if the application is mounted at `/at`."""
    assert site.send("/at/health", root="")[0] == 401
    assert site.send("/at/health")[0] == 401


@pytest.mark.parametrize("root", ["", "/at"])
def test_a_endpoint_sees_its_own_path_and_no_trace_of_the_ticket(site: Site, root: str) -> None:
    """Everything else of the connection stays: origin, other headers, subprotocols and query,
    each in its order.
    """
    ticket = site.ticket(KEYS[1], origin=ORIGIN)
    scope = socket_scope(
        root + Endpoint,
        ("omni.v1", f"ticket.{ticket}", "omni.v2"),
        b"a=ticket&ticket=stale&b=%C3%BC+x&a=2",
        root_path=root,
        headers={"origin": ORIGIN, "authorization": "Basic stale", "x-more": "1", "x-last": "2"},
    )
    assert site.call(scope)[0]["type"] == "websocket.accept"
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
    (seen,) = site.seen
    assert {name: seen[name] for name in expected} == expected


def test_what_a_server_leaves_out_of_a_scope_stays_out(site: Site) -> None:
    """Optional keys of a scope: without them the door is opened all the same."""
    scope = socket_scope(Endpoint, headers={"authorization": f"Bearer {KEYS[0]}"})
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
    assert site.call(scope)[0]["type"] == "websocket.accept"
    assert site.seen[0]["path"] == "/v1/walk/along" and site.seen[0]["subprotocols"] == []
    assert not {"client", "server", "http_version", "asgi"} & set(site.seen[0])


def test_the_key_itself_continues_as_it_came(site: Site) -> None:
    """A program that shows its key on the browsers' path needs no ticket; one that it offers as
    well is not used up.
    """
    ticket = site.ticket()
    headers = {"authorization": f"Bearer {KEYS[1]}", "x-more": "1"}
    assert site.connect(protocols=(f"ticket.{ticket}",), headers=headers) == "websocket.accept"
    assert site.seen[0]["headers"] == raw(headers)
    assert site.connect(protocols=(f"ticket.{ticket}",)) == "websocket.accept"


def test_without_keys_the_browsers_path_is_open() -> None:
    """A ticket offered all the same is not looked at, and no header is made up."""
    site = Site([])
    assert (
        site.connect(protocols=("ticket.nonsense",), headers={"x-more": "1"}) == "websocket.accept"
    )
    assert site.seen[0]["headers"] == raw({"x-more": "1"}) and site.seen[0]["subprotocols"] == []


def test_a_subprotocols_ticket_counts_before_the_querys(site: Site) -> None:
    """The first of several; what only looks like one is none."""
    good, query = site.ticket(), site.ticket()
    assert (
        site.connect(protocols=("omni.v1", f"ticket.{good}"), query=b"ticket=wrong")
        == "websocket.accept"
    )
    assert site.connect(protocols=("ticket.wrong",), query=f"ticket={query}".encode()) == 401
    assert site.connect(protocols=("ticket.wrong", f"ticket.{query}")) == 401
    assert site.connect(protocols=(f"xticket.{query}",)) == 401
    assert site.connect(query=f"ticket={query}".encode()) == "websocket.accept"


@pytest.mark.parametrize("bought", [ORIGIN, None])
@pytest.mark.parametrize("shown", [ORIGIN, "https://elsewhere.example", None])
def test_a_ticket_opens_from_its_origin_only(
    site: Site, bought: str | None, shown: str | None
) -> None:
    """Also one that no page bought, which no page may show."""
    ticket = site.ticket(**({"origin": bought} if bought else {}))
    result = site.connect(
        protocols=(f"ticket.{ticket}",), headers={"origin": shown} if shown else {}
    )
    assert result == ("websocket.accept" if bought == shown else 401)
    assert len(site.seen) == (bought == shown)


def test_a_refused_ticket_is_served_and_logged(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """The client is told to get a new one; why the last one was refused is for the log."""
    with caplog.at_level("INFO", logger="vllm.vllm_omni.entrypoints.limits.access"):
        start, body = site.call(socket_scope(Endpoint, ("ticket.x",)))
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 401)
    assert body["body"] == b"a new ticket is needed"
    assert [record.getMessage() for record in caplog.records] == [
        "a WebSocket was refused: ticket not base64"
    ]


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/work", {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}, 403),
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
def test_a_other_page_cannot_have_the_server_work(
    method: str, path: str, headers: dict[str, str], status: int
) -> None:
    """By `Origin` and `Sec-Fetch-Site`; links to pages, listed origins and programs are not
    affected.
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
