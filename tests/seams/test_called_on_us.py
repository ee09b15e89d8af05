# SPDX-License-Identifier: Apache-2.0
"""This package's classes that do not inherit from vLLM's classes accept the calls that vLLM makes
to them.
"""

import ast
import inspect
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from call_shapes import (
    CallShape,
    calls_of_attribute,
    function_of,
    methods,
    refused_calls,
    remote_calls,
)
from vllm.v1.engine import core
from vllm.v1.executor import abstract
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.worker_base import WorkerBase

from vllm_omni.executor.diffusers_pipeline_executor import PipelineWorker
from vllm_omni.worker.diffusion.runner import DiffusionGPUModelRunner
from vllm_omni.worker.diffusion.worker import DiffusionWorkerMixin

NOT_OF_THE_RUNNER = {
    "_init_kv_zero_meta": "guarded by hasattr and by needs_kv_cache_zeroing, which needs a "
    "KV group",
}
"""Calls on `model_runner` that cannot occur with the diffusion worker, each with the reason."""

ONLY_IN_WARM_UP = {"_compile_or_warm_up_model"}
"""Methods of vLLM's worker whose only callers are methods that the diffusion worker replaces."""

NOT_OF_A_PIPELINE = {
    "save_sharded_state": "the executor refuses it by name",
    "shutdown": "the executor calls it directly",
    "profile": "the executor calls it directly",
    "compute_weight_checksums": "RL weight sync; refused by vLLM's own NotImplementedError",
    "sample_tokens": "the executor implements it",
    "execute_model": "the executor calls it directly with the required arguments",
}
"""Worker methods that the diffusers executor never forwards, each with the reason."""

NARROWER_THAN_A_WORKER = {
    "reload_weights": "accepts a directory or no argument and refuses others by name",
    "execute_model": "the executor calls it directly with the required arguments",
    "initialize_from_config": "gets the configs of all ranks, as the wrapper around a worker does, "
    "by position",
}
"""Pipeline worker methods that accept fewer arguments than the methods of the same name in a vLLM
worker, each with the reason.
"""


def worker_methods() -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the methods of vLLM's GPU worker and CPU worker.

    The source files are read and not imported, because a process that tests CUDA must not import
    the CPU worker (tests/helpers/cpu_build.py).
    """
    for name in ("gpu_worker", "cpu_worker"):
        spec = find_spec(f"vllm.v1.worker.{name}")
        assert spec is not None and spec.origin is not None
        yield from methods(ast.parse(Path(spec.origin).read_text()))


def unreplaced_methods() -> Iterator[ast.AST]:
    """Yield the methods of vLLM's workers that a diffusion worker does not override."""
    ours = vars(DiffusionWorkerMixin)
    for method in worker_methods():
        replaced = method.name in ours and f"super().{method.name}(" not in inspect.getsource(
            ours[method.name]
        )
        if not replaced and method.name not in ONLY_IN_WARM_UP:
            yield method


def test_the_runner_accepts_every_call_of_the_worker() -> None:
    """The runner accepts every call that vLLM's two workers make to it in their source: the method
    exists and accepts the positional and keyword arguments.
    """
    refused, seen = {}, set()
    for method in unreplaced_methods():
        for name, shape in calls_of_attribute(method, "model_runner"):
            seen.add(name)
            function = function_of(inspect.getattr_static(DiffusionGPUModelRunner, name, None))
            if name in NOT_OF_THE_RUNNER:
                continue
            reason = (
                "no such method"
                if function is None
                else shape.refusal(inspect.signature(function), bound=1)
            )
            if reason is not None:
                refused[f"{name}{shape}"] = reason
    assert refused == {}
    assert {"load_model", "execute_model", "get_kv_cache_spec", "reload_weights"} <= seen and len(
        seen
    ) > 15


def test_skipped_methods_are_only_called_by_replaced_ones() -> None:
    """A skipped method is called only by methods that the diffusion worker replaces."""
    callers = {name: set[str]() for name in ONLY_IN_WARM_UP}
    for method in worker_methods():
        for name in ONLY_IN_WARM_UP:
            if f"self.{name}(" in ast.unparse(method):
                callers[name].add(method.name)
    for names in callers.values():
        assert names <= {"compile_or_warm_up_model"}


def test_the_pipeline_worker_accepts_every_remote_call() -> None:
    """The pipeline worker accepts every `collective_rpc` call that vLLM's executor and engine core
    make.
    """
    refused, seen = {}, set()
    for module in (abstract, core):
        for name, shape in remote_calls(ast.parse(inspect.getsource(module))):
            seen.add(name)
            function = function_of(inspect.getattr_static(PipelineWorker, name, None))
            if name in NOT_OF_A_PIPELINE:
                continue
            reason = (
                "no such method"
                if function is None
                else shape.refusal(inspect.signature(function), bound=1)
            )
            if reason is not None:
                refused[f"{name}{shape}"] = reason
    assert refused == {}
    assert {"get_kv_cache_spec", "set_kv_cache_layout", "initialize_from_config", "sleep"} <= seen


def test_the_pipeline_worker_accepts_the_calls_of_a_worker() -> None:
    """If a pipeline worker's method has the same name as a vLLM worker's method, it must accept the
    same calls, because clients call worker methods by name.
    """
    refused, compared = {}, set()
    for name, ours in vars(PipelineWorker).items():
        function = function_of(ours)
        worker = inspect.getattr_static(gpu_worker.Worker, name, None)
        theirs = function_of(worker)
        if (
            function is None
            or theirs is None
            or name.startswith("__")
            or name in NARROWER_THAN_A_WORKER
        ):
            continue
        compared.add(name)
        if reasons := refused_calls(inspect.signature(function), inspect.signature(theirs)):
            refused[name] = reasons
    assert refused == {}
    assert {"set_kv_cache_layout", "profile", "sleep", "wake_up", "add_lora"} <= compared
    assert issubclass(gpu_worker.Worker, WorkerBase)


def test_exemptions_are_needed() -> None:
    """vLLM still calls or defines every exempt name, so no exemption is obsolete."""
    source = ast.parse(inspect.getsource(gpu_worker))
    assert set(NOT_OF_THE_RUNNER) <= {
        name for name, _ in calls_of_attribute(source, "model_runner")
    }
    requested = {
        name
        for module in (abstract, core)
        for name, _ in remote_calls(ast.parse(inspect.getsource(module)))
    }
    assert set(NOT_OF_A_PIPELINE) - {"shutdown", "sample_tokens"} <= requested
    for name, shape in {"set_kv_cache_layout": CallShape(3, ())}.items():
        function = function_of(inspect.getattr_static(PipelineWorker, name))
        assert (
            shape.refusal(inspect.signature(function), bound=1) == "too many positional arguments"
        )
