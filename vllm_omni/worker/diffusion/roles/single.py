# SPDX-License-Identifier: Apache-2.0
"""`SingleRank`: the role of the only pipeline stage. Read this file first.

The rank holds all layers and the decoder, alone or with other ranks that share the layers (tensor
or sequence parallelism). An engine step, from top to bottom:

    step            launch one denoise step, deliver the results of earlier steps meanwhile
      micro_step    admit new requests, form batches
        forward     one forward pass for one batch, then the scheduler of the diffusion model
        end_batch   check, decode and commit the chunks whose last step this was

The roles for several pipeline stages (`with_layers.py`) override single methods of this class.
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
    """Runs one denoise step per engine step. The scheduler receives the device time of each."""

    decodes_chunks = True
    runs_schedule: ClassVar[bool] = True
    """Whether this rank updates the latents, and therefore checks them and ends chunks."""

    def step(
        self, states: Sequence[RequestState], received: IntermediateTensors | None
    ) -> IntermediateTensors | Envelopes:
        earlier, outputs = [state for state in states if state.done], Envelopes()
        self.pacer.launching()
        self.micro_step(states, received, outputs)
        self.pacer.launched(moves=len(earlier) < len(states))
        # This step's work is queued: the device is busy while the host packs earlier results.
        pack_results(earlier, outputs)
        # A clean-context pass is launched while the device runs the last denoise step. The host is
        # then free when the frames are decoded, however long it takes to launch the pass.
        early = any(state.pending is not None and not state.done for state in states)
        if self.pacer.wait(lambda: bool(early or outputs or self.chunk_end.ready(states))):
            pack_results(self.chunk_end.ready(states), outputs)
        return self.chunk_end.deliver(states, outputs)

    def micro_step(
        self,
        states: Sequence[RequestState],
        received: IntermediateTensors | None,
        outputs: Envelopes,
    ) -> IntermediateTensors | None:
        # Ranks that share the layers see the same list. A finished chunk may be in it once more, to
        # deliver a result that was held back.
        chunks = [state for state in states if not state.is_session_operation and not state.done]
        waiting = self.in_flight.waiting(chunks)
        if self.parts.omni.kv_growth:
            new = [state for state in chunks if state.chunk is None and state.failure is None]
            self.admission.grow_sessions(new, self.agreement)
        for state in states:
            if state.failure is None and state.chunk is None and state not in waiting:
                self.admission.admit(state, outputs)
        alive = [state for state in chunks if state.failure is None and state not in waiting]
        # ranks that share the layers run the same requests; one of them encodes text
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

        On one rank an exception fails only the request that causes it: the batch is repeated one
        request at a time. On several ranks the exception is raised, because the other ranks are in
        the collectives of this batch and the engine can only exit.

        Args:
            states: Requests with equal `batch_key` and adapters.
            hidden: Hidden states of the previous pipeline stage; None on the first stage.

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
                # launched now, read in `end_batch`
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
        """End the chunks of a batch whose latents are final: check, decode, commit.

        The decode is launched before a clean-context pass, because the frames do not depend on it.
        """
        alive = [state for state in states if state.failure is None]
        self.chunk_end.decode_before_clean_pass(alive)
        ended = [state for state in alive if state.done]
        self.chunk_end.decode_together(ended)
        for state in ended:
            self.chunk_end.finish(state, outputs)


class WholeChunks(SingleRank):
    """Runs all steps of a chunk in one engine step, for schedulers that expect this (vLLM's
    own).
    """

    def step(
        self, states: Sequence[RequestState], received: IntermediateTensors | None
    ) -> IntermediateTensors | Envelopes:
        outputs = Envelopes()
        for state in sorted(states, key=_chunk_order):  # chunks of a session run in order
            while state.request_id not in outputs:
                self.micro_step([state], None, outputs)
        return outputs


def first_steps(states: Sequence[RequestState]) -> list[DiffusionRequest]:
    """Return the chunks of `states` that are about to take their first step."""
    return [state.chunk for state in states if state.chunk is not None and state.chunk.step == 0]


def _chunk_order(state: RequestState) -> tuple[str, float]:
    """Sort key: chunks of one session in the order of their index."""
    return (
        ("", 0.0)
        if state.params is None
        else (state.params.session_id, turn(state.params.chunk_index))
    )
