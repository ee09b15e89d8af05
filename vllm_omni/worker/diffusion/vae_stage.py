# SPDX-License-Identifier: Apache-2.0
"""The VAE as a pipeline stage of its own (`omni.vae_stage`): both sides of the hand-over.

The last stage with layers runs the schedule, checks and commits; after every step it sends a small host message
(`hand_over`), with a chunk's latents as soon as they are final, which may be a clean-context pass before the chunk is
done. The VAE stage (`VAEStage`) takes the message, starts the decode on a stream of its own and answers the engine at
once, so that the next step is scheduled while both devices work. A result goes out with the first step that finds it
ready; when a step brings nothing but results, the stage waits for them, but never long: other batches queue behind.

A chunk is committed here when the ranks with layers have committed it. A decode that fails before (there is a clean
pass) leaves the session as it was. One that fails in that very step leaves the others ahead: the session lives on, on
all ranks alike, but refuses every later chunk until it is closed or reset.
Knows no model by name. Held by tests/worker/test_vae_stage_rank.py and tests/engine/test_vae_stage.py.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from vllm.sequence import IntermediateTensors

from vllm_omni.model_executor.interfaces import DiffusionRequest, SupportsStepExecution, SupportsVAEStage
from vllm_omni.outputs import RequestFailed
from vllm_omni.worker.diffusion.agreement import RankAgreement
from vllm_omni.worker.diffusion.decode import ResultStream
from vllm_omni.worker.diffusion.in_flight import ChunksInFlight
from vllm_omni.worker.diffusion.link import ChunkNote, StageNote
from vllm_omni.worker.diffusion.requests import RequestState, as_failure
from vllm_omni.worker.diffusion.results import PendingResult
from vllm_omni.worker.diffusion.sessions import SessionStore

if TYPE_CHECKING:
    from typing import Protocol

    class StageModel(SupportsStepExecution, SupportsVAEStage, Protocol): ...


_WAIT_S = 0.02
"""Longest wait for a result when a step brings nothing else; another batch may be behind it."""
_POLL_S = 0.0005
_MAX_DECODES = 3
"""Decodes in flight, over all sessions. From there on the stage holds up the steps: it is the slowest one."""


def hand_over(
    model: "StageModel", in_flight: ChunksInFlight, states: Sequence[RequestState], ranks: int
) -> IntermediateTensors:
    """The last stage with layers, after a step in which `states` took part or failed.

    ranks: that share a stage's layers. Each of several hands over to its counterpart, and all must say the same: what
    one of them happens to know earlier (`FiniteCheck.known`) waits for the chunk's end, where they agree.
    """
    chunks: list[ChunkNote] = []
    failures: dict[str, tuple[str, str]] = {}
    latents: list[torch.Tensor] = []
    for state in sorted(states, key=lambda state: not state.done):  # a chunk that is done before the one behind it
        request = state.chunk
        if ranks == 1 and state.failure is None and state.finite is not None and state.finite.known:
            try:
                state.finite.require("the chunk's latents")
            except RequestFailed as failure:
                state.failure = failure  # before the VAE stage has to do with it
        if state.failure is not None:
            failures[state.request_id] = (state.failure.code, str(state.failure.message))
            if request is not None:
                in_flight.fail(request)
        elif request is not None:
            clean = request.step == request.num_steps - request.clean_passes
            if clean:
                assert state.done or in_flight.is_next(request), "chunks of a session are decoded in order"
                latents.append(model.latents(request))
            chunks.append(
                ChunkNote(
                    state.request_id,
                    request.session.chunk_index - state.done,
                    request.step,
                    request.num_steps,
                    clean,
                    state.done,
                    model.hand_over(request) if clean else {},
                    request.timer.milliseconds_so_far() if state.done else {},
                )
            )
    return IntermediateTensors(StageNote(chunks, failures).message(latents, ranks))


class VAEStage:
    """The VAE stage's rank.

    commit: makes a chunk part of its session here. results: where it decodes, None on a rank that only follows
    (`ParallelContext.decodes`). agreement: with the ranks beside it, where they decode together
    (`SupportsParallelDecode`); None = this rank decodes, or follows, by itself.
    """

    def __init__(
        self,
        model: "StageModel",
        sessions: SessionStore,
        in_flight: ChunksInFlight,
        commit: Callable[[DiffusionRequest], None],
        results: ResultStream | None,
        agreement: RankAgreement | None = None,
    ) -> None:
        self._model = model
        self._sessions = sessions
        self._in_flight = in_flight
        self._commit = commit
        self._results = results
        self._agreement = agreement
        self._decoding: deque[PendingResult] = deque()

    def fail(self, states: Sequence[RequestState], note: StageNote) -> None:
        """Before anything of a step begins: what has failed where the layers are fails here too."""
        for state in states:
            failure = note.failure(state.request_id)
            if failure is not None and state.failure is None:
                state.failure = self._loss(state) or failure

    def advance(
        self, states: Sequence[RequestState], note: StageNote, latents: Mapping[str, torch.Tensor]
    ) -> list[RequestState]:
        """Take in what `hand_over` sent about `states`; returns those whose chunk is now committed.

        Their results are `pending` (nowhere on a rank that only follows). A refused or failed one has its `failure`.
        """
        by_id = {state.request_id: state for state in states}
        done = []
        for entry in note.chunks:
            state = by_id[entry.request_id]
            try:
                self._follow(state, entry)
                if entry.clean and state.failure is None and state.chunk is not None:
                    self._model.take_over(state.chunk, latents[entry.request_id], entry.facts)
            except Exception as error:
                state.failure = as_failure(error, state.request_id)
            if entry.clean:
                self._decode(state)
            if entry.done and state.failure is None and state.chunk is not None:
                self._commit(state.chunk)
                state.chunk.timer.add(entry.timings_ms)
                done.append(state)
            elif entry.done:
                self._lose(state)
        return done

    def ready(self, due: Sequence[RequestState], *, alone: bool) -> list[RequestState]:
        """Those of `due` whose result is on the host. alone: nothing but results is asked for, so wait a little."""
        deadline = time.perf_counter() + _WAIT_S
        while True:
            ready = [state for state in due if state.pending is not None and state.pending.ready()]
            if ready or not due or not alone or time.perf_counter() >= deadline:
                return ready
            time.sleep(_POLL_S)

    def _follow(self, state: RequestState, entry: ChunkNote) -> None:
        request = state.chunk
        if request is None or state.failure is not None:
            return
        if request.session.chunk_index != entry.committed:
            raise _lost()
        request.step, request.num_steps = entry.step, entry.num_steps

    def _decode(self, state: RequestState) -> None:
        """Launch the decode, unless the chunk has failed."""
        if self._agreement is not None:
            self._agreement.agree(state)
        if self._results is None or state.failure is not None or state.chunk is None:
            return
        while self._decoding and self._decoding[0].ready():
            self._decoding.popleft()
        if len(self._decoding) >= _MAX_DECODES:
            self._decoding.popleft().wait()
        try:
            state.pending = self._results.decode(self._model, state.chunk, state.started_s)
        except Exception as error:
            if self._agreement is not None:
                raise  # other ranks are inside this decode's collectives: only a clean death is left
            state.failure = as_failure(error, state.request_id)
            return
        self._decoding.append(state.pending)

    def _lose(self, state: RequestState) -> None:
        """The other ranks have committed a chunk that has failed here."""
        session_id = None if state.params is None else state.params.session_id
        if session_id is not None and session_id in self._sessions:
            self._sessions.get(session_id).failure = _lost()
        if state.failure is not None:
            state.failure = RequestFailed(state.failure.code, str(_lost().message))
        if state.chunk is not None:
            self._in_flight.fail(state.chunk, because=_lost())

    def _loss(self, state: RequestState) -> RequestFailed | None:
        """Why the session of a chunk that begins cannot go on; None if it can, or is not known here."""
        if state.chunk is not None or state.params is None or state.is_session_operation:
            return None
        session_id = state.params.session_id
        return self._sessions.get(session_id).failure if session_id in self._sessions else None


def _lost() -> RequestFailed:
    return RequestFailed(
        "session_lost",
        "a chunk of this session could not be decoded, so the session cannot go on: close or reset it",
    )
