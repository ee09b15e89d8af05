# SPDX-License-Identifier: Apache-2.0
"""The runner has every attribute that vLLM's worker uses. The tests extract these attributes from
the worker's source.

tests/seams/test_called_on_us.py checks the arguments of the calls.
"""

import inspect
import re

import pytest
import torch
from vllm.v1.worker import gpu_worker

from vllm_omni.worker.diffusion.runner import DiffusionGPUModelRunner
from vllm_omni.worker.diffusion.surface import RunnerSurface

# Attributes used only on code paths that a diffusion worker cannot reach, and the reason for each.
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


def test_the_pattern_finds_the_attributes() -> None:
    """The pattern finds attributes in vLLM's source. If vLLM renamed `model_runner`, the pattern
    would find no names, and this test would fail.
    """
    assert {"execute_model", "load_model", "get_kv_cache_spec"} <= set(used_by_worker())


@pytest.mark.parametrize("name", [name for name in used_by_worker() if name not in UNREACHABLE])
def test_every_attribute_that_the_worker_uses_exists(name: str) -> None:
    """Every attribute that the worker uses is a method of the class or is assigned in `__init__` or
    `load_model`.
    """
    assigned = inspect.getsource(DiffusionGPUModelRunner)
    module_like = name in {"GPUModelRunner"} or f"model_runner.{name} import" in inspect.getsource(
        gpu_worker
    )
    assert module_like or hasattr(DiffusionGPUModelRunner, name) or f"self.{name}" in assigned


def test_the_surface_reports_no_graphs_and_no_kv_cache() -> None:
    """The runner supports the `plugin` task, captures no CUDA graphs, and returns empty tensors for
    a dummy run.
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
