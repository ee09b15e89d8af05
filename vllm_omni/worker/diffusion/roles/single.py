# SPDX-License-Identifier: Apache-2.0
"""`SingleRank`: the role of a rank if there is only one pipeline stage. Read this file first.

The stage holds all layers and the decoder. A stage consists of one rank, or of several ranks that
share the layers (tensor or sequence parallelism). An engine step, from top to bottom:

    step            launch one denoise step, deliver the results of earlier steps meanwhile
      micro_step    admit new requests, form batches
        forward     one forward pass for one batch, then the scheduler of the diffusion model
        end_batch   check, decode and commit the chunks whose last step this was

The roles for several pipeline stages (`with_layers.py`) override individual methods of this class.
Tests: tests/worker/test_diffusion_model_runner.py, test_in_flight.py, test_overlap.py and
tests/engine/test_parallel.py.
"""

import contextlib
from collections.abc import Sequence
from typing import ClassVar

import torch
from vllm.sequence import IntermediateTensors

from vllm_omni.core.step_protocol import turn
from vllm_omni.model_executor.interfaces import DiffusionRequest
from vllm_omni.model_executor.requests import RequestState, as_failure, group_states
from vllm_omni.model_executor.results import FiniteCheck
from vllm_omni.worker.diffusion.roles.role import Envelopes, Role, pack_results


class SingleRank(Role):
    """Runs one denoise step per engine step. The device time of each step is reported to the
    scheduler.
    """

    decodes_chunks = True
    runs_schedule: ClassVar[bool] = True
    """Whether this rank updates the latents, and therefore also checks them and finishes chunks."""

    def step(
        self, states: Sequence[RequestState], received: IntermediateTensors | None
    ) -> IntermediateTensors | Envelopes:
        earlier, outputs = [state for state in states if state.done], Envelopes()
        self.pacer.launching()
        self.micro_step(states, received, outputs)
        self.pacer.launched(moves=len(earlier) < len(states))
        # The work of this step is queued, so the device is busy while the host packs the results of
        # earlier steps.
        pack_results(earlier, outputs)
        early = any(map(_launches_early, states))
        if self.pacer.wait(lambda: bool(early or outputs or self.chunk_end.ready(states))):
            pack_results(self.chunk_end.ready(states), outputs)
        return self.chunk_end.deliver(states, outputs)

    def micro_step(
        self,
        states: Sequence[RequestState],
        received: IntermediateTensors | None,
        outputs: Envelopes,
    ) -> IntermediateTensors | None:
        # This list is the same on all ranks that share the layers. `states` may contain a finished
        # chunk once more, to deliver a held-back result.
        chunks = [state for state in states if not state.is_session_operation and not state.done]
        waiting = self.in_flight.waiting(chunks)
        if self.parts.omni.kv_growth:
            new = [state for state in chunks if state.chunk is None and state.failure is None]
            self.admission.grow_sessions(new, self.agreement)
        for state in states:
            if state.failure is None and state.chunk is None and state not in waiting:
                self.admission.admit(state, outputs)
        alive = [state for state in chunks if state.failure is None and state not in waiting]
        # Ranks that share the layers run the same requests. Only one of these ranks encodes text.
        if self.agreement.several:
            alive = self.agreement.alive(chunks, waiting, None)
            self.parts.texts.complete(first_steps(alive), {})
        for batch in group_states(self.model, alive, self.parts.max_batch_size):
            self.forward(batch)
            self.end_batch(batch, outputs)
        self.chunk_end.pack_failures(states, outputs)
        return None

    def forward(
        self, states: Sequence[RequestState], hidden: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Run one forward pass for one batch.

        If the engine has one rank, an exception fails only the request that causes it, because the
        batch is then repeated one request at a time. If the engine has several ranks, the exception
        is raised and the engine exits, because the other ranks wait in the collectives of the
        batch.

        Args:
            states: Requests with the same `batch_key` and adapters.
            hidden: Hidden states from the previous pipeline stage; None on the first stage.

        Returns:
            The result of `take_step`, or None after an exception.
        """
        requests = [state.chunk for state in states if state.chunk is not None]
        try:
            with contextlib.ExitStack() as timed, self.parts.adapters.applied(requests[0].adapters):
                for request in requests:
                    timed.enter_context(request.timer.stage("steps"))
                result = self.take_step(requests, hidden)
        except Exception as error:
            if self.parts.num_ranks > 1:
                raise
            if len(states) == 1:
                states[0].failure = as_failure(error, states[0].request_id)
            else:
                for state in states:
                    self.forward([state], hidden)
            return None
        for state, request in zip(states, requests, strict=True):
            if self.runs_schedule and request.step == request.num_steps - request.clean_passes:
                # The check is launched now, and its result is read in `end_batch`.
                state.finite = FiniteCheck(self.model.latents(request))
        return result

    def take_step(
        self, requests: Sequence[DiffusionRequest], hidden: torch.Tensor | None
    ) -> torch.Tensor:
        """Advance each request by one denoise step."""
        prediction = self.model.denoise_step(requests, hidden)
        self.model.step_scheduler(requests, prediction)
        for request in requests:
            request.step += 1
        return prediction

    def end_batch(self, states: Sequence[RequestState], outputs: Envelopes) -> None:
        """Check, decode and commit the chunks of a batch that have finished their last step.

        If a chunk still has a clean-context pass after its latents are final, the decode is
        launched before that pass, because the frames do not depend on it.
        """
        alive = [state for state in states if state.failure is None]
        self.chunk_end.decode_before_clean_pass(alive)
        ended = [state for state in alive if state.done]
        self.chunk_end.decode_together(ended)
        for state in ended:
            self.chunk_end.finish(state, outputs)


class WholeChunks(SingleRank):
    """Runs all steps of a chunk in one engine step, as vLLM's own schedulers expect."""

    def step(
        self, states: Sequence[RequestState], received: IntermediateTensors | None
    ) -> IntermediateTensors | Envelopes:
        outputs = Envelopes()
        for state in sorted(states, key=_chunk_order):  # chunks of a session run in order
            while state.request_id not in outputs:
                self.micro_step([state], None, outputs)
        return outputs


def _launches_early(state: RequestState) -> bool:
    """Return whether a chunk's next pass is launched without waiting for the end of the last one.

    Frames can only be delivered after the clean-context pass has been launched, so that pass is
    launched while the device runs the last denoise step. The passes of a session's first chunk are
    short, because its window is empty, and a slow host can take longer to launch one pass than the
    device to run it. In that chunk, the last denoise step is therefore launched early, too. An
    abort just before these passes takes effect one step later.
    """
    chunk = state.chunk
    if chunk is None or state.done:
        return False
    is_last_denoise_step = chunk.step == chunk.num_steps - chunk.clean_passes - 1
    starts_session = chunk.session.chunk_index == 0 and chunk.clean_passes > 0
    return state.pending is not None or (starts_session and is_last_denoise_step)


def first_steps(states: Sequence[RequestState]) -> list[DiffusionRequest]:
    """Return the chunks of `states` that are about to take their first step."""
    return [state.chunk for state in states if state.chunk is not None and state.chunk.step == 0]


def _chunk_order(state: RequestState) -> tuple[str, float]:
    """Return a sort key that orders the chunks of a session by index."""
    return (
        ("", 0.0)
        if state.params is None
        else (state.params.session_id, turn(state.params.chunk_index))
    )
