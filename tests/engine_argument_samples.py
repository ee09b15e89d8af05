# SPDX-License-Identifier: Apache-2.0
"""A non-default value for every engine argument that a worker rejects."""

from typing import Any

TOGETHER: dict[str, Any] = {
    "model_class_overrides": {"NoSuchPipeline": "a:B"},
    "load_format": "npcache",
    "hf_overrides": {"unheard_of": 1},
    "model_weights": "elsewhere",
    "quantization": "awq",
    "kv_cache_dtype": "fp8_e5m2",
    "num_gpu_blocks_override": 7,
    "kv_offloading_size": 1.0,
    "enable_prefix_caching": True,
    "cpu_offload_gb": 1.0,
    "cpu_offload_params": {"a"},
    "offload_backend": "uva",
    "offload_group_size": 2,
    "sleep_preserve_parameter_names": ["a"],
    "sleep_mode_offload_cudagraph": True,
    "cudagraph_capture_sizes": [1, 2],
    "max_cudagraph_capture_size": 2,
    "optimization_level": 0,
    "performance_mode": "throughput",
    "attention_backend": "FLEX_ATTENTION",
    "linear_backend": "cutlass",
    "ir_op_priority": {"rms_norm": ["native"]},
    "ubatch_size": 2,
    "enable_dbo": True,
    "enable_hc_sp": True,
    "async_scheduling": True,
    "scheduling_policy": "priority",
    "return_sampling_mask": True,
    "enable_trace_replay": True,
    "worker_extension_cls": "a.B",
    "worker_cls": "a.B",
    "model_impl": "vllm",
    "convert": "embed",
    "enable_lora": True,
    "fully_sharded_loras": True,
    "lora_target_modules": ["a"],
    "diffusion_config": {},
    "enable_expert_parallel": True,
    "enable_return_routed_experts": True,
    "language_model_only": True,
    "kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
    "kv_events_config": {},
    "ec_transfer_config": {},
    "weight_transfer_config": {"backend": "nccl"},
}
"""Arguments that vLLM accepts until it calls the config hook. A single start passes all of them."""

LATER: dict[str, Any] = {"sleep_mode_backend": "elsewhere"}
"""Arguments that are added to `TOGETHER` if the installed vLLM supports them."""

ALONE: list[dict[str, Any]] = [
    {"hf_config_path": "the checkpoint itself"},
    {"quantization_config": {"linear": {"weight": "fp8_per_tensor_dynamic"}}},
    {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 2,
            "prompt_lookup_max": 2,
        }
    },
    {"prefill_context_parallel_size": 2},
    {"decode_context_parallel_size": 2, "tensor_parallel_size": 2},
    {"nnodes": 2, "pipeline_parallel_size": 2},
    {"node_rank": 1},
    {"mm_encoder_only": True},
    {"compilation_config": {"mode": 0}},
    {"attention_config": {"flash_attn_version": 2}},
    {"kernel_config": {"enable_jit_warmup": False}},
]
"""Arguments that exclude each other or an argument in `TOGETHER`, so each is passed in a separate
start.
"""

FOLDED: dict[str, tuple[dict[str, Any], str]] = {
    "spec_method": ({"spec_method": "ngram", "spec_tokens": 2}, "speculative_config"),
    "spec_tokens": ({"spec_method": "ngram", "spec_tokens": 3}, "speculative_config"),
    "aux_output_config": (
        {"aux_output_config": {"enable_return_routed_experts": True}},
        "enable_return_routed_experts",
    ),
}
"""Arguments that vLLM converts to another argument, each with the argument name that appears in the
error.
"""

BY_VLLM: dict[str, Any] = {
    "runner": "generate",
    "spec_model": "elsewhere",
    "enable_elastic_ep": True,
    "enable_eplb": True,
    "enable_fault_tolerance": True,
    "fault_tolerance_config": {},
    "watermark_config": {},
}
"""Arguments that vLLM itself rejects, for these models or on this machine, before it calls the
config hook.
"""

UNSEEN = {
    "elastic_ep_max_dp_size": "the size itself; vLLM overwrites it without --enable-elastic-ep, "
    "which is refused",
    "default_mm_loras": "vLLM takes it for its own multimodal models only, and for no "
    "request of ours",
    "enable_cumem_allocator": "vLLM refuses it on a CPU",
}
"""Arguments that startup neither detects nor rejects, each with the reason why it does no harm."""
