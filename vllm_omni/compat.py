# SPDX-License-Identifier: Apache-2.0
"""Where the supported versions of vLLM differ for us: one entry each, with why, and when it can go.

Supported are the last two minors (`MIN_VLLM` up to, not including, `NEXT_VLLM`; pyproject.toml says the same). A
difference belongs here if code would otherwise ask for a version or for an attribute's existence; nothing else of the
package does. Code that both versions accept needs no entry: a method that only the newer one calls, or a parameter
with a default that only the newer one passes, is simply there. docs/architecture/compatibility.md lists those, and
how the versions were tried. Nothing of vLLM is changed. Held by tests/test_compat.py and tests/seams/.
"""

import importlib
from typing import Any

MIN_VLLM = (0, 32)
NEXT_VLLM = (0, 34)
"""The first minor that was not tried."""


def is_supported(version: str) -> bool:
    """Whether a version of vLLM ("0.33.0", "0.32.0+cpu") is one of those this package was tried with."""
    major, minor, *_ = (*version.split("."), "", "")
    return major.isdecimal() and minor.isdecimal() and MIN_VLLM <= (int(major), int(minor)) < NEXT_VLLM


def supported_range() -> str:
    """The supported versions as pip writes them."""
    return f">={MIN_VLLM[0]}.{MIN_VLLM[1]},<{NEXT_VLLM[0]}.{NEXT_VLLM[1]}"


def cli_env_setup() -> None:
    """Prepare this process as vLLM's own command does before it parses its arguments.

    Why: 0.33 keeps `cli_env_setup` in `entrypoints.common.startup`, 0.32 in `entrypoints.serve.utils.api_utils`.
    Remove when 0.32 is no longer supported: import it where it is used.
    """
    try:
        module = importlib.import_module("vllm.entrypoints.common.startup")
    except ModuleNotFoundError:
        module = importlib.import_module("vllm.entrypoints.serve.utils.api_utils")
    module.cli_env_setup()


def set_profiler_kwargs(profiler: Any, profiler_kwargs: dict[str, Any] | None) -> None:
    """Give vLLM's worker profiler the arguments of one session.

    Why: 0.33 passes `profiler_kwargs` with a start and has a method for it; 0.32 knows neither and passes none.
    Remove when 0.32 is no longer supported: call the method. Raises RuntimeError rather than drop arguments.
    """
    setter = getattr(profiler, "set_profiler_kwargs", None)
    if setter is not None:
        setter(profiler_kwargs)
    elif profiler_kwargs:
        raise RuntimeError(f"this version of vLLM has no profiler_kwargs, got {sorted(profiler_kwargs)}")


def share_memory_nodes(parallel_config: Any) -> None:
    """Let a data-parallel rank on a CPU use any memory node if the machine has none of those it was given.

    Why: vLLM gives the n-th rank the n-th node. 0.33's CPU worker uses no other and dies with IndexError where there
    are more ranks than nodes; 0.32's never read its node. Call it before vLLM's CPU worker is set up.
    Remove when vLLM's CPU worker starts there by itself.
    """
    from vllm.utils.cpu_resource_utils import get_memory_affinity

    given = parallel_config.assigned_physical_gpu_ids
    if given is not None and set(given).isdisjoint(get_memory_affinity()):
        parallel_config.assigned_physical_gpu_ids = None


class WrapsAsyncOutput:
    """Mix in before `AsyncModelRunnerOutput`: an output around another one, `_inner`, hands on the connector's part.

    Why: 0.33 made `get_kv_connector_output` abstract and asks for it when `get_output` fails; 0.32 knows no such
    method. Remove when 0.32 is no longer supported: define it in the wrapper.
    """

    _inner: Any

    def get_kv_connector_output(self) -> Any:
        return self._inner.get_kv_connector_output()
