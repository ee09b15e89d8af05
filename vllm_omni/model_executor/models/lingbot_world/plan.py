# SPDX-License-Identifier: Apache-2.0
"""Estimate the memory and compute that LingBot World requires, for `vllm-omni plan`. The estimates
include the camera layers and the conditioning on a start image.
"""

from collections.abc import Mapping
from typing import Any, Final

from vllm_omni.model_executor.models.lingbot_world.config import LingBotWorldConfig
from vllm_omni.model_executor.models.lingbot_world.weights import transformer_shapes
from vllm_omni.model_executor.models.wan.plan import check_world, transformer_sizes
from vllm_omni.planning.stream_model import Changes, FamilyPlan, StreamModel

_SIZES: Final[Mapping[str, Mapping[str, Any]]] = {
    "lingbot_world": {},
    "lingbot_world_v2_1_3b": {
        "dim": 1536,
        "ffn_dim": 8960,
        "num_heads": 12,
        "num_layers": 30,
        "sink_frames": 6,
        "frames_per_chunk": 4,
    },
}
"""`LingBotWorldConfig` values that differ from the defaults, keyed by release."""


def _named(name: str, changes: Changes) -> StreamModel:
    return _stream_model(name, LingBotWorldConfig(**_SIZES[name]), changes)


def _of_checkpoint(directory: str, checkpoint: Mapping[str, Any], changes: Changes) -> StreamModel:
    return _stream_model(
        "lingbot_world", LingBotWorldConfig.from_checkpoint(checkpoint["transformer"]), changes
    )


def _stream_model(name: str, config: LingBotWorldConfig, changes: Changes) -> StreamModel:
    check_world("lingbot_world", changes)
    fields = {
        "window": config.window_frames or 18,
        "sinks": config.sink_frames or 9,
        "chunk": config.frames_per_chunk or 3,
        "camera": True,
        "image": True,
        **changes,
    }
    return StreamModel(name, **transformer_sizes(config, transformer_shapes(config)) | fields)


PLAN = FamilyPlan(sizes=tuple(_SIZES), named=_named, of_checkpoint=_of_checkpoint)
