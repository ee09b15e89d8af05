# SPDX-License-Identifier: Apache-2.0
"""The diffusion worker on CPU. Import only where vLLM's platform is CPU (see `vllm_omni.worker`)."""

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_omni.worker.diffusion_worker import DiffusionWorkerMixin


class DiffusionCPUWorker(DiffusionWorkerMixin, CPUWorker):  # type: ignore[misc]
    """Stock CPU worker with the diffusion runner; sleep is a no-op there, as in stock vLLM."""

    def init_device(self) -> None:
        super().init_device()
        self.model_runner = self._make_model_runner()  # CPUWorker names its runner class in init_device
