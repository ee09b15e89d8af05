# SPDX-License-Identifier: Apache-2.0
"""`FrameBudget`: limits the rate of small WebSocket frames per connection. The frames are counted
while they are being parsed.

Every frame costs the event loop a few microseconds, regardless of its size. Neither `--ws-max-size`
nor the endpoints' message rate limits fragments, pings and pongs. One megabyte of such frames
blocked all other connections for seconds. Frames of `SMALL_BYTES` or more are not counted, because
the byte limits apply to them. A connection that exceeds the budget is closed with code 1008 and a
reason. Reverse proxies do not parse WebSocket frames, so `BudgetedProtocol` counts them in uvicorn.

A protocol class is required because neither uvicorn nor `websockets` limits the number of frames,
and ASGI does not expose fragments, pings or pongs. tests/seams/test_uvicorn.py detects changes to
uvicorn's class.
"""

import functools
import logging
from dataclasses import dataclass
from typing import Any, Final

from websockets.frames import CloseCode, Frame

from vllm_omni.entrypoints.gathered_writes import GatheringProtocol
from vllm_omni.entrypoints.limits.token_bucket import TokenBucket

logger = logging.getLogger("vllm." + __name__)

SMALL_BYTES: Final = 1024
"""Payload size in bytes at and above which a frame no longer counts as small. WebSocket libraries
split messages into fragments of 1 KiB to 128 KiB.
"""
BURST_S: Final = 1.0
"""Maximum burst, expressed in seconds at the average rate. The average rate is at least twice the
message rate that an endpoint accepts.

Each new connection starts with a full budget. Parsing the frames of a full budget takes 4 ms.
"""
SLICE_BYTES: Final = 4096
"""Number of bytes parsed between two checks of the budget. That many bytes contain at most 682
frames, which take about 4 ms to parse.
"""
_LINGER_S: Final = 1.0
"""Time in seconds for which the socket stays open after the close frame. Closing the socket
immediately would reset the connection, and the peer would not receive the close frame.
"""


@dataclass(frozen=True)
class FrameBudget:
    """Budget for small frames on one connection."""

    small_frames_per_s: float = 400.0
    """Allowed average number of small frames per second. A burst may contain as many frames as this
    rate allows in `BURST_S` seconds.
    """

    @property
    def burst(self) -> float:
        return BURST_S * self.small_frames_per_s

    @property
    def reason(self) -> str:
        """Close reason for connections that exceed the budget."""
        return f"more than {self.small_frames_per_s:g} frames under {SMALL_BYTES} bytes a second"

    def bucket(self) -> TokenBucket:
        """Return a full bucket for one connection."""
        return TokenBucket(self.small_frames_per_s, self.burst)

    def apply(self, uvicorn_config: Any) -> None:
        """Make a `uvicorn.Config` use this budget for WebSockets. The config may already be
        loaded.
        """
        protocol = functools.partial(BudgetedProtocol, budget=self)
        uvicorn_config.ws = uvicorn_config.ws_protocol_class = protocol


class BudgetedProtocol(GatheringProtocol):
    """uvicorn's WebSocket protocol with a frame budget. It parses data in slices and accepts no
    more frames once the budget is exceeded.
    """

    def __init__(self, *args: Any, budget: FrameBudget, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._budget = budget
        self._bucket = budget.bucket()
        self._is_over = False

    def data_received(self, data: bytes) -> None:
        if len(data) <= SLICE_BYTES:
            self._take(data)
            return
        view = memoryview(data)
        for start in range(0, len(data), SLICE_BYTES):
            self._take(view[start : start + SLICE_BYTES])

    def _take(self, data: Any) -> None:
        if not self._is_over and not self.transport.is_closing():
            super().data_received(data)

    def handle_events(self) -> None:
        small = 0
        for event in self.conn.events:
            small += isinstance(event, Frame) and len(event.data) < SMALL_BYTES
        if self._bucket.take_tokens(small):
            super().handle_events()
        else:
            self._give_up()

    def _give_up(self) -> None:
        """Close the connection with code 1008, and discard all later data until the peer has read
        the close frame.
        """
        self._is_over = True
        self.stop_keepalive()
        self.frames.clear()
        logger.info("websocket_frames_over_budget client=%s", self.client)
        reason = self._budget.reason
        self.queue.put_nowait(
            {"type": "websocket.disconnect", "code": CloseCode.POLICY_VIOLATION, "reason": reason}
        )
        if not self.handshake_complete:
            self.transport.abort()
        elif not self.transport.is_closing():
            self.conn.fail(CloseCode.POLICY_VIOLATION, reason)
            self.transport.write(b"".join(self.conn.data_to_send()))
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self.close_timer = self.loop.call_later(_LINGER_S, self.transport.abort)
            if self.read_paused:
                self.read_paused = False
                self.transport.resume_reading()
        self.close_sent = True
