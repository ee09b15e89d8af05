# SPDX-License-Identifier: Apache-2.0
"""`PlayClock`: computes the deadline of a stream's next chunk from its playback time."""

from typing import NamedTuple


class PlayDeadline(NamedTuple):
    """A chunk's deadline, relative to the current time."""

    in_s: float
    """Time in seconds until the deadline."""
    period_s: float
    """The chunk's playing time in seconds."""


class PlayClock:
    """Computes one stream's deadlines.

    A chunk's deadline is the previous chunk's deadline plus the chunk's own playing time. If the
    stream is late or was paused, the next deadline is computed from the current time, so delays do
    not accumulate.
    """

    def __init__(self) -> None:
        self._deadline_s = 0.0

    def schedule_chunk(self, num_frames: int, fps: float, now_s: float) -> PlayDeadline:
        """Return the deadline for a chunk that is being requested now.

        Args:
            num_frames: Number of pixel frames in the chunk.
            fps: Playback rate in frames per second.
            now_s: Monotonic time in seconds.
        """
        period_s = num_frames / fps
        self._deadline_s = max(self._deadline_s, now_s) + period_s
        return PlayDeadline(self._deadline_s - now_s, period_s)
