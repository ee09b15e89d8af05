# SPDX-License-Identifier: Apache-2.0
"""Requests with slow bodies end with 408, whatever the route does with the body. Requests with
other bodies are not affected.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI, Request
from helpers.uvicorn_thread import serving
from helpers.waits import exactly, seconds, wait_until
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_omni.entrypoints.limits.body_timeout import DISCARDED_BYTES_PER_S, BodyLimits, BodyTimeout
from vllm_omni.entrypoints.session_routes import FileDownload

GRACE_S, BYTES_PER_S, DEADLINE_S = 0.5, 1000, 0.5
LARGE = 64 << 20


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    """Return an application with two routes: `/length` returns the length of the request body, and
    `/large` sends a file.
    """
    app = FastAPI()
    large: Path = tmp_path_factory.mktemp("download") / "large"
    with large.open("wb") as file:
        file.truncate(LARGE)
    app.state.files = []

    @app.post("/length")
    async def length(request: Request) -> str:
        return str(len(await request.body()))

    @app.post("/refused")
    async def refused() -> Response:
        return Response("no room", 507)

    async def download(request: Request) -> Response:
        app.state.files.append(large.open("rb"))
        return FileDownload(app.state.files[-1], DEADLINE_S, headers={"Content-Length": str(LARGE)})

    app.add_api_route("/large", download)
    app.state.bytes_read = 0

    class CountReads:
        def __init__(self, inner: ASGIApp) -> None:
            self._inner = inner

        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            async def counted() -> Message:
                message = await receive()
                app.state.bytes_read += len(message.get("body", b""))
                return message

            await self._inner(scope, counted, send)

    app.add_middleware(
        BodyTimeout, limits=BodyLimits(body_grace_s=GRACE_S, min_body_bytes_per_s=BYTES_PER_S)
    )
    app.add_middleware(CountReads)
    return app


@pytest.fixture(scope="module", params=["h11", "httptools"])
def port(request: pytest.FixtureRequest, app: FastAPI) -> Iterator[int]:
    with serving(uvicorn.Config(app, log_level="warning", http=request.param)) as port:
        yield port


def post(
    port: int, parts: list[bytes], pause_s: float, path: str = "/length"
) -> tuple[bytes, float]:
    """Send a body in pieces. Return all bytes received until the server closes the connection, and
    the time that this took.
    """
    length = sum(map(len, parts))
    started_s = time.monotonic()
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.settimeout(seconds(10))
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: "
            f"{length}\r\n\r\n"
        )
        sock.sendall(head.encode())
        stop = threading.Event()

        def send() -> None:
            for item in parts:
                if stop.wait(pause_s):
                    return
                try:
                    sock.sendall(item)
                except OSError:
                    return

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        response = b""
        try:
            while part := sock.recv(65536):
                response += part
        except ConnectionResetError:
            pass
        stop.set()
        sender.join()
    return response, time.monotonic() - started_s


def test_a_client_that_sends_all_before_it_reads_gets_its_response(port: int) -> None:
    """A client that sends its whole request body before it reads still gets its response. If the
    server closed the connection while bytes were unread, the connection would be reset, and a
    client such as urllib would not see the response.
    """
    length = 16 << 20
    with socket.create_connection(("127.0.0.1", port), timeout=seconds(10)) as sock:
        sock.sendall(
            b"POST /refused HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            % length
        )
        sock.sendall(b"x" * length)
        response = b"".join(iter(lambda: sock.recv(65536), b""))
    assert response.startswith(b"HTTP/1.1 507 ")
    assert response.endswith(b"no room")


def test_refused_bodies_of_one_client_are_read_slowly(port: int, app: FastAPI) -> None:
    """Refused bodies of one client are read slowly, because reading them at full speed would occupy
    a core and slow down other clients.
    """
    with ExitStack() as stack:
        before, started_s = app.state.bytes_read, time.monotonic()
        for _ in range(4):
            sock = stack.enter_context(
                socket.create_connection(("127.0.0.1", port), timeout=seconds(10))
            )
            sock.sendall(b"POST /refused HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % LARGE)
            sender = threading.Thread(target=send_until_cut, args=(sock, b"x" * LARGE))
            sender.start()
            stack.callback(sender.join)
            stack.callback(sock.shutdown, socket.SHUT_RDWR)
        exactly(1.0)
        read, took_s = app.state.bytes_read - before, time.monotonic() - started_s
    print(f"{read >> 20} MiB in {took_s:.1f} s")
    assert 0 < read < took_s * DISCARDED_BYTES_PER_S + (8 << 20)


def send_until_cut(sock: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        sock.sendall(data)


def test_a_response_does_not_wait_for_a_missing_body(port: int) -> None:
    """A response is sent immediately even if the body is still missing, and the rest of the body
    has a separate time limit.
    """
    response, took_s = post(port, [b"x" * 100, b"x"], 60.0, "/refused")
    assert response.endswith(b"no room") and took_s < GRACE_S + seconds(2)


@pytest.mark.parametrize("sent", [0, 3], ids=["nothing", "a byte now and then"])
def test_a_slow_body_ends_with_408(port: int, sent: int) -> None:
    """After the grace period, a client that sends its body slowly gets 408 with the reason, and the
    connection is closed.
    """
    response, took_s = post(port, [b"x"] * sent + [b"x"] * 1000, 0.1 if sent else 60.0)
    head, _, body = response.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    error = json.loads(body)["error"]
    assert (error["code"], error["type"]) == ("timeout", "invalid_request_error")
    assert "0.5 s, and a second more for every 1000 bytes" in error["message"]
    assert GRACE_S <= took_s < GRACE_S + seconds(5)


def test_a_fast_enough_body_may_take_longer_than_the_grace_period(port: int) -> None:
    """Each byte that arrives extends the time limit, so a fast enough body may take longer than the
    grace period.
    """
    response, took_s = post(port, [b"x" * 400] * 12, 0.1)
    assert response.endswith(b'"4800"')
    assert took_s > 2 * GRACE_S


def test_a_download_ends_with_its_reader(port: int, app: FastAPI) -> None:
    """A client that does not read its download is disconnected within the deadline, and the file is
    closed. Another client gets the whole file.
    """
    request = b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    address = ("127.0.0.1", port)
    with socket.create_connection(address) as reader, socket.create_connection(address) as silent:
        silent.sendall(request)
        reader.sendall(request)
        reader.settimeout(seconds(10))
        received = 0
        while part := reader.recv(1 << 20):
            received += len(part)
        assert LARGE < received < LARGE + 1000
        wait_until(
            lambda: all(file.closed for file in app.state.files),
            DEADLINE_S + 5,
            lambda: "the file of the reader that does not read is still open",
        )
