# SPDX-License-Identifier: Apache-2.0
"""Diffusers pipelines come from anywhere, so nothing is fetched by name; the early check of weight
files is here.

`vllm serve --omni` calls it unless weights are to be random (`--load-format dummy`).
"""

from pathlib import Path

from vllm_omni.model_executor.checkpoint.hub import HubComponent
from vllm_omni.model_executor.models.diffusers_pipeline.checkpoint import (
    PipelineIndex,
    check_weights,
)

PIECES: tuple[HubComponent, ...] = ()


def check_complete(path: Path) -> None:
    """Raise ValueError of one line if a component that is there lacks its weights."""
    check_weights(path, PipelineIndex.read_folder(path))
