# SPDX-License-Identifier: Apache-2.0
"""The executor for diffusers pipelines, which run in the engine's process without workers.

`--distributed-executor-backend vllm_omni.executor.DiffusersPipelineExecutor` selects the executor,
so this import path is public. The class is imported on first use. This package has no other
executor: all other models run on vLLM's own executors, with the workers in `vllm_omni/worker`.
"""

from typing import Any

__all__ = ["DiffusersPipelineExecutor"]


def __getattr__(name: str) -> Any:
    if name == "DiffusersPipelineExecutor":
        from vllm_omni.executor.diffusers_pipeline_executor import DiffusersPipelineExecutor

        return DiffusersPipelineExecutor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
