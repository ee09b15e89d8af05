# SPDX-License-Identifier: Apache-2.0
"""`StageSteps`: a pipeline in which every stage runs one denoise step (`omni.pipeline` "temporal").

A chunk passes through all stages in one engine step. Stage i holds the whole network and the K/V
window of step i. Stage i receives the chunk's latents, runs step i and sends the latents to the
next stage. The session's next chunk follows one stage behind, so a single session uses all stages.
The last stage decodes, and sends a message to the other stages (`ReturnChannel`). The message
contains the inputs of the last step. A stage needs these inputs to attend to the first chunk of a
session at the last step's noise level. The position of a stage in the pipeline, and therefore its
role, is the same as for any stage with layers. This module does not depend on a model.
"""

from collections.abc import Sequence

import torch

from vllm_omni.model_executor.interfaces import DiffusionRequest, SupportsStepExecution


class StageSteps:
    """Implementation of `StepSplit` for a rank in a temporal pipeline.

    Args:
        model: The model.
        stage: Index of this rank's stage, and of the denoise step that it runs.
        num_stages: Number of stages.
    """

    def __init__(self, model: SupportsStepExecution, stage: int, num_stages: int) -> None:
        self._model = model
        self._stage = stage
        self._is_last = stage == num_stages - 1
        self._entered: dict[str, torch.Tensor] = {}

    def run_steps(
        self, batch: Sequence[DiffusionRequest], hidden: torch.Tensor | None
    ) -> torch.Tensor:
        """Run this stage's denoise step, which is the only step of a chunk that this rank runs.

        Args:
            batch: Chunks that run the step.
            hidden: Result of the previous stage; None on the first stage.

        Returns:
            Latents of the chunks after the step, [B, ...].
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

    def latents_for_earlier_stages(self, request: DiffusionRequest) -> torch.Tensor:
        """Return and remove the stored inputs of the last step. Only the last stage calls this
        method.
        """
        return self._entered.pop(request.request_id)
