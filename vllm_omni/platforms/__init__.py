# SPDX-License-Identifier: Apache-2.0
"""The `vllm.platform_plugins` entry point: lets Ray place workers on machines without accelerators, when asked to.

vLLM's Ray executors refuse a platform without a Ray resource, and its CPU platform names none. With the variable
`VLLM_OMNI_RAY_ON_CPU=1` (for the Ray nodes as well as for the server) and a CPU build of vLLM, the platform is stock
vLLM's CPU platform plus that name. Without the variable, or on any other build, vLLM chooses its platform as ever. vLLM
calls this in every process: it imports nothing heavy. Held by tests/test_platforms.py and tests/engine/test_ray.py.
"""

import importlib.metadata
import os
from typing import Final

VARIABLE: Final = "VLLM_OMNI_RAY_ON_CPU"


def platform() -> str | None:
    """The platform class for this process; None = not ours to choose."""
    asked = os.environ.get(VARIABLE) == "1"
    return "vllm_omni.platforms.ray_cpu.RayCpuPlatform" if asked and is_cpu_build() else None


def is_cpu_build() -> bool:
    """Whether the installed vLLM is a CPU build, as vLLM itself decides: by its version."""
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
