# SPDX-License-Identifier: Apache-2.0
"""What a server concludes from another server's replies, tested with real sockets."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from helpers.waits import pause_task

from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.fleet import peer as peers
from vllm_omni.entrypoints.fleet.peer import MoveResult, Peer
from vllm_omni.entrypoints.fleet.servers import FleetServer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def reply(status: int, body: object) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        await request.read()
        return web.json_response(body, status=status)

    return handle


async def cut(request: web.Request) -> web.StreamResponse:
    """Close the connection without a reply, as a killed server does."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def hang(request: web.Request) -> web.StreamResponse:
    await pause_task(1.5)
    return web.Response()


UNKNOWN = reply(404, {"error": {"code": "unknown_migration"}})
OTHER_404 = reply(404, {"detail": "Not Found"})


def ask(handlers: dict[str, Handler], call: Callable[[Peer], Awaitable[object]]) -> object:
    """Run `call` against a server that has one handler per HTTP method. If there are no handlers,
    no server listens.
    """

    async def main() -> object:
        async def dispatch(request: web.Request) -> web.StreamResponse:
            return await handlers[request.method](request)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", dispatch)
        runner = web.AppRunner(app, shutdown_timeout=0.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        if not handlers:
            await runner.cleanup()
        try:
            async with aiohttp.ClientSession() as client:
                server = FleetServer(url=f"http://127.0.0.1:{port}")
                return await call(Peer(client, "b", server, "key"))
        finally:
            await runner.cleanup()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("handlers", "result"),
    [
        ({"POST": reply(200, {"state": "committed"})}, MoveResult.MOVED),
        # The first reply was lost, but the reply to a second request gives the outcome.
        ({"POST": cut, "DELETE": reply(200, {"state": "committed"})}, MoveResult.MOVED),
        ({"POST": cut, "DELETE": reply(200, {"state": "aborted"})}, MoveResult.STAYED),
        ({"POST": hang, "DELETE": reply(200, {"state": "committed"})}, MoveResult.MOVED),
        # The server refused the request or was restarted.
        ({"POST": reply(404, {}), "DELETE": UNKNOWN}, MoveResult.STAYED),
        ({}, MoveResult.STAYED),  # the server's process has ended
        # No reply gives the outcome, so it is unknown.
        ({"POST": cut, "DELETE": cut}, MoveResult.UNKNOWN),
        ({"POST": hang, "DELETE": hang}, MoveResult.UNKNOWN),
        ({"POST": cut, "DELETE": OTHER_404}, MoveResult.UNKNOWN),
        ({"POST": cut, "DELETE": reply(401, {})}, MoveResult.UNKNOWN),
    ],
)
def test_the_result_of_a_commit(
    handlers: dict[str, Handler], result: MoveResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "RESOLVE_S", 0.9)
    monkeypatch.setattr(peers, "_COMMIT_S", 0.3)
    monkeypatch.setattr(peers, "_END_S", 0.2)
    assert ask(handlers, lambda peer: peer.commit("m")) is result


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (reply(201, {"sha256": "0" * 64}), "damaged"),
        (reply(503, {"error": {"message": "all 8 sessions are in use"}}), "all 8 sessions"),
        (reply(503, "not an object"), "HTTP 503"),
        (cut, "does not respond"),
    ],
)
def test_a_failed_preparation_gives_the_reason(handler: Handler, said: str, tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    path.write_bytes(b"x" * 100_000)
    with pytest.raises(EndpointError, match=said) as failed:
        ask({"PUT": handler}, lambda peer: peer.prepare("m", path))
    assert failed.value.code == "move_failed"
