# SPDX-License-Identifier: Apache-2.0
"""What `vllm-omni plan` uses for all Wan networks: sizes of the transformer, and refusals of world
models."""

import math
from collections.abc import Mapping
from typing import Any

from vllm_omni.model_executor.models.wan.architecture import ChunkTransformerConfig
from vllm_omni.planning.stream_model import Changes


def transformer_sizes(config: ChunkTransformerConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return fields of `StreamModel`; `shapes` are those of the transformer's tensors, by name."""
    height, width = config.native_size
    return {
        "height": height,
        "width": width,
        "dim": config.dim,
        "ffn_dim": config.ffn_dim,
        "heads": config.num_heads,
        "layers": config.num_layers,
        "sides": sum(shape[0] + math.prod(shape[1:]) for shape in shapes.values() if len(shape) in (2, 5)),
        "parameters": sum(math.prod(shape) for shape in shapes.values()),
    }


def check_world(family: str, changes: Changes) -> None:
    """Raise ValueError for options that require a stream without camera or key input."""
    if changes.get("in_flight", 1) > 1 or changes.get("clean", 1) == 0:
        raise ValueError(f"{family} has no noise-matched cache; causal Wan has")
    if changes.get("video_input"):
        raise ValueError(f"{family} takes no video; causal Wan does")
