# SPDX-License-Identifier: Apache-2.0
"""`SharedGPUWorker`: more ranks than GPUs, to try a split, or to test one, on a machine that is too small for it.

NCCL refuses two ranks of one host on one device. If each rank has its own NCCL_HOSTID, it connects them by sockets:
slow, and kernels of several processes take turns, but each rank issues the same kernels and transfers, on the same
streams and in the same order, as on a GPU of its own. Held by tests/worker/test_shared_gpu_worker.py and, where a
machine has fewer GPUs than an engine has ranks, by every test of tests/engine/.
"""

import math
import os
from typing import Any

import torch

from vllm_omni.worker.diffusion.gpu_worker import DiffusionGPUWorker


class SharedGPUWorker(DiffusionGPUWorker):
    """`DiffusionGPUWorker` whose ranks are spread over the GPUs there are, several on each if there are too few.

    Needs `--distributed-executor-backend mp`, else vLLM counts GPUs and refuses. `--gpu-memory-utilization` is of a
    GPU, for all its ranks together. One engine on one node: raises ValueError with data parallel.
    """

    def init_device(self) -> None:
        if self.parallel_config.data_parallel_size > 1:
            raise ValueError("SharedGPUWorker spreads the ranks of one engine: drop --data-parallel-size")
        gpus = torch.accelerator.device_count()
        self._ranks_of_a_gpu = math.ceil(self.parallel_config.world_size / gpus)
        if self._ranks_of_a_gpu > 1:
            os.environ |= {
                "NCCL_HOSTID": f"rank{self.rank}",
                "NCCL_SOCKET_IFNAME": "lo",
                "NCCL_IB_DISABLE": "1",
                "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
            }
            self.parallel_config.disable_custom_all_reduce = True  # it, too, writes to another GPU's memory
        self.local_rank %= gpus
        super().init_device()

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        sessions = self.model_runner.sessions  # each rank has counted the GPU's free memory as its own
        sessions.max_bytes = sessions.max_bytes and sessions.max_bytes // self._ranks_of_a_gpu
        return times
