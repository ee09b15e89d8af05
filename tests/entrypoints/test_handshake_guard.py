# SPDX-License-Identifier: Apache-2.0
"""Connections without a complete request are closed after a timeout, and others are not
affected.
"""

import socket
import time
from collections.abc import Iterator

import pytest
import uvicorn
from fastapi import FastAPI, WebSocket
from helpers.uvicorn_thread import serving
from helpers.waits import seconds
from websockets.sync.client import connect

from vllm_omni.entrypoints.limits.handshake_guard import HandshakeGuard

TIMEOUT_S = 0.8


@pytest.fixture(params=["h11", "httptools"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """A server with each of uvicorn's HTTP parsers. `/echo` is a WebSocket."""
    app = FastAPI()

    @app.websocket("/echo")
    async def echo(websocket: WebSocket) -> None:
        await websocket.accept()
        while True:
            await websocket.send_text(await websocket.receive_text())

    @app.get("/hello")
    async def hello() -> str:
        return "hello"

    HandshakeGuard(TIMEOUT_S).attach_to_app(app)
    config = uvicorn.Config(app, log_level="warning", http=request.param, timeout_keep_alive=60)
    with serving(config) as port:
        yield port


def is_closed(sock: socket.socket, timeout_s: float) -> bool:
    sock.settimeout(max(0.001, timeout_s))
    try:
        return sock.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:  # reset
        return True


def send(sock: socket.socket) -> bytes:
    sock.settimeout(seconds(10))
    sock.sendall(b"GET /hello HTTP/1.1\r\nHost: x\r\n\r\n")
    response = b""
    while b'"hello"' not in response:
        response += sock.recv(1000)
    return response


def test_unfinished_handshakes_alone_are_closed(port: int) -> None:
    """Forty silent sockets and forty incomplete requests are closed, while a WebSocket and a
    keep-alive connection continue.
    """
    address = ("127.0.0.1", port)
    with (
        connect(f"ws://127.0.0.1:{port}/echo") as websocket,
        socket.create_connection(address) as retained,
    ):
        assert b"200 OK" in send(retained)
        opened_s = time.monotonic()
        late = [socket.create_connection(address) for _ in range(80)]
        for half in late[40:]:
            half.sendall(b"GET /echo HTTP/1.1\r\nHost: x\r\nUpgrade: webso")
        assert not is_closed(late[0], TIMEOUT_S / 4)
        assert all(
            is_closed(sock, opened_s + TIMEOUT_S + seconds(5) - time.monotonic()) for sock in late
        )
        assert time.monotonic() - opened_s >= TIMEOUT_S
        websocket.send("still here")
        assert websocket.recv(timeout=seconds(10)) == "still here"
        assert b"200 OK" in send(retained)
        for sock in late:
            sock.close()
