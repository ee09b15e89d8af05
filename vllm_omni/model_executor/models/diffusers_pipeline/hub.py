# SPDX-License-Identifier: Apache-2.0
"""Early check of weight files, called by `vllm serve --omni` unless `--load-format dummy` is set.
Pipelines of diffusers are not downloaded by name.
"""

from pathlib import Path

from vllm_omni.model_executor.checkpoint.hub import HubComponent
from vllm_omni.model_executor.models.diffusers_pipeline.checkpoint import (
    PipelineIndex,
    check_weights,
)

PIECES: tuple[HubComponent, ...] = ()


def check_complete(path: Path) -> None:
    """Raise ValueError (one line) if the weights of a component are missing."""
    check_weights(path, PipelineIndex.read_folder(path))
