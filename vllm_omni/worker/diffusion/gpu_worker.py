# SPDX-License-Identifier: Apache-2.0
"""Diffusion worker for CUDA."""

import os
from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker

from vllm_omni.worker.diffusion.worker import DiffusionWorkerMixin


class DiffusionGPUWorker(DiffusionWorkerMixin, Worker):
    """vLLM's CUDA worker with the diffusion runner.

    Sleep level 1 moves sessions to the host, and waking up moves them back. Sleep level 2 discards
    the weights and therefore also the sessions.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A forward pass of a large network launches about 1700 kernels, but by default the host
        # blocks when 1024 are queued. The result of a chunk is delivered after its clean-context
        # pass has been launched, so the result would wait for much of that pass. The variable is
        # read when the CUDA context is created.
        os.environ.setdefault("CUDA_SCALE_LAUNCH_QUEUES", "4x")
        if self.parallel_config.pipeline_parallel_size > 1:
            # Receive operations from other stages wait on the device, and streams that share a
            # hardware queue wait for each other. By default there are 8 hardware queues, but a
            # stage has more streams. The variable is read when the CUDA context is created.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        if not self.vllm_config.model_config.enable_sleep_mode:
            # A decoder allocates and frees buffers of many sizes, while tens of GiB of other memory
            # stay allocated. Without expandable segments, fragmentation costs 6 GiB. The variable
            # is read at torch's first allocation on the device. Sleep mode has its own memory pool.
            os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

    def _used_before(self) -> int:
        return self.init_snapshot.total_memory - self.init_snapshot.free_memory

    def sleep(self, level: int = 1) -> None:
        torch.cuda.synchronize(self.device)  # because a decode may still be running
        if level == 1:
            self.model_runner.sessions.to("cpu")
        else:
            self.model_runner.sessions.close_all()
            self.model_runner.sessions.trim_pool(0)
        super().sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        super().wake_up(tags)
        if tags is None or "weights" in tags:
            self.model_runner.sessions.to(self.device)
