# SPDX-License-Identifier: Apache-2.0
"""A relay between a client and a server that drops, delays and rate-limits the data that it
forwards.

The tests use this relay because their machines' kernels often lack `netem`. `Network` describes the
faults in one direction. `UdpRelay` and `TcpRelay` forward data and inject these faults. They run on
an event loop in a separate thread. Packets in the same direction stay in order. The delay changes
from time to time, like that of a network queue, and a packet that arrives at a full queue is
dropped.
"""

import asyncio
import contextlib
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from helpers.waits import exactly_in_task

_DELAY_CHANGES_S = 0.1
"""Mean time between delay changes, in seconds."""
_SEGMENT_BYTES = 1400


@dataclass(frozen=True)
class Network:
    """Network faults in one direction."""

    loss: float = 0.0
    """Fraction of packets dropped, from 0 to 1."""
    delay_ms: float = 0.0
    """Minimum packet delay in milliseconds."""
    jitter_ms: float = 0.0
    """Delay range in milliseconds. The delay varies from `delay_ms` to `delay_ms + jitter_ms`."""
    bits_per_s: float = float("inf")
    """Bandwidth in bits per second. Default: unlimited."""
    queue_ms: float = 200.0
    """Maximum time in milliseconds that a packet waits in the queue for the limited bandwidth. A
    packet that would wait longer is dropped.
    """
    retransmission_ms: float = 200.0
    """Additional delay in milliseconds for a lost TCP segment, which a kernel would retransmit. Not
    used for UDP.
    """


class _Direction:
    """Computes the arrival time of each packet in one direction."""

    def __init__(self, network: Network, seed: int) -> None:
        self._network, self._random = network, random.Random(seed)
        self._free_s = self._last_s = 0.0
        self._delay_ms, self._changes_s = network.delay_ms, 0.0
        self.num_packets = self.num_dropped = 0

    def arrival_s(self, num_bytes: int, now_s: float, *, reliable: bool = False) -> float | None:
        """Return a packet's arrival time, or None if the packet is dropped.

        Args:
            num_bytes: Size of the packet.
            now_s: Monotonic time in seconds.
            reliable: Whether to deliver lost packets late instead of never and to use an unlimited
                queue, as with TCP.
        """
        network = self._network
        self.num_packets += 1
        is_lost = self._random.random() < network.loss
        starts_s = max(now_s, self._free_s)
        if not reliable and (is_lost or starts_s - now_s > network.queue_ms / 1000):
            self.num_dropped += 1
            return None
        self._free_s = starts_s + num_bytes * 8 / network.bits_per_s
        if now_s >= self._changes_s:
            self._changes_s = now_s + self._random.expovariate(1 / _DELAY_CHANGES_S)
            self._delay_ms = network.delay_ms + self._random.random() * network.jitter_ms
        late_ms = network.retransmission_ms * (is_lost and reliable)
        arrives_s = self._free_s + (self._delay_ms + late_ms) / 1000
        self._last_s = max(self._last_s, arrives_s)
        return self._last_s


class _LoopThread:
    """An event loop that runs in its own thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()


class _Port(asyncio.DatagramProtocol):
    """One side of a UDP relay. It sends to the address that its last packet came from."""

    def __init__(self) -> None:
        self.peer: tuple[str, int] | None = None
        self.transport: asyncio.DatagramTransport | None = None
        self.forward: Callable[[bytes], None] = lambda data: None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.peer = addr
        self.forward(data)

    def send(self, data: bytes) -> None:
        if self.transport is not None and self.peer is not None:
            self.transport.sendto(data, self.peer)

    @property
    def port(self) -> int:
        assert self.transport is not None
        return int(self.transport.get_extra_info("sockname")[1])


class UdpRelay:
    """A UDP relay for one WebRTC connection.

    Both sides send to the relay: `rewrite_offer` gives the server an address of the relay as the
    client's candidate, and `rewrite_answer` gives the client another one as the server's candidate.
    Both methods remove all other candidates.

    Args:
        down: Faults from the server to the client.
        up: Faults from the client to the server.
    """

    def __init__(self, down: Network, up: Network, seed: int = 1) -> None:
        self.down, self.up = _Direction(down, seed), _Direction(up, seed + 1)
        self._client, self._server = _Port(), _Port()
        self.host = host_address()

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        for side in (self._client, self._server):
            await loop.create_datagram_endpoint(lambda side=side: side, local_addr=("0.0.0.0", 0))
        self._server.forward = self._forward(self.down, self._client)
        self._client.forward = self._forward(self.up, self._server)

    async def close(self) -> None:
        for side in (self._client, self._server):
            if side.transport is not None:
                side.transport.close()

    def _forward(self, direction: _Direction, side: _Port) -> Callable[[bytes], None]:
        loop = asyncio.get_running_loop()

        def forward(data: bytes) -> None:
            now_s = time.monotonic()
            arrives_s = direction.arrival_s(len(data), now_s)
            if arrives_s is not None:
                loop.call_at(loop.time() + arrives_s - now_s, side.send, data)

        return forward

    def rewrite_offer(self, sdp: str) -> str:
        return _with_candidate(sdp, self.host, self._server.port)

    def rewrite_answer(self, sdp: str) -> str:
        return _with_candidate(sdp, self.host, self._client.port)

    @property
    def page_script(self) -> str:
        """Return JavaScript that makes a page's WebRTC connections use the relay."""
        return f"""(() => {{
            const only = (sdp, port) => sdp.replaceAll(/^a=candidate:.*\\r?\\n/gm, "").replaceAll(
                /^(a=ice-ufrag:.*\\r?\\n)/gm,
                `a=candidate:1 1 udp 2122260223 {self.host} ${{port}} typ host\\r\\n$1`);
            const fetched = window.fetch;
            window.fetch = (url, options) => fetched(url, options?.body?.startsWith?.("v=0")
                ? {{ ...options, body: only(options.body, {self._server.port}) }} : options);
            const set = RTCPeerConnection.prototype.setRemoteDescription;
            RTCPeerConnection.prototype.setRemoteDescription = function ({{ type, sdp }}) {{
                return set.call(this, {{ type, sdp: only(sdp, {self._client.port}) }}); }};
        }})()"""


def _with_candidate(sdp: str, host: str, port: int) -> str:
    sdp = re.sub(r"(?m)^a=candidate:.*\r?\n", "", sdp)
    candidate = f"a=candidate:1 1 udp 2122260223 {host} {port} typ host\r\n"
    return re.sub(r"(?m)^(a=ice-ufrag:)", candidate + r"\1", sdp)


def host_address() -> str:
    """Return an address of this machine other than the loopback address, because WebRTC candidates
    contain such an address.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # connecting a UDP socket sends nothing
        return str(probe.getsockname()[0])
    return socket.gethostbyname(socket.gethostname())


class TcpRelay:
    """A TCP relay to a port on this machine.

    Args:
        target: The server's port.
        down: Faults from the server to the client.
        up: Faults from the client to the server.
    """

    def __init__(self, target: int, down: Network, up: Network, seed: int = 1) -> None:
        self._target, self._networks, self._seed = target, (down, up), seed
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", self._target)
        down, up = (
            _Direction(network, self._seed + at) for at, network in enumerate(self._networks)
        )
        for task in (
            asyncio.create_task(self._pump(there[0], writer, down)),
            asyncio.create_task(self._pump(reader, there[1], up)),
        ):
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: _Direction
    ) -> None:
        """Forward data in one direction. The number of undelivered segments is bounded, so a slow
        receiver blocks the sender.
        """
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(64)

        async def deliver() -> None:
            while True:
                arrives_s, data = await on_the_way.get()
                await exactly_in_task(max(0.0, arrives_s - time.monotonic()))
                writer.write(data)
                await writer.drain()

        delivering = asyncio.create_task(deliver())
        try:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(_SEGMENT_BYTES):
                    arrives_s = direction.arrival_s(len(data), time.monotonic(), reliable=True)
                    assert arrives_s is not None
                    await on_the_way.put((arrives_s, data))
                while not on_the_way.empty():
                    await exactly_in_task(0.01)
        finally:
            delivering.cancel()
            writer.close()


Relay = TypeVar("Relay", UdpRelay, TcpRelay)


@contextlib.contextmanager
def running(relay: Relay) -> Iterator[Relay]:
    """Run a relay for the duration of the `with` block."""
    thread = _LoopThread()
    try:
        thread.call(relay.open())
        yield relay
        thread.call(relay.close())
    finally:
        thread.stop()
