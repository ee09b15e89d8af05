# SPDX-License-Identifier: Apache-2.0
"""`ClientFrames`: counts a client's small WebSocket frames at the router, before they are parsed.

It is placed between a connection's transport and aiohttp's protocol and reads only the headers of
frames. Data of a client over its `FrameBudget` is discarded, and `over` is set. A client must wait
for the response to its handshake (RFC 6455, 4.1); earlier data is discarded and recorded.
"""

import asyncio
import logging
from typing import Final

from aiohttp import web

from vllm_omni.entrypoints.limits.frame_budget import SLICE_BYTES, SMALL_BYTES, FrameBudget

logger = logging.getLogger("vllm_omni.router")

_MASK_BYTES: Final = 4
_EXTENDED_LENGTH_BYTES: Final = {126: 2, 127: 8}


class ClientFrames(asyncio.Protocol):
    """The protocol of one connection, from its handshake on."""

    def __init__(self, request: web.Request, budget: FrameBudget) -> None:
        assert request.transport is not None
        # data arrived together with the handshake
        self.is_early = bool(request.protocol._message_tail)
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done when the budget is exceeded; its result is the reason for the client."""
        self._inner, self._budget, self._client = request.protocol, budget, request.remote
        self._bucket = budget.bucket()
        self._frames = FrameHeaders()
        self._is_open = False
        request.transport.set_protocol(self)

    def open(self) -> None:
        """Accept data, because the handshake is about to be completed."""
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
            if not self._bucket.take_tokens(
                self._frames.count_small(data[start : start + SLICE_BYTES])
            ):
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
    """Finds frame headers in a stream of bytes, regardless of its segmentation (RFC 6455, 5.2)."""

    def __init__(self) -> None:
        self._header = b""
        """Bytes of an incomplete header."""
        self._payload_bytes = 0
        """Remaining payload bytes of the current frame."""

    def count_small(self, data: bytes) -> int:
        """Return the number of frames below `SMALL_BYTES` that start here.

        A header counts when it is complete.
        """
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
