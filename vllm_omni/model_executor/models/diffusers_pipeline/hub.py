# SPDX-License-Identifier: Apache-2.0
"""Early check of the weight files. `vllm serve --omni` runs it unless `--load-format dummy` is set.
`vllm-omni download` does not download diffusers pipelines by name.
"""

from pathlib import Path

from vllm_omni.model_executor.checkpoint.hub import HubComponent
from vllm_omni.model_executor.models.diffusers_pipeline.checkpoint import (
    PipelineIndex,
    check_weights,
)

PIECES: tuple[HubComponent, ...] = ()


def check_complete(path: Path) -> None:
    """Raise a one-line ValueError if the weights of a component are missing."""
    check_weights(path, PipelineIndex.read_folder(path))
