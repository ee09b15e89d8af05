# SPDX-License-Identifier: Apache-2.0
"""The diffusion worker on CPU. Import only where vLLM's platform is CPU (see `vllm_omni.worker`).

Held by tests/engine/test_cpu_threads_of_worker.py.
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
    """Stock CPU worker with the diffusion runner; sleep is a no-op there, as in stock vLLM."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        share_memory_nodes(vllm_config.parallel_config)
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        if "OMP_NUM_THREADS" not in os.environ:  # neither the user nor vLLM's binding has said how many
            torch.set_num_threads(num_cores())
        super().init_device()  # from here on vLLM lets nobody change the number
        logger.info("this rank computes with %d threads", torch.get_num_threads())
        self.model_runner = self._make_model_runner()  # CPUWorker names its runner class in init_device

    def cpu_threads(self) -> dict[str, int]:
        """`collective_rpc("cpu_threads")`: how many threads compute here, and in which process."""
        return {"threads": torch.get_num_threads(), "pid": os.getpid()}


def num_cores() -> int:
    """Cores this process may use; of two hardware threads on one core, one counts."""
    allowed = get_allowed_cpu_list()
    return max(1, min(len({(cpu.numa_node, cpu.physical_core) for cpu in allowed}), available_cpu_count()))
