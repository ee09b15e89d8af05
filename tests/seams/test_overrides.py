# SPDX-License-Identifier: Apache-2.0
"""Every override of an installed vLLM method accepts all calls that the original method accepts."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from functools import cache
from typing import Any

from call_shapes import function_of, refused_calls
from vllm.platforms import current_platform

import vllm_omni

NOT_CALLED_BY_VLLM = {
    "StepPipeline.forward": "the diffusion runner never calls it and documents this",
    **{
        f"{layer}.__init__": (
            "only this package's transformers create it, with a ParallelContext, not vLLM's group"
        )
        for layer in ("ColumnLinear", "MergedLinear", "QKVLinear", "RowLinear", "StackedLinear")
    },
    "LinearPrecision.__init__": "only this package's transformers create it, from vLLM's config",
    "StoredQuantization.__init__": "only the pipeline creates it, from vLLM's config",
}
"""Methods that share their name with a vLLM method but are never called by vLLM, each with the
reason.
"""


@cache
def own_classes() -> dict[str, type]:
    """Return every class in this package, including the runner classes that workers build from a
    mixin and vLLM's runner.
    """
    found: dict[str, type] = {}
    for module_info in pkgutil.walk_packages(vllm_omni.__path__, "vllm_omni."):
        if module_info.name.endswith(".cpu_worker") and not current_platform.is_cpu():
            continue  # tests/helpers/cpu_build.py gives the reason
        module = importlib.import_module(module_info.name)
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == module.__name__:
                found[f"{module.__name__}.{value.__qualname__}"] = value
    return found | {mixed.__name__: mixed for mixed in runners()}


def runners() -> Iterator[type]:
    """Yield the runner classes that the AR workers' `_make_model_runner` builds."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vllm_omni.worker.ar.runner import ARModelRunnerV1Mixin, ARModelRunnerV2Mixin

    yield type("ARGPUModelRunner", (ARModelRunnerV1Mixin, GPUModelRunner), {})
    yield type("ARGPUModelRunnerV2", (ARModelRunnerV2Mixin, GPUModelRunnerV2), {})
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu.model_runner import CPUModelRunner as CPUModelRunnerV2

        yield type("ARCPUModelRunnerV2", (ARModelRunnerV2Mixin, CPUModelRunnerV2), {})


def overrides() -> Iterator[tuple[type, type, str, Any, Any]]:
    """Yield (this package's class, vLLM's class, name, this package's attribute, vLLM's attribute)
    for each override.
    """
    for cls in own_classes().values():
        order = cls.__mro__
        for position, owner in enumerate(order):
            if not owner.__module__.startswith("vllm_omni"):
                continue
            for name, ours in vars(owner).items():
                if name.startswith("__") and name != "__init__":
                    continue
                bases = [
                    b
                    for b in order[position + 1 :]
                    if b.__module__.split(".")[0] == "vllm" and name in vars(b)
                ]
                if bases:
                    # A method that takes and forwards any arguments does not determine which calls
                    # are valid.
                    base = next((b for b in bases if not _forwards_all(vars(b)[name])), bases[0])
                    yield owner, base, name, ours, vars(base)[name]


def _forwards_all(attribute: Any) -> bool:
    function = function_of(attribute)
    if function is None:
        return False
    parameters = list(inspect.signature(function).parameters.values())[
        0 if isinstance(attribute, staticmethod) else 1 :
    ]
    stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return bool(parameters) and all(parameter.kind in stars for parameter in parameters)


def test_every_override_accepts_the_calls_of_its_base() -> None:
    """Every override accepts the calls that its base method accepts. The test compares positions,
    names, defaults and star arguments.

    A property must not override a method, and a method must not override a property.
    """
    refused: dict[str, Any] = {}
    compared = set()
    for owner, base, name, ours, theirs in overrides():
        key = f"{owner.__name__}.{name}"
        ours_function, theirs_function = function_of(ours), function_of(theirs)
        if theirs_function is None or key in NOT_CALLED_BY_VLLM:
            continue
        compared.add(f"{key} over {base.__name__}")
        if ours_function is None:
            refused[key] = f"{type(ours).__name__} replaces a method"
            continue
        reasons = refused_calls(
            inspect.signature(ours_function), inspect.signature(theirs_function)
        )
        if reasons and not (name == "__init__" and getattr(base, "_is_protocol", False)):
            refused[f"{key} over {base.__name__}"] = reasons
    assert refused == {}
    assert {
        "DiffusionWorkerMixin.compile_or_warm_up_model over CPUWorker",
        "DiffusionWorkerMixin.execute_model over Worker",
        "DiffusersPipelineExecutor.profile over Executor",
        "StreamBatchScheduler.schedule over Scheduler",
        "_HiddenStatesMixin.sample_tokens over GPUModelRunner",
        "_HiddenStatesMixin.execute_model over GPUModelRunner",
        "OmniConfigParser.parse over ConfigParserBase",
        "HiddenStatesOutput.get_output over AsyncModelRunnerOutput",
    } <= compared
    assert len(compared) > 40


def test_no_class_is_abstract() -> None:
    """Every class whose instances vLLM creates or receives can be instantiated."""
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.outputs import AsyncModelRunnerOutput

    from vllm_omni.core.sched import ARHiddenStatesScheduler, StreamBatchScheduler
    from vllm_omni.registration import OmniConfigParser

    named = {ARHiddenStatesScheduler, StreamBatchScheduler, OmniConfigParser}
    used_by_vllm = [
        c
        for c in own_classes().values()
        if issubclass(c, Executor | AsyncModelRunnerOutput) or c in named
    ]
    assert len(used_by_vllm) >= len(named) + 2
    left = {cls.__name__: sorted(getattr(cls, "__abstractmethods__", ())) for cls in used_by_vllm}
    assert {name: methods for name, methods in left.items() if methods} == {}


def test_exemptions_are_needed() -> None:
    """Every exemption must still be needed, because an obsolete exemption would hide errors in a
    later method of the same name.
    """
    existing = {f"{owner.__name__}.{name}" for owner, _, name, _, _ in overrides()}
    assert set(NOT_CALLED_BY_VLLM) <= existing
