# SPDX-License-Identifier: Apache-2.0
"""Runs the VAE as a separate pipeline stage (`omni.vae_stage`), after the ranks with layers.

The last stage with layers (`BeforeVAE`) sends a small host message after every step. The message
contains the latents of a chunk as soon as they are final. The VAE stage starts the decode on a
separate CUDA stream and returns to the engine immediately, so the next step is scheduled while both
devices work. The first engine step that finds a result ready returns the result. An engine step
that only collects results waits for them, but only briefly, because other batches may be queued.

The VAE stage commits a chunk when the ranks with layers have committed it. If the decode of a chunk
fails before this commit (during a clean-context pass), the session is not changed. If the decode
fails in the step that commits the chunk, the other ranks have already committed the chunk. The
session then remains live on all ranks, but every later chunk is refused until the session is closed
or reset. This module does not depend on a model.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence

import torch
from vllm.sequence import IntermediateTensors

from vllm_omni.model_executor.interfaces import VAEStageModel
from vllm_omni.model_executor.requests import RequestState, as_failure
from vllm_omni.model_executor.results import PendingResult
from vllm_omni.outputs import RequestFailed
from vllm_omni.worker.diffusion.link import ChunkNote, StageNote
from vllm_omni.worker.diffusion.roles.role import Envelopes, RankParts, Role, pack_results

_WAIT_S = 0.02
"""Maximum wait in seconds for results in a step that only collects results. The wait is short,
because other batches may be queued.
"""
_POLL_S = 0.0005
_MAX_DECODES = 3
"""Maximum number of decodes in flight, summed over all sessions. At this limit, the VAE stage waits
for the oldest decode and thus delays the steps, because the VAE stage is then the slowest stage.
"""


class VAEStage(Role):
    """Role of the VAE stage.

    A rank decodes if `parts.decodes` is true; the other ranks of the stage only track chunks. With
    `parts.shares_decode`, all ranks of the stage decode together (`SupportsParallelDecode`) after
    they have agreed to do so.
    """

    def __init__(self, parts: RankParts) -> None:
        super().__init__(parts)
        assert isinstance(parts.model, VAEStageModel)
        self._stage_model = parts.model
        self._sessions = parts.sessions
        self._decoding: deque[PendingResult] = deque()

    def step(
        self, states: Sequence[RequestState], received: IntermediateTensors | None
    ) -> IntermediateTensors | Envelopes:
        pending = [state for state in states if state.done and state.pending is not None]
        outputs = Envelopes()
        self.micro_step(states, received, outputs)
        pack_results(self.ready(pending, alone=len(pending) == len(states)), outputs)
        return self.chunk_end.deliver(states, outputs)

    def micro_step(
        self,
        states: Sequence[RequestState],
        received: IntermediateTensors | None,
        outputs: Envelopes,
    ) -> None:
        assert received is not None
        note = StageNote.read_tensors(received.tensors)
        self.fail(states, note)
        for state in states:
            # A chunk does not start on this stage if the ranks with layers hold it back or have
            # refused it.
            starts = state.is_session_operation or state.request_id in note.taking_part
            if state.failure is None and state.chunk is None and starts:
                self.admission.admit(state, outputs)
        for state in self.advance(states, note, note.latents(received.tensors)):
            self.chunk_end.release_result(state, outputs)
        self.chunk_end.pack_failures(states, outputs)

    def fail(self, states: Sequence[RequestState], note: StageNote) -> None:
        """Fail the chunks that have failed on the ranks with layers, before a step starts."""
        for state in states:
            failure = note.failure(state.request_id)
            if failure is not None and state.failure is None:
                state.failure = self._loss(state) or failure

    def advance(
        self, states: Sequence[RequestState], note: StageNote, latents: Mapping[str, torch.Tensor]
    ) -> list[RequestState]:
        """Apply the message that the last stage with layers has sent after a step.

        After the call, committed chunks on ranks that decode have a `pending` result, and refused
        and failed requests have a `failure`.

        Args:
            states: Scheduled requests.
            note: Message from the last stage with layers.
            latents: Final latents, keyed by request id.

        Returns:
            The requests whose chunks are now committed.
        """
        by_id = {state.request_id: state for state in states}
        done = []
        for entry in note.chunks:
            state = by_id[entry.request_id]
            try:
                self._follow(state, entry)
                if entry.clean and state.failure is None and state.chunk is not None:
                    self._stage_model.unpack_decode_state(
                        state.chunk, latents[entry.request_id], entry.info
                    )
            except Exception as error:
                state.failure = as_failure(error, state.request_id)
            if entry.clean:
                self._decode(state)
            if entry.done and state.failure is None and state.chunk is not None:
                self.chunk_end.commit(state.chunk)
                state.chunk.timer.add_times(entry.timings_ms)
                done.append(state)
            elif entry.done:
                self._drop_chunks(state)
        return done

    def ready(self, due: Sequence[RequestState], *, alone: bool) -> list[RequestState]:
        """Return the requests in `due` whose results have arrived on the host.

        Args:
            due: Requests with a pending result.
            alone: Whether the step only collects results. Such a step waits up to `_WAIT_S` seconds
                for a result to arrive.
        """
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
        """Launch the decode of a chunk that has not failed, unless this rank only tracks chunks."""
        if not self.parts.decodes:
            return
        while self._decoding and self._decoding[0].ready():
            self._decoding.popleft()
        if len(self._decoding) >= _MAX_DECODES:
            self._decoding.popleft().wait()
        self.chunk_end.decode(state)
        if state.pending is not None:
            self._decoding.append(state.pending)
        elif state.failure is None:
            state.failure = state.decode_failure

    def _drop_chunks(self, state: RequestState) -> None:
        """Mark a session as lost, because other ranks have committed a chunk that failed on this
        rank.
        """
        session_id = None if state.params is None else state.params.session_id
        if session_id is not None and session_id in self._sessions:
            self._sessions.get(session_id).failure = _lost()
        if state.failure is not None:
            state.failure = RequestFailed(state.failure.code, str(_lost().message))
        if state.chunk is not None:
            self.in_flight.fail(state.chunk, because=_lost())

    def _loss(self, state: RequestState) -> RequestFailed | None:
        """Return the reason why the session of a new chunk cannot continue. The result is None if
        the session can continue or is not live.
        """
        if state.chunk is not None or state.params is None or state.is_session_operation:
            return None
        session_id = state.params.session_id
        return self._sessions.get(session_id).failure if session_id in self._sessions else None


def _lost() -> RequestFailed:
    return RequestFailed(
        "session_lost",
        "a chunk of this session could not be decoded, so the session cannot continue: close or "
        "reset it",
    )
