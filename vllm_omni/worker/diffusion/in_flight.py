# SPDX-License-Identifier: Apache-2.0
"""`ChunksInFlight`: the chunks of each session that this rank has begun and not yet committed, oldest first.

`ChunkOrder` decides which of them may take a step. If a chunk fails or is aborted, the chunks behind it fail too: they
were computed from it, and the session stays as last committed. The first pipeline stage decides which chunks may begin
(`waiting`) and their chunk indices; later stages follow its mask. A failure is known first on the last stage, where it
happens: until the scheduler releases the failed chunk, `failed` finds it for the chunks behind it that an earlier stage
still sends. Knows no model and no scheduler.
Held by tests/worker/test_in_flight.py and tests/engine/test_chunks_in_flight.py.
"""

from collections.abc import Sequence

from vllm_omni.core.step_protocol import DONE, ChunkOrder, turn
from vllm_omni.model_executor.interfaces import DiffusionRequest
from vllm_omni.model_executor.requests import RequestState
from vllm_omni.outputs import RequestFailed


class ChunksInFlight:
    """limit: chunks of one session in flight at once; with 1 no chunk waits or has a predecessor."""

    def __init__(self, limit: int) -> None:
        self.order = ChunkOrder(limit)
        self._chunks: dict[str, list[RequestState]] = {}
        self._failed: dict[str, list[RequestState]] = {}

    def last(self, session_id: str) -> DiffusionRequest | None:
        """The newest chunk in flight of the session, predecessor of its next one; None = the committed state is."""
        chunks = self._chunks.get(session_id)
        return chunks[-1].chunk if chunks else None

    def count(self, session_id: str) -> int:
        return len(self._chunks.get(session_id, ()))

    def is_next(self, request: DiffusionRequest) -> bool:
        """Whether the chunk follows the committed session, so that it may be decoded."""
        chunks = self._chunks.get(request.session.session_id, [])
        return bool(chunks) and chunks[0].chunk is request

    def waiting(self, states: Sequence[RequestState]) -> list[RequestState]:
        """The requests of a batch that may not take a step yet; called before any of the batch does."""
        if self.order.limit == 1:
            return []
        first: dict[str, tuple[float, RequestState]] = {}  # session id -> its only queued chunk that may begin
        for state in states:
            if state.chunk is None and state.failure is None and state.params is not None:
                number, session_id = turn(state.params.chunk_index), state.params.session_id
                if session_id not in first or number < first[session_id][0]:
                    first[session_id] = number, state
        may_begin = [state for _, state in first.values()]
        return [state for state in states if self._waits(state, state in may_begin)]

    def _waits(self, state: RequestState, may_begin: bool) -> bool:
        if state.failure is not None or state.params is None:
            return False
        if state.chunk is None and not may_begin:
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
        """The newest chunk of that index that has failed here and is not released yet."""
        return next((state.chunk for state in reversed(self._failed.get(session_id, [])) if state.index == index), None)

    def add(self, state: RequestState, predecessor: DiffusionRequest | None) -> None:
        """The chunk has been admitted behind `predecessor`; if that one has failed, the chunk fails too, and its steps
        are discarded.
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
        """The chunk is committed; the chunks behind it stay in flight. Idempotent."""
        self._cut(request, keep_followers=True)

    def fail(self, request: DiffusionRequest, because: RequestFailed | None = None) -> None:
        """The chunk and the chunks behind it will not be committed. Idempotent, also after `end`.

        because: the error for the chunks behind it; None = `predecessor_failed` (the session is as it was).
        """
        chunks = self._cut(request, keep_followers=False)
        for state in chunks[1:]:
            if state.failure is None:
                state.failure = because or _predecessor_failed()
        if chunks:
            self._failed.setdefault(request.session.session_id, []).extend(chunks)

    def release(self, request: DiffusionRequest) -> None:
        """The scheduler has finished or aborted the chunk: if it is not committed by now, it has failed."""
        self.fail(request)
        session_id = request.session.session_id
        left = [state for state in self._failed.pop(session_id, []) if state.chunk is not request]
        if left:
            self._failed[session_id] = left

    def _cut(self, request: DiffusionRequest, *, keep_followers: bool) -> list[RequestState]:
        """Remove the chunk; return it and the chunks behind it."""
        session_id = request.session.session_id
        chunks = self._chunks.get(session_id, [])
        position = next((index for index, state in enumerate(chunks) if state.chunk is request), None)
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
        "a chunk before this one failed or was aborted while both were in flight; the session is as it was before that "
        "chunk: send both again",
    )
