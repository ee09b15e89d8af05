# SPDX-License-Identifier: Apache-2.0
"""`Deadline`: a time limit for a block of code that runs for every chunk or message.

`asyncio.timeout` creates and cancels a timer at every entry. This class reuses its timer: if it
fires during a later entry, it is rescheduled for the remaining time.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType


class Deadline:
    """Context manager that raises TimeoutError if its block takes longer than `seconds`.

    It behaves like `asyncio.timeout`, but only one task may be inside at a time.

    Args:
        seconds: Time limit in seconds.
        on_expiry: Called when the time has expired, before the block is cancelled.
    """

    def __init__(self, seconds: float, on_expiry: Callable[[], None] = lambda: None) -> None:
        self._seconds, self._on_expiry = seconds, on_expiry
        self._at_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self.expired = False
        """Whether the time of the current or the last block has expired."""

    def __enter__(self) -> None:
        assert self._task is None, "a deadline is for one task at a time"
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling, self.expired = self._task.cancelling(), False
        loop = self._task.get_loop()
        self._at_s = loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_at(self._at_s, self._look, loop)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        assert task is not None
        if self.expired and task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def expire(self) -> None:
        """End the time of the current block, if any."""
        if self._task is not None and not self.expired:
            self.expired = True
            self._on_expiry()
            self._task.cancel()

    def close(self) -> None:
        """Cancel the timer. The deadline is not used again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        if self._task is None:
            return
        if loop.time() < self._at_s:
            self._timer = loop.call_at(self._at_s, self._look, loop)
            return
        self.expire()
