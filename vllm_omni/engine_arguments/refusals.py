# SPDX-License-Identifier: Apache-2.0
"""Combinations of vLLM arguments that this package refuses, and the default worker and scheduler
classes for a server.

`vllm serve --omni` checks the command-line flags (`entrypoints/cli/serve.py`). All other ways of
starting an engine check vLLM's config (`registration.py`). If a check fails, it raises ValueError
with a one-line message. This module does not import vLLM.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from vllm_omni.config import OmniConfig
from vllm_omni.engine_arguments.table import STORED_METHODS
from vllm_omni.model_executor.presets import ServedPreset

CONFIG_FORMAT: Final = "omni"
WORKER_CLS: Final = "vllm_omni.worker.DiffusionGPUWorker"
SCHEDULER_CLS: Final = "vllm_omni.core.sched.StreamBatchScheduler"
AR_WORKER_CLS: Final = "vllm_omni.worker.ARGPUWorker"
AR_SCHEDULER_CLS: Final = "vllm_omni.core.sched.ARHiddenStatesScheduler"

_SCHEDULER_ADVICE = (
    f"requires one denoise step per engine step: pass --scheduler-cls {SCHEDULER_CLS} or drop "
    "--scheduler-cls"
)


def is_ar_worker(worker_cls: str) -> bool:
    """Return whether `--worker-cls` names this package's worker for language models."""
    return worker_cls.startswith("vllm_omni.worker.") and worker_cls.rpartition(".")[2].startswith(
        "AR"
    )


def is_diffusion_worker(worker_cls: str) -> bool:
    """Return whether `--worker-cls` names one of this package's diffusion workers."""
    return worker_cls.startswith("vllm_omni.worker.") and not is_ar_worker(worker_cls)


def check_diffusion_worker(worker_cls: str) -> None:
    """Refuse workers that cannot run a diffusion model.

    User-defined worker classes are accepted here and checked when the worker starts.
    """
    if is_ar_worker(worker_cls) or worker_cls.startswith("vllm.v1.worker."):
        raise ValueError(
            f"--worker-cls {worker_cls} runs language models; this checkpoint needs {WORKER_CLS}: "
            "drop the flag"
        )


def check_ar_worker(worker_cls: str) -> None:
    """Refuse workers that cannot run a language model."""
    if is_diffusion_worker(worker_cls):
        raise ValueError(
            f"--worker-cls {worker_cls} runs diffusion models; for a language model drop the flag, "
            f"or pass {AR_WORKER_CLS} for hidden states"
        )


def check_ar_scheduler(carries_hidden_states: bool) -> None:
    """Refuse schedulers that do not send hidden states to clients.

    Args:
        carries_hidden_states: Whether the configured scheduler sends hidden states to clients.
    """
    if not carries_hidden_states:
        raise ValueError(
            f"--worker-cls {AR_WORKER_CLS} requires --scheduler-cls {AR_SCHEDULER_CLS}"
        )


def check_config_format(config_format: str) -> None:
    if config_format != CONFIG_FORMAT:
        raise ValueError(
            f"--config-format {config_format}: this checkpoint needs {CONFIG_FORMAT!r}; drop the "
            "flag"
        )


def check_async_scheduling(requested: bool) -> None:
    if requested:
        raise ValueError(
            "--async-scheduling slows diffusion down about 4x, because empty steps are in flight: "
            "remove it"
        )


def check_runner(runner: str) -> None:
    """Check that the value of `--runner` is one that diffusion models support."""
    if runner not in ("auto", "pooling"):
        raise ValueError(f"--runner {runner}: this checkpoint requires 'pooling'; drop the flag")


def check_kv_cache_dtype(name: str, allowed: Sequence[str]) -> None:
    """Check that the model family supports the value of `--kv-cache-dtype`.

    Args:
        name: Value of the flag.
        allowed: Dtypes that the model family supports.
    """
    if name not in allowed:
        raise ValueError(
            f"--kv-cache-dtype {name}: the K/V cache of this checkpoint cannot have this dtype; "
            "drop it"
        )


def check_heads(ranks: int, hf_config: Mapping[str, Any]) -> None:
    """Check that the attention heads can be distributed evenly over tensor-parallel ranks.

    Args:
        ranks: Value of `--tensor-parallel-size`.
        hf_config: Contents of the checkpoint's configuration file.
    """
    heads = hf_config.get("num_attention_heads") or hf_config.get("num_heads")
    if heads and heads % ranks:
        allowed = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(
            f"--tensor-parallel-size {ranks} does not divide the model's {heads} heads; allowed: "
            f"{allowed}"
        )


def check_one_device(sizes: Mapping[str, int], executor_cls: str) -> None:
    """Refuse several ranks for a model family whose executor runs in one process.

    Args:
        sizes: Number of ranks requested by each flag.
        executor_cls: Name of the model family's executor class.
    """
    for flag, ranks in sizes.items():
        if ranks > 1:
            raise ValueError(
                f"{flag} {ranks}: this checkpoint runs on one device ({executor_cls}); drop the "
                "flag"
            )


def check_backend(backend: Any, executor_cls: str) -> None:
    """If the model family's executor runs without workers, refuse backends that start workers."""
    if backend in ("ray", "external_launcher"):
        raise ValueError(
            f"--distributed-executor-backend {backend} starts workers; this checkpoint requires "
            f"{executor_cls}"
        )


def check_quantization(
    method: str | None,
    omni: OmniConfig,
    *,
    has_config: bool,
    cpu: bool,
    stored: Mapping[str, Any] | None = None,
) -> None:
    """Check that the requested quantization fits the checkpoint, the device and the options.

    Args:
        method: Value of `--quantization`, or the stored checkpoint's quantization method.
        omni: This package's options.
        has_config: Whether `--quantization-config` is given.
        cpu: Whether the model runs on a CPU.
        stored: Description of the checkpoint's quantization (`checkpoint/quantization.py`).
    """
    if method is None and has_config:
        raise ValueError(
            "--quantization-config has no effect without --quantization: add --quantization online"
        )
    if method == "online" and not has_config:
        raise ValueError(
            "--quantization online requires --quantization-config with the method: add it or use "
            "fp8_per_channel"
        )
    if method is None:
        return
    if stored is None and method in STORED_METHODS:
        raise ValueError(
            f"--quantization {method} is for checkpoints that are stored quantized, but this one "
            "is not; use fp8 to quantize it while loading"
        )
    if omni.pipeline_partition == "measured":
        raise ValueError(
            f"--quantization {method}: omni.pipeline_partition 'measured' cannot move quantized "
            "layers between stages; list the layers of each stage instead"
        )
    if cpu and method == "fp8_per_tensor":
        raise ValueError(
            f"--quantization {method}: vLLM has no kernel for it on a CPU; use fp8_per_channel"
        )
    if cpu and stored is not None and (scheme := _not_on_cpu(stored)) is not None:
        raise ValueError(
            f"the checkpoint is stored in {scheme}, for which vLLM has no kernel on a CPU; set "
            "omni.dequantize to true to dequantize its weights to --dtype"
        )


def _not_on_cpu(stored: Mapping[str, Any]) -> str | None:
    """Return the name of the stored quantization format if vLLM has no CPU kernel for it, otherwise
    None.
    """
    method = stored["quant_method"]
    if method == "fp8":
        return None if stored.get("weight_block_size") else "FP8 with a scale per tensor"
    if method == "modelopt":
        names = {"FP8": "ModelOpt's FP8", "NVFP4": "NVFP4", "W4A16_NVFP4": "NVFP4"}
        return names.get(stored["quant_algo"])
    weights = dict(stored["config_groups"]["all"]["weights"])
    if weights.get("num_bits") == 4:
        return "NVFP4" if weights.get("type") == "float" else None
    return (
        "FP8 with a scale per tensor"
        if (weights.get("type"), weights.get("strategy")) == ("float", "tensor")
        else None
    )


def check_preset_precision(preset: ServedPreset, dtype: str, *, has_fp8: bool, device: str) -> None:
    """If a preset requires FP8, check that the device and the model's dtype allow it.

    Args:
        preset: The preset.
        dtype: Name of the model's dtype, without the "torch." prefix.
        has_fp8: Whether the device has FP8 units.
        device: Name of the device, for the error message.

    Raises:
        ValueError: The preset requires FP8, but the device or the model's dtype does not allow it.
    """
    uses = [preset.quantization and "weights", preset.kv_cache_dtype and "keys and values"]
    parts = " and ".join(part for part in uses if part)
    remedy = "set omni.model.fp8 to false, which leaves the rest of the preset as it is"
    if parts and preset.needs_fp8_device and not has_fp8:
        raise ValueError(
            f"omni.model.preset {preset.name!r} has {parts} in FP8, for which this device "
            f"({device}) has no FP8 units: {remedy}, or to true to use FP8 anyway"
        )
    if preset.quantization is not None and dtype not in ("bfloat16", "float16"):
        raise ValueError(
            f"omni.model.preset {preset.name!r} has weights in FP8, which vLLM does not combine "
            f"with {dtype}: pass --dtype bfloat16, or {remedy}"
        )


def check_adapters(enabled: bool, omni: OmniConfig, *, taken: bool) -> None:
    """Check that the model family and the options are compatible with `--enable-lora`.

    Args:
        enabled: Whether the flag is given.
        omni: This package's options.
        taken: Whether the model family supports adapters.
    """
    if enabled and not taken:
        raise ValueError(
            "--enable-lora: this checkpoint's model does not support adapters; drop it"
        )
    if enabled and omni.pipeline_partition == "measured":
        raise ValueError(
            "--enable-lora: omni.pipeline_partition 'measured' cannot move layers with adapters "
            "between stages; list the layers of each stage instead"
        )


def check_offload(gibibytes: float, omni: OmniConfig) -> None:
    """Check that `--cpu-offload-gb` is compatible with the options."""
    if gibibytes > 0 and omni.pipeline_partition == "measured":
        raise ValueError(
            "--cpu-offload-gb: omni.pipeline_partition 'measured' cannot move layers in host "
            "memory between stages; list the layers of each stage instead"
        )
    if gibibytes > 0 and omni.model.get("cuda_graphs"):
        raise ValueError(
            "--cpu-offload-gb: CUDA graphs cannot prefetch weights; drop it or set "
            "omni.model.cuda_graphs to false"
        )


def check_stages_scheduler(stages: int, *, by_step: bool) -> None:
    """Check that the scheduler supports the number of pipeline stages.

    Args:
        stages: Value of `--pipeline-parallel-size`.
        by_step: Whether the scheduler runs one denoise step per engine step.
    """
    if stages > 1 and not by_step:
        raise ValueError(f"--pipeline-parallel-size {stages} {_SCHEDULER_ADVICE}")


def check_chunks_ahead(omni: OmniConfig, *, stages: int, by_step: bool) -> None:
    """Check that the number of stages and the scheduler support `omni.chunks_in_flight` and the
    "temporal" value of `omni.pipeline`.

    Args:
        omni: The server's options. The model family has already checked that its model supports
            these two options.
        stages: Value of `--pipeline-parallel-size`.
        by_step: Whether the scheduler runs one denoise step per engine step.
    """
    if omni.ahead is None:
        return
    if omni.pipeline == "temporal" and stages == 1:
        raise ValueError(
            "omni.pipeline 'temporal' runs every denoise step on a separate stage: pass "
            "--pipeline-parallel-size with the number of steps"
        )
    if not by_step:
        raise ValueError(f"omni.chunks_in_flight {omni.chunks_in_flight} {_SCHEDULER_ADVICE}")
