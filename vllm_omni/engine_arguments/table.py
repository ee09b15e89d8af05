# SPDX-License-Identifier: Apache-2.0
"""Fields of vLLM's `AsyncEngineArgs` that a worker refuses or treats differently.

A field is *refused* if a worker would ignore it although the user expects it to affect memory,
speed, precision, data or parallelism. A refusal names an alternative. A field is *honoured* with a
note if its effect differs from vLLM's documentation. All other fields are listed in `PLAIN_FIELDS`.
A test (tests/test_engine_arguments.py) fails if a vLLM version has a field that is in neither list.
This module does not import vLLM.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Literal


class WorkerKind(StrEnum):
    """Kinds of workers that can serve a model."""

    DIFFUSION = "diffusion worker"
    DIFFUSERS = "diffusers executor"
    AR = "AR worker"


@dataclass(frozen=True)
class ArgumentVerdict:
    """Effect of an engine argument on one worker."""

    kind: Literal["honoured", "no effect", "refused"]
    """Kind of effect. `honoured`: the argument works. `no effect`: the argument configures a
    component that this worker does not have. `refused`: the server does not start with this
    argument.
    """
    why: str = ""
    """The alternative for a refused argument; otherwise the difference from vLLM's documentation.
    The generated page appends this text to the argument's line.
    """
    unless: tuple[Any, ...] = ()
    """Values that are accepted even though the argument is otherwise refused."""


NO_EFFECT: Final = ArgumentVerdict("no effect")


@dataclass(frozen=True)
class EngineArgument:
    """One field of vLLM's `AsyncEngineArgs`, with its effect on each worker."""

    name: str
    """Field name in `AsyncEngineArgs`."""
    verdicts: dict[WorkerKind, ArgumentVerdict]
    """Effect of the field on each kind of worker."""
    since: str
    """First supported vLLM version that has the field."""

    @property
    def flag(self) -> str:
        return "--" + self.name.strip("_").replace("_", "-")


@dataclass(frozen=True)
class ArgumentGroup:
    """Fields of `AsyncEngineArgs` that have the same effects on the workers."""

    names: str
    """Names of the fields in this group, separated by spaces."""
    diffusion: ArgumentVerdict
    """Effect of the fields on the diffusion worker."""
    diffusers: ArgumentVerdict | None = None
    """Effect of the fields on the diffusers executor. If None, it is the same as on the diffusion
    worker.
    """
    ar: ArgumentVerdict = ArgumentVerdict("honoured")
    """Effect of the fields on the autoregressive worker. Default: honoured."""
    since: str = "0.32"
    """First supported vLLM version that has the fields. Default: 0.32."""

    def arguments(self) -> Iterator[EngineArgument]:
        diffusers = self.diffusion if self.diffusers is None else self.diffusers
        verdicts = {
            WorkerKind.DIFFUSION: self.diffusion,
            WorkerKind.DIFFUSERS: diffusers,
            WorkerKind.AR: self.ar,
        }
        for name in self.names.split():
            yield EngineArgument(name, verdicts, self.since)


def honoured(how: str = "") -> ArgumentVerdict:
    return ArgumentVerdict("honoured", how)


def refused(instead: str, *unless: Any) -> ArgumentVerdict:
    return ArgumentVerdict("refused", instead, unless)


_ONLINE_FP8 = ("fp8", "fp8_per_channel", "fp8_per_tensor", "fp8_per_block")
STORED_METHODS = ("modelopt", "modelopt_fp4", "compressed-tensors")
_COMPONENT_TYPES = refused(
    "--dtype or omni.model.component_dtypes determines the dtype of the weights: drop it"
)
DIFFUSION_WORKERS = (
    "vllm_omni.worker.DiffusionGPUWorker",
    "vllm_omni.worker.diffusion_gpu_worker.DiffusionGPUWorker",
)
"""Names of the diffusion worker class. The diffusers executor accepts and ignores these names,
because users pass them for every diffusion checkpoint.
"""
_WITHOUT_WORKER = refused("this executor has no worker: drop it")
_ONE_DEVICE = refused(
    "this executor uses one process and one device: drop it, or use --data-parallel-size"
)
_ONE_OFFLOADER = refused(
    "--cpu-offload-gb prefetches the weights of all blocks evenly: use it alone"
)
_PIPELINE_OFFLOAD = refused("use omni.model.offload")
_OWN_COMPILE = refused("use omni.model.compile and omni.model.cuda_graphs, or --enforce-eager")
_NEVER_COMPILED = refused("a pipeline is not compiled: drop it")
_OWN_ATTENTION = refused("attention kernels are those of torch and this package: drop it")
_BY_REQUEST = "requests for hidden states fail with an error; requests for text work"

ROWS = (
    # ---- the checkpoint
    ArgumentGroup(
        "dtype",
        honoured("`auto` is the dtype of the checkpoint; fp32 is not converted to fp16 as in vLLM"),
    ),
    ArgumentGroup(
        "load_format",
        refused("use auto, hf, safetensors or dummy", "auto", "hf", "safetensors", "dummy"),
    ),
    ArgumentGroup(
        "hf_config_path hf_overrides",
        refused("the checkpoint's configuration must match its weights: edit its config files"),
    ),
    ArgumentGroup("model_weights", refused("download the checkpoint and pass its directory")),
    ArgumentGroup(
        "model_class_overrides",
        honoured("replaces the class of an architecture of this package"),
        _WITHOUT_WORKER,
    ),
    ArgumentGroup(
        "model_impl", refused("there is only one implementation: drop it", "auto", "vllm")
    ),
    ArgumentGroup(
        "runner",
        refused("requests are pooling requests: drop it", "auto", "pooling"),
        ar=refused(
            "use vLLM's own worker for pooling",
            "auto",
            "generate",
        ),
    ),
    ArgumentGroup(
        "convert",
        refused("requests are pooling requests of the task 'plugin': drop it", "auto", "none"),
    ),
    ArgumentGroup(
        "skip_tokenizer_init tokens_only",
        honoured("vLLM's tokenizer is never created, because the config hook sets the first one"),
    ),
    # ---- precision and adapters
    ArgumentGroup(
        "quantization",
        refused(
            f"use {', '.join(_ONLINE_FP8)} to quantize while loading, or a checkpoint that is "
            f"stored as {', '.join(STORED_METHODS)}",
            *(*_ONLINE_FP8, "online", *STORED_METHODS),
        ),
        _COMPONENT_TYPES,
    ),
    ArgumentGroup(
        "quantization_config",
        honoured("`ignore` and `targets` name layers, for example `transformer.blocks.0.ffn.0`"),
        _COMPONENT_TYPES,
    ),
    ArgumentGroup(
        "enable_lora",
        honoured("for Wan models, Matrix-Game and Lance; see docs/how_to/lora.md"),
        refused(
            "list adapters in omni.model.loras, or load them with the RPC load_lora; requests "
            "select them in their options"
        ),
    ),
    ArgumentGroup(
        "max_loras",
        honoured("number of adapters in device memory, and maximum number for one chunk"),
        NO_EFFECT,
    ),
    ArgumentGroup(
        "max_cpu_loras",
        honoured("an adapter in neither memory is read from disk again when a request uses it"),
        NO_EFFECT,
    ),
    ArgumentGroup(
        "fully_sharded_loras",
        refused("every rank holds the whole A matrices, and there is one all-reduce: drop it"),
        NO_EFFECT,
    ),
    ArgumentGroup(
        "lora_target_modules",
        refused("adapters apply to all modules that they were trained on: drop it"),
        NO_EFFECT,
    ),
    ArgumentGroup(
        "default_mm_loras", refused("requests name their adapters in `lora`: drop it"), NO_EFFECT
    ),
    # ---- memory
    ArgumentGroup(
        "gpu_memory_utilization",
        honoured("the memory that weights and one chunk do not need is available to sessions"),
        NO_EFFECT,
    ),
    ArgumentGroup(
        "kv_cache_memory_bytes",
        honoured("maximum size of all sessions of a rank in bytes"),
        NO_EFFECT,
    ),
    ArgumentGroup(
        "kv_cache_dtype",
        refused(
            "the K/V cache has the dtype of --dtype or fp8 (e4m3)",
            "auto",
            "fp8",
            "fp8_e4m3",
        ),
        refused("a pipeline has no K/V cache between requests: drop it"),
    ),
    ArgumentGroup(
        "num_gpu_blocks_override",
        refused("the K/V cache of sessions has no blocks: use omni.max_session_bytes"),
        refused("a pipeline has no state between requests: drop it"),
    ),
    ArgumentGroup(
        "kv_offloading_size",
        refused(
            "sessions stay on the device: limit them with omni.max_session_bytes, or save snapshots"
        ),
        refused("a pipeline has no state between requests: drop it"),
    ),
    ArgumentGroup(
        "enable_prefix_caching",
        refused("it is always off, because requests do not share computed state"),
    ),
    ArgumentGroup("kv_sharing_fast_prefill", NO_EFFECT, ar=honoured(_BY_REQUEST)),
    ArgumentGroup(
        "cpu_offload_gb",
        honoured("size of the blocks' weights in pinned host memory, which are prefetched"),
        _PIPELINE_OFFLOAD,
    ),
    ArgumentGroup("cpu_offload_params offload_group_size", _ONE_OFFLOADER, _PIPELINE_OFFLOAD),
    ArgumentGroup(
        "offload_backend",
        refused(
            "--cpu-offload-gb prefetches the weights of all blocks evenly: drop it",
            "auto",
        ),
        _PIPELINE_OFFLOAD,
    ),
    ArgumentGroup(
        "enable_sleep_mode", honoured("level 1 retains sessions, level 2 discards them"), honoured()
    ),
    ArgumentGroup(
        "sleep_preserve_parameter_names enable_cumem_allocator", honoured(), _WITHOUT_WORKER
    ),
    ArgumentGroup("sleep_mode_backend", honoured(), _WITHOUT_WORKER, since="0.33"),
    ArgumentGroup(
        "sleep_mode_offload_cudagraph",
        refused("CUDA graphs of this package stay on the device: drop it"),
        _NEVER_COMPILED,
    ),
    # ---- speed
    ArgumentGroup(
        "enforce_eager",
        honoured("also sets the default of omni.model.compile and omni.model.cuda_graphs"),
        honoured("a pipeline is never compiled"),
    ),
    ArgumentGroup(
        "compilation_config cudagraph_capture_sizes max_cudagraph_capture_size optimization_level "
        "performance_mode",
        _OWN_COMPILE,
        _NEVER_COMPILED,
    ),
    ArgumentGroup(
        "attention_backend attention_config",
        _OWN_ATTENTION,
        refused("use omni.model.attention_backend"),
    ),
    ArgumentGroup(
        "linear_backend kernel_config ir_op_priority",
        refused("kernels are those of torch and this package: drop it"),
        refused("kernels are those of the pipeline: drop it"),
    ),
    ArgumentGroup("enable_dbo ubatch_size", refused("use omni.overlap_decode"), _ONE_DEVICE),
    ArgumentGroup(
        "speculative_config spec_method spec_model spec_tokens",
        refused("frames are not drafted: use fewer denoise steps"),
        ar=honoured(f"with adaptive verification, {_BY_REQUEST}"),
    ),
    ArgumentGroup(
        "diffusion_config",
        refused("it configures diffusion language models: use omni.model"),
        ar=honoured(_BY_REQUEST),
    ),
    # ---- several devices
    ArgumentGroup("tensor_parallel_size pipeline_parallel_size", honoured(), _ONE_DEVICE),
    ArgumentGroup(
        "prefill_context_parallel_size",
        refused("use --tensor-parallel-size with omni.model.sequence_parallel"),
        _ONE_DEVICE,
        ar=honoured(_BY_REQUEST),
    ),
    ArgumentGroup(
        "decode_context_parallel_size",
        refused("use --tensor-parallel-size with omni.model.sequence_parallel"),
        _ONE_DEVICE,
    ),
    ArgumentGroup("nnodes node_rank", honoured(), _ONE_DEVICE),
    ArgumentGroup(
        "distributed_executor_backend",
        honoured("uni, mp, ray"),
        honoured("the config hook sets it"),
    ),
    ArgumentGroup(
        "worker_cls",
        honoured("the config hook sets it"),
        refused(_WITHOUT_WORKER.why, *DIFFUSION_WORKERS),
    ),
    ArgumentGroup("worker_extension_cls", honoured(), _WITHOUT_WORKER),
    ArgumentGroup(
        "enable_expert_parallel enable_eplb enable_elastic_ep elastic_ep_max_dp_size enable_hc_sp",
        refused("the models have no experts: drop it"),
    ),
    ArgumentGroup(
        "enable_fault_tolerance fault_tolerance_config",
        refused("it is for models with experts: use omni.rank_timeout_s, which stops the engine"),
        _ONE_DEVICE,
    ),
    # ---- scheduling
    ArgumentGroup("scheduler_cls", honoured("default: set by the config hook")),
    ArgumentGroup(
        "max_num_seqs max_num_active_seqs max_num_queued_reqs max_num_queued_tokens",
        honoured("number of requests in the engine"),
    ),
    ArgumentGroup(
        "max_num_batched_tokens max_num_scheduled_tokens",
        honoured(
            "one token is one denoise step of one request; omni.max_requests_per_step also limits "
            "a step"
        ),
    ),
    ArgumentGroup(
        "async_scheduling",
        refused(
            "it slows diffusion down about 4x, because empty steps are in flight: drop it", False
        ),
    ),
    ArgumentGroup("scheduling_policy", refused("use omni.scheduling to schedule by deadline")),
    # ---- tokens
    ArgumentGroup(
        "return_sampling_mask",
        refused("the model samples no tokens: drop it"),
        ar=honoured(
            "not with ARHiddenStatesScheduler, which uses the same field and refuses to start"
        ),
    ),
    ArgumentGroup(
        "enable_trace_replay enable_return_routed_experts aux_output_config watermark_config",
        refused("the model samples no tokens: drop it"),
    ),
    # ---- inputs
    ArgumentGroup(
        "language_model_only", refused("these models have image and camera inputs: drop it")
    ),
    ArgumentGroup(
        "mm_encoder_only",
        refused("the encoder cannot run alone: drop it"),
        ar=refused("an encoder-only instance generates nothing: use vLLM's own worker"),
    ),
    # ---- other instances
    ArgumentGroup(
        "kv_transfer_config kv_events_config",
        refused("the K/V cache has no blocks to transfer: move sessions as snapshots"),
        refused("a pipeline has no state between requests: drop it"),
    ),
    ArgumentGroup(
        "ec_transfer_config",
        refused("the encoder cannot be shared: drop it"),
        ar=honoured("only as a consumer, because a producer runs the encoder alone"),
    ),
    ArgumentGroup(
        "weight_transfer_config", refused("use the RPC reload_weights with a checkpoint directory")
    ),
)

PLAIN_FIELDS: Final[Mapping[str, str]] = {
    "0.32": (
        "_api_process_count _api_process_rank additional_config aggregate_engine_logging "
        "all2all_backend allow_deprecated_quantization allowed_local_media_path "
        "allowed_media_domains block_size code_revision collect_detailed_traces config_format "
        "cp_kv_cache_interleave_size cpu_distributed_timeout_seconds cudagraph_metrics "
        "custom_histogram_buckets data_parallel_address data_parallel_backend "
        "data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb "
        "data_parallel_rank data_parallel_rpc_port data_parallel_size data_parallel_size_local "
        "data_parallel_start_rank dbo_decode_token_threshold dbo_prefill_token_threshold "
        "dcp_comm_backend dcp_kv_cache_interleave_size dcp_q_replicate device_ids "
        "disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce "
        "disable_hybrid_kv_cache_manager disable_log_stats disable_nccl_for_dp_synchronization "
        "disable_sliding_window distributed_timeout_seconds download_dir dp_sync_interval "
        "ec_manager_config enable_batch_sharded_sampling enable_chunked_prefill "
        "enable_ep_weight_filter enable_flashinfer_autotune enable_layerwise_nvtx_tracing "
        "enable_log_requests enable_logging_iteration_details "
        "enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint "
        "enable_mfu_metrics enable_mixed_moe_lora_format enable_mm_embeds "
        "enable_mm_processor_stats enable_moe_shared_loras enable_nccl_comm_suspend "
        "enable_prompt_embeds enable_shm_tensor_arena enable_tower_connector_lora engram_config "
        "eplb_config expert_placement_strategy fail_on_environ_validation gdn_prefill_backend "
        "generation_config hf_token ignore_patterns interleave_mm_strings io_processor_plugin "
        "jit_monitor_mode jit_monitor_verbose kda_decode_backend kda_prefill_backend "
        "kv_cache_dtype_skip_layers kv_cache_metrics kv_cache_metrics_sample kv_offloading_backend "
        "limit_mm_per_prompt log_config_file log_level logging_config logits_processors "
        "logprobs_mode long_prefill_token_threshold long_prefill_token_threshold_adaptive "
        "lora_dtype mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode "
        "mamba_cache_philox_rounds mamba_config mamba_ssm_cache_dtype mamba_ssu_algorithm "
        "master_addr master_port max_logprobs max_lora_cls_labels max_lora_rank max_model_len "
        "max_parallel_loading_workers media_io_kwargs mm_device_do_normalize "
        "mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
        "mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_tp_mode "
        "mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type "
        "mm_processor_device mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc "
        "model model_loader_extra_config moe_backend numa_bind numa_bind_cpus numa_bind_nodes "
        "offload_num_in_group offload_params offload_prefetch_step otlp_traces_endpoint "
        "override_generation_config per_request_spec_decode_metrics pooler_config "
        "prefill_schedule_interval prefix_cache_retention_interval prefix_caching_hash_algo "
        "prefix_match_unit profiler_config pt_load_map_location ray_workers_use_nsight "
        "reasoning_config reasoning_parser reasoning_parser_plugin renderer_num_workers "
        "replayssm_buffer_len revision safetensors_load_strategy safetensors_prefetch_block_size "
        "safetensors_prefetch_num_threads scheduler_reserve_full_isl seed served_model_name "
        "show_hidden_metrics_for_version shutdown_timeout skip_mm_profiling "
        "sparse_indexer_topk_backend specialize_active_lora stream_interval "
        "structured_outputs_config swa_bounded_replay tokenizer tokenizer_mode tokenizer_revision "
        "trust_remote_code use_fp64_gumbel use_replayssm use_tqdm_on_load video_pruning_method "
        "video_pruning_rate watermark"
    ),
    "0.33": ("monokernel watchdog_config"),
}
"""Fields without an entry in the table, by the first supported vLLM version that has them. Each of
these fields works as documented by vLLM, or configures a component that this package does not have.
"""

ARGUMENTS: dict[str, EngineArgument] = {
    argument.name: argument for row in ROWS for argument in row.arguments()
}

KNOWN_FIELDS: Final = {
    **{argument.name: argument.since for argument in ARGUMENTS.values()},
    **{name: since for since, names in PLAIN_FIELDS.items() for name in names.split()},
}
"""All known fields, each with the first supported vLLM version that has it."""
