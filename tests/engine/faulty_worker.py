# SPDX-License-Identifier: Apache-2.0
"""A worker for `--worker-cls` whose model fails on one rank, as a request's prompt says."""

from typing import Any

from vllm_omni.worker import DiffusionGPUWorker

AT_STEP = 2


def fault(rank: int, method: str) -> str:
    """The prompt with which `method` ("denoise_step", from the third step on, or "post_decode") fails on `rank`."""
    return f"rank {rank} fails in {method}"


class FaultyWorker(DiffusionGPUWorker):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        model = self.model_runner.model
        denoise_step, post_decode = model.denoise_step, model.post_decode

        def failing_step(batch: Any, *args: Any) -> Any:
            if any(request.step >= AT_STEP for request in batch):
                self._fail(batch, "denoise_step")
            return denoise_step(batch, *args)

        def failing_decode(request: Any) -> Any:
            self._fail([request], "post_decode")
            return post_decode(request)

        model.denoise_step, model.post_decode = failing_step, failing_decode

    def _fail(self, batch: Any, method: str) -> None:
        if any(request.params.prompt == fault(self.rank, method) for request in batch):
            raise RuntimeError("injected failure")
