# SPDX-License-Identifier: Apache-2.0
"""The diffusion worker on CUDA."""

from vllm.v1.worker.gpu_worker import Worker

from vllm_omni.worker.diffusion_worker import DiffusionWorkerMixin


class DiffusionGPUWorker(DiffusionWorkerMixin, Worker):
    """Stock CUDA worker with the diffusion runner.

    Sleep level 1 keeps sessions on the host and brings them back; level 2 drops weights, so it drops sessions too.
    """

    def sleep(self, level: int = 1) -> None:
        if level == 1:
            self.model_runner.sessions.to("cpu")
        else:
            self.model_runner.sessions.close_all()
        super().sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        super().wake_up(tags)
        if tags is None or "weights" in tags:
            self.model_runner.sessions.to(self.device)
