# SPDX-License-Identifier: Apache-2.0
"""`SharedGPUWorker`: runs more ranks than GPUs, to test a parallel layout on a smaller machine.

NCCL refuses to run two ranks of one host on one device. If each rank has a different NCCL_HOSTID,
NCCL accepts the ranks and connects them through sockets. Sockets are slow, and the processes'
kernels are time-sliced. However, each rank issues the same kernels and transfers as it would on a
separate GPU, on the same streams and in the same order. tests/engine/ uses this worker if a machine
has fewer GPUs than an engine has ranks.
"""

import math
import os
from typing import Any

import torch

from vllm_omni.worker.diffusion.gpu_worker import DiffusionGPUWorker


class SharedGPUWorker(DiffusionGPUWorker):
    """`DiffusionGPUWorker` that places several ranks on a GPU if there are too few GPUs.

    This worker requires `--distributed-executor-backend mp`; with other backends, vLLM counts the
    GPUs and refuses to start. `--gpu-memory-utilization` limits the total memory use of all ranks
    on a GPU. Data parallelism and several nodes are not supported.
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
            # vLLM's custom all-reduce writes to another GPU's memory.
            self.parallel_config.disable_custom_all_reduce = True
        self.local_rank %= gpus
        super().init_device()

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        # Each rank has counted all of the GPU's free memory as its own.
        sessions = self.model_runner.sessions
        sessions.max_bytes = sessions.max_bytes and sessions.max_bytes // self._ranks_of_a_gpu
        return times
