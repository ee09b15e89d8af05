# SPDX-License-Identifier: Apache-2.0
"""Attackers of realtime_load.py: sockets that flood the server, and come again a moment after they are closed.

A process of its own, killed when the measurement ends. Kinds: `fragments` (a million of one byte), `pings` (400,000),
`values` (messages of 260,000 msgpack values).
"""

import asyncio
import base64
import contextlib
import json
import os
import sys
from typing import Any

import msgspec
from realtime_clients import GENERATE_PATH

_MASK = bytes(4)
"""Clients mask their frames; a mask of zeroes leaves the payload as it is."""
_AGAIN_S = 0.25


def frame(first_byte: int, payload: bytes) -> bytes:
    """One masked WebSocket frame; first_byte: FIN and opcode."""
    size = len(payload)
    if size < 126:
        length = bytes([0x80 | size])
    elif size < 1 << 16:
        length = b"\xfe" + size.to_bytes(2)
    else:
        length = b"\xff" + size.to_bytes(8)
    return bytes([first_byte]) + length + _MASK + payload


def flood(kind: str) -> bytes:
    """The bytes that one socket of an attack sends, all at once."""
    if kind == "fragments":
        return frame(0x02, b"") + frame(0x00, b"x") * 1_000_000
    if kind == "pings":
        return frame(0x89, b"") * 400_000
    assert kind == "values"
    return frame(0x82, msgspec.msgpack.encode({"type": "init", "prompt": [[0.0] * 1000] * 260}))


async def attack(port: int, data: bytes) -> None:
    """Connect, send, wait to be closed; again and again."""
    key = base64.b64encode(os.urandom(16)).decode()
    lines = [f"GET {GENERATE_PATH} HTTP/1.1", "Host: 127.0.0.1", "Upgrade: websocket", "Connection: Upgrade"]
    handshake = "\r\n".join([*lines, f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13", "", ""]).encode()
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(handshake)
            await reader.readuntil(b"\r\n\r\n")
            writer.write(data)
            while await reader.read(65536):
                pass
            writer.close()
        await asyncio.sleep(_AGAIN_S)


async def run(options: dict[str, Any]) -> None:
    data = flood(options["kind"])
    print("open", flush=True)
    await asyncio.gather(*(attack(options["port"], data) for _ in range(options["sockets"])))


if __name__ == "__main__":
    asyncio.run(run(json.loads(sys.argv[1])))
