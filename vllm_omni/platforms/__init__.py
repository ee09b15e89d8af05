# SPDX-License-Identifier: Apache-2.0
"""The `vllm.platform_plugins` entry point: allows Ray workers on machines without accelerators.

vLLM's Ray executors reject a platform without a Ray resource, such as vLLM's CPU platform. If
`VLLM_OMNI_RAY_ON_CPU=1` is set (on the Ray nodes and on the server) and vLLM is a CPU build, this
package provides vLLM's CPU platform with a Ray resource. In all other cases, vLLM selects its
platform as usual. vLLM calls the entry point in every process, so this module imports nothing
heavy.
"""

import importlib.metadata
import os
from typing import Final

VARIABLE: Final = "VLLM_OMNI_RAY_ON_CPU"


def platform() -> str | None:
    """Return the name of the platform class for this process, or None to leave the choice to
    vLLM.
    """
    requested = os.environ.get(VARIABLE) == "1"
    return "vllm_omni.platforms.ray_cpu.RayCpuPlatform" if requested and is_cpu_build() else None


def is_cpu_build() -> bool:
    """Return whether the installed vLLM is a CPU build. Like vLLM's own check, this check uses the
    version string.
    """
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
