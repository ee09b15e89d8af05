# SPDX-License-Identifier: Apache-2.0
"""`ChunkOrder`: when a chunk may run a step while others of its session are in flight.

The rule applies twice: the scheduler applies it to requests (`Streams`), and the first pipeline
stage applies it to the chunks that it has started (`ChunksInFlight`). A chunk may start, and run
each further step, while its predecessor in the session is at least `steps_behind` steps ahead. The
first chunk of a session runs alone, because until it is committed there is no session to continue.
"""

import math
from collections.abc import Sequence

DONE = math.inf
"""Step of a chunk that has no steps left. It never delays its successor."""


class ChunkOrder:
    """Order of the chunks of a session.

    Args:
        limit: Maximum number of chunks of a session in flight (`omni.chunks_in_flight`). With 1,
            they run one after the other.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.steps_behind = 1

    def may_move(self, step: int | None, ahead: Sequence[float], *, established: bool) -> bool:
        """Whether a chunk may run its next step.

        Args:
            step: Steps that the chunk has run; None if it has not started.
            ahead: Steps of the earlier chunks in flight of its session, oldest first.
            established: Whether the session has a committed chunk, which the chunks in flight
                continue.
        """
        if not ahead:
            return True
        if step is None and len(ahead) >= self.limit:
            return False
        return established and (step or 0) + self.steps_behind <= ahead[-1]


def turn(chunk_index: int | None) -> float:
    """Return the sort key of a session's requests; requests without an index come last."""
    return math.inf if chunk_index is None else chunk_index
