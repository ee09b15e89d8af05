# SPDX-License-Identifier: Apache-2.0
"""Workers for `--worker-cls`. Each name works on the platform at hand.

Names resolve on first use: vLLM's CPU worker modules patch torch when imported, so they must never be imported in a
CUDA process.
"""

from typing import Any

__all__ = ["ARGPUWorker", "DiffusionGPUWorker", "SharedGPUWorker"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.platforms import current_platform

    if name == "ARGPUWorker":
        if current_platform.is_cpu():
            from vllm_omni.worker.ar.cpu_worker import ARCPUWorker

            return ARCPUWorker
        from vllm_omni.worker.ar.gpu_worker import ARGPUWorker

        return ARGPUWorker
    if current_platform.is_cpu():
        from vllm_omni.worker.diffusion.cpu_worker import DiffusionCPUWorker

        return DiffusionCPUWorker
    if name == "SharedGPUWorker":
        from vllm_omni.worker.diffusion.shared_gpu_worker import SharedGPUWorker

        return SharedGPUWorker
    from vllm_omni.worker.diffusion.gpu_worker import DiffusionGPUWorker

    return DiffusionGPUWorker
