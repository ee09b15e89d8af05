# SPDX-License-Identifier: Apache-2.0
"""Limits on request headers apply before the key check. The tests use real sockets."""

import socket
from argparse import Namespace
from collections.abc import Iterator

import pytest
import uvicorn
from fastapi import FastAPI, Request, WebSocket
from helpers.uvicorn_thread import serving
from helpers.waits import seconds
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from vllm_omni.entrypoints.cli.serve import serve_parser
from vllm_omni.entrypoints.limits import header_limits

MOST_HEADERS = 40


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Start a server as vLLM does. `/echo` is a WebSocket endpoint, and `/body` returns the number
    of body bytes received.
    """
    app = FastAPI()
    app.state.args = Namespace(h11_max_header_count=MOST_HEADERS)

    @app.websocket("/echo")
    async def echo(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text(await websocket.receive_text())

    @app.post("/body")
    async def body(request: Request) -> str:
        return f"{len(await request.body())} bytes"

    header_limits.limit_headers(app)
    config = uvicorn.Config(app, log_level="warning", http="httptools")
    config.h11_max_incomplete_event_size = header_limits.VLLM_DEFAULT_BYTES
    with serving(config) as port:
        yield port


def response(port: int, request: bytes) -> bytes:
    """Send a request, which may be incomplete, and return all bytes received until the server
    closes the connection.
    """
    said = b""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.settimeout(seconds(10))
        try:
            sock.sendall(request)
            while data := sock.recv(65536):
                said += data
        except (ConnectionResetError, BrokenPipeError):
            pass
    return said


def request(headers: bytes, body: bytes = b"") -> bytes:
    head = b"POST /body HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n" % len(
        body
    )
    return head + headers + b"\r\n" + body


def test_headers_without_an_end_close_the_connection(port: int) -> None:
    """If a client sends headers that never end, the server closes the connection after buffering at
    most 64 KiB. The limit also applies if the connection has already carried a complete request.
    """
    first = b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    endless = b"".join(b"X-%07d: %s\r\n" % (number, b"a" * 1000) for number in range(2000))
    for before in (b"", first):
        said = response(port, before + b"POST /body HTTP/1.1\r\nHost: x\r\n" + endless)
        assert said.count(b"200 OK") <= bool(before), "the endless request was answered"
    assert b'"0 bytes"' in response(port, request(b""))


@pytest.mark.parametrize(
    ("count", "status"), [(MOST_HEADERS - 3, b"200 OK"), (MOST_HEADERS - 2, b"431 ")]
)
def test_headers_are_counted(port: int, count: int, status: bytes) -> None:
    headers = b"".join(b"X-%d: a\r\n" % number for number in range(count))
    assert status in response(port, request(headers, b"body")).partition(b"\r\n")[0]


def test_a_long_header_and_a_large_body_are_accepted(port: int) -> None:
    """A long header and a large body are accepted. The header limit does not apply to bodies, with
    or without chunked encoding.
    """
    assert b'"3000000 bytes"' in response(
        port, request(b"X-Long: %s\r\n" % (b"a" * 60_000), b"b" * 3_000_000)
    )
    parts = b"".join(b"%x\r\n%s\r\n" % (size, b"b" * size) for size in (1, 200_000)) + b"0\r\n\r\n"
    head = (
        b"POST /body HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    assert b'"200001 bytes"' in response(port, head + parts)


def test_a_websocket_handshake_has_the_same_limits(port: int) -> None:
    url = f"ws://127.0.0.1:{port}/echo"
    with connect(url, proxy=None) as websocket:
        websocket.send("hello")
        assert websocket.recv(timeout=seconds(10)) == "hello"
    with pytest.raises(InvalidStatus, match="431"):
        connect(
            url,
            proxy=None,
            additional_headers={f"X-{number}": "a" for number in range(MOST_HEADERS)},
        )


def test_the_defaults_are_those_of_vllm() -> None:
    """The constants equal vLLM's defaults. If vLLM changed a default, this package would mistake
    the new default for a value set by the operator.
    """
    args = serve_parser().parse_args(["serve", "model"])
    assert (args.h11_max_incomplete_event_size, args.h11_max_header_count) == (
        header_limits.VLLM_DEFAULT_BYTES,
        256,
    )
