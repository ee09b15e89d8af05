# SPDX-License-Identifier: Apache-2.0
"""`TokenBucket`: limits the average rate and the size of bursts.

The `limits` and slowapi libraries are not used, because they count whole requests over a window.
This package charges for bytes and chunks. Their number is known only after the work is done, so a
bucket's balance can become negative.
"""

import time
from collections.abc import Callable
from typing import Final

_ROUNDING: Final = 1e-6
"""Tolerance in tokens. It ensures that a caller that waits exactly `wait_s` seconds succeeds."""


class TokenBucket:
    """A token bucket that starts full.

    Args:
        per_s: Tokens added per second.
        burst: Capacity in tokens.
        clock: Function that returns a monotonic time in seconds.
    """

    def __init__(
        self, per_s: float, burst: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_s, self._burst, self._clock = per_s, burst, clock
        self._left = burst
        self._counted_s = clock()

    def take_tokens(self, count: float) -> bool:
        """Take tokens from the bucket. If it has too few, its balance becomes negative.

        Returns:
            Whether the bucket had enough tokens.
        """
        now_s = self._clock()
        self._left = min(self._burst, self._left + (now_s - self._counted_s) * self._per_s) - count
        self._counted_s = now_s
        return self._left >= 0

    def wait_s(self) -> float:
        """Return the seconds until one token is available, or 0 if one is available now."""
        self.take_tokens(0)
        missing = 1.0 - self._left
        return missing / self._per_s if missing > _ROUNDING else 0.0
