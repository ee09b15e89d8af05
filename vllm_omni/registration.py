# SPDX-License-Identifier: Apache-2.0
"""`register()`: adds to vLLM's registries model classes, one config parser, one config hook per architecture.

Only additive and idempotent; nothing of vLLM is replaced. The exact list of touched registries is asserted by
tests/test_import_purity.py.
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
    check_quantization,
    check_stages_scheduler,
    is_ar_worker,
)
from vllm_omni.engine_arguments.table import Worker
from vllm_omni.entrypoints.cli.omni_hint import hint_at_exit
from vllm_omni.entrypoints.logs import quiet_start
from vllm_omni.entrypoints.output_threads import wait_for_output_threads_at_exit
from vllm_omni.model_executor.models.registry import (
    AR_ARCHITECTURES,
    ARCHITECTURES,
    MODEL_TYPES,
    detect_family,
    family_names,
    get_family,
)
from vllm_omni.model_executor.root_config import ROOT_MODEL_TYPE
from vllm_omni.worlds.card import CONFIG_KEY, WorldCard, read_card, with_defaults
from vllm_omni.worlds.manifest import check_files

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig

logger = logging.getLogger("vllm." + __name__)

IN_PROCESS_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""By its full name: on a CPU vLLM replaces the name `uni` by `mp`."""
ONLINE_METHOD = "fp8_per_channel"
"""The meaning of `--quantization fp8` for a checkpoint that is not stored quantized."""
THREADS_BIND = "VLLM_CPU_OMP_THREADS_BIND"
"""vLLM's own variable: cores of each rank."""
SPIN_COUNT, SPINS = "GOMP_SPINCOUNT", "3000"
"""libgomp's variable: how often a waiting thread looks before it sleeps; 3000 times take about 0.1 ms."""


class OmniPipelineConfig(PreTrainedConfig):
    """The HF-shaped config that vLLM carries for a pipeline checkpoint; filled by the model family."""

    model_type = ROOT_MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Read the directory that transformers names: its `config.json` only says that it is one of this package's."""
        folder = kwargs.get("name_or_path", "")
        if "omni_family" in config_dict or not Path(folder).is_dir():
            return super().from_dict(config_dict, **kwargs)
        config = read_checkpoint(Path(folder))
        return (config, kwargs) if kwargs.pop("return_unused_kwargs", False) else config


_CONFIG_CLASSES: dict[str, type[OmniPipelineConfig]] = {
    name: type(OmniPipelineConfig.__name__, (OmniPipelineConfig,), {"model_type": name}) for name in MODEL_TYPES
}
"""transformers asks for a class of its own for each type; each reads an `OmniPipelineConfig`."""


class OmniConfigParser(ConfigParserBase):
    """`--config-format omni`: any checkpoint layout of any family this package knows (no `config.json` needed)."""

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
    """Return the config that the directory's family reads. Raises ValueError in one line."""
    check_files(path)
    family = detect_family(path)
    values: dict[str, Any] = {"omni_family": family.name, **family.hf_config(path)}
    if (card := read_card(path)) is not None:
        values[CONFIG_KEY] = msgspec.to_builtins(card)
    return OmniPipelineConfig(**values)


class OmniModelConfig(VerifyAndUpdateConfig):
    """Defaults and refusals for every architecture of this package, so that `vllm serve DIR` needs few flags."""

    @staticmethod
    def verify_and_update_model_config(model_config: "ModelConfig") -> None:
        model_config.skip_tokenizer_init = True
        stored = getattr(torch, str(model_config.hf_config.dtype).removeprefix("torch."))
        if model_config.dtype == torch.float16 and stored != torch.float16:
            # `--dtype auto` makes fp16 of fp32 weights; that overflows in video transformers: keep the stored dtype.
            model_config.dtype = stored

    @staticmethod
    def verify_and_update_config(vllm_config: "VllmConfig") -> None:
        from vllm.platforms import current_platform  # looks for devices when imported

        parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
        heed_executor(vllm_config.model_config, parallel.distributed_executor_backend)
        family = get_family(vllm_config.model_config.hf_config.omni_family)
        check_config(Worker.DIFFUSION if family.executor_cls is None else Worker.DIFFUSERS, vllm_config)
        check_kv_cache_dtype(vllm_config.cache_config.cache_dtype, family.kv_cache_dtypes)
        hf_config = vllm_config.model_config.hf_config
        card, size = world_card(hf_config), family.size_of(hf_config.to_dict())
        vllm_config.additional_config = with_defaults(vllm_config.additional_config, card, size)
        omni = check_options(hf_config, vllm_config.additional_config)
        if card is not None and (warning := card.untrained_size(omni.width, omni.height)) is not None:
            logger.warning("omni.width, omni.height: %s", warning)
        resolve_quantization(vllm_config.model_config, omni, cpu=current_platform.is_cpu())
        if current_platform.is_cuda():
            use_quantization_kernel(vllm_config.compilation_config.custom_ops)
        check_adapters(vllm_config.lora_config is not None, omni, taken=family.takes_adapters)
        check_offload(vllm_config.offload_config.uva.cpu_offload_gb, omni)
        omni.check_stages(parallel.pipeline_parallel_size)
        omni.check_ranks(parallel.tensor_parallel_size)
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
        check_chunks_ahead(omni, stages=stages, has_worker=executor_cls is None, by_step=by_step)
        vllm_config.cache_config.enable_prefix_caching = False
        if vllm_config.model_config.multimodal_config is not None:
            vllm_config.model_config.multimodal_config.mm_processor_cache_gb = 0  # no camera path ever comes twice


class LanguageModelConfig(VerifyAndUpdateConfig):
    """For stock architectures that have no hook yet: acts only if `--worker-cls` names a worker of this package."""

    @staticmethod
    def verify_and_update_config(vllm_config: "VllmConfig") -> None:
        worker_cls, scheduler = vllm_config.parallel_config.worker_cls, vllm_config.scheduler_config
        check_ar_worker(worker_cls)
        if is_ar_worker(worker_cls) and scheduler.scheduler_cls is None:
            scheduler.scheduler_cls = AR_SCHEDULER_CLS


def world_card(hf_config: PreTrainedConfig) -> WorldCard | None:
    """The card that the config parser found beside the checkpoint."""
    values = hf_config.to_dict().get(CONFIG_KEY)
    return None if values is None else msgspec.convert(values, WorldCard)


def heed_executor(model_config: "ModelConfig", backend: Any) -> None:
    """Give the checkpoint to the family whose executor the user names; the config parser could not know of it.

    Raises ValueError when that family does not take the directory.
    """
    if all(get_family(name).executor_cls != backend for name in family_names()) or backend is None:
        return
    family = detect_family(Path(model_config.model), backend)
    if model_config.hf_config.omni_family != family.name:
        model_config.hf_config.update({"omni_family": family.name, **family.hf_config(Path(model_config.model))})


def choose_executor(parallel: "ParallelConfig", executor_cls: str) -> None:
    """Give a family without workers its executor; raises ValueError for a backend that needs workers."""
    backend = parallel.distributed_executor_backend
    check_backend(backend, executor_cls)
    if backend in (None, "uni", "mp"):  # vLLM's own choices for one process
        parallel.distributed_executor_backend = executor_cls


def resolve_quantization(model_config: "ModelConfig", omni: OmniConfig, *, cpu: bool) -> None:
    """Settle which of vLLM's methods the transformers' layers take; raises ValueError with the reason for none.

    `fp8` of a plain checkpoint means `fp8_per_channel`; in vLLM it names a stored format. cpu: whether a CPU computes.
    """
    stored = getattr(model_config.hf_config, "quantization_config", None)
    has_config = model_config.quantization_config is not None
    if omni.dequantize and stored is not None:
        model_config.quantization = None
    elif stored is None and model_config.quantization == "fp8":
        model_config.quantization = ONLINE_METHOD
        model_config.quantization_config = resolve_quantization_config(ONLINE_METHOD, model_config.quantization_config)
    check_quantization(model_config.quantization, omni, has_config=has_config, cpu=cpu, stored=stored)


def use_quantization_kernel(custom_ops: list[str]) -> None:
    """Let vLLM's linear layers quantize their inputs by its CUDA kernel, unless the user has said otherwise.

    custom_ops: of the compilation config, changed in place. Where models are compiled as a whole, vLLM's default is the
    plain version, to be fused with its neighbours. Ours compile chains between layers: it would be a slower kernel of
    its own.
    """
    if not {"+quant_fp8", "-quant_fp8"} & set(custom_ops):
        custom_ops.append("+quant_fp8")


def stay_in_process(parallel: "ParallelConfig") -> None:
    """On a CPU, let the only rank compute in the engine's own process, unless the user has said where it runs.

    vLLM would start a worker process and keep a core back for the engine's, which polls while it waits: with two cores
    that is half of the machine. How many threads there are then is up to `DiffusionCPUWorker`.
    """
    from vllm.platforms import current_platform  # looks for devices when imported

    alone = parallel.world_size == 1 and parallel.data_parallel_size == 1
    unnamed = parallel.distributed_executor_backend in (None, "uni") and THREADS_BIND not in os.environ
    if current_platform.is_cpu() and alone and unnamed:
        parallel.distributed_executor_backend = IN_PROCESS_EXECUTOR


def let_threads_sleep() -> None:
    """Let OpenMP's threads sleep soon when they wait for each other, unless the user has said how they wait.

    They would look for 10 ms, which uses up their share of a core that another program wants, too; a thread without a
    share is interrupted within the next small product, and the others wait. With one busy program of low priority on
    one of two cores a tiny chunk took 27 times as long, with this 1.7 times (`benchmarks/served_attacks.py --attack
    program`). Processes that start later heed it: libgomp reads its variables once.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(SPIN_COUNT, SPINS)


def check_options(hf_config: PreTrainedConfig, additional_config: Any) -> OmniConfig:
    """Parse and check everything a user set; raises ValueError naming the key. Returns the parsed `OmniConfig`."""
    omni = OmniConfig.from_additional_config(additional_config)
    family = get_family(hf_config.omni_family)
    if family.check_options is not None:
        family.check_options(hf_config.to_dict(), omni)
    return omni


def steps_one_at_a_time(vllm_config: "VllmConfig") -> bool:
    """Whether the configured scheduler runs one denoise step per engine step (ours) or whole chunks (stock)."""
    from vllm_omni.core.sched import StreamBatchScheduler

    return issubclass(vllm_config.scheduler_config.get_scheduler_cls(), StreamBatchScheduler)


def register_with_vllm() -> None:
    quiet_start()  # before vLLM looks at the environment, which is soon after it has called this
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
