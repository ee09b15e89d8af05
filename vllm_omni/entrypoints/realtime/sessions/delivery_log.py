# SPDX-License-Identifier: Apache-2.0
"""`DeliveryLog`: the recent requests of a session and their replies, for replay and resume.

The numbers of requests and bytes are bounded. This module depends neither on the engine nor on the
session's state.
"""

from collections import OrderedDict
from typing import Final

from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.realtime.sessions.run import Run

_REMEMBERED_RUNS: Final = 64


class DeliveryLog:
    """Requests of one session and their replies."""

    def __init__(self) -> None:
        self.runs: OrderedDict[str, Run] = OrderedDict()
        """Runs by request id, oldest first."""

    def missed_since(self, last_chunk: int | None, next_chunk: int) -> list[tuple[Run, int]]:
        """Return the replies to replay after a reconnect.

        Args:
            last_chunk: Last chunk that the client has received. None: no chunk.
            next_chunk: Number of the session's next chunk.

        Returns:
            Runs and the numbers of their first reply to deliver.

        Raises:
            EndpointError: `resync_required`: some replies have been dropped.
        """
        wanted = 0 if last_chunk is None else last_chunk + 1
        missed: list[tuple[Run, int]] = []
        for run in self.runs.values():
            skipped = sum(reply.chunk_index < wanted for reply in run.replies)
            retained = list(run.replies)[skipped:]
            if retained and retained[0].chunk_index == wanted and retained[0].part == 0:
                missed.append((run, run.first_retained + skipped))
                wanted = retained[-1].chunk_index + 1
            elif not run.finished:
                missed.append((run, run.num_replies))
        if wanted < next_chunk:
            raise EndpointError(
                "resync_required",
                "some replies have been dropped; continue from here",
                next_chunk_index=next_chunk,
            )
        return missed

    def drop_delivered(self, keep_bytes: int) -> None:
        """Drop delivered replies, oldest first, until at most `keep_bytes` remain."""
        total = 0
        # runs after every chunk, so a generator expression would cost too much
        for run in self.runs.values():
            total += run.retained_bytes
        for run in self.runs.values():
            while total > keep_bytes and (freed := run.drop_oldest()):
                total -= freed

    def evict_old(self) -> None:
        """Remove the oldest finished requests beyond the limit."""
        num_old = len(self.runs) - _REMEMBERED_RUNS
        if num_old <= 0:
            return
        for request_id, run in list(self.runs.items())[:num_old]:
            if run.finished and not run.has_follower:
                self._evict(request_id, run)

    def evict_finished(self) -> None:
        for request_id, run in list(self.runs.items()):
            if run.finished:
                self._evict(request_id, run)

    def discard(self) -> None:
        """Drop every reply, because the session has ended."""
        for run in self.runs.values():
            run.discard()

    def _evict(self, request_id: str, run: Run) -> None:
        run.discard()
        del self.runs[request_id]
