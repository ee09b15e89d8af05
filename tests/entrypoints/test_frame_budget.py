# SPDX-License-Identifier: Apache-2.0
"""The rate of small WebSocket frames is limited per connection."""

import contextlib
import logging
import socket
from collections.abc import Iterator

import pytest
import uvicorn
from fastapi import FastAPI, WebSocket
from helpers.uvicorn_thread import serving
from helpers.waits import exactly, pause, pause_task, seconds
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode
from websockets.protocol import Protocol
from websockets.server import ServerProtocol
from websockets.sync.client import ClientConnection, connect

from vllm_omni.entrypoints.limits.frame_budget import SLICE_BYTES, SMALL_BYTES, FrameBudget

BUDGET = FrameBudget(small_frames_per_s=100.0)
BURST = int(BUDGET.burst)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Start a server that limits the rate of small frames. `/count` replies to each message with
    the message's length, and `/late` accepts a connection only after a delay.
    """
    app = FastAPI()

    @app.websocket("/count")
    async def count(websocket: WebSocket) -> None:
        await websocket.accept()
        async for message in websocket.iter_bytes():
            await websocket.send_text(str(len(message)))

    @app.websocket("/late")
    async def late(websocket: WebSocket) -> None:
        await pause_task(0.3)
        await websocket.accept()

    config = uvicorn.Config(
        app, log_level="warning", ws_max_size=64 << 20, ws_per_message_deflate=False
    )
    BUDGET.apply(config)
    with serving(config) as port:
        yield port


def fragments(total: int, size: int) -> bytes:
    """Return one binary message of `total` bytes, split into fragments of `size` bytes."""
    parts = []
    for start in range(0, total, size):
        opcode = Opcode.CONT if start else Opcode.BINARY
        parts.append(Frame(opcode, b"x" * size, fin=start + size >= total).serialize(mask=True))
    return b"".join(parts)


def read_on(client: ClientConnection) -> None:
    while True:
        client.recv(timeout=seconds(10))


@pytest.mark.parametrize(
    ("total", "size"),
    [(32 << 20, 64 << 10), (1 << 20, SMALL_BYTES), (64 * (BURST - 20), 64)],
    ids=str,
)
def test_fragments_within_the_budget_are_one_message(port: int, total: int, size: int) -> None:
    """A message can have any number of fragments of 1 KiB or more, and as many smaller fragments as
    the burst allows.
    """
    with connect(f"ws://127.0.0.1:{port}/count", compression=None) as client:
        client.socket.sendall(fragments(total, size))
        assert client.recv(timeout=seconds(30)) == str(total)


def test_the_budget_comes_back_with_time(port: int) -> None:
    """The budget refills over time, so a client that pauses can send more small frames in total
    than the burst allows.
    """
    ping = Frame(Opcode.PING, b"").serialize(mask=True)
    with connect(f"ws://127.0.0.1:{port}/count", compression=None) as client:
        client.socket.sendall((BURST - 5) * ping)
        for _ in range(2):
            exactly(0.4)
            client.socket.sendall(int(0.4 * BUDGET.small_frames_per_s) * ping)
        client.send(b"still here")
        assert client.recv(timeout=seconds(10)) == "10"


@pytest.mark.parametrize(
    "opcode", [Opcode.PING, Opcode.PONG, Opcode.BINARY], ids=lambda opcode: opcode.name
)
def test_a_flood_is_closed_with_1008_and_a_reason(port: int, opcode: Opcode) -> None:
    """A connection flooded with whole messages or control frames is closed with 1008 and a reason,
    even if the client keeps sending.
    """
    flood = Frame(opcode, b"x").serialize(mask=True) * 100_000
    with connect(f"ws://127.0.0.1:{port}/count", compression=None) as client:
        client.socket.sendall(flood)
        with pytest.raises(ConnectionClosed) as closed:
            read_on(client)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1008
    assert closed.value.rcvd.reason == "more than 100 frames under 1024 bytes a second"


def test_a_flood_is_hardly_parsed(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a client floods the server with frames, the server parses at most the frames allowed in
    one second, plus those in one slice of received bytes.
    """
    parsed: list[Frame] = []
    take = Protocol.recv_frame

    def counted(protocol: Protocol, frame: Frame) -> None:
        parsed.append(frame)
        take(protocol, frame)

    with connect(f"ws://127.0.0.1:{port}/count", compression=None) as client:
        raw = client.socket.dup()
        monkeypatch.setattr(ServerProtocol, "recv_frame", counted)
        raw.sendall(Frame(Opcode.PONG, b"").serialize(mask=True) * 20_000)
        with pytest.raises(ConnectionClosed):
            read_on(client)
        raw.close()
    assert 0 < len(parsed) <= BUDGET.small_frames_per_s + SLICE_BYTES / 6


def test_a_flood_during_the_handshake_is_disconnected(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that floods the server during the handshake is disconnected without a close code,
    because there is no WebSocket to close yet. If the application accepts the connection
    afterwards, no error is raised.
    """
    caplog.set_level(logging.ERROR)
    head = (
        b"GET /late HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(head)
        pause(0.1)
        raw.sendall(Frame(Opcode.PING, b"").serialize(mask=True) * (2 * BURST))
        raw.settimeout(seconds(5))
        with contextlib.suppress(ConnectionResetError):
            assert raw.recv(1) == b""
    pause(0.5)
    assert not caplog.records
