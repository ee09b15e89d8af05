# SPDX-License-Identifier: Apache-2.0
"""Differences between the supported vLLM versions. Each function and class in this module states
why it exists and when it can be removed.

The package supports the last two minor versions of vLLM: `MIN_VLLM` inclusive to `NEXT_VLLM`
exclusive, as in pyproject.toml. Code that checks the vLLM version, or whether an attribute exists,
belongs in this module; no other module makes such checks. Code that works with both versions needs
no entry here. Examples are a method that only the newer version calls, and a parameter with a
default value that only the newer version passes. docs/architecture/compatibility.md lists such code
and describes how the versions were tested. This module does not modify vLLM.
"""

import importlib
from typing import Any

MIN_VLLM = (0, 32)
NEXT_VLLM = (0, 34)
"""First minor vLLM version that has not been tested."""


def is_supported(version: str) -> bool:
    """Return whether a vLLM version ("0.33.0", "0.32.0+cpu") is one of the tested versions."""
    major, minor, *_ = (*version.split("."), "", "")
    return (
        major.isdecimal() and minor.isdecimal() and MIN_VLLM <= (int(major), int(minor)) < NEXT_VLLM
    )


def supported_range() -> str:
    """Return the supported vLLM versions as a pip version specifier."""
    return f">={MIN_VLLM[0]}.{MIN_VLLM[1]},<{NEXT_VLLM[0]}.{NEXT_VLLM[1]}"


def cli_env_setup() -> None:
    """Prepare this process in the same way that vLLM's command line does before parsing its
    arguments.

    Why: vLLM 0.33 has `cli_env_setup` in `entrypoints.common.startup`; vLLM 0.32 has it in
    `entrypoints.serve.utils.api_utils`. When vLLM 0.32 is no longer supported, import the function
    directly at its call site.
    """
    try:
        module = importlib.import_module("vllm.entrypoints.common.startup")
    except ModuleNotFoundError:
        module = importlib.import_module("vllm.entrypoints.serve.utils.api_utils")
    module.cli_env_setup()


def set_profiler_kwargs(profiler: Any, profiler_kwargs: dict[str, Any] | None) -> None:
    """Pass a profiling session's arguments to vLLM's worker profiler.

    Why: vLLM 0.33 passes `profiler_kwargs` when profiling starts, and its profiler has a setter for
    them; vLLM 0.32 has neither. When vLLM 0.32 is no longer supported, call the setter directly.

    Args:
        profiler: vLLM's worker profiler.
        profiler_kwargs: The profiling session's arguments, if any.

    Raises:
        RuntimeError: Arguments are given, but the installed vLLM version does not support them.
    """
    setter = getattr(profiler, "set_profiler_kwargs", None)
    if setter is not None:
        setter(profiler_kwargs)
    elif profiler_kwargs:
        raise RuntimeError(
            f"this version of vLLM has no profiler_kwargs, got {sorted(profiler_kwargs)}"
        )


def share_memory_nodes(parallel_config: Any) -> None:
    """Let a data-parallel CPU rank use any NUMA node if its assigned nodes do not exist.

    Call this function before vLLM's CPU worker is set up.

    Why: vLLM assigns NUMA node n to rank n. In vLLM 0.33, the CPU worker uses only that node and
    fails with IndexError if there are more ranks than nodes. vLLM 0.32 does not read the
    assignment. Remove this function once vLLM's CPU worker can start with more ranks than nodes.
    """
    from vllm.utils.cpu_resource_utils import get_memory_affinity

    given = parallel_config.assigned_physical_gpu_ids
    if given is not None and set(given).isdisjoint(get_memory_affinity()):
        parallel_config.assigned_physical_gpu_ids = None


class WrapsAsyncOutput:
    """Mixin for `AsyncModelRunnerOutput` wrappers that forwards the KV connector's output.

    The wrapper class lists this mixin as its first base class and stores the wrapped output in
    `_inner`.

    Why: in vLLM 0.33, `get_kv_connector_output` is abstract and is called when `get_output` fails;
    vLLM 0.32 does not have this method. When vLLM 0.32 is no longer supported, define the method in
    the wrapper.
    """

    _inner: Any

    def get_kv_connector_output(self) -> Any:
        return self._inner.get_kv_connector_output()
