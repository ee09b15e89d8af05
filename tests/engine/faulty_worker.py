# SPDX-License-Identifier: Apache-2.0
"""Workers for `--worker-cls` that simulate faults.

The simulated faults are a model that fails on one rank or produces NaN for a given prompt, and slow
pipeline stages.
"""

import time
from typing import Any

from vllm_omni.worker import SharedGPUWorker

AT_STEP = 2


def fault(rank: int, method: str) -> str:
    """Return the prompt that makes `method` fail on `rank`. `denoise_step` fails in its third and
    later steps.
    """
    return f"rank {rank} fails in {method}"


NAN = "latents that are not finite"
"""Prompt that causes NaNs on the rank that runs a chunk's last step."""

SLOW_STEP_S = 0.2
"""Duration of a slow step, in seconds. A tiny model's step takes less time, even on a busy machine.
"""


class FaultyWorker(SharedGPUWorker):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        model = self.model_runner.model
        denoise_step, post_decode, step_scheduler = (
            model.denoise_step,
            model.post_decode,
            model.step_scheduler,
        )

        def failing_step(batch: Any, *args: Any) -> Any:
            if any(request.step >= AT_STEP for request in batch):
                self._fail(batch, "denoise_step")
            return denoise_step(batch, *args)

        def failing_decode(request: Any) -> Any:
            self._fail([request], "post_decode")
            return post_decode(request)

        def spoiling_scheduler(batch: Any, prediction: Any) -> None:
            step_scheduler(batch, prediction)
            for request in batch:
                if request.params.prompt == NAN and request.step == request.num_steps - 1:
                    model.set_latents(request, model.latents(request) * float("nan"))

        model.denoise_step, model.post_decode, model.step_scheduler = (
            failing_step,
            failing_decode,
            spoiling_scheduler,
        )

    def _fail(self, batch: Any, method: str) -> None:
        if any(request.params.prompt == fault(self.rank, method) for request in batch):
            raise RuntimeError("injected failure")


class _SlowStageWorker(SharedGPUWorker):
    slow_stage: int

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        model = self.model_runner.model
        denoise_step = model.denoise_step

        def slow_step(*args: Any) -> Any:
            if self.model_runner.pp.rank_in_group == self.slow_stage:
                time.sleep(SLOW_STEP_S)
            return denoise_step(*args)

        model.denoise_step = slow_step

    def layers_held(self) -> int:
        return len(self.model_runner.model.transformer.blocks)


class SlowStage0Worker(_SlowStageWorker):
    slow_stage = 0


class SlowStage1Worker(_SlowStageWorker):
    slow_stage = 1
