# SPDX-License-Identifier: Apache-2.0
"""`LayersRole`: the additions to `SingleRank` for several pipeline stages. `LastStage`: the role of
the last stage.

A stage receives hidden states and a mask of the requests that take part, runs its layers and sends
a message to the next stage. A `StepSplit` determines which denoise steps this rank runs. Tests:
tests/worker/test_two_stages.py and test_return_channel.py, tests/engine/test_parallel.py.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from vllm.sequence import IntermediateTensors

from vllm_omni.model_executor.interfaces import DiffusionRequest, SupportsStepExecution
from vllm_omni.model_executor.requests import RequestState, group_states
from vllm_omni.worker.diffusion.link import HIDDEN, unpack
from vllm_omni.worker.diffusion.roles.role import Envelopes, RankParts
from vllm_omni.worker.diffusion.roles.single import SingleRank, first_steps


class StepSplit(Protocol):
    """Runs the denoise steps of a chunk, or the share of each step, that `omni.pipeline` assigns to
    a rank.
    """

    def run_steps(
        self, batch: Sequence[DiffusionRequest], hidden: torch.Tensor | None
    ) -> torch.Tensor:
        """Run this rank's share of a step, and advance `step` of each request.

        Args:
            batch: Chunks that run the step.
            hidden: Result of the previous stage; None on the first stage.

        Returns:
            The `hidden` argument for the next stage.
        """

    def latents_for_earlier_stages(self, request: DiffusionRequest) -> torch.Tensor:
        """Return the latents to send to the earlier stages. The last stage calls this method once
        for each chunk after `run_steps`.
        """


class EveryStep:
    """Implementation of `StepSplit` for a rank that runs its layers in every step.

    Args:
        model: The model.
        ends_steps: Whether this rank also runs the noise schedule, which is true on the last stage.
    """

    def __init__(self, model: SupportsStepExecution, ends_steps: bool) -> None:
        self._model = model
        self._ends_steps = ends_steps

    def run_steps(
        self, batch: Sequence[DiffusionRequest], hidden: torch.Tensor | None
    ) -> torch.Tensor:
        result = self._model.denoise_step(batch, hidden)
        if self._ends_steps:
            self._model.step_scheduler(batch, result)
        for request in batch:
            request.step += 1
        return result

    def latents_for_earlier_stages(self, request: DiffusionRequest) -> torch.Tensor:
        return self._model.latents(request)


@dataclass(frozen=True)
class MicroStep:
    """Outcome of one micro-step. The message to the next stage is built from it."""

    states: Sequence[RequestState]
    """All scheduled requests."""
    chunks: Sequence[RequestState]
    """Requests whose chunk is not finished. Session operations are not included."""
    alive: Sequence[RequestState]
    """Requests that ran the micro-step."""
    starting: Sequence[DiffusionRequest]
    """Chunks that ran their first step."""
    waiting: Sequence[RequestState]
    """Requests held back in this micro-step."""
    results: Sequence[torch.Tensor | None]
    """Results of the forward passes, in order."""


class LayersRole(SingleRank):
    """Role of a stage that holds layers, if there are several pipeline stages.

    Args:
        parts: Objects that the rank uses.
        steps: Object that runs this rank's share of a chunk's denoise steps.
    """

    def __init__(self, parts: RankParts, steps: StepSplit) -> None:
        super().__init__(parts)
        self.steps = steps

    def micro_step(
        self,
        states: Sequence[RequestState],
        received: IntermediateTensors | None,
        outputs: Envelopes,
    ) -> IntermediateTensors | None:
        # This list is the same on every rank. A finished chunk may be scheduled again to deliver a
        # result that was held back.
        chunks = [state for state in states if not state.is_session_operation and not state.done]
        tensors = {} if received is None else received.tensors
        mask = None if received is None else self.agreement.read_mask(tensors, chunks)
        waiting = (
            self.in_flight.waiting(chunks) if mask is None else self.agreement.waiting(chunks, mask)
        )
        indices = self.agreement.indices(chunks, mask)
        for state in states:
            if state.failure is None and state.chunk is None and state not in waiting:
                self.admission.admit(state, outputs, indices.get(state.request_id))
        alive = self.agreement.alive(chunks, waiting, mask)
        first_part = first_steps(alive)
        self.parts.texts.complete(first_part, tensors)
        batches = group_states(self.model, alive, self.parts.max_batch_size)
        arrived: Sequence[torch.Tensor | None] = [None] * len(batches)
        if received is not None:
            arrived = unpack(HIDDEN, tensors)
        results: list[torch.Tensor | None] = []
        for batch, hidden in zip(batches, arrived, strict=True):
            results.append(self.forward(batch, hidden))
            self.end_batch(batch, outputs)
        return self.message(MicroStep(states, chunks, alive, first_part, waiting, results), outputs)

    def take_step(
        self, requests: Sequence[DiffusionRequest], hidden: torch.Tensor | None
    ) -> torch.Tensor:
        return self.steps.run_steps(requests, hidden)

    def end_batch(self, states: Sequence[RequestState], outputs: Envelopes) -> None:
        """Finish chunks as `SingleRank` does, and send the latents and the status of each request
        to the earlier stages.
        """
        super().end_batch(states, outputs)
        if self.channel is not None:
            requests = [state.chunk for state in states if state.chunk is not None]
            succeeded = [state.failure is None for state in states]
            self.channel.send(
                requests,
                succeeded,
                [self.steps.latents_for_earlier_stages(request) for request in requests],
            )

    @abstractmethod
    def message(self, done: MicroStep, outputs: Envelopes) -> IntermediateTensors | None:
        """Return the tensors for the next stage, or None on the last stage."""


class LastStage(LayersRole):
    """Role of the last of several pipeline stages, which has the last layers and the decoder.

    The last stage sends return messages to the earlier stages, decodes, and returns results to the
    engine.
    """

    def message(self, done: MicroStep, outputs: Envelopes) -> None:
        self.chunk_end.pack_failures(done.states, outputs)
