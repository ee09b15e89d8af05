# SPDX-License-Identifier: Apache-2.0
"""Role of the last stage with layers when a separate VAE stage follows it (`omni.vae_stage`).

This stage runs the noise schedule, checks chunks and commits them. After every step, this stage
sends a small host message to the VAE stage (`send_to_vae_stage`). As soon as the latents of a chunk
are final, the message includes them; this may be one clean-context pass before the chunk ends.
Messages to the VAE stage must not wait for the current denoise step, so the host waits for the
device before a step instead of after it.
"""

from collections.abc import Sequence

import torch
from vllm.sequence import IntermediateTensors

from vllm_omni.model_executor.interfaces import VAEStageModel
from vllm_omni.model_executor.requests import RequestState
from vllm_omni.outputs import RequestFailed
from vllm_omni.worker.diffusion.link import ChunkNote, StageNote
from vllm_omni.worker.diffusion.roles.role import Envelopes, RankParts
from vllm_omni.worker.diffusion.roles.with_layers import LayersRole, MicroStep, StepSplit
from vllm_omni.worker.diffusion.sessions.in_flight import ChunksInFlight


class BeforeVAE(LayersRole):
    """Role of the last stage with layers before a VAE stage.

    For a batch that only collects results, this rank does nothing on the device, so the host does
    not wait.
    """

    decodes_chunks = False

    def __init__(self, parts: RankParts, steps: StepSplit) -> None:
        super().__init__(parts, steps)
        assert isinstance(parts.model, VAEStageModel)
        self._stage_model = parts.model

    def step(
        self, states: Sequence[RequestState], received: IntermediateTensors | None
    ) -> IntermediateTensors | Envelopes:
        computes = not all(state.done for state in states)
        if computes:
            self.pacer.wait()
        message = self.micro_step(states, received, Envelopes())
        assert message is not None
        if computes:
            self.pacer.launched()
        return message

    def message(self, done: MicroStep, outputs: Envelopes) -> IntermediateTensors:
        failed = [
            state for state in done.states if state.failure is not None and state not in done.alive
        ]
        return send_to_vae_stage(
            self._stage_model, self.in_flight, [*done.alive, *failed], self.parts.parallel.size
        )


def send_to_vae_stage(
    model: VAEStageModel, in_flight: ChunksInFlight, states: Sequence[RequestState], ranks: int
) -> IntermediateTensors:
    """Return the message to the VAE stage after a step in which `states` took part or failed.

    With several ranks per stage, each rank sends the message to its counterpart, and all messages
    must be identical. A rank that detects a failure early (`FiniteCheck.known`) therefore reports
    the failure only at the end of the chunk, when the ranks agree on it.

    Args:
        model: The model.
        in_flight: Chunks in flight on this rank.
        states: Requests that took part in the step or failed.
        ranks: Number of ranks that share the layers of a stage.
    """
    chunks: list[ChunkNote] = []
    failures: dict[str, tuple[str, str]] = {}
    latents: list[torch.Tensor] = []
    # A finished chunk comes before the next chunk of its session.
    for state in sorted(states, key=lambda state: not state.done):
        request = state.chunk
        if ranks == 1 and state.failure is None and state.finite is not None and state.finite.known:
            try:
                state.finite.require("the chunk's latents")
            except RequestFailed as failure:
                state.failure = failure  # so that the VAE stage does not start to decode the chunk
        if state.failure is not None:
            failures[state.request_id] = (state.failure.code, str(state.failure.message))
            if request is not None:
                in_flight.fail(request)
        elif request is not None:
            clean = request.step == request.num_steps - request.clean_passes
            if clean:
                assert state.done or in_flight.is_next(request), (
                    "chunks of a session are decoded in order"
                )
                latents.append(model.latents(request))
            chunks.append(
                ChunkNote(
                    state.request_id,
                    request.session.chunk_index - state.done,
                    request.step,
                    request.num_steps,
                    clean,
                    state.done,
                    model.pack_decode_state(request) if clean else {},
                    request.timer.milliseconds_so_far() if state.done else {},
                )
            )
    return IntermediateTensors(StageNote(chunks, failures).message(latents, ranks))
