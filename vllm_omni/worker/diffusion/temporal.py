# SPDX-License-Identifier: Apache-2.0
"""`TemporalStage`: the pipeline in which every stage owns one denoise step (`omni.pipeline` "temporal").

One engine step is a chunk's whole trip: stage i holds the whole network and the K/V window of step i, takes the chunk's
latents, runs step i, hands the latents on. The next chunk of the session follows one stage behind, so one session keeps
all stages at work. The last stage decodes and tells the others how it ended (`ReturnChannel`); its message carries the
latents that entered the last step, which is what a stage needs to see a session's first chunk as that step left it.
Knows no model by name. Held by tests/model_executor/models/causal_wan/test_causal_wan_in_flight.py and
tests/engine/test_chunks_in_flight.py.
"""

from collections.abc import Sequence

import torch

from vllm_omni.model_executor.interfaces import DiffusionRequest, SupportsStepExecution


class TemporalStage:
    """stage: this rank's of `num_stages`, counted from 0; it runs the step of that number."""

    def __init__(self, stage: int, num_stages: int) -> None:
        self._stage = stage
        self._is_last = stage == num_stages - 1
        self._entered: dict[str, torch.Tensor] = {}

    def step(
        self, model: SupportsStepExecution, batch: Sequence[DiffusionRequest], received: torch.Tensor | None
    ) -> torch.Tensor:
        """Run this stage's step, leave the chunks at their last one, which the runner counts; return latents [B, ...].

        received: the stage before's return value, None on the first stage.
        """
        if received is not None:
            for request, latents in zip(batch, received, strict=True):
                model.set_latents(request, latents)
                if self._is_last:
                    self._entered[request.request_id] = latents
        for request in batch:
            request.step = self._stage
        model.step_scheduler(batch, model.denoise_step(batch))
        for request in batch:
            request.step = request.num_steps - 1  # nothing more to do for it here
        return torch.stack([model.latents(request) for request in batch])

    def answer(self, request: DiffusionRequest) -> torch.Tensor:
        """Last stage: the latents with which the chunk came here; to be asked once."""
        return self._entered.pop(request.request_id)
