# SPDX-License-Identifier: Apache-2.0
"""The diffusion worker on CUDA."""

import os
from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker

from vllm_omni.worker.diffusion.worker import DiffusionWorkerMixin


class DiffusionGPUWorker(DiffusionWorkerMixin, Worker):
    """Stock CUDA worker with the diffusion runner.

    Sleep level 1 keeps sessions on the host and brings them back; level 2 drops weights, so it drops sessions too.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A pass of a wide network is some 1700 kernels, and the host waits while 1024 are queued: a chunk's result,
        # which leaves when its clean pass is launched, waited for much of it. Read when the CUDA context is made.
        os.environ.setdefault("CUDA_SCALE_LAUNCH_QUEUES", "4x")
        if self.parallel_config.pipeline_parallel_size > 1:
            # Receives from other stages wait on the device, and streams that share a hardware queue wait for one
            # another: 8, the default, are fewer than a stage has streams. Read when the CUDA context is made.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        if not self.vllm_config.model_config.enable_sleep_mode:
            # A decoder's buffers of many sizes come and go beside tens of GiB that stay: without this the allocator
            # holds 6 GiB more than it uses. Read when torch first allocates on the device; sleep mode has its own pool.
            os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

    def _used_before(self) -> int:
        return self.init_snapshot.total_memory - self.init_snapshot.free_memory

    def sleep(self, level: int = 1) -> None:
        torch.cuda.synchronize(self.device)  # a result may still be decoding
        if level == 1:
            self.model_runner.sessions.to("cpu")
        else:
            self.model_runner.sessions.close_all()
            self.model_runner.sessions.trim_kept(0)
        super().sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        super().wake_up(tags)
        if tags is None or "weights" in tags:
            self.model_runner.sessions.to(self.device)
