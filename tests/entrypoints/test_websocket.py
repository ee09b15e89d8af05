# SPDX-License-Identifier: Apache-2.0
"""Tests of WebSocket limits in vLLM's server, with a real uvicorn server and real sockets."""

import argparse
import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from fastapi import FastAPI, WebSocket
from helpers.waits import seconds, until
from uvicorn.protocols.websockets.auto import AutoWebSocketsProtocol
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError

from vllm_omni.entrypoints.websocket import WebSocketOptions, apply_at_startup


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    WebSocketOptions.add_arguments(parser)
    return parser.parse_args(argv)


def test_flags_become_options() -> None:
    """Command-line flags set the server's options, and a ping interval of zero disables pings."""
    options = WebSocketOptions.from_args(parse("--ws-max-size", "2048", "--ws-ping-interval", "0"))
    assert options == WebSocketOptions(max_bytes=2048, ping_interval_s=None, ping_timeout_s=10.0)


@pytest.mark.parametrize("library", ["auto", "websockets", "websockets-sansio"])
def test_the_library_may_be_named(library: str) -> None:
    """The flag that selects the WebSocket library is accepted, because commands written for other
    servers set it. It has no effect, because `websockets` is the only supported library.
    """
    assert WebSocketOptions.from_args(parse("--ws", library)) == WebSocketOptions()
    assert AutoWebSocketsProtocol.__init__.__globals__["ServerProtocol"].__module__.startswith(
        "websockets."
    )


def test_another_library_is_refused() -> None:
    with pytest.raises(argparse.ArgumentError, match="--ws: invalid choice: 'wsproto'"):
        parse("--ws", "wsproto")


def test_plain_vllm_serve_has_the_defaults() -> None:
    """Plain `vllm serve` uses the default limits, because its parsed arguments do not include this
    package's flags.
    """
    assert WebSocketOptions.from_args(argparse.Namespace(port=8000)) == WebSocketOptions()


@pytest.mark.parametrize(
    "argv",
    [
        ["--ws-max-size", "12"],
        ["--ws-max-size", "1e9"],
        ["--ws-ping-interval", "-1"],
        ["--ws-ping-timeout", "x"],
    ],
)
def test_values_out_of_range_are_refused(argv: list[str]) -> None:
    """An out-of-range value is rejected with an error that names the flag and the range."""
    with pytest.raises(argparse.ArgumentError, match=rf"{argv[0]}: must be .* from .* to .*, got"):
        parse(*argv)


async def _run_limited_server(app: FastAPI, listening: socket.socket) -> None:
    """Start uvicorn as vLLM does (config first, server in `app.state`). Send one message within the
    size limit and one that exceeds it.
    """
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    app.state.server = server
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    url = f"ws://127.0.0.1:{listening.getsockname()[1]}/echo"
    await until(lambda: server.started)
    try:
        async with connect(url, compression="deflate") as client:
            assert client.protocol.extensions == []  # compression was offered but not accepted
            await client.send(b"x" * 4096)
            assert await client.recv() == b"4096"
            await client.send(b"x" * 4097)
            with pytest.raises(ConnectionClosedError) as closed:
                await client.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009
    finally:
        server.should_exit = True
        await serving


def test_limits_hold_from_the_first_connection() -> None:
    """Limits apply from the first connection on. Compression is off, a message of exactly the
    maximum size is accepted, and a message one byte larger closes the connection with 1009. vLLM's
    own lifespan handler still runs.
    """
    ran: list[str] = []

    @asynccontextmanager
    async def vllm_lifespan(app: FastAPI) -> AsyncIterator[None]:
        ran.append("start")
        yield
        ran.append("stop")

    app = FastAPI(lifespan=vllm_lifespan)
    app.state.args = parse("--ws-max-size", "4096")

    @app.websocket("/echo")
    async def echo(websocket: WebSocket) -> None:
        await websocket.accept()
        async for message in websocket.iter_bytes():
            await websocket.send_bytes(str(len(message)).encode())

    apply_at_startup(app)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        asyncio.run(asyncio.wait_for(_run_limited_server(app, listening), seconds(20)))
    assert ran == ["start", "stop"]
