# SPDX-License-Identifier: Apache-2.0
"""`ClientFrames`: counts the small WebSocket frames that a client sends to the router, before they are parsed.

It stands between a connection's transport and aiohttp's protocol, reads the headers of frames and keeps none of them.
A client over its `FrameBudget` is not listened to any more, and `over` says so. A client has to wait for the answer to
its handshake (RFC 6455, 4.1): earlier data is discarded and noted. Held by tests/entrypoints/test_router.py.
"""

import asyncio
import logging
from typing import Final

from aiohttp import web

from vllm_omni.entrypoints.frame_budget import SLICE_BYTES, SMALL_BYTES, FrameBudget

logger = logging.getLogger("vllm_omni.router")

_MASK_BYTES: Final = 4
_EXTENDED_LENGTH_BYTES: Final = {126: 2, 127: 8}


class ClientFrames(asyncio.Protocol):
    """The protocol of one connection from its handshake on."""

    def __init__(self, request: web.Request, budget: FrameBudget) -> None:
        assert request.transport is not None
        self.is_early = bool(request.protocol._message_tail)  # arrived together with the handshake
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when the budget is used up, with the reason for the client."""
        self._inner, self._budget, self._client = request.protocol, budget, request.remote
        self._bucket = budget.bucket()
        self._frames = FrameHeaders()
        self._is_open = False
        request.transport.set_protocol(self)

    def open(self) -> None:
        """The handshake is about to be answered."""
        self._is_open = True

    def data_received(self, data: bytes) -> None:
        if not self._is_open:
            self.is_early = True
        elif self._within_budget(data):
            self._inner.data_received(data)

    def _within_budget(self, data: bytes) -> bool:
        for start in range(0, len(data), SLICE_BYTES):
            if self.over.done():
                return False
            if not self._bucket.take(self._frames.count_small(data[start : start + SLICE_BYTES])):
                logger.info("websocket_frames_over_budget client=%s", self._client)
                self.over.set_result(self._budget.reason)
        return not self.over.done()

    def eof_received(self) -> None:
        self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


class FrameHeaders:
    """Finds the frames in a stream of bytes, however it is cut (RFC 6455, 5.2)."""

    def __init__(self) -> None:
        self._header = b""
        """A header of which not all bytes are there."""
        self._payload_bytes = 0
        """Of the current frame, still to come."""

    def count_small(self, data: bytes) -> int:
        """Return how many frames of less than `SMALL_BYTES` begin here; a header counts once it is whole."""
        data, self._header = self._header + data, b""
        at, count = self._payload_bytes, 0
        while at < len(data):
            length = data[at + 1] & 0x7F if at + 1 < len(data) else 0
            extended = _EXTENDED_LENGTH_BYTES.get(length, 0)
            end = at + 2 + extended
            if end > len(data):
                self._header, at = data[at:], len(data)
                break
            is_masked = data[at + 1] & 0x80
            if extended:
                length = int.from_bytes(data[at + 2 : end])
            count += length < SMALL_BYTES
            at = end + length + (_MASK_BYTES if is_masked else 0)
        self._payload_bytes = at - len(data)
        return count
