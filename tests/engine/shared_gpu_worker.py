# SPDX-License-Identifier: Apache-2.0
"""A worker for `--worker-cls` with which the ranks of an engine share GPUs, where a machine has fewer GPUs than ranks.

NCCL refuses two ranks of one host on one device. Ranks that say they are hosts of their own it connects by sockets:
slow, and kernels of several processes take turns, but what each rank issues, on which streams and in which order, is
what it issues on a GPU of its own.
"""

import os

import torch

from vllm_omni.worker import DiffusionGPUWorker


class SharedGPUWorker(DiffusionGPUWorker):
    def init_device(self) -> None:
        os.environ |= {"NCCL_HOSTID": f"rank{self.rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"
        self.local_rank %= torch.accelerator.device_count()
        super().init_device()
