# SPDX-License-Identifier: Apache-2.0
"""`DiffusersPipeline`: the name vLLM's model registry knows; no engine ever makes one.

vLLM reads a few class attributes of an architecture before it chooses the executor. The pipeline
itself is loaded by `vllm_omni.executor.DiffusersPipelineExecutor`.
"""

from typing import Any

from vllm_omni.model_executor.vllm_model import StepPipeline


class DiffusersPipeline(StepPipeline):
    def __init__(self, **kwargs: Any) -> None:
        raise RuntimeError(
            "a diffusers pipeline is not run by a worker: pass --distributed-executor-backend "
            "vllm_omni.executor.DiffusersPipelineExecutor (vllm serve --omni does)"
        )
