# SPDX-License-Identifier: Apache-2.0
"""`OwnStep`: the pipeline in which every stage owns one denoise step (`omni.pipeline` "temporal").

One engine step is a chunk's whole trip: stage i holds the whole network and the K/V window of step i, takes the chunk's
latents, runs step i, hands the latents on. The next chunk of the session follows one stage behind, so one session keeps
all stages at work. The last stage decodes and tells the others how it ended (`ReturnChannel`); its message carries the
latents that entered the last step, which a stage needs to see a session's first chunk as that step left it.
A stage's place in the pipeline, and so its role, is that of any other stage with layers.
Knows no model by name. Held by tests/model_executor/models/causal_wan/test_causal_wan_in_flight.py and
tests/engine/test_chunks_in_flight.py.
"""

from collections.abc import Sequence

import torch

from vllm_omni.model_executor.interfaces import DiffusionRequest, SupportsStepExecution


class OwnStep:
    """A `StepTaker`. stage: this rank's of `num_stages`, counted from 0; it runs the step of that number."""

    def __init__(self, model: SupportsStepExecution, stage: int, num_stages: int) -> None:
        self._model = model
        self._stage = stage
        self._is_last = stage == num_stages - 1
        self._entered: dict[str, torch.Tensor] = {}

    def take(self, batch: Sequence[DiffusionRequest], hidden: torch.Tensor | None) -> torch.Tensor:
        """Run this stage's step, after which a chunk has no more to take here; return latents [B, ...].

        hidden: the stage before's return value, None on the first stage.
        """
        if hidden is not None:
            for request, latents in zip(batch, hidden, strict=True):
                self._model.set_latents(request, latents)
                if self._is_last:
                    self._entered[request.request_id] = latents
        for request in batch:
            request.step = self._stage
        self._model.step_scheduler(batch, self._model.denoise_step(batch))
        for request in batch:
            request.step = request.num_steps
        return torch.stack([self._model.latents(request) for request in batch])

    def answer(self, request: DiffusionRequest) -> torch.Tensor:
        """Last stage: the latents with which the chunk came here; to be asked once."""
        return self._entered.pop(request.request_id)
