# SPDX-License-Identifier: Apache-2.0
"""A request that offers a protocol upgrade keeps its body, and WebSocket upgrades still work."""

import socket
from argparse import Namespace
from collections.abc import Iterator

import pytest
import uvicorn
from fastapi import FastAPI, Request, WebSocket
from helpers.uvicorn_thread import serving
from helpers.waits import seconds
from websockets.sync.client import connect

from vllm_omni.entrypoints.limits.header_limits import limit_headers

UPGRADE = (
    "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: "
    "AAMAAABkAAQAoAAAAAIAAAAA\r\n"
)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Start a server as vLLM does. By default, uvicorn would use httptools as its HTTP parser."""
    app = FastAPI()

    @app.api_route("/length", methods=["POST", "PUT", "PATCH", "DELETE"])
    async def length(request: Request) -> int:
        return len(await request.body())

    @app.websocket("/echo")
    async def echo(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text(await websocket.receive_text())

    app.state.args = Namespace(h11_max_header_count=256)
    limit_headers(app)
    with serving(uvicorn.Config(app, log_level="warning", http="httptools")) as port:
        yield port


def send(sock: socket.socket, head: str, body: bytes) -> tuple[bytes, bytes]:
    """Send a request, and return the response's status and body."""
    sock.settimeout(seconds(10))
    sock.sendall(f"{head}\r\n\r\n".encode() + body)
    response = b""
    while b"\r\n\r\n" not in response or not response.partition(b"\r\n\r\n")[2]:
        response += sock.recv(4096)
    return response.split(b" ")[1], response.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("upgrade", ["", UPGRADE, "Connection: Upgrade\r\nUpgrade: TLS/1.0\r\n"])
def test_a_body_arrives_with_any_offered_upgrade(
    port: int, method: str, chunked: bool, upgrade: str
) -> None:
    """The request body arrives and the connection stays open, whatever upgrade the client offers.
    For example, Java's HttpClient offers h2c with every request.
    """
    body = b"x" * 100_000
    framed = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    head = f"{method} /length HTTP/1.1\r\nHost: x\r\n{upgrade}{length}"
    with socket.create_connection(("127.0.0.1", port)) as sock:
        assert [send(sock, head, framed) for _ in range(2)] == [(b"200", b"100000")] * 2


def test_websockets_are_upgraded(port: int) -> None:
    with connect(f"ws://127.0.0.1:{port}/echo", proxy=None) as websocket:
        websocket.send("hello")
        assert websocket.recv() == "hello"
