# SPDX-License-Identifier: Apache-2.0
"""Other clients are still served when realtime clients disconnect, stop reading, read slowly, flood
the server or are too numerous.
"""

import contextlib
import itertools
import socket
import statistics
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers.fake_engine import FIRST, LATER, Client, EndpointServer, FakeEngine, infer, numbers
from helpers.live_clients import ExtendedClient, GenerateClient, VideoClient, png
from helpers.waits import exactly, pause, seconds, wait_until
from test_video_endpoint import START
from websockets.client import ClientProtocol
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

from vllm_omni.entrypoints.realtime.connection import codec
from vllm_omni.entrypoints.realtime.encoding.fmp4 import FragmentEncoder
from vllm_omni.entrypoints.realtime.generate.handler import PATHS
from vllm_omni.entrypoints.realtime.world_camera import handler

MakeEndpoint = Callable[..., EndpointServer]
BIG = {"width": 416, "height": 240}  # a raw chunk of 12 frames is 3.6 MB and fills the buffers
BIG_INIT = {"size": "416x240"}
# The deadline is longer than the gap that `steady` allows, so the test fails if a client blocks
# others until the deadline.
DEADLINE_S = 1.25
ALL_ENDPOINTS = pytest.mark.parametrize("endpoint_name", ["generate", "video", "world camera"])
StreamClient = GenerateClient | VideoClient | Client


def connect(endpoint: EndpointServer, endpoint_name: str) -> StreamClient:
    if endpoint_name == "world camera":
        return endpoint.client()
    return (GenerateClient if endpoint_name == "generate" else VideoClient)(endpoint.port)


def start(client: StreamClient) -> None:
    if isinstance(client, GenerateClient):
        client.init()
    else:
        client.send(START if isinstance(client, VideoClient) else infer(FIRST + 3 * LATER))


class RawClient:
    """A WebSocket client over a bare socket with a small receive buffer, which reads only when the
    test tells it to.
    """

    def __init__(
        self, port: int, path: str, first_message: bytes | str, buffer_bytes: int = 4096
    ) -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self.socket.connect(("127.0.0.1", port))
        self.protocol = ClientProtocol(parse_uri(f"ws://127.0.0.1:{port}{path}"))
        self.protocol.send_request(self.protocol.connect())
        self._flush()
        while self.protocol.state.name == "CONNECTING":
            self.protocol.receive_data(self.socket.recv(4096))
        if isinstance(first_message, str):
            self.protocol.send_text(first_message.encode())
        else:
            self.protocol.send_binary(first_message)
        self._flush()

    def _flush(self) -> None:
        for data in self.protocol.data_to_send():
            self.socket.sendall(data)

    def read_slowly(
        self, bytes_per_s: float, for_s: float
    ) -> tuple[float, int | None, list[bytes]]:
        """Read at the given rate until the server closes the connection. Return `(seconds, close
        code, last messages)`.
        """
        started_s, messages, read = time.monotonic(), deque[bytes](maxlen=3), 0
        while (now_s := time.monotonic() - started_s) < for_s:
            wanted = int(now_s * bytes_per_s) - read
            try:
                data = self.socket.recv(wanted) if wanted > 0 else None
            except OSError:  # reset by the server
                data = b""
            if data:
                read += len(data)
                self.protocol.receive_data(data)
                frames = [
                    event for event in self.protocol.events_received() if isinstance(event, Frame)
                ]
                messages.extend(
                    frame.data for frame in frames if frame.opcode in (Opcode.TEXT, Opcode.BINARY)
                )
            elif data is not None:
                break
            self._flush()
            if self.protocol.close_rcvd is not None:
                break
            exactly(0.01)
        received = self.protocol.close_rcvd
        return (
            time.monotonic() - started_s,
            None if received is None else received.code,
            list(messages),
        )

    def reset(self) -> None:
        """Disconnect with RST."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def big_init(**fields: Any) -> bytes:
    return msgspec.msgpack.encode(
        {"type": "init", "prompt": "p", "first_frame": png(), **BIG_INIT, **fields}
    )


def vanish(client: StreamClient) -> None:
    """Close the TCP connection with RST, as happens when a client process is killed."""
    raw = client.connection.socket
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.shutdown(socket.SHUT_RD)
    raw.close()


@contextlib.contextmanager
def cadence(endpoint: EndpointServer, engine: FakeEngine) -> Iterator[list[float]]:
    """Yield a list that collects the arrival times of another client's chunks while the `with`
    block runs. The engine takes 50 ms per chunk.
    """
    engine.delay_s = 0.05
    arrivals: list[float] = []
    with GenerateClient(endpoint.port) as client:
        client.init(size="32x32", realtime_output_format="jpeg")
        client.chunk()

        def read() -> None:
            with contextlib.suppress(ConnectionClosed, OSError, TimeoutError):
                while True:
                    client.chunk()
                    arrivals.append(time.monotonic())

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        yield arrivals
        before = len(arrivals)
        # Include a gap at the end of the `with` block.
        wait_until(lambda: len(arrivals) > before)
        client.connection.close()
    reader.join(seconds(5))


def steady(arrivals: list[float]) -> bool:
    """Return whether, on average, at least four of the 20 possible chunks per second arrived, with
    no gap of a second or more. A busy machine may cause shorter gaps.
    """
    gaps_s = [b - a for a, b in itertools.pairwise(arrivals)]
    return len(gaps_s) >= 5 and statistics.mean(gaps_s) < 0.25 and max(gaps_s) < 1.0


@ALL_ENDPOINTS
@pytest.mark.parametrize("how", ["close frame", "reset"])
def test_leaving_aborts_the_running_chunk_at_once(
    endpoint: EndpointServer, engine: FakeEngine, endpoint_name: str, how: str
) -> None:
    """When a client disconnects during a chunk that takes 5 s, the engine is free in less than a
    second.
    """
    engine.delay_s = 5.0
    running = 2 if endpoint_name == "world camera" else 1
    client = connect(endpoint, endpoint_name)
    start(client)
    wait_until(lambda: engine.running == running)
    started_s = time.monotonic()
    if how == "reset":
        vanish(client)
    else:
        threading.Thread(target=client.connection.close, daemon=True).start()
    wait_until(lambda: engine.running == 0, 2.0)
    assert time.monotonic() - started_s < seconds(1.0)
    assert len(engine.aborted) == running
    wait_until(lambda: not len(endpoint.manager) and not engine.worlds)


@ALL_ENDPOINTS
def test_a_client_that_never_reads_is_disconnected(
    make_endpoint: MakeEndpoint, engine: FakeEngine, endpoint_name: str
) -> None:
    """The connection of a client that never reads is closed at the send deadline. Until then, the
    engine does not generate ahead for that client. Afterwards, another client can use its slot.
    Other clients are not affected.
    """
    endpoint = make_endpoint(info={**BIG, "max_sessions": 2}, send_deadline_s=DEADLINE_S)
    engine.noise = endpoint_name == "video"
    body = {**BIG, "video_format": "ndarray_u8"}
    path, message = {
        "generate": (PATHS[0], big_init()),
        "video": ("/v1/realtime/video", msgspec.json.encode({**START, **BIG}).decode()),
        "world camera": (
            handler.PATHS[0],
            codec.encode(infer(FIRST + 20 * LATER, extra_body=body)),
        ),
    }[endpoint_name]
    with cadence(endpoint, engine) as arrivals:
        silent = RawClient(endpoint.port, path, message)
        wait_until(lambda: len(endpoint.manager) == 2)
        wait_until(lambda: len(endpoint.server.server_state.connections) == 1, DEADLINE_S + 4)
        made = len([call for call in engine.chunks if call.params.width == 416])
        # Only the request for a session's first chunk contains a size, so `made` counts no others.
        assert made <= 1
        with GenerateClient(endpoint.port) as next_client:
            next_client.init(**BIG_INIT, max_chunks=1)
            next_client.chunk()
        silent.socket.close()
    assert steady(arrivals)


@pytest.mark.parametrize(
    "endpoint_name", ["generate", "generate with extensions", "video", "world camera"]
)
def test_a_reader_at_a_quarter_of_the_rate_is_closed(
    make_endpoint: MakeEndpoint, engine: FakeEngine, endpoint_name: str
) -> None:
    """After the timeout, the connection of a client that reads too slowly is closed with 4008 and
    the reason. Its session slot is freed, and other clients are not delayed.
    """
    timeout_s, bytes_per_s = 0.75, 250_000  # 0.9 s for each raw chunk
    endpoint = make_endpoint(info={**BIG, "max_sessions": 2}, slow_reader_timeout_s=timeout_s)
    sized = {"width": 96, "height": 64}
    fps = 4 * bytes_per_s / (96 * 64 * 3)
    extensions = ["ping"] if "with" in endpoint_name else None
    path, start = PATHS[0], big_init(size="96x64", fps=int(fps), extensions=extensions)
    if endpoint_name == "video":
        engine.noise = True
        noise_THWC = np.random.default_rng(0).integers(0, 256, (12, 64, 96, 3), dtype=np.uint8)
        sized["fps"] = int(
            4 * bytes_per_s / (len(FragmentEncoder(16).encode_fragment(noise_THWC, 0)) / 12)
        )
        path, start = "/v1/realtime/video", msgspec.json.encode({**START, **sized}).decode()
    elif endpoint_name == "world camera":
        frames = FIRST + 39 * LATER
        body = {**sized, "video_format": "ndarray_u8", "fps": fps}
        start = codec.encode(infer(frames, session_id="s", request_id="r", extra_body=body))
        path = handler.PATHS[0]
    with cadence(endpoint, engine) as arrivals:
        slow = RawClient(endpoint.port, path, start, 16384)
        taken_s, code, messages = slow.read_slowly(bytes_per_s, 12.0)
        slow.socket.close()
        assert timeout_s < taken_s < timeout_s + seconds(5)
        assert code == 4008, messages
        wait_until(lambda: len(endpoint.server.server_state.connections) == 1)
        decode = msgspec.json.decode if endpoint_name == "video" else msgspec.msgpack.decode
        last = decode(messages[-1])
        assert last["type"] == "error"
        assert "read too slowly" in last.get("message", last.get("content"))
        if endpoint_name != "generate":
            assert last["code"] == "slow_reader"
        if endpoint_name != "world camera":
            wait_until(lambda: len(endpoint.manager) == 1)
        else:
            with endpoint.client() as again:
                again.send(infer(frames, session_id="s", request_id="r", extra_body=body))
                assert numbers(again.frames()) == [n % 256 for n in range(frames)]
    assert steady(arrivals)


def test_a_slow_reader_slows_only_itself(make_endpoint: MakeEndpoint, engine: FakeEngine) -> None:
    """A client that reads slowly, but at the playing rate, stays connected. Its session generates
    no more than the client reads, and the server buffers little for the client.
    """
    endpoint = make_endpoint(info=BIG, send_deadline_s=DEADLINE_S)
    chunk_bytes, for_s = 12 * 160 * 96 * 3, 1.5
    with cadence(endpoint, engine) as arrivals:
        slow = RawClient(endpoint.port, PATHS[0], big_init(size="160x96"), 65536)
        deadline_s, most_held, read = time.monotonic() + for_s, 0, 0
        while time.monotonic() < deadline_s:
            read += len(slow.socket.recv(20_000))
            most_held = max(most_held, endpoint.manager.held_bytes)
            exactly(0.01)
        assert len(endpoint.manager) == 2
        assert most_held <= 4 * chunk_bytes
        # The engine could generate 20 chunks per second.
        assert 5e5 < read < 0.5 * 20 * chunk_bytes * for_s
        slow.reset()
        wait_until(lambda: len(endpoint.manager) == 1)
    assert steady(arrivals)


def test_a_reader_of_a_few_bytes_is_disconnected(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """A client that reads only a few bytes at a time is disconnected, because the whole message
    must be sent within the deadline.
    """
    endpoint = make_endpoint(info=BIG, send_deadline_s=DEADLINE_S)
    slow = RawClient(endpoint.port, PATHS[0], big_init())
    started_s = time.monotonic()
    wait_until(lambda: len(endpoint.manager) == 1)
    while len(endpoint.manager) and time.monotonic() - started_s < seconds(10):
        with contextlib.suppress(OSError):
            slow.socket.recv(64)
        exactly(0.05)
    assert time.monotonic() - started_s < DEADLINE_S + seconds(3)
    slow.socket.close()


def test_sessions_of_one_client_are_bounded(make_endpoint: MakeEndpoint) -> None:
    """A client that exceeds its session limit is refused. A different API key has a separate limit,
    and a freed slot can be used again.
    """
    endpoint = make_endpoint(sessions_per_client=2, slot_wait_s=0.2)
    clients = [GenerateClient(endpoint.port) for _ in range(3)]
    for client in clients[:2]:
        client.init()
        client.chunk()
    clients[2].init()
    assert clients[2].error() == "another realtime session is already active"
    assert clients[2].close_code()[0] == 1008
    with GenerateClient(
        endpoint.port, additional_headers={"Authorization": "Bearer other"}
    ) as other:
        other.init(max_chunks=1)
        other.chunk()
    with VideoClient(endpoint.port) as video:
        assert video.request(START)["code"] == "session_limit"
    vanish(clients[0])
    with ExtendedClient(endpoint.port) as again:
        again.init(max_chunks=1, extensions=["ping"])
        assert again.receive()["type"] == "session"
    vanish(clients[1])


def test_a_hundred_refusals_for_capacity_lose_no_slot(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """Each refusal for lack of capacity consists of one error and close code 1013, and a hundred
    refusals lose no slot.
    """
    engine.delay_s = 0.02
    endpoint = make_endpoint(info={"max_sessions": 2}, slot_wait_s=0.001)
    residents = [ExtendedClient(endpoint.port) for _ in range(2)]
    for resident in residents:  # each requests one chunk and then pauses
        resident.init(extensions=["credit"])
        resident.receive()
        resident.send({"type": "credit", "chunks": 1})
        resident.chunk()
    for _ in range(100):
        with ExtendedClient(endpoint.port) as late:
            started_s = time.monotonic()
            late.init(extensions=["ping"])
            message = late.receive()
            assert (message["type"], message["code"], message["retryable"]) == (
                "error",
                "capacity",
                True,
            )
            assert late.close_code()[0] == 1013
            assert time.monotonic() - started_s < seconds(1.0)
    residents[0].connection.close()
    wait_until(lambda: len(endpoint.manager) == 1)
    with ExtendedClient(endpoint.port) as late:
        late.init(max_chunks=1, extensions=["ping"])
        assert late.receive()["type"] == "session"
        late.chunk()


def test_bytes_held_for_readers_are_bounded(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """When the server holds more undelivered bytes than allowed, new sessions are refused and
    running sessions wait for their readers. When the readers have disconnected, sessions can start
    again.
    """
    endpoint = make_endpoint(
        info=BIG, max_held_bytes=1_000_000, send_deadline_s=60, slot_wait_s=0.1
    )
    readers = [RawClient(endpoint.port, PATHS[0], big_init()) for _ in range(2)]
    wait_until(lambda: endpoint.manager.held_bytes > 1_000_000)
    pause(0.3)
    made = len(engine.chunks)
    pause(0.3)
    assert len(engine.chunks) == made
    assert endpoint.manager.held_bytes < 2 * 3 * 3.7e6
    with ExtendedClient(endpoint.port) as late:
        late.init(extensions=["ping"])
        assert late.receive()["code"] == "capacity"
    for one in readers:
        one.reset()
    wait_until(lambda: not len(endpoint.manager) and endpoint.manager.held_bytes == 0)
    with GenerateClient(endpoint.port) as client:
        client.init(max_chunks=1)
        client.chunk()


def test_connections_of_all_endpoints_are_counted_together(make_endpoint: MakeEndpoint) -> None:
    """The connection limit applies to the connections of all endpoints together. A connection
    beyond the limit is refused with 503 before the upgrade until another connection ends.
    """
    endpoint = make_endpoint(max_connections=2)
    with GenerateClient(endpoint.port), VideoClient(endpoint.port) as second:
        for name in ("generate", "video", "world camera"):
            with pytest.raises(InvalidStatus) as refused:
                connect(endpoint, name)
            assert refused.value.response.status_code == 503
        second.connection.close()
        wait_until(lambda: len(endpoint.server.server_state.connections) == 1)
        endpoint.client().connection.close()


def test_a_flood_of_controls_closes_the_connection(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """The connection of a client that floods the server with controls is closed with 1008, and
    another client still receives chunks at its rate.
    """
    endpoint = make_endpoint(max_messages_per_s=500)
    with cadence(endpoint, engine) as arrivals:
        with GenerateClient(endpoint.port) as flood:
            flood.init()
            with contextlib.suppress(ConnectionClosed):
                for number in range(20_000):
                    flood.state(["w"] if number % 2 else [], event_id=number)
            # The client may close the connection before it reads the close frame.
            assert flood.close_code()[0] in (1008, 1006)
        pause(0.3)
    assert steady(arrivals)
    wait_until(lambda: not len(endpoint.manager))


@ALL_ENDPOINTS
def test_abrupt_ends_leave_nothing_behind(
    make_endpoint: MakeEndpoint, engine: FakeEngine, endpoint_name: str
) -> None:
    """After sixty clients have vanished at various stages, no task, request, connection, session or
    held byte remains.
    """
    info = {"max_sessions": 4, "session_idle_s": 0.5}
    # Each client needs the place of an earlier one at once.
    endpoint = make_endpoint(info=info, reconnect_grace_s=0.001)
    engine.delay_s = 0.02
    for number in range(60):
        client = connect(endpoint, endpoint_name)
        if number % 4:
            start(client)
        if number % 4 == 2:
            wait_until(lambda: engine.running)
        if number % 4 == 3:
            client.connection.recv(timeout=seconds(10))
        vanish(client)
    wait_until(lambda: not engine.running and not endpoint.server.server_state.connections)
    wait_until(lambda: not engine.worlds and not len(endpoint.manager))
    wait_until(lambda: len(endpoint.manager._tasks) == 1)  # the task that closes idle sessions
    assert (engine.live, endpoint.manager.held_bytes, endpoint.manager.guard.num_connections) == (
        {},
        0,
        0,
    )
