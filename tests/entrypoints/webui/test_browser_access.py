# SPDX-License-Identifier: Apache-2.0
"""Tests of API keys on every route, tickets for WebSockets, and origin checks. The tests use real
sockets and stock vLLM's key check.
"""

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

import pytest
from helpers.fake_engine import Client, infer
from helpers.waits import seconds
from page_server import MakeServer, PageServer
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from vllm_omni.entrypoints.limits.access import OPEN_PATHS, TICKET_PATH

KEYS = ["first key", "second key"]
ENDPOINT = "/omni/ws/realtime/world/camera"


@pytest.fixture
def guarded(make_server: MakeServer) -> PageServer:
    return make_server(keys=KEYS)


def send(server: PageServer, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}{path}", method=method, headers=headers
    )
    try:
        with urllib.request.urlopen(request, timeout=seconds(10)) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def ticket(server: PageServer, key: str = KEYS[0], **headers: str) -> str:
    status, body = send(server, TICKET_PATH, "POST", Authorization=f"Bearer {key}", **headers)
    assert status == 200, body
    return json.loads(body)["ticket"]


def endpoint(
    server: PageServer, path: str = ENDPOINT, shown: str | None = None, **options: Any
) -> Client:
    """Return a connected client, or raise InvalidStatus if the server refuses the handshake.
    `shown` is the ticket to send.
    """
    protocols = ["omni.world.camera.v1", *([f"ticket.{shown}"] if shown is not None else [])]
    url = f"ws://127.0.0.1:{server.port}{path}"
    return Client(connect(url, compression=None, subprotocols=protocols, **options))  # type: ignore[arg-type]


def refusal(server: PageServer, *args: Any, **options: Any) -> int:
    with pytest.raises(InvalidStatus) as refused:
        endpoint(server, *args, **options)
    return refused.value.response.status_code


@pytest.mark.parametrize(
    "header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEYS[0]}"}]
)
def test_every_route_needs_the_key(guarded: PageServer, header: dict[str, str]) -> None:
    """Every route requires the API key, except for the probes and the page's files."""
    app: Any = guarded.server.config.app
    paths = {route.path for route in app.routes if hasattr(route, "methods")} | {
        "/docs",
        "/nothing",
    }
    open_to_all = {path for path in paths if send(guarded, path, **header)[0] not in (401, 405)}
    page_files = {path for path in paths if path.startswith("/omni")} - {"/omni/ready"}
    assert open_to_all == {"/", "/health"} | page_files
    assert send(guarded, "/work", "POST", **header)[0] == 401
    assert send(guarded, TICKET_PATH, "POST", **header)[0] == 401


@pytest.mark.parametrize(
    "path",
    ["/omni/../work", "/omni//work", "//work", "/omni/ws/../../work", "/OMNI/x", "/health/../work"],
)
def test_no_spelling_of_a_path_bypasses_the_key(guarded: PageServer, path: str) -> None:
    """Only the exact spelling of an open path can be requested without a key, so no other spelling
    bypasses the key check.
    """
    assert send(guarded, path)[0] in (401, 404)


@pytest.mark.parametrize("path", sorted(OPEN_PATHS - {"/metrics"}))
@pytest.mark.parametrize("more", ["x", "/x", "/../work"])
def test_a_path_with_an_open_prefix_is_closed(guarded: PageServer, path: str, more: str) -> None:
    """A path that merely starts with an open path is not open: the guard refuses it before any
    route is looked up.
    """
    assert send(guarded, path + more)[0] == 401


def test_each_key_opens_every_route(guarded: PageServer) -> None:
    """Every API key gives access to every route, including routes outside `/v1`. The name of the
    authorization scheme is not case-sensitive.
    """
    for key in KEYS:
        assert send(guarded, "/work", Authorization=f"bearer {key}") == (200, b'{"done":true}')


def test_without_keys_every_route_is_open(server: PageServer) -> None:
    """On a server without keys, no ticket is needed, and the ticket route says so."""
    assert send(server, TICKET_PATH, "POST") == (200, b'{"required":false}')
    assert send(server, "/work")[0] == 200
    with endpoint(server) as client:
        assert client.hello["protocol"] == "omni.world.camera"


def test_a_ticket_opens_one_websocket(guarded: PageServer) -> None:
    """A ticket opens one WebSocket and cannot be used twice. The client sends it as a subprotocol,
    and the server does not echo it.
    """
    shown = ticket(guarded)
    with endpoint(guarded, shown=shown) as client:
        assert client.hello["model"] == "fake"
        assert client.connection.subprotocol == "omni.world.camera.v1"
    assert refusal(guarded, shown=shown) == 401


@pytest.mark.parametrize(
    "shown", [None, "", "x", "A" * 47, "é".encode("latin-1").decode("latin-1") * 3]
)
def test_without_a_ticket_the_endpoint_is_closed(guarded: PageServer, shown: str | None) -> None:
    """A handshake without a valid ticket is refused with 401 before the model is used."""
    path = ENDPOINT if shown is None else f"{ENDPOINT}?ticket={urllib.parse.quote(shown)}"
    assert refusal(guarded, path) == 401
    assert guarded.engine.calls == []


def test_endpoints_under_v1_still_take_the_header_only(guarded: PageServer) -> None:
    """Endpoints under `/v1` still have stock vLLM's key check: they accept a key in the header but
    no ticket.
    """
    path = "/v1/realtime/world/camera"
    assert refusal(guarded, path, shown=ticket(guarded)) == 401
    with endpoint(
        guarded, path, additional_headers={"Authorization": f"Bearer {KEYS[1]}"}
    ) as client:
        assert client.hello["model"] == "fake"


def test_a_ticket_is_bound_to_its_origin_over_sockets(guarded: PageServer) -> None:
    """No other site or program can use a ticket requested by this server's page, and no page can
    use a ticket requested by a program.
    """
    own, other_package = f"http://127.0.0.1:{guarded.port}", "https://elsewhere.example"
    with endpoint(guarded, shown=ticket(guarded, Origin=own), origin=own) as client:
        assert client.hello["model"] == "fake"
    assert refusal(guarded, shown=ticket(guarded, Origin=own), origin=other_package) == 401
    assert refusal(guarded, shown=ticket(guarded, Origin=own)) == 401
    assert refusal(guarded, shown=ticket(guarded), origin=own) == 401


def test_another_origin_is_refused_even_with_its_ticket(
    guarded: PageServer, make_server: MakeServer
) -> None:
    """A request's origin must be this server's own or one of the listed origins, whether or not the
    server has keys.
    """
    other_package = "https://elsewhere.example"
    assert (
        refusal(guarded, shown=ticket(guarded, Origin=other_package), origin=other_package) == 403
    )
    open_server = make_server()
    assert refusal(open_server, origin=other_package) == 403
    listing = make_server(origins=[other_package])
    with endpoint(listing, origin=other_package) as client:
        assert client.hello["model"] == "fake"


def test_sessions_belong_to_the_key_of_the_ticket(guarded: PageServer) -> None:
    """A page and a program that use the same key share sessions. A client with another key cannot
    see these sessions.
    """
    with endpoint(guarded, shown=ticket(guarded)) as client:
        client.send(infer(session_id="walk"))
        client.frames()
    resume = {"endpoint": "resume", "session_id": "walk", "last_chunk_id": 0}
    with endpoint(
        guarded,
        "/v1/realtime/world/camera",
        additional_headers={"Authorization": f"Bearer {KEYS[0]}"},
    ) as same:
        assert same.request(resume)["type"] == "resumed"
    with endpoint(guarded, shown=ticket(guarded, KEYS[1])) as other:
        assert other.error(resume) == "session_evicted"


def test_processes_that_share_keys_and_environment_take_each_others_tickets(
    make_server: MakeServer,
) -> None:
    """With `--api-server-count 2`, a ticket issued by one process opens a WebSocket on the other
    process.
    """
    environ = {"VLLM_OMNI_TICKET_SECRET": "of this start"}
    one, two = (make_server(keys=KEYS, environ=environ) for _ in range(2))
    with endpoint(two, shown=ticket(one)) as client:
        assert client.hello["model"] == "fake"
    later = make_server(keys=KEYS, environ={"VLLM_OMNI_TICKET_SECRET": "of the next"})
    assert refusal(later, shown=ticket(one)) == 401


def test_other_endpoints_open_with_tickets_too(guarded: PageServer) -> None:
    """With a ticket, the path for browsers gives access to every WebSocket under `/v1` and to no
    other route.
    """
    url = f"ws://127.0.0.1:{guarded.port}/omni/ws/realtime_video/generate"
    with connect(url, compression=None, subprotocols=[f"ticket.{ticket(guarded)}"]) as socket:  # type: ignore[list-item]
        socket.send(b"not msgpack")
        assert b"invalid" in socket.recv(timeout=seconds(10))
    assert refusal(guarded, "/omni/ws/work", shown=ticket(guarded)) in (403, 404)
