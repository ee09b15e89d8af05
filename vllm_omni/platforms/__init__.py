# SPDX-License-Identifier: Apache-2.0
"""The `vllm.platform_plugins` entry point: allows Ray workers on machines without accelerators.

vLLM's Ray executors refuse a platform without a Ray resource, and its CPU platform has none. With
`VLLM_OMNI_RAY_ON_CPU=1` (on the Ray nodes and on the server) and a CPU build of vLLM, the platform
is vLLM's CPU platform plus a resource. Otherwise vLLM selects its platform as usual. vLLM calls
this in every process, so this module imports nothing heavy.
"""

import importlib.metadata
import os
from typing import Final

VARIABLE: Final = "VLLM_OMNI_RAY_ON_CPU"


def platform() -> str | None:
    """Return the platform class for this process. None leaves the choice to vLLM."""
    requested = os.environ.get(VARIABLE) == "1"
    return "vllm_omni.platforms.ray_cpu.RayCpuPlatform" if requested and is_cpu_build() else None


def is_cpu_build() -> bool:
    """Return whether the installed vLLM is a CPU build, determined from its version in the same way
    as in vLLM.
    """
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
