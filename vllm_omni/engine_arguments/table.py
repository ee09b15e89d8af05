# SPDX-License-Identifier: Apache-2.0
"""The table: fields of vLLM's `AsyncEngineArgs` x workers of this package -> `Verdict`. It imports nothing of vLLM.

A field is *honoured* if it works here as vLLM documents it, *meaningless* if the thing it sets does not exist here (it
costs a warning), *refused* if it promises memory, speed, precision, data or a split that would not come. A refusal
names an alternative. Held by tests/test_engine_arguments.py: the fields are those of the installed vLLM, and each that
is not honoured is noticed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal


class Worker(StrEnum):
    """Who serves: the diffusion worker, the executor without a worker, the autoregressive worker."""

    DIFFUSION = "diffusion worker"
    DIFFUSERS = "diffusers executor"
    AR = "AR worker"


@dataclass(frozen=True)
class Verdict:
    """kind: see above. why: half a sentence; of a refusal, the alternative. unless: values that are honoured."""

    kind: Literal["honoured", "meaningless", "refused"]
    why: str = ""
    unless: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Argument:
    """One field of `AsyncEngineArgs`. since: the first vLLM that has it, of those supported."""

    name: str
    verdicts: dict[Worker, Verdict]
    since: str

    @property
    def flag(self) -> str:
        return "--" + self.name.strip("_").replace("_", "-")


@dataclass(frozen=True)
class Row:
    """Fields that fare alike. diffusers: None = as the diffusion worker."""

    names: str
    diffusion: Verdict
    diffusers: Verdict | None = None
    ar: Verdict = Verdict("honoured")
    since: str = "0.32"

    def arguments(self) -> Iterator[Argument]:
        diffusers = self.diffusion if self.diffusers is None else self.diffusers
        verdicts = {Worker.DIFFUSION: self.diffusion, Worker.DIFFUSERS: diffusers, Worker.AR: self.ar}
        for name in self.names.split():
            yield Argument(name, verdicts, self.since)


def honoured(how: str = "") -> Verdict:
    return Verdict("honoured", how)


def meaningless(why: str) -> Verdict:
    return Verdict("meaningless", why)


def refused(instead: str, *unless: Any) -> Verdict:
    return Verdict("refused", instead, unless)


_ONLINE_FP8 = ("fp8", "fp8_per_channel", "fp8_per_tensor", "fp8_per_block")
STORED_METHODS = ("modelopt", "modelopt_fp4", "compressed-tensors")
_COMPONENT_TYPES = refused("weights are served in the type that --dtype or omni.model.component_dtypes names: drop it")
_LOCAL = meaningless("the checkpoint is a local directory, and none of its code is run")
_TEXT_ENCODER = meaningless("prompts go to the pipeline's own text encoder, with its own tokenizer")
_NO_SAMPLING = meaningless("no token is sampled")
_NO_PROMPT_TOKENS = meaningless("a request is one placeholder token to vLLM, in one piece")
_NO_BLOCKS = meaningless("sessions keep their state in the runner, not in vLLM's block pool")
_NO_EXPERTS = meaningless("the networks have no experts")
_NO_STATE_SPACE = meaningless("the networks have no such layers")
_NO_ENCODER = meaningless("vLLM's multimodal processors and encoders have no part in it")
_OWN_READER = meaningless("the checkpoint is read by this package, one tensor at a time")
_INDEPENDENT = meaningless("data-parallel engines do not wait for one another")
_WITH_LORA = meaningless("belongs to --enable-lora, which is refused")
_ONE_PROCESS = meaningless("there is one process on one device")
_EMPTY_POOL = meaningless("a pipeline keeps nothing between requests: no cache is sized")
DIFFUSION_WORKERS = (
    "vllm_omni.worker.DiffusionGPUWorker",
    "vllm_omni.worker.diffusion_gpu_worker.DiffusionGPUWorker",
)
"""Names of this package's worker that users give to every diffusion checkpoint; a pipeline runs without it."""
_WITHOUT_WORKER = refused("the pipeline runs without a worker: drop it")
_ONE_DEVICE = refused("it runs one process on one device: drop it, or add engines with --data-parallel-size")
_ONE_OFFLOADER = refused("--cpu-offload-gb fetches weights ahead of their use, evenly over all blocks: use it alone")
_PIPELINE_OFFLOAD = refused("use omni.model.offload")
_OWN_COMPILE = refused("use omni.model.compile and omni.model.cuda_graphs, or --enforce-eager")
_NEVER_COMPILED = refused("a pipeline is not compiled: drop it")
_OWN_ATTENTION = refused("attention is torch's and this package's own: drop it")
_BY_REQUEST = "a request that asks for hidden states gets an error that says why; its text would be right"

ROWS = (
    # ---- the checkpoint -------------------------------------------------------------------------------------------
    Row("model served_model_name config_format", honoured()),
    Row("dtype", honoured("`auto` is what the checkpoint stores: the config hook undoes vLLM's fp32 to fp16")),
    Row(
        "load_format",
        refused("only auto, hf, safetensors and dummy exist here", "auto", "hf", "safetensors", "dummy"),
    ),
    Row("trust_remote_code revision code_revision hf_token download_dir", _LOCAL),
    Row(
        "safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size use_tqdm_on_load "
        "pt_load_map_location model_loader_extra_config ignore_patterns max_parallel_loading_workers",
        _OWN_READER,
    ),
    Row(
        "hf_config_path hf_overrides",
        refused("the configuration is the checkpoint's, checked against its weights: edit its own files"),
    ),
    Row("model_weights", refused("download the checkpoint and pass its directory")),
    Row("model_class_overrides", honoured("a class for an architecture of this package"), _WITHOUT_WORKER),
    Row("model_impl", refused("only this package's implementation exists: drop it", "auto", "vllm")),
    Row(
        "runner",
        refused("requests are pooling requests: drop it", "auto", "pooling"),
        ar=refused("pooling gives no text beside hidden states: use vLLM's own worker for it", "auto", "generate"),
    ),
    Row("convert", refused("requests are pooling requests of the task 'plugin': drop it", "auto", "none")),
    Row("pooler_config", meaningless("results are frames or latents, which no pooler touches")),
    Row("tokenizer tokenizer_mode tokenizer_revision", _TEXT_ENCODER),
    Row("skip_tokenizer_init tokens_only", honoured("no tokenizer of vLLM's is ever made: the config hook sees to it")),
    # ---- precision and adapters -----------------------------------------------------------------------------------
    Row(
        "quantization",
        refused(
            f"weights are quantized as they are loaded, by one of {', '.join(_ONLINE_FP8)}, or stored quantized by "
            f"{', '.join(STORED_METHODS)}",
            *(*_ONLINE_FP8, "online", *STORED_METHODS),
        ),
        _COMPONENT_TYPES,
    ),
    Row(
        "quantization_config",
        honoured("`ignore` and `targets` name layers as `transformer.blocks.0.ffn.0`"),
        _COMPONENT_TYPES,
    ),
    Row("allow_deprecated_quantization", meaningless("belongs to methods of --quantization that are refused")),
    Row(
        "enable_lora",
        honoured("adapters of Wan models, Matrix-Game and Lance: docs/user_guide/lora.md"),
        refused("name adapters in omni.model.loras, or load them with the RPC load_lora; requests choose in options"),
    ),
    Row("max_loras", honoured("adapters in the device's memory, so the most that act on one chunk"), _WITH_LORA),
    Row("max_lora_rank", honoured(), _WITH_LORA),
    Row("max_cpu_loras", honoured("one that is in neither memory is read again when it is asked for"), _WITH_LORA),
    Row("lora_dtype", honoured(), _WITH_LORA),
    Row(
        "fully_sharded_loras",
        refused("every rank holds whole first factors, and sums once: drop it"),
        _WITH_LORA,
    ),
    Row("lora_target_modules", refused("an adapter acts wherever it was trained: drop it"), _WITH_LORA),
    Row("default_mm_loras", refused("a request names its adapters in `lora`: drop it"), _WITH_LORA),
    Row(
        "enable_tower_connector_lora max_lora_cls_labels",
        meaningless("adapters act on the diffusion network alone"),
        _WITH_LORA,
    ),
    Row(
        "specialize_active_lora",
        meaningless("graphs are kept for each session and its adapters"),
        _WITH_LORA,
    ),
    Row("enable_mixed_moe_lora_format enable_moe_shared_loras", _NO_EXPERTS, _WITH_LORA),
    # ---- memory ---------------------------------------------------------------------------------------------------
    Row(
        "gpu_memory_utilization",
        honoured("what weights and one chunk leave of it is for sessions"),
        _EMPTY_POOL,
    ),
    Row("kv_cache_memory_bytes", honoured("bytes that the sessions of a rank may hold together"), _EMPTY_POOL),
    Row(
        "kv_cache_dtype",
        refused("sessions keep keys and values as --dtype says or as fp8 (e4m3)", "auto", "fp8", "fp8_e4m3"),
        refused("a pipeline keeps no keys and values between requests: drop it"),
    ),
    Row(
        "num_gpu_blocks_override",
        refused("sessions have no blocks: use omni.max_session_bytes"),
        refused("a pipeline keeps nothing between requests: drop it"),
    ),
    Row(
        "kv_offloading_size",
        refused("sessions stay on the device: bound them with omni.max_session_bytes, or save them as snapshots"),
        refused("a pipeline keeps nothing between requests: drop it"),
    ),
    Row("enable_prefix_caching", refused("always off (the config hook sets it): no two requests share computed state")),
    Row(
        "block_size kv_cache_dtype_skip_layers prefix_caching_hash_algo prefix_cache_retention_interval "
        "prefix_match_unit swa_bounded_replay kv_offloading_backend kv_cache_metrics kv_cache_metrics_sample watermark "
        "disable_hybrid_kv_cache_manager scheduler_reserve_full_isl",
        _NO_BLOCKS,
    ),
    Row("kv_sharing_fast_prefill", _NO_PROMPT_TOKENS, ar=honoured(_BY_REQUEST)),
    Row(
        "cpu_offload_gb",
        honoured("so much of the blocks' weights lies in pinned host memory, and is fetched ahead of its use"),
        _PIPELINE_OFFLOAD,
    ),
    Row("cpu_offload_params offload_group_size", _ONE_OFFLOADER, _PIPELINE_OFFLOAD),
    Row(
        "offload_backend",
        refused("--cpu-offload-gb fetches weights ahead of their use, evenly over all blocks: drop it", "auto"),
        _PIPELINE_OFFLOAD,
    ),
    Row(
        "offload_num_in_group offload_prefetch_step offload_params",
        meaningless("belongs to --offload-group-size, which is refused"),
    ),
    Row("enable_sleep_mode", honoured("level 1 keeps sessions, level 2 drops them"), honoured()),
    Row("sleep_preserve_parameter_names enable_cumem_allocator", honoured(), _WITHOUT_WORKER),
    Row("sleep_mode_backend", honoured(), _WITHOUT_WORKER, since="0.33"),
    Row("enable_nccl_comm_suspend", honoured(), _ONE_PROCESS),
    Row(
        "sleep_mode_offload_cudagraph",
        refused("graphs are this package's own and stay on the device: drop it"),
        _NEVER_COMPILED,
    ),
    # ---- speed ----------------------------------------------------------------------------------------------------
    Row(
        "enforce_eager",
        honoured("also the default of omni.model.compile and omni.model.cuda_graphs"),
        honoured("a pipeline is never compiled"),
    ),
    Row(
        "compilation_config cudagraph_capture_sizes max_cudagraph_capture_size optimization_level performance_mode",
        _OWN_COMPILE,
        _NEVER_COMPILED,
    ),
    Row("attention_backend attention_config", _OWN_ATTENTION, refused("use omni.model.attention_backend")),
    Row(
        "linear_backend kernel_config ir_op_priority",
        refused("kernels are torch's and this package's own: drop it"),
        refused("kernels are the pipeline's own: drop it"),
    ),
    Row("monokernel", _NO_EXPERTS, since="0.33"),
    Row("enable_flashinfer_autotune sparse_indexer_topk_backend", meaningless("no such kernel is called")),
    Row("enable_dbo ubatch_size", refused("use omni.overlap_decode"), _ONE_DEVICE),
    Row(
        "dbo_decode_token_threshold dbo_prefill_token_threshold",
        meaningless("belongs to --enable-dbo, which is refused"),
    ),
    Row(
        "speculative_config spec_method spec_model spec_tokens",
        refused("there are no drafts of frames: use fewer denoise steps"),
        ar=honoured(f"with adaptive verification {_BY_REQUEST}"),
    ),
    Row("diffusion_config", refused("is of diffusion language models: use omni.model"), ar=honoured(_BY_REQUEST)),
    # ---- several devices ------------------------------------------------------------------------------------------
    Row("tensor_parallel_size pipeline_parallel_size", honoured(), _ONE_DEVICE),
    Row(
        "prefill_context_parallel_size",
        refused("use --tensor-parallel-size with omni.model.sequence_parallel"),
        _ONE_DEVICE,
        ar=honoured(_BY_REQUEST),
    ),
    Row(
        "decode_context_parallel_size",
        refused("use --tensor-parallel-size with omni.model.sequence_parallel"),
        _ONE_DEVICE,
    ),
    Row(
        "dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size",
        meaningless("belongs to --decode-context-parallel-size, which is refused"),
    ),
    Row(
        "data_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address "
        "data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb "
        "data_parallel_backend device_ids numa_bind numa_bind_nodes numa_bind_cpus _api_process_count "
        "_api_process_rank",
        honoured(),
    ),
    Row("dp_sync_interval disable_nccl_for_dp_synchronization prefill_schedule_interval", _INDEPENDENT),
    Row("nnodes node_rank", honoured(), _ONE_DEVICE),
    Row(
        "master_addr master_port distributed_timeout_seconds cpu_distributed_timeout_seconds disable_custom_all_reduce "
        "enable_shm_tensor_arena ray_workers_use_nsight",
        honoured(),
        _ONE_PROCESS,
    ),
    Row("distributed_executor_backend", honoured("uni, mp, ray"), honoured("the config hook sets it")),
    Row(
        "worker_cls",
        honoured("the config hook sets it"),
        refused(_WITHOUT_WORKER.why, *DIFFUSION_WORKERS),
    ),
    Row("worker_extension_cls", honoured(), _WITHOUT_WORKER),
    Row(
        "enable_expert_parallel enable_eplb enable_elastic_ep elastic_ep_max_dp_size enable_hc_sp",
        refused("the networks have no experts: drop it"),
    ),
    Row("enable_ep_weight_filter eplb_config expert_placement_strategy all2all_backend moe_backend", _NO_EXPERTS),
    Row(
        "enable_fault_tolerance fault_tolerance_config",
        refused("is of engines with experts: a lost rank ends its engine, see omni.rank_timeout_s"),
        _ONE_DEVICE,
    ),
    Row("enable_batch_sharded_sampling", _NO_SAMPLING),
    # ---- scheduling -----------------------------------------------------------------------------------------------
    Row("scheduler_cls", honoured("the config hook sets it if it is not given")),
    Row(
        "max_num_seqs max_num_active_seqs max_num_queued_reqs max_num_queued_tokens", honoured("requests in the engine")
    ),
    Row(
        "max_num_batched_tokens max_num_scheduled_tokens",
        honoured("one token is one denoise step of one request: a bound beside omni.max_requests_per_step"),
    ),
    Row(
        "async_scheduling",
        refused("does not pay for diffusion (empty steps in flight, about 4x slower): drop it", False),
    ),
    Row("scheduling_policy", refused("order by deadline instead: omni.scheduling")),
    Row(
        "max_model_len enable_chunked_prefill disable_chunked_mm_input long_prefill_token_threshold "
        "long_prefill_token_threshold_adaptive",
        _NO_PROMPT_TOKENS,
    ),
    Row("stream_interval", meaningless("a request has one result")),
    Row(
        "seed",
        meaningless(
            "noise comes from the seed of a request or session; without one it is 0, or drawn over /v1/images and "
            "/v1/videos"
        ),
    ),
    # ---- tokens ---------------------------------------------------------------------------------------------------
    Row(
        "max_logprobs logprobs_mode use_fp64_gumbel logits_processors generation_config override_generation_config "
        "reasoning_parser reasoning_parser_plugin reasoning_config structured_outputs_config "
        "per_request_spec_decode_metrics",
        _NO_SAMPLING,
    ),
    Row(
        "return_sampling_mask",
        refused("no token is sampled: drop it"),
        ar=honoured("without ARHiddenStatesScheduler, which needs the same field and refuses to start"),
    ),
    Row(
        "enable_trace_replay enable_return_routed_experts aux_output_config watermark_config",
        refused("no token is sampled: drop it"),
    ),
    Row("disable_sliding_window disable_cascade_attn", meaningless("a session's window is set in omni.model")),
    Row("enable_prompt_embeds", meaningless("embeddings travel as tensors of a request, whatever it says")),
    Row(
        "gdn_prefill_backend kda_prefill_backend kda_decode_backend mamba_config mamba_backend mamba_ssu_algorithm "
        "mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode "
        "enable_mamba_shared_prefix_checkpoint enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds "
        "replayssm_buffer_len use_replayssm engram_config",
        _NO_STATE_SPACE,
    ),
    # ---- inputs ---------------------------------------------------------------------------------------------------
    Row("io_processor_plugin renderer_num_workers mm_tensor_ipc limit_mm_per_prompt", honoured()),
    Row("language_model_only", refused("images and cameras are inputs of these models: drop it")),
    Row(
        "mm_encoder_only",
        refused("there is no encoder to run alone: drop it"),
        ar=refused("an encoder-only instance generates nothing: run it with vLLM's own worker"),
    ),
    Row("mm_processor_cache_gb", meaningless("always 0 (the config hook sets it): no camera path comes twice")),
    Row(
        "mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_processor_kwargs "
        "mm_processor_device mm_device_do_normalize mm_ipc_gpu_memory_gb mm_encoder_tp_mode mm_encoder_attn_backend "
        "mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin enable_mm_embeds interleave_mm_strings media_io_kwargs skip_mm_profiling "
        "video_pruning_rate video_pruning_method ec_manager_config",
        _NO_ENCODER,
    ),
    Row(
        "allowed_local_media_path allowed_media_domains",
        meaningless("no route fetches media: they arrive with the request"),
    ),
    # ---- other instances ------------------------------------------------------------------------------------------
    Row(
        "kv_transfer_config kv_events_config",
        refused("there are no blocks to send: move sessions as snapshots"),
        refused("a pipeline keeps nothing between requests: drop it"),
    ),
    Row(
        "ec_transfer_config",
        refused("there is no encoder to share: drop it"),
        ar=honoured("as a consumer; a producer runs the encoder alone, which is refused"),
    ),
    Row("weight_transfer_config", refused("use the RPC reload_weights with a directory")),
    # ---- logs and metrics -----------------------------------------------------------------------------------------
    Row(
        "disable_log_stats aggregate_engine_logging enable_log_requests logging_config log_level log_config_file "
        "show_hidden_metrics_for_version otlp_traces_endpoint custom_histogram_buckets "
        "enable_logging_iteration_details enable_mm_processor_stats profiler_config "
        "fail_on_environ_validation shutdown_timeout additional_config",
        honoured(),
    ),
    Row("watchdog_config", honoured(), since="0.33"),
    Row(
        "collect_detailed_traces cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics jit_monitor_mode "
        "jit_monitor_verbose",
        meaningless("measures vLLM's own runner: use --profiler-config"),
    ),
)

ARGUMENTS: dict[str, Argument] = {argument.name: argument for row in ROWS for argument in row.arguments()}
