# SPDX-License-Identifier: Apache-2.0
"""Checks a start command's arguments against the table in `table.py`. If an argument is refused,
the error is one line.

`vllm serve --omni` can inspect the parsed command line. If an argument's value differs from vLLM's
default, the user must have set it (`requested_on_command_line`). Plain `vllm serve` and `LLM(...)`
provide only a `VllmConfig` (`requested_in_config`). Every argument is a field in the config, and
the config hook runs before vLLM fills in values for the platform, the model and the optimization
level. `_DECIDED_BY_VLLM` lists the values that vLLM sets even before the hook runs. An argument is
never refused if its value is the one that vLLM would use anyway.
"""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_omni.engine_arguments.table import ARGUMENTS, EngineArgument, WorkerKind

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
"""Config sections that are searched for a field, in this order."""

_PATHS = {
    "kv_cache_dtype": "cache_config.cache_dtype",
    "scheduling_policy": "scheduler_config.policy",
    "attention_backend": "attention_config.backend",
    "cudagraph_capture_sizes": "compilation_config.cudagraph_capture_sizes",
    "max_cudagraph_capture_size": "compilation_config.max_cudagraph_capture_size",
    "lora_target_modules": "lora_config.target_modules",
}
"""Paths of fields whose names in the config differ from those in the engine arguments."""

_DECIDED_BY_VLLM: dict[str, Callable[["VllmConfig"], Any]] = {
    "enable_prefix_caching": lambda config: config.model_config.is_prefix_caching_supported,
    "elastic_ep_max_dp_size": lambda config: config.parallel_config.data_parallel_size,
}
"""Functions that return the value that vLLM itself sets for a field. The keys are the fields for
which this value can differ from the field's default.
"""

_PARTS = {
    "attention_config": {"attention_backend"},
    "kernel_config": {"linear_backend", "ir_op_priority"},
    "compilation_config": {"cudagraph_capture_sizes", "max_cudagraph_capture_size"},
    "aux_output_config": {"enable_return_routed_experts"},
}
"""For each argument among the keys, the arguments whose values vLLM copies into it. Only the
argument that the user has set is reported.
"""


def check_config(worker: WorkerKind, vllm_config: "VllmConfig") -> None:
    """Check that a worker supports all arguments in a config.

    Raises:
        ValueError: The worker refuses one or more arguments. The message is one line.
    """
    names = [
        name for name, argument in ARGUMENTS.items() if argument.verdicts[worker].kind == "refused"
    ]
    if refusal := refusal_of(worker, requested_in_config(vllm_config, names)):
        raise ValueError(refusal)


def refusal_of(worker: WorkerKind, requested: Mapping[str, Any]) -> str | None:
    """Return one line that lists the refused arguments and their alternatives, or None if no
    arguments are refused.
    """
    refused = []
    for name in ARGUMENTS.keys() & requested.keys():
        argument, value = ARGUMENTS[name], requested[name]
        verdict = argument.verdicts[worker]
        if verdict.kind == "refused" and value not in verdict.unless:
            refused.append(
                f"the {worker} does not support {_shown(argument, value)}: {verdict.why}"
            )
    return "; ".join(sorted(refused)) or None


def requested_on_command_line(
    parsed: Mapping[str, Any], plain: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the engine arguments that differ from vLLM's defaults.

    Args:
        parsed: Namespace that vLLM's parser returns for the user's command line.
        plain: Namespace that vLLM's parser returns for an empty command line. The comparison needs
            this namespace, because a few of the parser's defaults differ from the engine's.
    """
    defaults = _defaults()
    return {
        name: value
        for name, value in parsed.items()
        if name in defaults and value != defaults[name] and value != plain.get(name)
    }


def requested_in_config(vllm_config: "VllmConfig", names: Iterable[str]) -> dict[str, Any]:
    """Return the named fields that the user has set, with their values in the config.

    A field counts as set by the user if its value differs from the one that vLLM sets by itself.
    """
    defaults, requested = _defaults(), {}
    for name in names:
        if name not in defaults:
            continue  # the installed vLLM version does not have this field yet
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
    """Return whether the config has the argument, and the argument's value."""
    if name in _PATHS:
        return _follow(vllm_config, _PATHS[name])
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


def _shown(argument: EngineArgument, value: Any) -> str:
    """Return the argument as it would be written on a command line. Only scalar values are
    included.
    """
    if value is False:
        return argument.flag.replace("--", "--no-", 1)
    if isinstance(value, enum.Enum):
        value = value.name
    return (
        f"{argument.flag} {value}"
        if isinstance(value, str | int | float) and value is not True
        else argument.flag
    )
