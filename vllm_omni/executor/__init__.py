# SPDX-License-Identifier: Apache-2.0
"""Executors for `--distributed-executor-backend`. Names resolve on first use."""

from typing import Any

__all__ = ["DiffusersPipelineExecutor"]


def __getattr__(name: str) -> Any:
    if name == "DiffusersPipelineExecutor":
        from vllm_omni.executor.diffusers_pipeline_executor import DiffusersPipelineExecutor

        return DiffusersPipelineExecutor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
