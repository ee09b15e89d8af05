# SPDX-License-Identifier: Apache-2.0
"""Diffusion worker for CPUs. Import this module only if vLLM's platform is CPU (see
`vllm_omni.worker`).
"""

import logging
import os
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.utils.cpu_resource_utils import get_allowed_cpu_list
from vllm.utils.torch_utils import available_cpu_count
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_omni.compat import share_memory_nodes
from vllm_omni.worker.diffusion.worker import DiffusionWorkerMixin

logger = logging.getLogger("vllm." + __name__)


class DiffusionCPUWorker(DiffusionWorkerMixin, CPUWorker):  # type: ignore[misc]
    """vLLM's CPU worker with the diffusion runner. Sleep does nothing, as in stock vLLM."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        share_memory_nodes(vllm_config.parallel_config)
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        if "OMP_NUM_THREADS" not in os.environ:  # neither the user nor vLLM's binding set a number
            torch.set_num_threads(num_cores())
        super().init_device()  # afterwards, vLLM prevents changes to the number of threads
        logger.info("this rank uses %d CPU threads", torch.get_num_threads())
        self.model_runner = self._make_model_runner()  # because CPUWorker hard-codes its runner

    def cpu_threads(self) -> dict[str, int]:
        """Return the number of CPU threads and the pid of this rank, for
        `collective_rpc("cpu_threads")`.
        """
        return {"threads": torch.get_num_threads(), "pid": os.getpid()}


def num_cores() -> int:
    """Return the number of physical cores that this process can use."""
    allowed = get_allowed_cpu_list()
    return max(
        1, min(len({(cpu.numa_node, cpu.physical_core) for cpu in allowed}), available_cpu_count())
    )
