# SPDX-License-Identifier: Apache-2.0
"""Provides `ARGPUModelRunner` at the module path that other integrations import.

The class is the V1 runner for language models on the current platform.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "ARGPUModelRunner":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm_omni.worker.ar.cpu_worker import ARCPUModelRunner

        return ARCPUModelRunner
    from vllm_omni.worker.ar.gpu_worker import first_generation_runner

    return first_generation_runner()
