# SPDX-License-Identifier: Apache-2.0
"""The last pipeline stage with layers before a VAE stage (`omni.vae_stage`): it ends chunks, and hands them over.

It runs the schedule, checks and commits; after every step it sends a small host message (`hand_over`), with a chunk's
latents as soon as they are final, which may be a clean-context pass before the chunk is done. Messages to the VAE stage
must not wait for the current denoise step, so the host waits for the device before a step, not after it.
Held by tests/worker/test_vae_stage_rank.py and tests/engine/test_vae_stage.py.
"""

from collections.abc import Sequence

import torch
from vllm.sequence import IntermediateTensors

from vllm_omni.model_executor.interfaces import VAEStageModel
from vllm_omni.model_executor.requests import RequestState
from vllm_omni.outputs import RequestFailed
from vllm_omni.worker.diffusion.in_flight import ChunksInFlight
from vllm_omni.worker.diffusion.link import ChunkNote, StageNote
from vllm_omni.worker.diffusion.roles.role import Envelopes, RankParts
from vllm_omni.worker.diffusion.roles.with_layers import MicroStep, StepTaker, WithLayers


class BeforeVAE(WithLayers):
    """Runs the schedule and commits chunks, and sends their final latents to the VAE stage."""

    decodes_chunks = False

    def __init__(self, parts: RankParts, steps: StepTaker) -> None:
        super().__init__(parts, steps)
        assert isinstance(parts.model, VAEStageModel)
        self._stage_model = parts.model

    def step(
        self, states: Sequence[RequestState], received: IntermediateTensors | None
    ) -> IntermediateTensors | Envelopes:
        computes = not all(state.done for state in states)
        if computes:  # a batch that only fetches results waits for nothing
            self.pacer.wait()
        message = self.micro_step(states, received, Envelopes())
        assert message is not None
        if computes:
            self.pacer.launched()
        return message

    def message(self, done: MicroStep, outputs: Envelopes) -> IntermediateTensors:
        failed = [state for state in done.states if state.failure is not None and state not in done.alive]
        return hand_over(self._stage_model, self.in_flight, [*done.alive, *failed], self.parts.place.size)


def hand_over(
    model: VAEStageModel, in_flight: ChunksInFlight, states: Sequence[RequestState], ranks: int
) -> IntermediateTensors:
    """The message after a step in which `states` took part or failed.

    ranks: that share a stage's layers. Each of several hands over to its counterpart, and all must say the same: if one
    of them knows of a failure earlier (`FiniteCheck.known`), it says so at the chunk's end, where they agree.
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
