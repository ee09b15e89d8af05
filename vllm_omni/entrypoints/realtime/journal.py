# SPDX-License-Identifier: Apache-2.0
"""`Journal`: the requests a session remembers and the replies it keeps of them, for replay and resume.

Bounded in requests and in bytes. Knows neither the engine nor the world. Held by
tests/entrypoints/realtime/{test_session,test_world_camera_sessions}.py.
"""

from collections import OrderedDict
from typing import Final

from vllm_omni.entrypoints.realtime.errors import DoorError
from vllm_omni.entrypoints.realtime.run import Run

_REMEMBERED_RUNS: Final = 64


class Journal:
    """`runs`: by request id, oldest first."""

    def __init__(self) -> None:
        self.runs: OrderedDict[str, Run] = OrderedDict()

    def missed_since(self, last_chunk: int | None, next_chunk: int) -> list[tuple[Run, int]]:
        """Runs and reply numbers from which to replay the chunks after `last_chunk` (None: from the beginning).

        next_chunk: where the session stands. Raises `DoorError("resync_required", next_chunk_index=...)` if a part of
        it is no longer kept.
        """
        wanted = 0 if last_chunk is None else last_chunk + 1
        missed: list[tuple[Run, int]] = []
        for run in self.runs.values():
            skipped = sum(reply.chunk_index < wanted for reply in run.replies)
            kept = list(run.replies)[skipped:]
            if kept and kept[0].chunk_index == wanted and kept[0].part == 0:
                missed.append((run, run.first_kept + skipped))
                wanted = kept[-1].chunk_index + 1
            elif not run.finished:
                missed.append((run, run.num_replies))
        if wanted < next_chunk:
            raise DoorError(
                "resync_required", "not everything since then is kept; go on from here", next_chunk_index=next_chunk
            )
        return missed

    def drop_delivered(self, keep_bytes: int) -> None:
        """Forget delivered replies, oldest first, until at most `keep_bytes` are kept (or none is left to forget)."""
        total = 0
        for run in self.runs.values():  # after every chunk, and without the frames of a generator
            total += run.kept_bytes
        for run in self.runs.values():
            while total > keep_bytes and (freed := run.drop_oldest()):
                total -= freed

    def forget_old(self) -> None:
        """Forget ended requests beyond the number that is remembered."""
        num_old = len(self.runs) - _REMEMBERED_RUNS
        if num_old <= 0:
            return
        for request_id, run in list(self.runs.items())[:num_old]:
            if run.finished and not run.has_follower:
                self._forget(request_id, run)

    def forget_finished(self) -> None:
        for request_id, run in list(self.runs.items()):
            if run.finished:
                self._forget(request_id, run)

    def discard(self) -> None:
        """Give back the bytes of every reply; the session is gone."""
        for run in self.runs.values():
            run.discard()

    def _forget(self, request_id: str, run: Run) -> None:
        run.discard()
        del self.runs[request_id]
