# SPDX-License-Identifier: Apache-2.0
"""The `diffusers_pipeline` family: any diffusers pipeline directory, served by
`DiffusersPipelineExecutor`.

This family comes last in the registry, so that other families take precedence for their own
checkpoints.
"""

from pathlib import Path
from typing import Any

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.models.capabilities import (
    SESSIONS_END_WITH_REQUEST,
    Capabilities,
    Refusal,
    Refusals,
)
from vllm_omni.model_executor.models.diffusers_pipeline.checkpoint import (
    PipelineIndex,
    check_class,
    check_components,
    component_config,
    is_pipeline,
    stored_dtype,
    temporal_stride,
)
from vllm_omni.model_executor.models.diffusers_pipeline.options import DiffusersOptions
from vllm_omni.model_executor.models.registry import ModelFamily

NO_WORKER = Refusal("it runs without a worker")


def _hf_config(path: Path) -> dict[str, Any]:
    index = PipelineIndex.read_folder(path)
    check_class(index.class_name)
    return {
        "architectures": ["DiffusersPipeline"],
        "dtype": stored_dtype(path, index),
        # vLLM requires these fields for every model, but pipelines do not use them.
        "hidden_size": 1,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": 8,
        "max_position_embeddings": 16,
        "diffusers_pipeline": {
            "path": str(path),
            "class_name": index.class_name,
            "temporal_stride": temporal_stride(path),
            "guidance_distilled": component_config(path, "transformer").get("guidance_embeds")
            is True,
        },
    }


def _check_options(config: dict[str, Any], omni: OmniConfig) -> None:
    options = DiffusersOptions.parse(omni.model)
    path = Path(config["diffusers_pipeline"]["path"])
    check_components(path, PipelineIndex.read_folder(path), options.without)
    if options.pipeline_class is not None:
        check_class(options.pipeline_class)


def _capabilities(config: dict[str, Any], omni: OmniConfig) -> Capabilities:
    # Imported here, because `capabilities` imports the pipeline class.
    from vllm_omni.model_executor.models.diffusers_pipeline.tasks import capabilities

    options = DiffusersOptions.parse(omni.model)
    info = config["diffusers_pipeline"]
    return capabilities(
        options.pipeline_class or info["class_name"],
        options,
        info["temporal_stride"],
        distilled=info["guidance_distilled"],
    )


FAMILY = ModelFamily(
    name="diffusers_pipeline",
    title="a diffusers pipeline",
    architecture="DiffusersPipeline",
    detect=is_pipeline,
    hf_config=_hf_config,
    layouts=("qwen_image", "flux", "wan", "sd3"),
    check_options=_check_options,
    refusals=lambda hf_config, omni, stages: Refusals(
        chunks_in_flight=NO_WORKER,
        temporal_pipeline=NO_WORKER,
        periodic_snapshots=SESSIONS_END_WITH_REQUEST,
    ),
    capabilities=_capabilities,
    executor_cls="vllm_omni.executor.DiffusersPipelineExecutor",
)
