# SPDX-License-Identifier: Apache-2.0
"""Memory and compute of Matrix-Game for `vllm-omni plan`, including the action modules and the
cross-attention to image embeddings.
"""

from collections.abc import Mapping
from typing import Any

from vllm_omni.model_executor.models.matrix_game.checkpoint import transformer_shapes
from vllm_omni.model_executor.models.matrix_game.config import MatrixGameConfig
from vllm_omni.model_executor.models.wan.plan import check_world, transformer_sizes
from vllm_omni.planning.stream_model import Changes, FamilyPlan, StreamModel

_CLIP_WEIGHTS = 1.26e9
"""Size of the ViT-H/14 vision tower without its last layer, in bytes (bf16)."""


def _named(name: str, changes: Changes) -> StreamModel:
    return _stream_model(name, MatrixGameConfig(), changes)


def _of_checkpoint(directory: str, checkpoint: Mapping[str, Any], changes: Changes) -> StreamModel:
    return _stream_model(
        directory, MatrixGameConfig.from_checkpoint(checkpoint["transformer"]), changes
    )


def _stream_model(name: str, config: MatrixGameConfig, changes: Changes) -> StreamModel:
    check_world("matrix_game", changes)
    fields = {
        "window": config.window_frames or config.variant.window_frames,
        "sinks": 0,
        "denoise": len(config.variant.steps),
        "image": True,
        "side_kv": 2 * config.mouse_width * len(config.action_blocks) if config.mouse_dim else 0,
        "context_length": config.text_len,
        "context_weights": _CLIP_WEIGHTS,
        "context_everywhere": True,
        **changes,
    }
    return StreamModel(name, **transformer_sizes(config, transformer_shapes(config)) | fields)


PLAN = FamilyPlan(sizes=("matrix_game",), named=_named, of_checkpoint=_of_checkpoint)
