# SPDX-License-Identifier: Apache-2.0
"""`ChunkOrder`: which chunk of a session may begin, or take its next step, while others of it are at work.

One rule, applied twice: by the scheduler to requests (`Streams`), and by the first pipeline stage's rank to the chunks
that it has begun (`ChunksInFlight`). A chunk may begin, and take each further step, while the one before it in its
session is at least `steps_behind` steps ahead. A session's first chunk is alone: until it is committed there is no
session to continue. Held by tests/core/test_chunks_in_flight_turns.py and tests/worker/test_chunks_in_flight_rules.py.
"""

import math
from collections.abc import Sequence

DONE = math.inf
"""The step of a chunk that has none left: however far behind, the next one may move."""


class ChunkOrder:
    """limit: chunks of one session at work at once (`omni.chunks_in_flight`); with 1, one after the other."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.steps_behind = 1

    def may_move(self, step: int | None, ahead: Sequence[float], *, established: bool) -> bool:
        """Whether a chunk may take its next step; step None = it has not begun, so this would be its first one.

        ahead: the steps of the chunks of its session at work before it, oldest first. established: the session has a
        committed chunk, which those at work continue.
        """
        if not ahead:
            return True
        if step is None and len(ahead) >= self.limit:
            return False
        return established and (step or 0) + self.steps_behind <= ahead[-1]


def turn(chunk_index: int | None) -> float:
    """Requests of a session begin in this order, then by arrival: those that name no chunk come last."""
    return math.inf if chunk_index is None else chunk_index
