# SPDX-License-Identifier: Apache-2.0
"""Workers for `--worker-cls`: a model that fails on one rank or makes NaN, as a prompt says;
stages that are slow.
"""

from typing import Any

from vllm_omni.worker import SharedGPUWorker

AT_STEP = 2


def fault(rank: int, method: str) -> str:
    """The prompt with which `method` ("denoise_step", from the third step on, or "post_decode")
    fails on `rank`.
    """
    return f"rank {rank} fails in {method}"


NAN = "latents that are not finite"
"""The prompt of a chunk whose last step, wherever it is taken, makes NaN."""


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
