# SPDX-License-Identifier: Apache-2.0
"""Registration with vLLM: model classes, the checkpoint config parser and the config hooks.

`register_with_vllm` only adds entries, is idempotent, and does not replace any vLLM code.
tests/test_import_purity.py asserts the exact list of registries that it modifies.
"""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from transformers import AutoConfig, PreTrainedConfig
from vllm.config.quantization import resolve_quantization_config
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.model_executor.models.registry import ModelRegistry
from vllm.transformers_utils.config import _CONFIG_FORMAT_TO_CONFIG_PARSER, register_config_parser
from vllm.transformers_utils.config_parser_base import ConfigParserBase

from vllm_omni.config import OmniConfig
from vllm_omni.engine_arguments.check import check_config
from vllm_omni.engine_arguments.refusals import (
    AR_SCHEDULER_CLS,
    CONFIG_FORMAT,
    SCHEDULER_CLS,
    WORKER_CLS,
    check_adapters,
    check_ar_worker,
    check_backend,
    check_chunks_ahead,
    check_diffusion_worker,
    check_kv_cache_dtype,
    check_offload,
    check_preset_precision,
    check_quantization,
    check_stages_scheduler,
    is_ar_worker,
)
from vllm_omni.engine_arguments.table import WorkerKind
from vllm_omni.entrypoints.cli.omni_hint import hint_at_exit
from vllm_omni.entrypoints.engine.output_threads import wait_for_output_threads_at_exit
from vllm_omni.entrypoints.telemetry.logs import quiet_start
from vllm_omni.model_executor.checkpoint.root_config import ROOT_MODEL_TYPE
from vllm_omni.model_executor.models.registry import (
    AR_ARCHITECTURES,
    ARCHITECTURES,
    MODEL_TYPES,
    ModelFamily,
    detect_family,
    family_names,
    get_family,
)
from vllm_omni.planning.preset_records import preset_line
from vllm_omni.worlds.description import (
    CONFIG_KEY,
    WorldDescription,
    read_description,
    with_defaults,
)
from vllm_omni.worlds.manifest import check_files

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig

logger = logging.getLogger("vllm." + __name__)

IN_PROCESS_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Full name of vLLM's in-process executor. The short name `uni` cannot be used, because vLLM
replaces it with `mp` on a CPU."""
ONLINE_METHOD = "fp8_per_channel"
"""Method that `--quantization fp8` selects for a checkpoint whose weights are not quantized."""
THREADS_BIND = "VLLM_CPU_OMP_THREADS_BIND"
"""vLLM's environment variable that assigns CPU cores to each rank."""
SPIN_COUNT, SPINS = "GOMP_SPINCOUNT", "3000"
"""Environment variable of libgomp, and its value: how many times a waiting thread spins before it
sleeps. 3000 spins take 0.1 ms.
"""


class OmniPipelineConfig(PreTrainedConfig):
    """Hugging Face config of a pipeline checkpoint. The model family fills in the fields of the
    config.
    """

    model_type = ROOT_MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read the checkpoint directory that transformers passes.

        `config.json` is not sufficient, because it only declares that the checkpoint belongs to
        this package.
        """
        folder = kwargs.get("name_or_path", "")
        if "omni_family" in config_dict or not Path(folder).is_dir():
            return super().from_dict(config_dict, **kwargs)
        config = read_checkpoint(Path(folder))
        return (config, kwargs) if kwargs.pop("return_unused_kwargs", False) else config


_CONFIG_CLASSES: dict[str, type[OmniPipelineConfig]] = {
    name: type(OmniPipelineConfig.__name__, (OmniPipelineConfig,), {"model_type": name})
    for name in MODEL_TYPES
}
"""Config class for each model type. transformers requires a distinct class for each type."""


class OmniConfigParser(ConfigParserBase):
    """Config parser for `--config-format omni`.

    The parser accepts every checkpoint layout of the registered families. The checkpoint needs no
    `config.json`.
    """

    def parse(
        self,
        model: str | Path,
        trust_remote_code: bool,
        revision: str | None = None,
        code_revision: str | None = None,
        **kwargs: Any,
    ) -> tuple[dict[str, Any], PreTrainedConfig]:
        config = read_checkpoint(Path(model))
        return config.to_dict(), config


def read_checkpoint(path: Path) -> OmniPipelineConfig:
    """Return the config of a checkpoint directory, as read by the model family.

    Raises:
        ValueError: The directory is not a valid checkpoint. The message is one line.
    """
    check_files(path)
    family = detect_family(path)
    values: dict[str, Any] = {"omni_family": family.name, **family.hf_config(path)}
    if (description := read_description(path)) is not None:
        values[CONFIG_KEY] = msgspec.to_builtins(description)
    return OmniPipelineConfig(**values)


class OmniModelConfig(VerifyAndUpdateConfig):
    """Config hook for all architectures in this package.

    The hook sets defaults so that `vllm serve DIR` needs few flags, and it rejects unsupported
    arguments.
    """

    @staticmethod
    def verify_and_update_model_config(model_config: "ModelConfig") -> None:
        model_config.skip_tokenizer_init = True
        stored = getattr(torch, str(model_config.hf_config.dtype).removeprefix("torch."))
        if model_config.dtype == torch.float16 and stored != torch.float16:
            # `--dtype auto` converts fp32 weights to fp16, which overflows in video transformers.
            model_config.dtype = stored

    @staticmethod
    def verify_and_update_config(vllm_config: "VllmConfig") -> None:
        from vllm.platforms import current_platform  # the import probes for devices

        parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
        heed_executor(vllm_config.model_config, parallel.distributed_executor_backend)
        family = get_family(vllm_config.model_config.hf_config.omni_family)
        check_config(
            WorkerKind.DIFFUSION if family.executor_cls is None else WorkerKind.DIFFUSERS,
            vllm_config,
        )
        hf_config = vllm_config.model_config.hf_config
        description, size = world_description(hf_config), family.size_of(hf_config.to_dict())
        vllm_config.additional_config = with_defaults(
            vllm_config.additional_config, description, size
        )
        omni = check_options(hf_config, vllm_config.additional_config)
        if (
            description is not None
            and (warning := description.untrained_size(omni.width, omni.height)) is not None
        ):
            logger.warning("omni.width, omni.height: %s", warning)
        if vllm_config.load_config.load_format != "dummy" and family.check_files is not None:
            family.check_files(Path(vllm_config.model_config.model), hf_config.to_dict(), omni)
        if family.served_preset is not None:
            apply_preset(vllm_config, family, omni)
        check_kv_cache_dtype(vllm_config.cache_config.cache_dtype, family.kv_cache_dtypes)
        resolve_quantization(vllm_config.model_config, omni, cpu=current_platform.is_cpu())
        if current_platform.is_cuda():
            use_quantization_kernel(vllm_config.compilation_config.custom_ops)
        check_adapters(vllm_config.lora_config is not None, omni, taken=family.takes_adapters)
        check_offload(vllm_config.offload_config.uva.cpu_offload_gb, omni)
        omni.check_stages(parallel.pipeline_parallel_size)
        omni.check_ranks(parallel.tensor_parallel_size)
        family.check_refusals(hf_config.to_dict(), omni, parallel.pipeline_parallel_size)
        if family.check_parallel is not None:
            sizes = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
            family.check_parallel(hf_config.to_dict(), omni, *sizes)
        executor_cls = family.executor_cls
        if executor_cls is not None:
            choose_executor(parallel, executor_cls)
        else:
            stay_in_process(parallel)
            if current_platform.is_cpu():
                let_threads_sleep()
            if parallel.worker_cls == "auto":
                parallel.worker_cls = WORKER_CLS
            check_diffusion_worker(parallel.worker_cls)
        if scheduler.scheduler_cls is None:
            scheduler.scheduler_cls = SCHEDULER_CLS
        scheduler.async_scheduling = False
        by_step, stages = steps_one_at_a_time(vllm_config), parallel.pipeline_parallel_size
        check_stages_scheduler(stages, by_step=by_step)
        check_chunks_ahead(omni, stages=stages, by_step=by_step)
        vllm_config.cache_config.enable_prefix_caching = False
        if vllm_config.model_config.multimodal_config is not None:
            # A camera path never repeats, so the processor cache would never have a hit.
            vllm_config.model_config.multimodal_config.mm_processor_cache_gb = 0


class LanguageModelConfig(VerifyAndUpdateConfig):
    """Config hook for stock architectures that have no config hook.

    The hook has an effect only if `--worker-cls` names a worker from this package.
    """

    @staticmethod
    def verify_and_update_config(vllm_config: "VllmConfig") -> None:
        worker_cls, scheduler = vllm_config.parallel_config.worker_cls, vllm_config.scheduler_config
        check_ar_worker(worker_cls)
        if is_ar_worker(worker_cls) and scheduler.scheduler_cls is None:
            scheduler.scheduler_cls = AR_SCHEDULER_CLS


def world_description(hf_config: PreTrainedConfig) -> WorldDescription | None:
    """Return the world description that the config parser found in the checkpoint, if any."""
    values = hf_config.to_dict().get(CONFIG_KEY)
    return None if values is None else msgspec.convert(values, WorldDescription)


def heed_executor(model_config: "ModelConfig", backend: Any) -> None:
    """Assign the checkpoint to the model family whose executor the user has requested.

    The config parser cannot make this assignment, because it does not receive the executor.

    Raises:
        ValueError: The family does not support the checkpoint directory.
    """
    if all(get_family(name).executor_cls != backend for name in family_names()) or backend is None:
        return
    family = detect_family(Path(model_config.model), backend)
    if model_config.hf_config.omni_family != family.name:
        model_config.hf_config.update(
            {"omni_family": family.name, **family.hf_config(Path(model_config.model))}
        )


def choose_executor(parallel: "ParallelConfig", executor_cls: str) -> None:
    """Select the executor of a model family that has no workers.

    Raises:
        ValueError: The user has requested a backend that requires workers.
    """
    backend = parallel.distributed_executor_backend
    check_backend(backend, executor_cls)
    if backend in (None, "uni", "mp"):  # vLLM's defaults for one process
        parallel.distributed_executor_backend = executor_cls


def apply_preset(vllm_config: "VllmConfig", family: ModelFamily, omni: OmniConfig) -> None:
    """Set the precision that the preset specifies, unless the user has set a precision, and log one
    line about the preset.

    Args:
        vllm_config: Engine configuration. It is updated in place.
        family: Model family, which must have presets.
        omni: Options of this package.

    Raises:
        ValueError: The device does not support the preset's precision.
    """
    from vllm.platforms import current_platform  # the import probes for devices

    model, cache = vllm_config.model_config, vllm_config.cache_config
    config = model.hf_config.to_dict()
    assert family.served_preset is not None
    preset = family.served_preset(config, omni).next_to(
        weights=bool(model.quantization or config.get("quantization_config") is not None),
        keys_and_values=cache.cache_dtype != "auto",
    )
    check_preset_precision(
        preset,
        str(model.dtype).removeprefix("torch."),
        has_fp8=current_platform.supports_fp8(),
        device=current_platform.get_device_name(),
    )
    if preset.quantization is not None:
        model.quantization = preset.quantization
    if preset.kv_cache_dtype is not None:
        cache.cache_dtype = preset.kv_cache_dtype
    logger.info("%s", preset_line(preset, family, model.model, config, omni))


def resolve_quantization(model_config: "ModelConfig", omni: OmniConfig, *, cpu: bool) -> None:
    """Determine the quantization method of the transformer's layers.

    For a checkpoint whose weights are not quantized, `fp8` selects `fp8_per_channel`, because
    vLLM's `fp8` is the name of a storage format.

    Args:
        model_config: Model configuration. It is updated in place.
        omni: Options of this package.
        cpu: Whether the model runs on a CPU.

    Raises:
        ValueError: The quantization is not supported; the message gives the reason.
    """
    stored = getattr(model_config.hf_config, "quantization_config", None)
    has_config = model_config.quantization_config is not None
    if omni.dequantize and stored is not None:
        model_config.quantization = None
    elif stored is None and model_config.quantization == "fp8":
        model_config.quantization = ONLINE_METHOD
        model_config.quantization_config = resolve_quantization_config(
            ONLINE_METHOD, model_config.quantization_config
        )
    check_quantization(
        model_config.quantization, omni, has_config=has_config, cpu=cpu, stored=stored
    )


def use_quantization_kernel(custom_ops: list[str]) -> None:
    """By default, select vLLM's CUDA kernel for quantizing the inputs of linear layers.

    For models compiled as a whole, vLLM's default is the PyTorch implementation, because Inductor
    fuses it with neighbouring ops. This package compiles only the pointwise ops between layers, so
    the PyTorch implementation would run as a separate, slower kernel.

    Args:
        custom_ops: `custom_ops` of the compilation config. The list is updated in place, unless the
            user has chosen an implementation.
    """
    if not {"+quant_fp8", "-quant_fp8"} & set(custom_ops):
        custom_ops.append("+quant_fp8")


def stay_in_process(parallel: "ParallelConfig") -> None:
    """Run a single CPU rank in the engine's own process, unless the user has chosen otherwise.

    By default, vLLM would start a worker process and reserve a core for the engine process, which
    polls while it waits. On a machine with two cores, only one core would be left for the worker.
    `DiffusionCPUWorker` sets the number of threads.
    """
    from vllm.platforms import current_platform  # the import probes for devices

    alone = parallel.world_size == 1 and parallel.data_parallel_size == 1
    unnamed = (
        parallel.distributed_executor_backend in (None, "uni") and THREADS_BIND not in os.environ
    )
    if current_platform.is_cpu() and alone and unnamed:
        parallel.distributed_executor_backend = IN_PROCESS_EXECUTOR


def let_threads_sleep() -> None:
    """Shorten the time that waiting OpenMP threads spin, unless the user has set a wait policy.

    By default, waiting threads spin for 10 ms. If another program runs on the same core, spinning
    uses up the thread's share of CPU time. The thread is then preempted during the next small
    matmul, and all other threads wait for it. As a result, even one busy low-priority program would
    slow small models down by an order of magnitude (`benchmarks/served_attacks.py --attack
    program`). The variable affects only processes that start later, because libgomp reads its
    environment variables once.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(SPIN_COUNT, SPINS)


def check_options(hf_config: PreTrainedConfig, additional_config: Any) -> OmniConfig:
    """Parse and check this package's options.

    Raises:
        ValueError: An option is invalid; the message names the option.
    """
    omni = OmniConfig.from_additional_config(additional_config)
    family = get_family(hf_config.omni_family)
    if family.check_options is not None:
        family.check_options(hf_config.to_dict(), omni)
    return omni


def steps_one_at_a_time(vllm_config: "VllmConfig") -> bool:
    """Return whether the scheduler runs one denoise step per engine step. vLLM's own schedulers run
    a whole chunk per engine step.
    """
    from vllm_omni.core.sched import StreamBatchScheduler

    return issubclass(vllm_config.scheduler_config.get_scheduler_cls(), StreamBatchScheduler)


def register_with_vllm() -> None:
    quiet_start()  # must run before vLLM first reads the environment, soon after this call
    wait_for_output_threads_at_exit()
    hint_at_exit()
    for architecture, qualname in ARCHITECTURES.items():
        if architecture not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(architecture, qualname)
        MODELS_CONFIG_MAP.setdefault(architecture, OmniModelConfig)
    for architecture, qualname in AR_ARCHITECTURES.items():
        if architecture not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(architecture, qualname)
    for architecture in ModelRegistry.get_supported_archs():
        MODELS_CONFIG_MAP.setdefault(architecture, LanguageModelConfig)
    for model_type, config_class in _CONFIG_CLASSES.items():
        AutoConfig.register(model_type, config_class, exist_ok=True)
    if CONFIG_FORMAT not in _CONFIG_FORMAT_TO_CONFIG_PARSER:
        register_config_parser(CONFIG_FORMAT)(OmniConfigParser)
