# SPDX-License-Identifier: Apache-2.0
"""`TokenBucket`: how much may happen on average, and how much at once.

Why not `limits` or slowapi: they count whole requests over a window. Costs here are bytes and
chunks that are known only afterwards, so a bucket may go below zero.
Held by tests/entrypoints/test_token_bucket.py.
"""

import time
from collections.abc import Callable
from typing import Final

_ROUNDING: Final = 1e-6
"""Tolerance in tokens: a caller that waits exactly `wait_s` seconds is served."""


class TokenBucket:
    """Full at first; refills by `per_s` a second up to `burst`. clock: seconds that never go back."""

    def __init__(self, per_s: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._burst, self._clock = per_s, burst, clock
        self._left = burst
        self._counted_s = clock()

    def take(self, count: float) -> bool:
        """Take `count` tokens; returns whether they were there. Missing ones are a debt."""
        now_s = self._clock()
        self._left = min(self._burst, self._left + (now_s - self._counted_s) * self._per_s) - count
        self._counted_s = now_s
        return self._left >= 0

    def wait_s(self) -> float:
        """Seconds until there is one to take; 0 = now."""
        self.take(0)
        missing = 1.0 - self._left
        return missing / self._per_s if missing > _ROUNDING else 0.0
