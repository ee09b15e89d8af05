# SPDX-License-Identifier: Apache-2.0
"""Worker classes for `--worker-cls`. Each name resolves to the class for the current platform.

A name resolves on first use, because vLLM's CPU worker modules patch torch when they are imported
and must never be imported in a CUDA process.
"""

import importlib
from typing import Any

_CLASSES = {
    "ARGPUWorker": ("ar.gpu_worker:ARGPUWorker", "ar.cpu_worker:ARCPUWorker"),
    "DiffusionGPUWorker": (
        "diffusion.gpu_worker:DiffusionGPUWorker",
        "diffusion.cpu_worker:DiffusionCPUWorker",
    ),
    "SharedGPUWorker": (
        "diffusion.shared_gpu_worker:SharedGPUWorker",
        "diffusion.cpu_worker:DiffusionCPUWorker",
    ),
}
"""For each name, the worker class for GPUs and the worker class for CPUs."""
__all__ = ["ARGPUWorker", "DiffusionGPUWorker", "SharedGPUWorker"]


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.platforms import current_platform

    module, found = _CLASSES[name][current_platform.is_cpu()].split(":")
    return getattr(importlib.import_module(f"{__name__}.{module}"), found)
