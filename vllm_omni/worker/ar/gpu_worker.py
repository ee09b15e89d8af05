# SPDX-License-Identifier: Apache-2.0
"""AR worker for CUDA: vLLM's worker, with the AR mixin for the runner generation that vLLM
selects.
"""

import functools
from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from vllm_omni.worker.ar.runner import ARModelRunnerV1Mixin, ARModelRunnerV2Mixin
from vllm_omni.worker.ar.worker import ARWorkerMixin


@functools.cache
def first_generation_runner() -> type[Any]:
    """Return the class of the V1 runner.

    As in vLLM itself, the runner is imported on the first call.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    class ARGPUModelRunner(ARModelRunnerV1Mixin, GPUModelRunner):  # type: ignore[misc]
        pass

    return ARGPUModelRunner


class ARGPUWorker(ARWorkerMixin, Worker):
    def _make_model_runner(self) -> Any:
        assert self.device is not None
        if self.vllm_config.is_mm_encoder_only:
            raise ValueError(
                "an encoder-only instance generates nothing: run it with vLLM's own worker"
            )
        if self.use_v2_model_runner:
            from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2

            class ARGPUModelRunnerV2(ARModelRunnerV2Mixin, GPUModelRunnerV2):
                pass

            return ARGPUModelRunnerV2(self.vllm_config, self.device)
        return first_generation_runner()(self.vllm_config, self.device)
