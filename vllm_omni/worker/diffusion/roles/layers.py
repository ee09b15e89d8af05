# SPDX-License-Identifier: Apache-2.0
"""A pipeline stage with layers that is not the last one.

The stage sends hidden states to the next stage and receives the return messages from the last
stage.
"""

from collections.abc import Iterable, Sequence

import torch
from vllm.sequence import IntermediateTensors

from vllm_omni.model_executor.interfaces import DiffusionRequest
from vllm_omni.model_executor.requests import RequestState
from vllm_omni.worker.diffusion.link import HIDDEN, together
from vllm_omni.worker.diffusion.roles.role import Envelopes
from vllm_omni.worker.diffusion.roles.with_layers import LayersRole, MicroStep


class LayersStage(LayersRole):
    """Role of a stage that depends on results from the last stage.

    Before the next step of a chunk can start, or the chunk can be committed, the return message
    from the last stage must have arrived.
    """

    decodes_chunks = False
    runs_schedule = False

    def step(
        self, states: Sequence[RequestState], received: IntermediateTensors | None
    ) -> IntermediateTensors | Envelopes:
        message = self.micro_step(states, received, Envelopes())
        assert message is not None
        self.pacer.launched(moves=not all(state.done for state in states))
        self.pacer.wait()
        return message

    def end_batch(self, states: Sequence[RequestState], outputs: Envelopes) -> None:
        assert self.channel is not None
        self.channel.expect([state.chunk for state in states if state.chunk is not None])

    def message(self, done: MicroStep, outputs: Envelopes) -> IntermediateTensors:
        results = [result for result in done.results if result is not None]
        assert len(results) == len(done.results), (
            "with several ranks a failed forward pass ends the engine"
        )
        hidden = together(HIDDEN, results, self.parts.parallel.size)
        mask = self.agreement.mask(done.chunks, done.alive, done.waiting)
        return IntermediateTensors(hidden | self.parts.texts.message(done.starting) | mask)

    def receive_results(self, request_ids: Iterable[str]) -> None:
        if self.channel is not None:
            self.channel.drain(request_ids, self._receive_result)

    def listen(self) -> None:
        if self.channel is not None:
            self.channel.listen(self.model)

    def _receive_result(self, request: DiffusionRequest, ok: bool, latents: torch.Tensor) -> None:
        """Apply the result of a step that the last stage has finished."""
        if request.state is None:
            return  # the chunk was aborted or has finished in the meantime
        self.model.set_latents(request, latents.view(self.model.latents(request).shape))
        if request.step >= request.num_steps:
            if ok:
                self.chunk_end.commit(request)
            else:
                self.in_flight.fail(request)
