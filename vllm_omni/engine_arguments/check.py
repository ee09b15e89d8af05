# SPDX-License-Identifier: Apache-2.0
"""Compares a start with the table: a refused argument ends it with one line.

A user's arguments are read in two places. `vllm serve --omni` has the parsed command line, where a
value that differs from vLLM's default was given (`requested_on_command_line`). Plain `vllm serve`
and `LLM(...)` leave only a `VllmConfig` (`requested_in_config`): every argument has a place in it,
and the config hook runs before platform, model and optimisation level fill anything in. Where vLLM
has decided even earlier, `_DECIDED_BY_VLLM` says how. A value equal to vLLM's own is never refused.
Held by tests/test_engine_arguments.py.
"""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_omni.engine_arguments.table import ARGUMENTS, Argument, Worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SECTIONS = (
    "model_config",
    "model_config.multimodal_config",
    "cache_config",
    "load_config",
    "parallel_config",
    "scheduler_config",
    "observability_config",
    "offload_config",
    "offload_config.uva",
    "offload_config.prefetch",
    "lora_config",
    "kernel_config",
    "structured_outputs_config",
    "aux_output_config",
    "",
)
"""Where a field of the same name is looked for, in this order."""

_PLACES = {
    "kv_cache_dtype": "cache_config.cache_dtype",
    "scheduling_policy": "scheduler_config.policy",
    "attention_backend": "attention_config.backend",
    "cudagraph_capture_sizes": "compilation_config.cudagraph_capture_sizes",
    "max_cudagraph_capture_size": "compilation_config.max_cudagraph_capture_size",
    "lora_target_modules": "lora_config.target_modules",
}
"""Fields that have another name in the config."""

_DECIDED_BY_VLLM: dict[str, Callable[["VllmConfig"], Any]] = {
    "enable_prefix_caching": lambda config: config.model_config.is_prefix_caching_supported,
    "elastic_ep_max_dp_size": lambda config: config.parallel_config.data_parallel_size,
}
"""Values in the config of a user who gave no argument, where they are not the field's default."""

_PARTS = {
    "attention_config": {"attention_backend"},
    "kernel_config": {"linear_backend", "ir_op_priority"},
    "compilation_config": {"cudagraph_capture_sizes", "max_cudagraph_capture_size"},
    "aux_output_config": {"enable_return_routed_experts"},
}
"""Arguments that vLLM folds into another: that one then differs, too, and would be named beside
them.
"""


def check_config(worker: Worker, vllm_config: "VllmConfig") -> None:
    """Raise ValueError, one line, for arguments that `worker` refuses."""
    names = [
        name for name, argument in ARGUMENTS.items() if argument.verdicts[worker].kind == "refused"
    ]
    if refusal := refusal_of(worker, requested_in_config(vllm_config, names)):
        raise ValueError(refusal)


def refusal_of(worker: Worker, requested: Mapping[str, Any]) -> str | None:
    """One line that names the refused arguments, each with an alternative; None if there are
    none.
    """
    refused = []
    for name in ARGUMENTS.keys() & requested.keys():
        argument, value = ARGUMENTS[name], requested[name]
        verdict = argument.verdicts[worker]
        if verdict.kind == "refused" and value not in verdict.unless:
            refused.append(f"the {worker} cannot honour {_shown(argument, value)}: {verdict.why}")
    return "; ".join(sorted(refused)) or None


def requested_on_command_line(
    parsed: Mapping[str, Any], plain: Mapping[str, Any]
) -> dict[str, Any]:
    """The engine's arguments among `parsed`, a namespace of vLLM's parser, that differ from vLLM's
    defaults.

    plain: the parser's namespace for an empty command line; a few of its defaults are not those of
    the engine.
    """
    defaults = _defaults()
    return {
        name: value
        for name, value in parsed.items()
        if name in defaults and value != defaults[name] and value != plain.get(name)
    }


def requested_in_config(vllm_config: "VllmConfig", names: Iterable[str]) -> dict[str, Any]:
    """Those of `names` whose place in the config holds something else than vLLM would have put
    there by itself.
    """
    defaults, requested = _defaults(), {}
    for name in names:
        if name not in defaults:
            continue  # of a later vLLM
        found, value = _look_up(vllm_config, name)
        if name == "enable_lora":
            found, value = True, vllm_config.lora_config is not None
        own = _DECIDED_BY_VLLM[name](vllm_config) if name in _DECIDED_BY_VLLM else defaults[name]
        if found and value != own:
            requested[name] = value
    return {
        name: value
        for name, value in requested.items()
        if not _PARTS.get(name, set()) & requested.keys()
    }


def _defaults() -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs

    return {
        field.name: field.default
        if field.default_factory is dataclasses.MISSING
        else field.default_factory()
        for field in dataclasses.fields(AsyncEngineArgs)
    }


def _look_up(vllm_config: "VllmConfig", name: str) -> tuple[bool, Any]:
    """(whether the config has a place for the argument, its value)."""
    if name in _PLACES:
        return _follow(vllm_config, _PLACES[name])
    for section in _SECTIONS:
        found, value = _follow(vllm_config, f"{section}.{name}".lstrip("."))
        if found:
            return found, value
    return False, None


def _follow(owner: Any, path: str) -> tuple[bool, Any]:
    for step in path.split("."):
        held = (
            owner if isinstance(owner, dict) else vars(owner) if hasattr(owner, "__dict__") else {}
        )
        if step not in held:
            return False, None
        owner = held[step]
    return True, owner


def _shown(argument: Argument, value: Any) -> str:
    """The argument as on a command line; values that are no scalars are left out."""
    if value is False:
        return argument.flag.replace("--", "--no-", 1)
    if isinstance(value, enum.Enum):
        value = value.name
    return (
        f"{argument.flag} {value}"
        if isinstance(value, str | int | float) and value is not True
        else argument.flag
    )
