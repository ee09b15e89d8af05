# SPDX-License-Identifier: Apache-2.0
"""Functions for `vllm-omni plan` that the Wan families share: the dimensions of a transformer, and
a check of the requested changes.

`tests/planning/test_plan_memory.py` tests the resulting plans.
"""

import math
from collections.abc import Mapping
from typing import Any

from vllm_omni.model_executor.models.wan.architecture import ChunkTransformerConfig
from vllm_omni.planning.stream_model import Changes


def transformer_sizes(
    config: ChunkTransformerConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Return the `StreamModel` fields that describe a transformer. `shapes` maps tensor names to
    shapes.
    """
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
    """Raise ValueError for changes that a world model does not support, such as several chunks in
    flight.
    """
    if changes.get("in_flight", 1) > 1 or changes.get("noise_matched"):
        raise ValueError(f"{family} has no noise-matched cache; causal Wan has")
    if changes.get("video_input"):
        raise ValueError(f"{family} takes no video; causal Wan does")
