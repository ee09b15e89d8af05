# SPDX-License-Identifier: Apache-2.0
"""`SharedGPUWorker`: more ranks than GPUs, to try a split, or to test one, on a machine that is too small for it.

NCCL refuses two ranks of one host on one device. Ranks that say they are hosts of their own it connects by sockets:
slow, and kernels of several processes take turns, but what each rank issues, on which streams and in which order, is
what it issues on a GPU of its own. Held by tests/worker/test_shared_gpu_worker.py and, where a machine has fewer GPUs
than an engine has ranks, by every test of tests/engine/.
"""

import os

import torch

from vllm_omni.worker.diffusion_gpu_worker import DiffusionGPUWorker


class SharedGPUWorker(DiffusionGPUWorker):
    """`DiffusionGPUWorker` whose ranks are spread over the GPUs there are, several on each.

    Needs `--distributed-executor-backend mp` (else vLLM counts GPUs and refuses) and a `--gpu-memory-utilization` that
    leaves room for the other ranks of a GPU. One node only.
    """

    def init_device(self) -> None:
        os.environ |= {
            "NCCL_HOSTID": f"rank{self.rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
            "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        }
        self.parallel_config.disable_custom_all_reduce = True  # as symmetric memory: it writes to another GPU's memory
        self.local_rank %= torch.accelerator.device_count()
        super().init_device()
