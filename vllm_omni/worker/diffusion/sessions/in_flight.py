# SPDX-License-Identifier: Apache-2.0
"""`ChunksInFlight`: the chunks of each session that this rank has started but not committed.

`ChunkOrder` decides which chunks in flight may run a step. If a chunk fails or is aborted, all
later chunks of the session fail, too, because they were computed from the failed chunk. The session
retains its last committed state.

The first pipeline stage decides which chunks may start (`waiting`) and assigns their indices; later
stages follow the mask that they receive. The last stage is the first to detect a failure, and
earlier stages may still send it later chunks of the session. For these chunks, `failed` finds the
failed predecessor until the scheduler releases the predecessor. This module does not depend on a
model or on the scheduler.
"""

from collections.abc import Sequence

from vllm_omni.core.step_protocol import DONE, ChunkOrder, turn
from vllm_omni.model_executor.interfaces import DiffusionRequest
from vllm_omni.model_executor.requests import RequestState
from vllm_omni.outputs import RequestFailed


class ChunksInFlight:
    """Chunks in flight on one rank, oldest chunk first.

    Args:
        limit: Maximum number of chunks of a session in flight. If the limit is 1, no chunk waits,
            and no chunk has a predecessor in flight.
    """

    def __init__(self, limit: int) -> None:
        self.order = ChunkOrder(limit)
        self._chunks: dict[str, list[RequestState]] = {}
        self._failed: dict[str, list[RequestState]] = {}

    def ahead(self, session_id: str) -> tuple[int, DiffusionRequest | None]:
        """Return the number of a session's chunks in flight, and the newest of these chunks."""
        chunks = self._chunks.get(session_id)
        return (len(chunks), chunks[-1].chunk) if chunks else (0, None)

    def is_next(self, request: DiffusionRequest) -> bool:
        """Return whether a chunk immediately follows the last committed chunk of its session.

        Other chunks in flight must not be decoded yet.
        """
        chunks = self._chunks.get(request.session.session_id, [])
        return bool(chunks) and chunks[0].chunk is request

    def waiting(self, states: Sequence[RequestState]) -> list[RequestState]:
        """Return the requests of a batch that must not run a step yet.

        Call this method before any request of the batch runs its step.
        """
        if self.order.limit == 1:
            return []
        # For each session id, the only queued chunk of the session that may start.
        first: dict[str, tuple[float, RequestState]] = {}
        for state in states:
            if state.chunk is None and state.failure is None and state.params is not None:
                number, session_id = turn(state.params.chunk_index), state.params.session_id
                if session_id not in first or number < first[session_id][0]:
                    first[session_id] = number, state
        may_start = [state for _, state in first.values()]
        return [state for state in states if self._waits(state, state in may_start)]

    def _waits(self, state: RequestState, may_start: bool) -> bool:
        if state.failure is not None or state.params is None:
            return False
        if state.chunk is None and not may_start:
            return True
        ahead = self._chunks.get(state.params.session_id, [])
        if state.chunk is not None:
            ahead = ahead[: ahead.index(state)]
        before = [other.chunk for other in ahead if other.chunk is not None]
        steps = [DONE if chunk.step >= chunk.num_steps else chunk.step for chunk in before]
        established = all(chunk.session.chunk_index > 0 for chunk in before)
        step = None if state.chunk is None else state.chunk.step
        return not self.order.may_move(step, steps, established=established)

    def failed(self, session_id: str, index: int) -> DiffusionRequest | None:
        """Return the newest failed chunk that has the given index in a session and has not been
        released. The result is None if there is no such chunk.
        """
        return next(
            (
                state.chunk
                for state in reversed(self._failed.get(session_id, []))
                if state.index == index
            ),
            None,
        )

    def add_chunk(self, state: RequestState, predecessor: DiffusionRequest | None) -> None:
        """Register an admitted chunk.

        If the predecessor has failed, the chunk fails, too, and the results of its steps are
        discarded.
        """
        assert state.chunk is not None
        session_id = state.chunk.session.session_id
        failed = self._failed.get(session_id, [])
        if predecessor is not None and any(other.chunk is predecessor for other in failed):
            failed.append(state)
            state.failure = _predecessor_failed()
        else:
            self._chunks.setdefault(session_id, []).append(state)

    def end(self, request: DiffusionRequest) -> None:
        """Remove a committed chunk. Later chunks remain in flight. Idempotent."""
        self._cut(request, keep_followers=True)

    def fail(self, request: DiffusionRequest, because: RequestFailed | None = None) -> None:
        """Fail a chunk and all later chunks of its session. Idempotent, even after `end`.

        Args:
            request: The failed chunk.
            because: Error for the later chunks. By default, the error is `predecessor_failed`,
                which implies that the session is unchanged.
        """
        chunks = self._cut(request, keep_followers=False)
        for state in chunks[1:]:
            if state.failure is None:
                state.failure = because or _predecessor_failed()
        if chunks:
            self._failed.setdefault(request.session.session_id, []).extend(chunks)

    def release(self, request: DiffusionRequest) -> None:
        """Release a finished or aborted chunk. The chunk counts as failed if it has not been
        committed.
        """
        self.fail(request)
        session_id = request.session.session_id
        left = [state for state in self._failed.pop(session_id, []) if state.chunk is not request]
        if left:
            self._failed[session_id] = left

    def _cut(self, request: DiffusionRequest, *, keep_followers: bool) -> list[RequestState]:
        """Remove a chunk, and all later chunks unless `keep_followers` is set.

        Returns:
            The chunk and all later chunks of its session. Empty if the chunk is not in flight.
        """
        session_id = request.session.session_id
        chunks = self._chunks.get(session_id, [])
        position = next(
            (index for index, state in enumerate(chunks) if state.chunk is request), None
        )
        if position is None:
            return []
        before, followers = chunks[:position], chunks[position + 1 :]
        left = before + followers if keep_followers else before
        if left:
            self._chunks[session_id] = left
        else:
            del self._chunks[session_id]
        return chunks[position:]


def _predecessor_failed() -> RequestFailed:
    return RequestFailed(
        "predecessor_failed",
        "an earlier chunk failed or was aborted while both were in flight; the session is "
        "as it was "
        "before that chunk: send both again",
    )
