# SPDX-License-Identifier: Apache-2.0
"""`DeliveryWindow`: detects clients that receive video more slowly than it plays.

A client may be slow for a moment. The send deadline disconnects clients that never read. This class
detects clients that keep reading but too slowly, because such clients would occupy a session and
the engine permanently.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from vllm_omni.entrypoints.errors import EndpointError, WebSocketCloseCode

_KEEPS_UP: Final = 0.9
"""Fraction of the playback rate at which a client must receive frames. The value is below 1 because
clocks and networks are not exact.
"""
_PAUSE: Final = 0.1
"""Fraction of the timeout after which earlier lateness is ignored if the client has not been late
again.

Clients read a socket's buffer in bursts, so the server's queue is empty for a moment after each
burst.
"""


class DeliveryWindow:
    """Measures how fast one client reads a run's replies.

    A client is late if, each time it has received a reply, a later chunk is already waiting. A late
    client is not necessarily too slow, because the model may be faster than real time. A late
    client is too slow if it has also received fewer frames than it plays in `timeout_s`. The
    measured window is one chunk longer than `timeout_s` because a client that plays in real time
    receives no data between two chunks.

    Args:
        timeout_s: Maximum time in seconds that a client may be continuously late. 0: no limit.
        fps: Playback rate in frames per second.
    """

    def __init__(self, timeout_s: float, fps: float) -> None:
        self._timeout_s, self._fps = timeout_s, fps
        self._late_since_s: float | None = None
        self._last_late_s = 0.0
        self._taken: deque[tuple[float, int]] = deque()  # (time, frames) within the window
        self._num_taken = 0
        self._window_s = timeout_s

    async def deliver(
        self, delivery: Awaitable[None], num_frames: int, is_more_waiting: Callable[[], bool]
    ) -> None:
        """Await the delivery of a reply.

        Args:
            delivery: Awaitable that sends the reply.
            num_frames: Number of new frames in the reply.
            is_more_waiting: Function that returns whether a later chunk is ready. `deliver` calls
                it after the delivery.

        Raises:
            EndpointError: `slow_reader` if the client is too slow.
        """
        if self._timeout_s == 0:
            await delivery
            return
        now = asyncio.get_running_loop().time
        started_s = now()
        if num_frames:
            self._window_s = self._timeout_s + num_frames / self._fps
        if started_s - self._last_late_s > _PAUSE * self._timeout_s:
            self._late_since_s = None
        if self._late_since_s is None:  # the usual case, which requires no timer
            await delivery
        else:
            await self._within(self._too_slow_at_s(self._late_since_s) - started_s, delivery)
        now_s = now()
        self._taken.append((now_s, num_frames))
        self._num_taken += num_frames
        while self._taken[0][0] + self._window_s < now_s:
            self._num_taken -= self._taken.popleft()[1]
        if is_more_waiting():
            self._late_since_s = started_s if self._late_since_s is None else self._late_since_s
            self._last_late_s = now_s

    def note_wait(self) -> None:
        """Record that the server delays a reply to pace the stream. The client then does not count
        as late.

        During such a delay, the next chunk waits for its playing time rather than for the client.
        """
        self._late_since_s = None

    async def _within(self, left_s: float, delivery: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(left_s) as limit:
                await delivery
        except TimeoutError:
            if not limit.expired():
                raise
            raise EndpointError(
                "slow_reader",
                f"you read too slowly: for {self._timeout_s:g} s you received fewer than "
                f"{self._fps:g} frames a second while more were waiting",
                close=WebSocketCloseCode.SLOW_CONSUMER,
            ) from None

    def _too_slow_at_s(self, late_since_s: float) -> float:
        """Return the monotonic time in seconds when a client becomes too slow if it receives no
        more frames.
        """
        at_s = late_since_s + self._window_s
        needed = _KEEPS_UP * self._fps * self._timeout_s
        left = self._num_taken
        for taken_s, num_frames in self._taken:
            if left < needed:
                break
            at_s = max(at_s, taken_s + self._window_s)
            left -= num_frames
        return at_s
