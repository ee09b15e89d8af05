# SPDX-License-Identifier: Apache-2.0
"""`ReaderPace`: whether a client takes its video as fast as it plays.

A reader that is slow for a moment is waited for; one that never reads runs into the send deadline. In between is the
one that always reads a little, and would keep its session, and the engine waiting for it, for ever. Knows no sockets.
Held by tests/entrypoints/realtime/test_pace.py.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from vllm_omni.entrypoints.realtime.errors import Close, DoorError

_KEEPS_UP: Final = 0.9
"""Of its playing rate: clocks and networks are not exact."""
_PAUSE: Final = 0.1
"""Of the timeout: how long nothing must have waited for the client before its lateness is forgiven. Readers take a
socket's buffer in gulps; after each, the server's queue is empty for a moment."""


class ReaderPace:
    """One for each client that follows a run.

    timeout_s: how long it may be behind without pause; 0 = for ever. fps: frames that it plays in a second. A client is
    behind while, whenever it has taken a reply, a later chunk already waits for it. That alone may mean a model faster
    than real time: it is too slow if it has also taken less than it would have played in `timeout_s`. It is looked at
    for the time of one chunk more than that: between two chunks a client that plays, or that the door paces, takes
    nothing.
    """

    def __init__(self, timeout_s: float, fps: float) -> None:
        self._timeout_s, self._fps = timeout_s, fps
        self._behind_since_s: float | None = None
        self._last_behind_s = 0.0
        self._taken: deque[tuple[float, int]] = deque()  # (when, frames), not older than the timeout
        self._num_taken = 0
        self._window_s = timeout_s

    async def hand_over(self, delivery: Awaitable[None], num_frames: int, is_more_waiting: Callable[[], bool]) -> None:
        """Await the delivery of a reply with `num_frames` new frames. Raises `DoorError` `slow_reader`.

        is_more_waiting: asked afterwards; whether a later chunk is ready for the client.
        """
        if self._timeout_s == 0:
            await delivery
            return
        now = asyncio.get_running_loop().time
        started_s = now()
        if num_frames:
            self._window_s = self._timeout_s + num_frames / self._fps
        if started_s - self._last_behind_s > _PAUSE * self._timeout_s:
            self._behind_since_s = None
        if self._behind_since_s is None:  # almost every delivery, so without a timer
            await delivery
        else:
            await self._within(self._too_slow_at_s(self._behind_since_s) - started_s, delivery)
        now_s = now()
        self._taken.append((now_s, num_frames))
        self._num_taken += num_frames
        while self._taken[0][0] + self._window_s < now_s:
            self._num_taken -= self._taken.popleft()[1]
        if is_more_waiting():
            self._behind_since_s = started_s if self._behind_since_s is None else self._behind_since_s
            self._last_behind_s = now_s

    async def _within(self, left_s: float, delivery: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(left_s) as limit:
                await delivery
        except TimeoutError:
            if not limit.expired():
                raise
            raise DoorError(
                "slow_reader",
                f"you have been behind for {self._timeout_s:g} s: fewer than {self._fps:g} frames a second were taken "
                "while more were waiting",
                close=Close.SLOW_CONSUMER,
            ) from None

    def _too_slow_at_s(self, behind_since_s: float) -> float:
        """When the client has been behind for too long, if it takes nothing more until then."""
        at_s = behind_since_s + self._window_s
        needed = _KEEPS_UP * self._fps * self._timeout_s
        left = self._num_taken
        for taken_s, num_frames in self._taken:
            if left < needed:
                break
            at_s = max(at_s, taken_s + self._window_s)
            left -= num_frames
        return at_s
