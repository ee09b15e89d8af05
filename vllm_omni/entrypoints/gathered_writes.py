# SPDX-License-Identifier: Apache-2.0
"""ASGI extension that sends several WebSocket messages with one write and without copies.

Stock uvicorn copies each message into a buffer with its frame header and writes each buffer
separately. For video, this costs a copy of every video frame and a system call for every small
message. After the connection has been accepted, an application can get a `MessageWriter` from
`writer_of(scope)` and use it instead of `websocket.send`. With either method, the client receives
the same messages in the same order.

`uvicorn.Config(ws=...)` is the public way to set a protocol class. `GatheringProtocol` subclasses a
private uvicorn class, because uvicorn has no hook for writes and ASGI sends one message at a time.
tests/seams/test_uvicorn.py detects changes to the uvicorn internals that this module uses.
"""

import functools
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Opcode
from websockets.http11 import Request

Message = bytes | memoryview | str

EXTENSION: Final = "omni.websocket.messages"
"""This extension's key in `scope["extensions"]`. The value is a dict with a `writer` entry."""

_FINAL: Final = 0x80
_SHORT, _MEDIUM = 126, 1 << 16
_pack_short, _pack_medium, _pack_long = (
    struct.Struct(layout).pack for layout in ("!BB", "!BBH", "!BBQ")
)


class MessageWriter(Protocol):
    """Writes messages to one connection. Buffers must not change after they are written."""

    has_room: bool
    """Whether the kernel has accepted all data written so far."""

    def write(self, messages: Sequence[Message]) -> None:
        """Write messages immediately and in order.

        Raises:
            ClientDisconnected: The connection is closed. This exception is a subclass of OSError.
        """

    async def send(self, messages: Sequence[Message]) -> None:
        """Wait until the kernel accepts data, then write messages.

        The call returns once the kernel has accepted the messages or, for a single message, as soon
        as it is written. If `messages` is empty, the call returns once the kernel has accepted all
        earlier messages.
        """


def writer_of(scope: Mapping[str, Any]) -> MessageWriter | None:
    """Return the writer for a WebSocket's scope.

    Returns None if the server is not uvicorn with this extension, or if the connection is
    compressed.
    """
    writer: MessageWriter | None = (scope.get("extensions") or {}).get(EXTENSION, {}).get("writer")
    return writer


@functools.lru_cache(maxsize=1024)
def frame_header(opcode: Opcode, num_bytes: int) -> bytes:
    """Return the header of an unfragmented, unmasked frame (RFC 6455, section 5.2)."""
    first = _FINAL | opcode
    if num_bytes < _SHORT:
        return _pack_short(first, num_bytes)
    if num_bytes < _MEDIUM:
        return _pack_medium(first, 126, num_bytes)
    return _pack_long(first, 127, num_bytes)


class GatheringProtocol(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol, which offers the extension on uncompressed connections."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._writer = _Writer(self)

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code == 101 and not self.conn.extensions:
            self.scope["extensions"][EXTENSION] = {"writer": self._writer}

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writer.has_room = False

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writer.has_room = True


class _Writer:
    """The `MessageWriter` for a connection."""

    def __init__(self, protocol: WebSocketsSansIOProtocol) -> None:
        self._protocol = protocol
        self._writable = protocol.writable
        self.has_room = True

    def write(self, messages: Sequence[Message]) -> None:
        protocol = self._protocol
        # `close_sent` is also true after the peer has sent a close frame.
        if protocol.close_sent or protocol.transport.is_closing():
            raise ClientDisconnected
        protocol.transport.writelines(_frames(messages))

    async def send(self, messages: Sequence[Message]) -> None:
        await self._writable.wait()
        if messages:
            self.write(messages)
        if len(messages) != 1:  # separate writes would also have waited before the last message
            await self._writable.wait()
            if self._protocol.disconnected:
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
