# SPDX-License-Identifier: Apache-2.0
"""Messages written together arrive as if they had been written separately."""

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI, WebSocket
from helpers.uvicorn_thread import serving
from helpers.waits import pause_task, seconds, wait_until
from uvicorn.protocols.utils import ClientDisconnected
from websockets.frames import Frame, Opcode
from websockets.sync.client import connect

from vllm_omni.entrypoints.gathered_writes import frame_header, writer_of
from vllm_omni.entrypoints.limits.frame_budget import FrameBudget

MUCH = bytes(64 << 20)
PIXELS = np.arange(3 << 20, dtype=np.uint8)


@pytest.fixture(scope="module")
def writes() -> list[list[int]]:
    """Record the buffer sizes of each `writelines` call that the server's transports receive."""
    return []


def watched(websocket: WebSocket, writes: list[list[int]]) -> None:
    (protocol,) = (
        c for c in websocket.app.state.server.server_state.connections if hasattr(c, "conn")
    )
    inner = protocol.transport

    class Watch:
        def writelines(self, buffers: list[bytes]) -> None:
            writes.append([len(buffer) for buffer in buffers])
            inner.writelines(buffers)

        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

    protocol.transport = Watch()


def application(writes: list[list[int]]) -> FastAPI:
    app = FastAPI()

    @app.websocket("/group")
    async def group(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text(str(writer_of(websocket.scope) is not None))
        watched(websocket, writes)
        writer = writer_of(websocket.scope)
        assert writer is not None
        writer.write([b"header", PIXELS.data, "words", b"", memoryview(b"end")])
        await websocket.send_bytes(b"by itself")

    @app.websocket("/waiting")
    async def waiting(websocket: WebSocket) -> None:
        await websocket.accept()
        writer = writer_of(websocket.scope)
        assert writer is not None
        assert writer.has_room
        writer.write([MUCH])  # more than the kernel buffers if the client does not read
        assert not writer.has_room
        sending = [asyncio.ensure_future(writer.send(messages)) for messages in ([b"last"], [])]
        await pause_task(0.1)
        writes.append([sum(task.done() for task in sending)])
        await asyncio.gather(*sending)
        assert writer.has_room
        await websocket.close()

    @app.websocket("/late")
    async def late(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.close()
        writer = writer_of(websocket.scope)
        assert writer is not None
        with pytest.raises(ClientDisconnected):
            writer.write([b"too late"])
        writes.append([])

    return app


def served(writes: list[list[int]], **options: Any) -> Iterator[int]:
    app = application(writes)
    config = uvicorn.Config(app, log_level="warning", **options)
    FrameBudget().apply(config)
    with serving(config) as port:
        yield port


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def port(request: pytest.FixtureRequest, writes: list[list[int]]) -> Iterator[int]:
    yield from served(writes, ws_per_message_deflate=False, loop=request.param)


@pytest.mark.parametrize("opcode", [Opcode.TEXT, Opcode.BINARY])
@pytest.mark.parametrize("num_bytes", [0, 1, 125, 126, 127, 65535, 65536, 1 << 20])
def test_headers_are_those_of_the_library(opcode: Opcode, num_bytes: int) -> None:
    """At each length where the encoding changes, the frame header equals the one that the
    `websockets` library writes.
    """
    whole = Frame(opcode, bytes(num_bytes)).serialize(mask=False)
    assert frame_header(opcode, num_bytes) == whole[: len(whole) - num_bytes]


def test_messages_of_a_group_arrive_one_by_one_and_in_order(
    port: int, writes: list[list[int]]
) -> None:
    """Bytes, buffers and text are sent in a single write, whatever their lengths. They arrive in
    order, before any later message.
    """
    writes.clear()
    with connect(f"ws://127.0.0.1:{port}/group", compression=None, max_size=None) as client:
        assert client.recv(timeout=seconds(10)) == "True"
        assert [client.recv(timeout=seconds(10)) for _ in range(6)] == [
            b"header", PIXELS.tobytes(), "words", b"", b"end", b"by itself",
        ]  # fmt: skip
    assert writes == [[2, 6, 10, PIXELS.nbytes, 2, 5, 2, 0, 2, 3]]


def test_compressed_connections_do_not_offer_grouped_writes(writes: list[list[int]]) -> None:
    """A compressed connection does not offer grouped writes, because only the `websockets` library
    can write compressed frames.
    """
    for port in served(writes, ws_per_message_deflate=True):
        with connect(f"ws://127.0.0.1:{port}/group", max_size=None) as client:
            assert client.recv(timeout=seconds(10)) == "False"


def test_nothing_is_sent_after_a_close(port: int, writes: list[list[int]]) -> None:
    """After a connection is closed, nothing more is sent, and a later send by the application
    raises ClientDisconnected.
    """
    writes.clear()
    with connect(f"ws://127.0.0.1:{port}/late", compression=None) as client:
        assert list(client) == []
        assert client.close_code == 1000
    assert writes == [[]]


def test_a_send_waits_for_a_reader(port: int, writes: list[list[int]]) -> None:
    """A send waits until the buffer has room for the message. An empty send waits until the kernel
    has taken all buffered bytes.
    """
    writes.clear()
    lines = ["GET /waiting HTTP/1.1", "Host: x", "Upgrade: websocket", "Connection: Upgrade"]
    lines += ["Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "", ""]
    with socket.create_connection(("127.0.0.1", port)) as client, client.makefile("rb") as reader:
        client.sendall("\r\n".join(lines).encode())
        wait_until(lambda: writes)
        assert writes == [[0]]  # nothing sent, because the client has read nothing
        while reader.readline() != b"\r\n":
            pass
        received = reader.read(10 + len(MUCH) + 6)
    assert received[10:] == MUCH + b"\x82\x04last"
