# SPDX-License-Identifier: Apache-2.0
"""`PlayClock`: when a stream's next chunk is due, reckoned from the frames that its client has to play.

Knows no sockets and no engine. Held by tests/entrypoints/realtime/test_play_clock.py.
"""

from typing import NamedTuple


class Due(NamedTuple):
    """in_s: from now on, in seconds. period_s: how long the chunk plays."""

    in_s: float
    period_s: float


class PlayClock:
    """One per stream. A chunk is due one playing time after the one before it was; a stream that has fallen behind, or
    has paused, begins anew from now, so that being late does not pile up."""

    def __init__(self) -> None:
        self._due_s = 0.0

    def ask(self, num_frames: int, fps: float, now_s: float) -> Due:
        """A chunk of `num_frames` is asked for now."""
        period_s = num_frames / fps
        self._due_s = max(self._due_s, now_s) + period_s
        return Due(self._due_s - now_s, period_s)
