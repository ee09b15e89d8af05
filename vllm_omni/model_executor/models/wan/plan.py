# SPDX-License-Identifier: Apache-2.0
"""The common parts of Wan networks in `vllm-omni plan`: sizes of the transformer, refusals of a
world.

Held by tests/planning/test_plan_memory.py.
"""

import math
from collections.abc import Mapping
from typing import Any

from vllm_omni.model_executor.models.wan.architecture import ChunkTransformerConfig
from vllm_omni.planning.stream_model import Changes


def transformer_sizes(
    config: ChunkTransformerConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Fields of `StreamModel`. shapes: of the transformer's tensors, by name."""
    height, width = config.native_size
    return {
        "height": height,
        "width": width,
        "latent_cell": config.pixels_per_cell,
        "dim": config.dim,
        "ffn_dim": config.ffn_dim,
        "heads": config.num_heads,
        "layers": config.num_layers,
        "sides": sum(
            shape[0] + math.prod(shape[1:]) for shape in shapes.values() if len(shape) in (2, 5)
        ),
        "parameters": sum(math.prod(shape) for shape in shapes.values()),
    }


def check_world(family: str, changes: Changes) -> None:
    """Raise ValueError for modifications that are only possible for a stream without a camera or
    keys.
    """
    if changes.get("in_flight", 1) > 1 or changes.get("noise_matched"):
        raise ValueError(f"{family} has no noise-matched cache; causal Wan has")
    if changes.get("video_input"):
        raise ValueError(f"{family} takes no video; causal Wan does")
