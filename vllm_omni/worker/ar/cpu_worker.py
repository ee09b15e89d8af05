# SPDX-License-Identifier: Apache-2.0
"""The AR worker on CPU. Import only where vLLM's platform is CPU (see `vllm_omni.worker`)."""

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_omni.compat import share_memory_nodes
from vllm_omni.worker.ar.runner import ARModelRunnerV1Mixin, ARModelRunnerV2Mixin
from vllm_omni.worker.ar.worker import ARWorkerMixin


class ARCPUModelRunner(ARModelRunnerV1Mixin, CPUModelRunner):  # type: ignore[misc]
    """The first-generation runner on CPU."""


class ARCPUWorker(ARWorkerMixin, CPUWorker):  # type: ignore[misc]
    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        share_memory_nodes(vllm_config.parallel_config)
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        super().init_device()
        self.model_runner = self._make_model_runner()  # CPUWorker names its runner class in init_device

    def _make_model_runner(self) -> Any:
        assert self.device is not None
        if self.use_v2_model_runner:
            from vllm.v1.worker.cpu.model_runner import CPUModelRunner as CPUModelRunnerV2

            class ARCPUModelRunnerV2(ARModelRunnerV2Mixin, CPUModelRunnerV2):
                pass

            return ARCPUModelRunnerV2(self.vllm_config, self.device)
        return ARCPUModelRunner(self.vllm_config, self.device)
