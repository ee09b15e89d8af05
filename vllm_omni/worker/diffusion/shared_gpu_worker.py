# SPDX-License-Identifier: Apache-2.0
"""`SharedGPUWorker`: runs more ranks than GPUs, to test a parallel layout on a smaller machine.

NCCL refuses two ranks of one host on one device. If each rank has a different NCCL_HOSTID, NCCL
connects them through sockets. This is slow, and kernels of the processes are time-sliced, but each
rank issues the same kernels and transfers, on the same streams and in the same order, as on a
separate GPU. tests/engine/ uses it if a machine has fewer GPUs than an engine has ranks.
"""

import math
import os
from typing import Any

import torch

from vllm_omni.worker.diffusion.gpu_worker import DiffusionGPUWorker


class SharedGPUWorker(DiffusionGPUWorker):
    """`DiffusionGPUWorker` that places several ranks on a GPU if there are too few GPUs.

    Requires `--distributed-executor-backend mp`, because vLLM otherwise counts GPUs and refuses.
    `--gpu-memory-utilization` applies to each GPU, for all of its ranks together. Data parallelism
    and several nodes are not supported.
    """

    def init_device(self) -> None:
        if self.parallel_config.data_parallel_size > 1:
            raise ValueError(
                "SharedGPUWorker supports one engine only: remove --data-parallel-size"
            )
        gpus = torch.accelerator.device_count()
        self._ranks_of_a_gpu = math.ceil(self.parallel_config.world_size / gpus)
        if self._ranks_of_a_gpu > 1:
            os.environ |= {
                "NCCL_HOSTID": f"rank{self.rank}",
                "NCCL_SOCKET_IFNAME": "lo",
                "NCCL_IB_DISABLE": "1",
                "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
            }
            # it writes to another GPU's memory
            self.parallel_config.disable_custom_all_reduce = True
        self.local_rank %= gpus
        super().init_device()

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        # each rank has counted all free memory of the GPU as its own
        sessions = self.model_runner.sessions
        sessions.max_bytes = sessions.max_bytes and sessions.max_bytes // self._ranks_of_a_gpu
        return times
