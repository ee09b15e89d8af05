# SPDX-License-Identifier: Apache-2.0
"""The runner offers everything that vLLM's worker asks of one: read from the worker's source, so it
follows vLLM.

Here names; with which arguments the worker calls them is held by tests/seams/test_called_on_us.py.
"""

import inspect
import re

import pytest
import torch
from vllm.v1.worker import gpu_worker

from vllm_omni.worker.diffusion.runner import DiffusionGPUModelRunner
from vllm_omni.worker.diffusion.surface import RunnerSurface

# Paths that a diffusion worker can never take, each with the reason.
UNREACHABLE = {
    "_init_kv_zero_meta": "guarded by hasattr and by needs_kv_cache_zeroing, which needs a "
    "KV group",
    "uniform_decode_query_len": "read with a default",
    "eplb": "compile_or_warm_up_model of the V2 runner only (0.33), which DiffusionWorkerMixin "
    "overrides",
    "kv_caches": "CPUWorker.compile_or_warm_up_model only, which DiffusionWorkerMixin overrides",
}


def used_by_worker() -> list[str]:
    source = inspect.getsource(gpu_worker)
    return sorted(set(re.findall(r"model_runner\.([A-Za-z_]\w*)", source)))


def test_the_pattern_still_finds_the_surface() -> None:
    """If vLLM renames the attribute, this test must fail instead of finding nothing to check."""
    assert {"execute_model", "load_model", "get_kv_cache_spec"} <= set(used_by_worker())


@pytest.mark.parametrize("name", [name for name in used_by_worker() if name not in UNREACHABLE])
def test_every_attribute_the_worker_uses_exists(name: str) -> None:
    """Methods on the class, attributes assigned in __init__ or load_model."""
    assigned = inspect.getsource(DiffusionGPUModelRunner)
    module_like = name in {"GPUModelRunner"} or f"model_runner.{name} import" in inspect.getsource(
        gpu_worker
    )
    assert module_like or hasattr(DiffusionGPUModelRunner, name) or f"self.{name}" in assigned


def test_there_is_nothing_to_capture_to_profile_or_to_run_idly() -> None:
    """Requests reach vLLM's endpoints as those of a plugin, and an idle rank answers on its own
    device.
    """
    surface = RunnerSurface()
    surface.device = torch.device("meta")
    assert surface.get_supported_tasks() == ("plugin",)
    assert surface.get_kv_cache_spec() == surface.get_encoder_timing_stats() == {}
    assert (
        surface.profile_cudagraph_memory(),
        surface.capture_model(),
        surface.needs_cudagraph_capture(),
    ) == (
        0,
        0,
        False,
    )
    for empty in surface._dummy_run():
        assert (empty.numel(), empty.device.type) == (0, "meta")
