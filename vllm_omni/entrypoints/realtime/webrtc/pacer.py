# SPDX-License-Identifier: Apache-2.0
"""`ChunkPacer`: delays chunk requests for as long as playback allows, so that each chunk uses
recent controls.

On the world camera's WebSocket, the client itself requests each chunk. With WebRTC, the server
requests chunks by the same rule as the web page (`webui/static/js/pacer.js`). It requests a chunk
when the buffered video's playback time has fallen to the usual waiting time for a chunk, plus three
mean deviations, plus a margin.
"""

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Final

_KEPT: Final = 8
_SPREAD: Final = 3
_OUTLIER: Final = 2.5
"""Multiple of the median waiting time above which the longest waiting time is ignored as an
outlier.
"""
_MARGIN_S: Final = 0.02


class ChunkPacer:
    """Paces one stream's chunk requests.

    Args:
        buffered_s: Function that returns the delivered frames' remaining playback time in seconds.
        fps: Playback rate in frames per second.
        clock: Function that returns a monotonic time in seconds.
    """

    def __init__(
        self,
        buffered_s: Callable[[], float],
        fps: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._buffered_s, self._fps, self._clock = buffered_s, fps, clock
        self._requests: deque[tuple[float, int]] = deque()  # (time, frames), not delivered yet
        self._waits_s: deque[float] = deque(maxlen=_KEPT)
        self._num_chunks = 0

    @property
    def needed_s(self) -> float | None:
        """Playback time in seconds that must still be buffered when a chunk is requested. None: no
        chunk has been measured yet.
        """
        if not self._waits_s:
            return None
        waits_s = sorted(self._waits_s)
        if waits_s[-1] > _OUTLIER * waits_s[(len(waits_s) - 1) // 2]:
            waits_s.pop()
        mean_s = statistics.fmean(waits_s)
        deviation_s = statistics.fmean(abs(wait_s - mean_s) for wait_s in waits_s)
        return mean_s + _SPREAD * deviation_s + _MARGIN_S

    @property
    def _excess_s(self) -> float:
        """Time in seconds until the next chunk should be requested. The frames of chunks in the
        engine count as buffered.
        """
        if self.needed_s is None:
            return 0.0
        num_requested = sum(num_frames for _, num_frames in self._requests)
        return self._buffered_s() + num_requested / self._fps - self.needed_s

    @property
    def is_time(self) -> bool:
        """Whether the next chunk should be requested now."""
        return self._excess_s <= 0

    async def wait_until_time(self) -> None:
        while (excess_s := self._excess_s) > 0:
            await asyncio.sleep(excess_s)

    def note_request(self, num_frames: int) -> None:
        """Record that a chunk with `num_frames` frames is being requested now."""
        self._requests.append((self._clock(), num_frames))

    def note_chunk(self, ready_s: float) -> None:
        """Record that the oldest requested chunk is being delivered now.

        Args:
            ready_s: Monotonic time in seconds when the chunk's frames were encoded.
        """
        requested_s, _ = self._requests.popleft()
        if self._num_chunks == 1:
            self._waits_s.clear()  # the first chunk's time includes compilation and the start image
        self._waits_s.append(max(0.0, ready_s - requested_s))
        self._num_chunks += 1
