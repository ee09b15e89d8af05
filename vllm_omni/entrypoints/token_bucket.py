# SPDX-License-Identifier: Apache-2.0
"""`TokenBucket`: how much may happen on average, and how much at once.

Held by tests/entrypoints/test_token_bucket.py.
"""

import time
from collections.abc import Callable


class TokenBucket:
    """Full at first; refills by `per_s` a second up to `burst`. clock: seconds that never go back."""

    def __init__(self, per_s: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._burst, self._clock = per_s, burst, clock
        self._left = burst
        self._counted_s = clock()

    def take(self, count: float) -> bool:
        """Take so many; returns whether they were there. What was not there is still owed."""
        now_s = self._clock()
        self._left = min(self._burst, self._left + (now_s - self._counted_s) * self._per_s) - count
        self._counted_s = now_s
        return self._left >= 0
