# SPDX-License-Identifier: Apache-2.0
"""`PlayClock`: computes the deadline of a stream's next chunk from its playback time."""

from typing import NamedTuple


class PlayDeadline(NamedTuple):
    """Deadline of a chunk, relative to the current time."""

    in_s: float
    """Time in seconds until the deadline."""
    period_s: float
    """Playing time of the chunk in seconds."""


class PlayClock:
    """Computes the deadlines of one stream.

    The deadline of a chunk is the deadline of the previous chunk plus the chunk's own playing time.
    If the stream is late or was paused, the next deadline is computed from the current time, so
    delays do not accumulate.
    """

    def __init__(self) -> None:
        self._deadline_s = 0.0

    def schedule_chunk(self, num_frames: int, fps: float, now_s: float) -> PlayDeadline:
        """Return the deadline of a chunk that is requested now.

        Args:
            num_frames: Number of pixel frames in the chunk.
            fps: Playback rate in frames per second.
            now_s: Monotonic time in seconds.
        """
        period_s = num_frames / fps
        self._deadline_s = max(self._deadline_s, now_s) + period_s
        return PlayDeadline(self._deadline_s - now_s, period_s)
