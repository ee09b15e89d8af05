# SPDX-License-Identifier: Apache-2.0
"""`DiffusersPipeline`: the class in vLLM's model registry, which is never instantiated.

vLLM reads an architecture's class attributes before it chooses the executor.
`vllm_omni.executor.DiffusersPipelineExecutor` loads the pipeline.
"""

from typing import Any

from vllm_omni.model_executor.vllm_model import StepPipeline


class DiffusersPipeline(StepPipeline):
    def __init__(self, **kwargs: Any) -> None:
        raise RuntimeError(
            "a diffusers pipeline is not run by a worker: pass --distributed-executor-backend "
            "vllm_omni.executor.DiffusersPipelineExecutor (vllm serve --omni does)"
        )
