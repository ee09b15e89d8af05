# SPDX-License-Identifier: Apache-2.0
"""Streaming doors and clients that leave, freeze, dawdle, lie or are too many: nobody else may
notice.
"""

import contextlib
import ctypes
import gc
import itertools
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from helpers.fake_engine import FIRST, LATER, EndpointServer, FakeEngine, infer, numbers
from helpers.live_clients import ExtendedClient, GenerateClient, VideoClient, png
from helpers.waits import exactly, pause, seconds, wait_until
from test_video_endpoint import START
from websockets.client import ClientProtocol
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri

from vllm_omni.entrypoints.media.fmp4 import FragmentEncoder
from vllm_omni.entrypoints.realtime.connection import codec
from vllm_omni.entrypoints.realtime.generate.handler import PATHS
from vllm_omni.entrypoints.realtime.world_camera import handler

MakeEndpoint = Callable[..., EndpointServer]
BIG = {"width": 416, "height": 240}  # a raw chunk of 12 frames is 3.6 MB: buffers fill at once
BIG_INIT = {"size": "416x240"}
# well above the gap that `steady` allows: a deaf client for whom all wait is seen
DEADLINE_S = 1.25


class Deaf:
    """A WebSocket client over a bare socket with a small receive buffer: it reads when told to,
    if ever.
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

    def dawdle(self, bytes_per_s: float, for_s: float) -> tuple[float, int | None, list[bytes]]:
        """Read at that rate until the server has ended it: `(seconds, close code, last
        messages)`.
        """
        started_s, messages, read = time.monotonic(), deque[bytes](maxlen=3), 0
        while (now_s := time.monotonic() - started_s) < for_s:
            wanted = int(now_s * bytes_per_s) - read
            try:
                data = self.socket.recv(wanted) if wanted > 0 else None
            except OSError:  # reset: the server has cut it
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
        """Leave with RST."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def big_init(**fields: Any) -> bytes:
    return msgspec.msgpack.encode(
        {"type": "init", "prompt": "p", "first_frame": png(), **BIG_INIT, **fields}
    )


def vanish(client: GenerateClient | VideoClient) -> None:
    """End the TCP connection with RST, as a killed process behind a full buffer does."""
    raw = client.connection.socket
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.shutdown(socket.SHUT_RD)
    raw.close()


@contextlib.contextmanager
def cadence(endpoint: EndpointServer, engine: FakeEngine) -> Iterator[list[float]]:
    """Another client's chunk arrivals while something happens; the engine takes 50 ms a chunk."""
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
        # the gap that something at the very end leaves is seen, too
        wait_until(lambda: len(arrivals) > before)
        client.connection.close()
    reader.join(seconds(5))


def steady(arrivals: list[float]) -> bool:
    """Four a second at least, where 20 can be made, and no gap of a second: a busy machine may
    hiccup for less.
    """
    gaps_s = [b - a for a, b in itertools.pairwise(arrivals)]
    return len(gaps_s) >= 5 and statistics.mean(gaps_s) < 0.25 and max(gaps_s) < 1.0


@pytest.mark.parametrize("endpoint_name", ["generate", "video"])
@pytest.mark.parametrize("how", ["close frame", "reset"])
def test_leaving_aborts_the_running_chunk_at_once(
    endpoint: EndpointServer, engine: FakeEngine, endpoint_name: str, how: str
) -> None:
    """In the middle of a chunk of 5 s, politely or not: the engine is free in well under a
    second.
    """
    engine.delay_s = 5.0
    client: GenerateClient | VideoClient
    if endpoint_name == "generate":
        client = GenerateClient(endpoint.port)
        client.init()
    else:
        client = VideoClient(endpoint.port)
        client.send(START)
    wait_until(lambda: engine.running == 1)
    started_s = time.monotonic()
    if how == "reset":
        vanish(client)
    else:
        threading.Thread(target=client.connection.close, daemon=True).start()
    wait_until(lambda: engine.running == 0, 2.0)
    assert time.monotonic() - started_s < seconds(0.5)
    assert len(engine.aborted) == 1
    wait_until(lambda: not len(endpoint.manager) and not engine.worlds)


@pytest.mark.parametrize("endpoint_name", ["generate", "video"])
def test_a_client_that_never_reads_is_cut_off(
    make_endpoint: MakeEndpoint, engine: FakeEngine, endpoint_name: str
) -> None:
    """Within the send deadline; the engine does not work ahead for it; the next client gets its
    slot; others go on.
    """
    endpoint = make_endpoint(info={**BIG, "max_sessions": 2}, send_deadline_s=DEADLINE_S)
    with cadence(endpoint, engine) as arrivals:
        start: bytes | str = big_init()
        if endpoint_name == "video":
            start = msgspec.json.encode({**START, "width": 416, "height": 240}).decode()
            engine.noise = True
        deaf = Deaf(
            endpoint.port, PATHS[0] if endpoint_name == "generate" else "/v1/realtime/video", start
        )
        wait_until(lambda: len(endpoint.manager) == 2)
        wait_until(lambda: len(endpoint.manager) == 1, DEADLINE_S + 4)
        wait_until(lambda: len(endpoint.server.server_state.connections) == 1)
        made = len([call for call in engine.chunks if call.params.width == 416])
        assert made <= 1  # only the first chunk names a size
        with GenerateClient(endpoint.port) as next_client:
            next_client.init(**BIG_INIT, max_chunks=1)
            next_client.chunk()
        deaf.socket.close()
    assert steady(arrivals)


@pytest.mark.parametrize(
    "endpoint_name", ["generate", "generate with extensions", "video", "world camera"]
)
def test_a_reader_at_a_quarter_of_the_rate_is_closed(
    make_endpoint: MakeEndpoint, engine: FakeEngine, endpoint_name: str
) -> None:
    """It is told why, with 4008, when it has been behind for the timeout; its place is free, its
    neighbour steady.
    """
    timeout_s, bytes_per_s = 0.75, 250_000  # 0.9 s a raw chunk
    endpoint = make_endpoint(info={**BIG, "max_sessions": 2}, slow_reader_timeout_s=timeout_s)
    sized = {"width": 96, "height": 64}
    fps = 4 * bytes_per_s / (96 * 64 * 3)
    extensions = ["ping"] if "with" in endpoint_name else None
    path, start = PATHS[0], big_init(size="96x64", fps=int(fps), extensions=extensions)
    if endpoint_name == "video":
        engine.noise = True
        noise_THWC = np.random.default_rng(0).integers(0, 256, (12, 64, 96, 3), dtype=np.uint8)
        sized["fps"] = int(4 * bytes_per_s / (len(FragmentEncoder(16).encode(noise_THWC)) / 12))
        path, start = "/v1/realtime/video", msgspec.json.encode({**START, **sized}).decode()
    elif endpoint_name == "world camera":
        frames = FIRST + 39 * LATER
        body = {**sized, "video_format": "ndarray_u8", "fps": fps}
        start = codec.encode(infer(frames, session_id="s", request_id="r", extra_body=body))
        path = handler.PATHS[0]
    with cadence(endpoint, engine) as arrivals:
        slow = Deaf(endpoint.port, path, start, 16384)
        taken_s, code, messages = slow.dawdle(bytes_per_s, 12.0)
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
    """It takes what it plays, so it stays; its session makes no more than it takes, and little
    waits for it.
    """
    endpoint = make_endpoint(info=BIG, send_deadline_s=DEADLINE_S)
    chunk_bytes, for_s = 12 * 160 * 96 * 3, 1.5
    with cadence(endpoint, engine) as arrivals:
        slow = Deaf(endpoint.port, PATHS[0], big_init(size="160x96"), 65536)
        deadline_s, most_held, read = time.monotonic() + for_s, 0, 0
        while time.monotonic() < deadline_s:
            read += len(slow.socket.recv(20_000))
            most_held = max(most_held, endpoint.manager.held_bytes)
            exactly(0.01)
        assert len(endpoint.manager) == 2
        assert most_held <= 4 * chunk_bytes
        # of the 20 chunks a second that the engine could make
        assert 5e5 < read < 0.5 * 20 * chunk_bytes * for_s
        slow.reset()
        wait_until(lambda: len(endpoint.manager) == 1)
    assert steady(arrivals)


def test_a_reader_that_trickles_is_cut_off(make_endpoint: MakeEndpoint, engine: FakeEngine) -> None:
    """A few bytes now and then do not keep a place: the message must be through within the
    deadline.
    """
    endpoint = make_endpoint(info=BIG, send_deadline_s=DEADLINE_S)
    slow = Deaf(endpoint.port, PATHS[0], big_init())
    started_s = time.monotonic()
    wait_until(lambda: len(endpoint.manager) == 1)
    while len(endpoint.manager) and time.monotonic() - started_s < seconds(10):
        with contextlib.suppress(OSError):
            slow.socket.recv(64)
        exactly(0.05)
    assert time.monotonic() - started_s < DEADLINE_S + seconds(3)
    slow.socket.close()


def test_a_frozen_client_is_cut_off(make_endpoint: MakeEndpoint, engine: FakeEngine) -> None:
    """A process stopped in the middle of its stream (SIGSTOP): its socket lives, nobody reads."""
    endpoint = make_endpoint(info=BIG, send_deadline_s=DEADLINE_S)
    program = (
        "import sys, websockets.sync.client as c\n"
        f"with c.connect('ws://127.0.0.1:{endpoint.port}{PATHS[0]}', max_size=None) as ws:\n"
        "    ws.send(bytes.fromhex(sys.argv[1]))\n"
        "    while True:\n        ws.recv()\n"
    )
    frozen = subprocess.Popen([sys.executable, "-c", program, big_init().hex()])
    try:
        with cadence(endpoint, engine) as arrivals:
            wait_until(lambda: len(endpoint.manager) == 2)
            wait_until(
                lambda: len([call for call in engine.chunks if call.params.width == 416]) == 1
            )
            pause(0.5)
            os.kill(frozen.pid, signal.SIGSTOP)
            stopped_s = time.monotonic()
            wait_until(lambda: len(endpoint.manager) == 1, 12.0)
            assert time.monotonic() - stopped_s < DEADLINE_S + seconds(5)
        assert steady(arrivals)
    finally:
        frozen.kill()
        frozen.wait()


def test_a_half_open_connection_is_noticed(make_endpoint: MakeEndpoint, engine: FakeEngine) -> None:
    """Behind a proxy that stops forwarding: nothing arrives, nothing is refused; the deadline
    ends it.
    """
    endpoint = make_endpoint(info=BIG, send_deadline_s=DEADLINE_S)
    listener = socket.create_server(("127.0.0.1", 0))
    forwarding = threading.Event()
    forwarding.set()

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while forwarding.is_set() and (data := source.recv(65536)):
                sink.sendall(data)

    def proxy() -> None:
        near, _ = listener.accept()
        far = socket.create_connection(("127.0.0.1", endpoint.port))
        threading.Thread(target=pump, args=(near, far), daemon=True).start()
        pump(far, near)

    threading.Thread(target=proxy, daemon=True).start()
    client = GenerateClient(listener.getsockname()[1])
    client.init(**BIG_INIT)
    client.chunk()
    forwarding.clear()
    wait_until(lambda: not len(endpoint.manager), DEADLINE_S + 5)
    wait_until(lambda: engine.running == 0)
    listener.close()


def test_sessions_of_one_client_are_bounded(make_endpoint: MakeEndpoint) -> None:
    """One more is refused; another API key has its own share; a place that becomes free is given
    again.
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


def test_capacity_is_refused_a_hundred_times_and_comes_back(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """Capacity plus one arrives again and again: always one clear refusal with 1013, never a
    lost slot.
    """
    engine.delay_s = 0.02
    endpoint = make_endpoint(info={"max_sessions": 2}, slot_wait_s=0.001)
    residents = [ExtendedClient(endpoint.port) for _ in range(2)]
    for resident in residents:  # they ask for one chunk and look at it for a long time
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
    """Over budget no session begins, and those that run wait for their readers; it recovers by
    itself.
    """
    endpoint = make_endpoint(
        info=BIG, max_held_bytes=1_000_000, send_deadline_s=60, slot_wait_s=0.1
    )
    deaf = [Deaf(endpoint.port, PATHS[0], big_init()) for _ in range(2)]
    wait_until(lambda: endpoint.manager.held_bytes > 1_000_000)
    pause(0.3)
    made = len(engine.chunks)
    pause(0.3)
    assert len(engine.chunks) == made
    assert endpoint.manager.held_bytes < 2 * 3 * 3.7e6
    with ExtendedClient(endpoint.port) as late:
        late.init(extensions=["ping"])
        assert late.receive()["code"] == "capacity"
    for one in deaf:
        one.reset()
    wait_until(lambda: not len(endpoint.manager) and endpoint.manager.held_bytes == 0)
    with GenerateClient(endpoint.port) as client:
        client.init(max_chunks=1)
        client.chunk()


def test_connections_of_all_endpoints_are_counted_together(make_endpoint: MakeEndpoint) -> None:
    """One more is refused with 503 before the upgrade, whichever door it knocks at."""
    endpoint = make_endpoint(max_connections=2)
    with GenerateClient(endpoint.port), VideoClient(endpoint.port):
        for client in (GenerateClient, VideoClient):
            with pytest.raises(InvalidStatus) as refused:
                client(endpoint.port)
            assert refused.value.response.status_code == 503


def test_a_flood_of_controls_is_taken_together_then_cut(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """Latest wins; what cannot be meant is ended with 1008; a neighbour keeps its cadence."""
    endpoint = make_endpoint(max_messages_per_s=500)
    with cadence(endpoint, engine) as arrivals:
        with GenerateClient(endpoint.port) as flood:
            flood.init()
            with contextlib.suppress(ConnectionClosed):
                for number in range(20_000):
                    flood.state(["w"] if number % 2 else [], event_id=number)
            # the close frame may drown in what it had still to read
            assert flood.close_code()[0] in (1008, 1006)
        pause(0.3)
    assert steady(arrivals)
    wait_until(lambda: not len(endpoint.manager))


@pytest.mark.parametrize("kind", ["generate", "video"])
def test_abrupt_ends_leave_nothing_behind(
    make_endpoint: MakeEndpoint, engine: FakeEngine, kind: str
) -> None:
    """Sixty clients vanish at every stage: no task, request, connection, world or byte stays."""
    endpoint = make_endpoint(info={"max_sessions": 4})
    engine.delay_s = 0.02
    for number in range(60):
        client: GenerateClient | VideoClient
        if kind == "generate":
            client = GenerateClient(endpoint.port)
            if number % 4:
                client.init()
        else:
            client = VideoClient(endpoint.port)
            if number % 4:
                client.send(START)
        if number % 4 == 2:
            wait_until(lambda: engine.running)
        if number % 4 == 3:
            client.connection.recv(timeout=seconds(10))
        vanish(client)
    wait_until(lambda: not engine.running and not endpoint.server.server_state.connections)
    wait_until(lambda: not engine.worlds and not len(endpoint.manager))
    wait_until(lambda: len(endpoint.manager._tasks) == 1)  # the sweeper
    assert (engine.live, endpoint.manager.held_bytes, endpoint.manager.guard.num_connections) == (
        {},
        0,
        0,
    )


@pytest.mark.nightly
def test_churn_does_not_grow(make_endpoint: MakeEndpoint, engine: FakeEngine) -> None:
    """Thousands of short sessions, half of them cut: at most 256 bytes each after a warm-up, and no
    descriptor.

    Memory is read after ``malloc_trim``: what the C library keeps free for later (5 MB here) is no
    leak. Nor is a heap's last growth: a leak shows in each round of a thousand.
    """
    endpoint = make_endpoint()
    process = psutil.Process()
    trim = ctypes.CDLL(None).malloc_trim
    small_init = {"type": "init", "prompt": "p", "size": "32x32", "first_frame": png()}

    def churn(count: int) -> None:
        for number in range(count):
            # a bare socket: a library's client that is cut off leaves its own thread behind
            if number % 2:
                leaver = Deaf(endpoint.port, PATHS[0], msgspec.msgpack.encode(small_init))
                assert leaver.socket.recv(64)
                leaver.reset()
                continue
            with GenerateClient(endpoint.port) as client:
                client.send({**small_init, "max_chunks": 2})
                assert [client.chunk().index, client.chunk().index] == [0, 1]
        wait_until(
            lambda: not len(endpoint.manager) and not endpoint.server.server_state.connections
        )
        engine.calls.clear()
        engine.aborted.clear()
        gc.collect()
        trim(0)

    def used() -> tuple[int, int]:
        return process.memory_info().rss, process.num_fds()

    churn(1000)
    notes = [used()]
    for _ in range(3):
        churn(1000)
        notes.append(used())
    assert min(after[0] - before[0] for before, after in itertools.pairwise(notes)) < 1000 * 256, (
        notes
    )
    assert notes[-1][1] <= notes[0][1] + 2, notes
