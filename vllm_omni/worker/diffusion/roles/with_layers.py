# SPDX-License-Identifier: Apache-2.0
"""`WithLayers`: the micro-step of a rank that holds layers, shared by the roles with layers.

A micro-step admits new requests, agrees with the other ranks on which take part, and runs one
forward pass per batch. A role defines what follows the forward pass of a batch (`_after_forward`),
the message to the next stage (`_hand_on`) and when the host waits for the device. A `StepTaker`
defines which denoise steps this rank runs.
"""

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from vllm.sequence import IntermediateTensors

from vllm_omni.model_executor.interfaces import DiffusionRequest, SupportsStepExecution
from vllm_omni.model_executor.requests import RequestState, as_failure
from vllm_omni.model_executor.results import FiniteCheck
from vllm_omni.worker.diffusion.batches import group_states
from vllm_omni.worker.diffusion.decode import deliverable
from vllm_omni.worker.diffusion.link import HIDDEN, unpack
from vllm_omni.worker.diffusion.roles.role import Envelopes, RankParts, Role, delivering, envelopes


class StepTaker(Protocol):
    """The denoise steps of a chunk that a rank runs (`omni.pipeline`)."""

    def take(self, batch: Sequence[DiffusionRequest], hidden: torch.Tensor | None) -> torch.Tensor:
        """Run this rank's part of a step and advance each request's `step`.

        Args:
            batch: Chunks that run the step.
            hidden: Result of the previous stage; None on the first one.

        Returns:
            `hidden` for the next stage.
        """

    def answer(self, request: DiffusionRequest) -> torch.Tensor:
        """Return the latents for the earlier stages. For the last stage, once after each `take`."""


class EveryStep:
    """Every step runs on this rank's layers.

    Args:
        model: The model.
        ends_steps: Whether this rank also runs the noise schedule: true on the last stage.
    """

    def __init__(self, model: SupportsStepExecution, ends_steps: bool) -> None:
        self._model = model
        self._ends_steps = ends_steps

    def take(self, batch: Sequence[DiffusionRequest], hidden: torch.Tensor | None) -> torch.Tensor:
        result = self._model.denoise_step(batch, hidden)
        if self._ends_steps:
            self._model.step_scheduler(batch, result)
        for request in batch:
            request.step += 1
        return result

    def answer(self, request: DiffusionRequest) -> torch.Tensor:
        return self._model.latents(request)


@dataclass(frozen=True)
class MicroStep:
    """Outcome of one micro-step."""

    states: Sequence[RequestState]
    """All requests of the batch."""
    chunks: Sequence[RequestState]
    """Requests that need computation."""
    alive: Sequence[RequestState]
    """Requests that ran the step."""
    beginning: Sequence[DiffusionRequest]
    """Chunks that ran their first step."""
    waiting: Sequence[RequestState]
    """Requests held back in this step."""
    results: Sequence[torch.Tensor | None]
    """Result of each forward pass, in order."""


class WithLayers(Role):
    """Role of a rank with layers.

    Args:
        parts: Objects of the rank.
        steps: The denoise steps that this rank runs.
    """

    def __init__(self, parts: RankParts, steps: StepTaker) -> None:
        super().__init__(parts)
        self.steps = steps

    # -- an engine step ----------------------------------------------------------------------------

    def step(
        self, states: Sequence[RequestState], received: IntermediateTensors | None
    ) -> IntermediateTensors | Envelopes:
        ready, outputs = delivering(states), Envelopes()
        moves = not all(state.done for state in states)
        self._before_launch(moves)
        handed_on = self.micro_step(states, received, outputs)
        self._launched(moves)
        # This step is queued: the device is busy while the host processes earlier results.
        outputs.update(envelopes(ready))
        if self._after_launch(lambda: bool(outputs or self.chunk_end.ready(states))):
            outputs.update(envelopes(self.chunk_end.ready(states)))
        if handed_on is not None:
            return handed_on
        deliver = deliverable(states, outputs)
        self.chunk_end.delivered(deliver)
        return deliver

    def _before_launch(self, moves: bool) -> None:
        """Prepare the launch of a step.

        Args:
            moves: Whether a request runs a step. False if the batch only fetches results.
        """

    def _launched(self, moves: bool) -> None:
        self.pacer.launched(moves=moves)

    def _after_launch(self, is_result_ready: Callable[[], bool]) -> bool:
        """Wait for the device until a result is ready for delivery; return whether one is."""
        return self.pacer.wait(is_result_ready)

    # -- a micro-step ------------------------------------------------------------------------------

    def micro_step(
        self, states: Sequence[RequestState], received: IntermediateTensors | None, outputs: Envelopes
    ) -> IntermediateTensors | None:
        # Equal on every rank. A finished chunk may be scheduled again to deliver a result held
        # back.
        chunks = [state for state in states if not state.is_session_operation and not state.done]
        mask = None if received is None else self.agreement.read_mask(received.tensors, chunks)
        waiting = self.in_flight.waiting(chunks) if mask is None else self.agreement.waiting(chunks, mask)
        indices = self.agreement.indices(chunks, mask)
        for state in states:
            if state.failure is None and state.chunk is None and state not in waiting:
                self.admission.admit(state, outputs, indices.get(state.request_id))
        alive = self.agreement.alive(chunks, waiting, mask)
        beginning = [state.chunk for state in alive if state.chunk is not None and state.chunk.step == 0]
        self.parts.texts.complete(beginning, {} if received is None else received.tensors)
        omni = self.parts.omni
        limit = 1 if omni.batch_invariant else omni.max_requests_per_step
        groups = group_states(self.model, alive, limit)
        arrived: Sequence[torch.Tensor | None] = [None] * len(groups)
        if received is not None:
            arrived = unpack(HIDDEN, received.tensors)
        results: list[torch.Tensor | None] = []
        for members, hidden in zip(groups, arrived, strict=True):
            results.append(self.forward(members, hidden))
            self._after_forward(members, outputs)
        return self._hand_on(MicroStep(states, chunks, alive, beginning, waiting, results), outputs)

    def forward(self, states: Sequence[RequestState], hidden: torch.Tensor | None) -> torch.Tensor | None:
        """Run the forward pass of a batch.

        With one rank, an exception fails only the request that causes it.
        """
        batch = [state.chunk for state in states if state.chunk is not None]
        try:
            with contextlib.ExitStack() as timed, self.parts.adapters.applied(batch[0].adapters):
                for request in batch:
                    timed.enter_context(request.timer.stage("steps"))
                result = self.steps.take(batch, hidden)
        except Exception as error:
            if self.parts.num_ranks > 1:
                raise  # other ranks are in this batch's collectives: the engine can only exit
            if len(states) > 1:
                for state in states:
                    self.forward([state], hidden)
            else:
                states[0].failure = as_failure(error, states[0].request_id)
            return None
        return result

    @abstractmethod
    def _after_forward(self, states: Sequence[RequestState], outputs: Envelopes) -> None:
        """Process the requests of a batch after their step has run or failed."""

    @abstractmethod
    def _hand_on(self, done: MicroStep, outputs: Envelopes) -> IntermediateTensors | None:
        """Finish `micro_step`; its return value is the return value of this method."""


class EndsSteps(WithLayers):
    """Role of a rank with the last layers.

    The noise schedule runs here, so chunks are checked and committed here first, and return
    messages come from here.
    """

    def forward(self, states: Sequence[RequestState], hidden: torch.Tensor | None) -> torch.Tensor | None:
        result = super().forward(states, hidden)
        if result is not None:
            for state in states:
                request = state.chunk
                if request is not None and request.step == request.num_steps - request.clean_passes:
                    state.finite = FiniteCheck(self.model.latents(request))
        return result

    def _after_forward(self, states: Sequence[RequestState], outputs: Envelopes) -> None:
        self.chunk_end.decode_before_clean_pass([state for state in states if state.failure is None])
        ended = [state for state in states if state.done and state.failure is None]
        self.chunk_end.decode_together(ended)
        for state in ended:
            self.chunk_end.finish(state, outputs)
        if self.channel is not None:
            requests = [state.chunk for state in states if state.chunk is not None]
            fine = [state.failure is None for state in states]
            self.channel.send(requests, fine, [self.steps.answer(request) for request in requests])
