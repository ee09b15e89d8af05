# SPDX-License-Identifier: Apache-2.0
"""`MemoryBudget`: the memory that the sessions on one rank may use.

vLLM profiles memory only for models with KV cache groups. A diffusion runner has no such groups, so
this module computes the budget: the fraction `--gpu-memory-utilization` of the GPU's memory, minus
the weights, and minus the peak of a warm-up chunk of the largest shape. If
`--kv-cache-memory-bytes` is given, its value is the budget, as it is for vLLM's own cache. As in
vLLM's profiling, memory that was in use before this rank's worker started (for example by another
engine on the same GPU) is not counted as used by this rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
from vllm.config import VllmConfig


class MemoryBudget:
    """Computes the memory for sessions on one rank.

    Args:
        vllm_config: Configuration of the engine.
        device: Device of the rank.
        used_before: Number of bytes in use on the device after the device and the process groups
            were set up, but before the worker loaded anything.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, used_before: int = 0) -> None:
        self._cache_config = vllm_config.cache_config
        self._device = device
        self._used_before = used_before
        self._peak_bytes = 0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Measure the peak memory, including weights, while the body of the `with` statement runs.
        The body must run the largest shape.
        """
        if self._device.type != "cuda":
            yield
            return
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        outside_torch = total - free - torch.cuda.memory_reserved(self._device) - self._used_before
        # `outside_torch` is negative if another process has freed memory in the meantime.
        torch_peak = torch.cuda.max_memory_allocated(self._device)
        self._peak_bytes = torch_peak + max(0, outside_torch)
        torch.cuda.empty_cache()
        allocated = torch.cuda.memory_allocated(self._device)
        # CUDA graphs use this memory while they run, so it is not available for anything else.
        self._peak_bytes += torch.cuda.memory_reserved(self._device) - allocated
        _make_allocator_retain(torch_peak - allocated, self._device)

    def session_bytes(
        self, warm_up_session_bytes: int, configured: int | None, growing_bytes: int = 0
    ) -> int:
        """Return the number of bytes that all sessions together may use.

        Args:
            warm_up_session_bytes: Size in bytes of a session of the largest shape.
            configured: Value of `omni.max_session_bytes`.
            growing_bytes: Number of bytes of the warm-up session that are not included in the
                measured peak, because they were allocated outside torch and freed with the session.

        Raises:
            ValueError: The memory is not sufficient for one session of the largest shape.
        """
        available = self._available(warm_up_session_bytes - growing_bytes)
        budget = available if configured is None else min(configured, available)
        if budget < warm_up_session_bytes:
            raise ValueError(
                f"one session of the largest shape needs {warm_up_session_bytes / 2**30:.2f} GiB, "
                "but sessions may "
                f"hold {budget / 2**30:.2f} GiB: lower omni.height/width or the window, raise "
                "--gpu-memory-utilization or omni.max_session_bytes"
            )
        return budget

    def _available(self, bytes_in_peak: int) -> int:
        # The value is set by the flag or by VLLM_CPU_KVCACHE_SPACE.
        if self._cache_config.kv_cache_memory_bytes is not None:
            return int(self._cache_config.kv_cache_memory_bytes)
        if self._device.type == "cuda":
            total = torch.cuda.get_device_properties(self._device).total_memory
            allowed = int(total * self._cache_config.gpu_memory_utilization)
            return allowed - (self._peak_bytes - bytes_in_peak)
        return psutil.virtual_memory().available // 2


def _make_allocator_retain(nbytes: int, device: torch.device) -> None:
    """Allocate as much memory as the warm-up needed and free it, so that torch's allocator retains
    it.

    The first session then does not have to wait for `cudaMalloc`, which takes 40 ms for 11 GiB.
    """
    if nbytes > 0:
        torch.empty(nbytes, dtype=torch.uint8, device=device)
