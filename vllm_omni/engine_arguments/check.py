# SPDX-License-Identifier: Apache-2.0
"""Compares a start with the table: a refused argument ends it with one line, a meaningless one costs a warning.

A user's arguments are read in two places. `vllm serve --omni` has the parsed command line, where a value that differs
from vLLM's default was given (`asked_on_command_line`). Plain `vllm serve` and `LLM(...)` leave only a `VllmConfig`
(`asked_in_config`): every argument has a place in it, and the config hook runs before platform, model and optimisation
level fill anything in. Where vLLM has decided even earlier, `_DECIDED_BY_VLLM` says how. A value equal to vLLM's own is
never refused. Held by tests/test_engine_arguments.py.
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
    "max_model_len": "model_config.original_max_model_len",
    "scheduling_policy": "scheduler_config.policy",
    "attention_backend": "attention_config.backend",
    "cudagraph_capture_sizes": "compilation_config.cudagraph_capture_sizes",
    "max_cudagraph_capture_size": "compilation_config.max_cudagraph_capture_size",
    "lora_target_modules": "lora_config.target_modules",
    "mamba_backend": "mamba_config.backend",
    "mamba_ssu_algorithm": "mamba_config.ssu_algorithm",
    "enable_mamba_cache_stochastic_rounding": "mamba_config.enable_stochastic_rounding",
    "mamba_cache_philox_rounds": "mamba_config.stochastic_rounding_philox_rounds",
    "gdn_prefill_backend": "additional_config.gdn_prefill_backend",
    "kda_prefill_backend": "additional_config.kda_prefill_backend",
    "kda_decode_backend": "additional_config.kda_decode_backend",
}
"""Fields that have another name in the config."""

_DECIDED_BY_VLLM: dict[str, Callable[["VllmConfig"], Any]] = {
    "tokenizer": lambda config: config.model_config.model,
    "tokenizer_revision": lambda config: config.model_config.revision,
    "enable_prefix_caching": lambda config: config.model_config.is_prefix_caching_supported,
    "enable_chunked_prefill": lambda config: config.model_config.is_chunked_prefill_supported,
    "cp_kv_cache_interleave_size": lambda config: 1,
    "block_size": lambda config: config.cache_config.DEFAULT_BLOCK_SIZE,
    "elastic_ep_max_dp_size": lambda config: config.parallel_config.data_parallel_size,
    "reasoning_parser_plugin": lambda config: "",
    "mamba_cache_mode": lambda config: "none",  # 0.33 has None as the argument's default
    "disable_cascade_attn": lambda config: True,
    "disable_custom_all_reduce": lambda config: config.parallel_config.disable_custom_all_reduce,
    # Off where the processor cannot do it, with any value given.
    "mm_device_do_normalize": lambda config: _look_up(config, "mm_device_do_normalize")[1],
    "pooler_config": lambda config: _own_pooler(config.model_config.pooler_config),
}
"""Values in the config of a user who gave no argument, where they are not the field's default."""

_PARTS = {
    "attention_config": {"attention_backend"},
    "kernel_config": {
        *("linear_backend", "moe_backend", "ir_op_priority", "sparse_indexer_topk_backend"),
        *("enable_flashinfer_autotune", "monokernel"),
    },
    "compilation_config": {"cudagraph_capture_sizes", "max_cudagraph_capture_size"},
    "mamba_config": {
        *("mamba_backend", "mamba_ssu_algorithm", "enable_mamba_cache_stochastic_rounding"),
        "mamba_cache_philox_rounds",
    },
    "aux_output_config": {"enable_return_routed_experts"},
    "reasoning_config": {"reasoning_parser"},
    "structured_outputs_config": {"reasoning_parser", "reasoning_parser_plugin"},
}
"""Arguments that vLLM folds into another: that one then differs, too, and would be named beside them."""


def check_config(worker: Worker, vllm_config: "VllmConfig") -> None:
    """Raise ValueError, one line, for arguments that `worker` refuses; warn of arguments meaningless to it."""
    from vllm.logger import init_logger

    asked = asked_in_config(vllm_config, _not_honoured(worker))
    if refusal := refusal_of(worker, asked):
        raise ValueError(refusal)
    for argument, value in _judged(worker, asked, "meaningless"):
        reason = argument.verdicts[worker].why
        init_logger("vllm." + __name__).warning(
            "%s means nothing to the %s: %s", _shown(argument, value), worker, reason
        )


def refusal_of(worker: Worker, asked: Mapping[str, Any]) -> str | None:
    """One line that names the refused arguments, each with an alternative; None if there are none."""
    refused = [
        f"the {worker} cannot honour {_shown(argument, value)}: {argument.verdicts[worker].why}"
        for argument, value in _judged(worker, asked, "refused")
    ]
    return "; ".join(refused) or None


def asked_on_command_line(parsed: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's arguments among `parsed`, a namespace of vLLM's parser, that differ from vLLM's defaults.

    plain: the parser's namespace for an empty command line; a few of its defaults are not those of the engine.
    """
    defaults = _defaults()
    return {
        name: value
        for name, value in parsed.items()
        if name in defaults and value != defaults[name] and value != plain.get(name)
    }


def asked_in_config(vllm_config: "VllmConfig", names: Iterable[str]) -> dict[str, Any]:
    """Those of `names` whose place in the config holds something else than vLLM would have put there by itself."""
    defaults, asked = _defaults(), {}
    for name in names:
        if name not in defaults:
            continue  # of a later vLLM
        found, value = _look_up(vllm_config, name)
        if name == "enable_lora":
            found, value = True, vllm_config.lora_config is not None
        own = _DECIDED_BY_VLLM[name](vllm_config) if name in _DECIDED_BY_VLLM else defaults[name]
        if found and value != own:
            asked[name] = value
    return {name: value for name, value in asked.items() if not _PARTS.get(name, set()) & asked.keys()}


def _own_pooler(resolved: Any) -> Any:
    """vLLM's own pooler settings: the defaults, with the two types that it takes from the model."""
    if resolved is None:
        return None
    types = {"seq_pooling_type": resolved.seq_pooling_type, "tok_pooling_type": resolved.tok_pooling_type}
    return type(resolved)(**types)


def _not_honoured(worker: Worker) -> list[str]:
    return [name for name, argument in ARGUMENTS.items() if argument.verdicts[worker].kind != "honoured"]


def _judged(worker: Worker, asked: Mapping[str, Any], kind: str) -> list[tuple[Argument, Any]]:
    return [
        (ARGUMENTS[name], value)
        for name, value in asked.items()
        if name in ARGUMENTS
        and ARGUMENTS[name].verdicts[worker].kind == kind
        and value not in ARGUMENTS[name].verdicts[worker].unless
    ]


def _defaults() -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs

    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
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
        held = owner if isinstance(owner, dict) else vars(owner) if hasattr(owner, "__dict__") else {}
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
    return f"{argument.flag} {value}" if isinstance(value, str | int | float) and value is not True else argument.flag
