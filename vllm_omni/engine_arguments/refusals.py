# SPDX-License-Identifier: Apache-2.0
"""Combinations of vLLM's arguments that this package refuses, and the class names that a start is
completed with.

Both ways to start use them: `vllm serve --omni` on the flags as written
(`entrypoints/cli/serve.py`), every other start on vLLM's config (`registration.py`). Each check
raises ValueError with one line. Imports nothing of vLLM. Held by
tests/entrypoints/cli/test_serve.py, tests/test_combinations.py and tests/docs/test_refusals.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from vllm_omni.config import OmniConfig
from vllm_omni.engine_arguments.table import STORED_METHODS

CONFIG_FORMAT: Final = "omni"
WORKER_CLS: Final = "vllm_omni.worker.DiffusionGPUWorker"
SCHEDULER_CLS: Final = "vllm_omni.core.sched.StreamBatchScheduler"
AR_WORKER_CLS: Final = "vllm_omni.worker.ARGPUWorker"
AR_SCHEDULER_CLS: Final = "vllm_omni.core.sched.ARHiddenStatesScheduler"

_SCHEDULER_ADVICE = (
    "needs one denoise step per engine step: pass --scheduler-cls "
    f"{SCHEDULER_CLS} "
    "or drop --scheduler-cls"
)


def is_ar_worker(worker_cls: str) -> bool:
    """Whether `--worker-cls` names this package's worker of language models, by any of its
    paths.
    """
    return worker_cls.startswith("vllm_omni.worker.") and worker_cls.rpartition(".")[2].startswith(
        "AR"
    )


def is_diffusion_worker(worker_cls: str) -> bool:
    """Whether `--worker-cls` names one of this package's diffusion workers, by any of its paths."""
    return worker_cls.startswith("vllm_omni.worker.") and not is_ar_worker(worker_cls)


def check_diffusion_worker(worker_cls: str) -> None:
    """Refuse workers that cannot run a diffusion model; a class of the user's own checks itself
    when it starts.
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
            "or pass "
            f"{AR_WORKER_CLS} for hidden states"
        )


def check_ar_scheduler(carries_hidden_states: bool) -> None:
    """carries_hidden_states: whether the scheduler sends hidden states to clients; requests for
    them would be lost.
    """
    if not carries_hidden_states:
        raise ValueError(f"--worker-cls {AR_WORKER_CLS} needs --scheduler-cls {AR_SCHEDULER_CLS}")


def check_config_format(config_format: str) -> None:
    if config_format != CONFIG_FORMAT:
        raise ValueError(
            f"--config-format {config_format}: this checkpoint needs {CONFIG_FORMAT!r}; drop "
            "the flag"
        )


def check_async_scheduling(requested: bool) -> None:
    if requested:
        raise ValueError(
            "--async-scheduling does not pay for diffusion (empty steps in flight, about 4x "
            "slower): remove it"
        )


def check_runner(runner: str) -> None:
    """vLLM's `--runner`."""
    if runner not in ("auto", "pooling"):
        raise ValueError(f"--runner {runner}: a world model is served as 'pooling'; drop the flag")


def check_kv_cache_dtype(name: str, allowed: Sequence[str]) -> None:
    """vLLM's `--kv-cache-dtype`. allowed: by the family."""
    if name not in allowed:
        raise ValueError(
            f"--kv-cache-dtype {name}: this checkpoint's sessions hold no keys and values in "
            "it; drop it"
        )


def check_heads(ranks: int, hf_config: Mapping[str, Any]) -> None:
    """ranks: `--tensor-parallel-size`."""
    heads = hf_config.get("num_attention_heads") or hf_config.get("num_heads")
    if heads and heads % ranks:
        allowed = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(
            f"--tensor-parallel-size {ranks} does not divide the model's {heads} heads; allowed: "
            f"{allowed}"
        )


def check_one_device(sizes: Mapping[str, int], executor_cls: str) -> None:
    """A family with an executor of its own runs in one process. sizes: flag -> ranks."""
    for flag, ranks in sizes.items():
        if ranks > 1:
            raise ValueError(
                f"{flag} {ranks}: this checkpoint runs on one device ({executor_cls}); drop "
                "the flag"
            )


def check_backend(backend: Any, executor_cls: str) -> None:
    """A family with an executor of its own has no workers for `backend`
    (`--distributed-executor-backend`) to start.
    """
    if backend in ("ray", "external_launcher"):
        raise ValueError(
            f"--distributed-executor-backend {backend} needs workers; this checkpoint needs "
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
    """vLLM's `--quantization`, or the method of a checkpoint that is stored quantized.

    has_config: whether `--quantization-config` is given. cpu: whether a CPU computes. stored: the
    description of a quantized checkpoint (`checkpoint/quantization.py`).
    """
    if method is None and has_config:
        raise ValueError(
            "--quantization-config quantizes nothing without --quantization: add "
            "--quantization online"
        )
    if method == "online" and not has_config:
        raise ValueError(
            "--quantization online needs --quantization-config, which names the method: add it or "
            "take fp8_per_channel"
        )
    if method is None:
        return
    if stored is None and method in STORED_METHODS:
        raise ValueError(
            f"--quantization {method} names how a checkpoint is stored, and this one is plain; "
            "take fp8 to quantize it "
            "while it is loaded"
        )
    if omni.pipeline_partition == "measured":
        raise ValueError(
            f"--quantization {method}: quantized layers cannot move, as omni.pipeline_partition "
            "'measured' asks; "
            "write the layers of each stage instead"
        )
    if cpu and method == "fp8_per_tensor":
        raise ValueError(
            f"--quantization {method}: vLLM has no kernel for it on a CPU; take fp8_per_channel"
        )
    if cpu and stored is not None and (scheme := _not_on_cpu(stored)) is not None:
        raise ValueError(
            f"the checkpoint is stored in {scheme}, for which vLLM has no kernel on a CPU; set "
            "omni.dequantize to true "
            "to read its weights back into --dtype"
        )


def _not_on_cpu(stored: Mapping[str, Any]) -> str | None:
    """The name of a stored format that vLLM cannot compute in on a CPU; None if it may."""
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


def check_adapters(enabled: bool, omni: OmniConfig, *, taken: bool) -> None:
    """vLLM's `--enable-lora`. taken: by the family."""
    if enabled and not taken:
        raise ValueError("--enable-lora: this checkpoint's model takes no adapters; drop it")
    if enabled and omni.pipeline_partition == "measured":
        raise ValueError(
            "--enable-lora: layers with adapters cannot move, as omni.pipeline_partition "
            "'measured' asks; "
            "write the layers of each stage instead"
        )


def check_offload(gibibytes: float, omni: OmniConfig) -> None:
    """vLLM's `--cpu-offload-gb`."""
    if gibibytes > 0 and omni.pipeline_partition == "measured":
        raise ValueError(
            "--cpu-offload-gb: layers in host memory cannot move, as omni.pipeline_partition "
            "'measured' asks; "
            "write the layers of each stage instead"
        )
    if gibibytes > 0 and omni.model.get("cuda_graphs"):
        raise ValueError(
            "--cpu-offload-gb: CUDA graphs cannot fetch weights; drop it or set "
            "omni.model.cuda_graphs to false"
        )


def check_stages_scheduler(stages: int, *, by_step: bool) -> None:
    """stages: `--pipeline-parallel-size`. by_step: whether the scheduler runs one denoise step
    per engine step.
    """
    if stages > 1 and not by_step:
        raise ValueError(f"--pipeline-parallel-size {stages} {_SCHEDULER_ADVICE}")


def check_chunks_ahead(omni: OmniConfig, *, stages: int, has_worker: bool, by_step: bool) -> None:
    """`omni.chunks_in_flight` and `omni.pipeline` "temporal"; the model has checks of its own
    (`interfaces.check_chunks_in_flight`).
    """
    if omni.ahead is None:
        return
    if omni.pipeline == "temporal" and stages == 1:
        raise ValueError(
            "omni.pipeline 'temporal' gives every denoise step a stage of its own: "
            "pass --pipeline-parallel-size, as many as there are steps"
        )
    if not has_worker:
        raise ValueError(
            "omni.chunks_in_flight and omni.pipeline need a worker; this checkpoint runs "
            "without one"
        )
    if not by_step:
        raise ValueError(f"omni.chunks_in_flight {omni.chunks_in_flight} {_SCHEDULER_ADVICE}")
