# SPDX-License-Identifier: Apache-2.0
"""Several WebSocket messages in one write, none of them copied: an ASGI extension of uvicorn's own protocol.

Stock uvicorn copies each message behind its frame header and writes it by itself. For video that is a copy of every
picture and a system call for every small message beside it. An application that finds `EXTENSION` in its scope may
send `messages_event(...)` instead of one `websocket.send` for each. The client sees the same messages in the same
order. Held by tests/entrypoints/test_gathered_writes.py.
"""

import struct
from collections.abc import Sequence
from typing import Any, Final

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Opcode
from websockets.http11 import Request
from websockets.protocol import State

Message = bytes | memoryview | str

EXTENSION: Final = "omni.websocket.messages"
"""Name in `scope["extensions"]` and key of the event."""

_FINAL: Final = 0x80
_SHORT, _MEDIUM = 126, 1 << 16
_pack_short, _pack_medium, _pack_long = (struct.Struct(layout).pack for layout in ("!BB", "!BBH", "!BBQ"))


def messages_event(messages: Sequence[Message]) -> dict[str, Any]:
    """The ASGI event that sends all of them, in order. Their buffers must not change afterwards."""
    return {"type": "websocket.send", EXTENSION: messages}


def frame_header(opcode: Opcode, num_bytes: int) -> bytes:
    """First bytes of an unfragmented, unmasked frame with a payload of `num_bytes` (RFC 6455, section 5.2)."""
    first = _FINAL | opcode
    if num_bytes < _SHORT:
        return _pack_short(first, num_bytes)
    if num_bytes < _MEDIUM:
        return _pack_medium(first, 126, num_bytes)
    return _pack_long(first, 127, num_bytes)


class GatheringProtocol(WebSocketsSansIOProtocol):
    """uvicorn's own protocol with the extension, unless the connection is compressed."""

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code == 101 and not self.conn.extensions:
            self.scope["extensions"][EXTENSION] = {}

    async def send(self, message: Any) -> None:
        """As ASGI says. The messages of one event are written at once; a group returns when the kernel has it."""
        messages: Sequence[Message] | None = message.get(EXTENSION)
        if messages is None:
            await super().send(message)
            return
        if not self.writable.is_set():
            await self.writable.wait()
        if self.disconnected or self.close_sent or self.conn.state is not State.OPEN:
            raise ClientDisconnected
        self.transport.writelines(_frames(messages))
        if len(messages) > 1 and not self.writable.is_set():  # with a write each, the last one would have waited
            await self.writable.wait()
            if self.disconnected:
                raise ClientDisconnected


def _frames(messages: Sequence[Message]) -> list[bytes | memoryview]:
    frames: list[bytes | memoryview] = []
    for message in messages:
        if isinstance(message, str):
            payload: bytes | memoryview = message.encode()
            frames.append(frame_header(Opcode.TEXT, len(payload)))
        else:
            payload = message
            frames.append(frame_header(Opcode.BINARY, len(payload)))
        frames.append(payload)
    return frames
