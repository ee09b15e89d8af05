# SPDX-License-Identifier: Apache-2.0
"""Clients for realtime_load.py: many sessions of `/v1/realtime_video/generate` in one process.

To avoid becoming the bottleneck, the process reads only frame headers and twelve bytes of each
image. The clients' CPU time is reported alongside the server's. When the process ends, it prints
one JSON object.
"""

import asyncio
import base64
import itertools
import json
import os
import socket
import struct
import sys
import time
from typing import Any, cast

import msgspec

STAMP = struct.Struct("<dI")
"""Layout of a chunk's first pixels: the time at which the chunk was due (`time.monotonic`), and the
chunk index.
"""

GENERATE_PATH = "/v1/realtime_video/generate"
_pack = msgspec.msgpack.Encoder().encode


class Session(asyncio.Protocol):
    """One session, which starts a stream and records when each chunk arrived and when the chunk was
    due.

    If `read_bytes_per_s` is None, the session reads data as fast as it arrives. If it is 0, the
    session never reads again after the first frame.
    """

    def __init__(
        self, chunk_bytes: int, init: dict[str, Any], read_bytes_per_s: float | None
    ) -> None:
        self._chunk_bytes, self._init, self._rate = chunk_bytes, init, read_bytes_per_s
        self._buffer = bytearray()
        self._open = False
        self.transport: asyncio.Transport
        self.arrivals: list[tuple[float, float, int]] = []  # (received, due, chunk index)
        self.closed_s: float | None = None
        self.errors: list[str] = []
        self.bytes_read = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop has its own class
        key = base64.b64encode(os.urandom(16)).decode()
        lines = [
            f"GET {GENERATE_PATH} HTTP/1.1",
            "Host: 127.0.0.1",
            "Upgrade: websocket",
            "Connection: Upgrade",
        ]
        lines += [f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "", ""]
        transport.write("\r\n".join(lines).encode())

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        self.bytes_read += len(data)
        self._buffer += data
        if not self._open:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            if not self._buffer.startswith(b"HTTP/1.1 101"):
                self.errors.append(self._buffer[:end].split(b"\r\n")[0].decode())
                self.transport.abort()
                return
            del self._buffer[: end + 4]
            self._open = True
            self.send(2, _pack(self._init))
        self._parse(now_s)
        if self._rate is not None and self.arrivals:
            self.transport.pause_reading()
            if self._rate:
                asyncio.get_running_loop().call_later(len(data) / self._rate, self._resume)

    def _resume(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def _parse(self, now_s: float) -> None:
        buffer, at = self._buffer, 0
        while len(buffer) - at >= 2:
            length, head = buffer[at + 1] & 127, 2
            if length >= 126:
                head = 4 if length == 126 else 10
                if len(buffer) - at < head:
                    break
                length = int.from_bytes(buffer[at + 2 : at + head])
            if len(buffer) - at < head + length:
                break
            self._take(buffer[at] & 15, at + head, at + head + length, now_s)
            at += head + length
        if at:
            del buffer[:at]

    def _take(self, opcode: int, start: int, end: int, now_s: float) -> None:
        if opcode == 9:
            self.send(10, bytes(self._buffer[start:end]))
        elif opcode == 8:
            self.errors.append(f"closed with {int.from_bytes(self._buffer[start : start + 2])}")
        elif end - start >= self._chunk_bytes:
            deadline_s, index = STAMP.unpack_from(self._buffer, end - self._chunk_bytes)
            self.arrivals.append((now_s, deadline_s, index))

    def send(self, opcode: int, payload: bytes) -> None:
        """Send a masked frame. The mask is zero, so the payload is sent as it is."""
        size = len(payload)
        head = (
            bytes([0x80 | opcode, 0x80 | size])
            if size < 126
            else bytes([0x80 | opcode, 0xFE]) + size.to_bytes(2)
        )
        if not self.transport.is_closing():
            self.transport.write(head + bytes(4) + payload)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed_s = time.monotonic()


def init_message(width: int, height: int) -> dict[str, Any]:
    """Return the message that starts a session."""
    return {"type": "init", "prompt": "walk", "size": f"{width}x{height}"}


async def open_sessions(options: dict[str, Any]) -> list[Session]:
    """Connect all sessions, spread over one frame's duration, so that their frames are not all due
    at the same time.
    """
    init = init_message(options["width"], options["height"])
    chunk_bytes = options["chunk_frames"] * options["width"] * options["height"] * 3
    loop, sessions = asyncio.get_running_loop(), []
    for number in range(options["sessions"]):
        await asyncio.sleep((number % 16) / (16 * options["fps"]) / 4 + 0.002)
        raw = socket.socket()
        if options["receive_buffer"]:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, options["receive_buffer"])
        raw.setblocking(False)
        await loop.sock_connect(raw, ("127.0.0.1", options["port"]))
        _, session = await loop.create_connection(
            lambda: Session(chunk_bytes, init, options["read_bytes_per_s"]), sock=raw
        )
        sessions.append(session)
    return sessions


async def steer(sessions: list[Session], per_s: float) -> None:
    """Press and release keys in each session `per_s` times per second, as SGLang's WebUI does."""
    number = 0
    while True:
        number += 1
        for position, session in enumerate(sessions):
            keys = ["w"] if (number + position) % 2 else []
            payload = {
                "mode": "state",
                "transitions": [{"actions": keys, "client_ts_ms": time.time() * 1e3}],
            }
            event = {
                "type": "event",
                "kind": "camera_actions",
                "payload": payload,
                "event_id": number,
            }
            session.send(2, _pack(event))
            if position % 8 == 7:
                await asyncio.sleep(8 / (per_s * len(sessions)))
        await asyncio.sleep(0.001)


async def run(options: dict[str, Any]) -> dict[str, Any]:
    sessions = await open_sessions(options)
    steering = (
        asyncio.create_task(steer(sessions, options["controls_per_s"]))
        if options["controls_per_s"]
        else None
    )
    print("open", flush=True)
    await asyncio.sleep(options["warm_up_s"])
    start_s, cpu_s = time.monotonic(), time.process_time()
    await asyncio.sleep(options["seconds"])
    end_s, cpu_s = time.monotonic(), time.process_time() - cpu_s
    if steering is not None:
        steering.cancel()
    latencies_ms, gaps_ms, delivered, lost = [], [], 0, 0
    for session in sessions:
        seen = [arrival for arrival in session.arrivals if start_s <= arrival[0] < end_s]
        delivered += len(seen) * options["chunk_frames"]
        latencies_ms += [(received - due) * 1e3 for received, due, _ in seen]
        for (before, _, last), (after, _, index) in itertools.pairwise(seen):
            gaps_ms.append((after - before) * 1e3)
            lost += index != last + 1
    result = {
        "begin_s": start_s,
        "end_s": end_s,
        "cpu_percent": 100 * cpu_s / (end_s - start_s),
        "delivered": delivered,
        "due": options["sessions"] * options["fps"] * (end_s - start_s),
        "out_of_order": lost,
        "latencies_ms": latencies_ms,
        "gaps_ms": gaps_ms,
        "bytes": sum(session.bytes_read for session in sessions),
        "still_open": sum(session.closed_s is None for session in sessions),
        "errors": [error for session in sessions for error in session.errors][:10],
    }
    for session in sessions:
        session.transport.abort()
    return result


def main() -> None:
    """Run `realtime_clients.py OPTIONS`, where OPTIONS is a JSON object."""
    options = json.loads(sys.argv[1])
    if options["loop"] == "uvloop":
        import uvloop

        result = uvloop.run(run(options))
    else:
        result = asyncio.run(run(options))
    report(result)


def report(result: dict[str, Any]) -> None:
    """Print the complete result as one line of JSON.

    `print` is not used, because with PYTHONUNBUFFERED it writes only once and drops the rest if a
    signal interrupts that write. A signal from io_uring interrupts the write when uvloop's event
    loop ends.
    """
    with open(sys.stdout.fileno(), "w", closefd=False) as output:
        output.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
