# SPDX-License-Identifier: Apache-2.0
"""Matrix-Game for `vllm-omni plan`: action modules in addition to the transformer, image embeddings
as context."""

from collections.abc import Mapping
from typing import Any

from vllm_omni.model_executor.models.matrix_game.checkpoint import transformer_shapes
from vllm_omni.model_executor.models.matrix_game.config import MatrixGameConfig
from vllm_omni.model_executor.models.wan.plan import check_world, transformer_sizes
from vllm_omni.planning.stream_model import Changes, FamilyPlan, StreamModel

_CLIP_WEIGHTS = 1.26e9
"""Bytes of ViT-H/14's vision tower without its last layer, bf16."""


def _named(name: str, changes: Changes) -> StreamModel:
    return _stream_model(name, MatrixGameConfig(), changes)


def _of_checkpoint(directory: str, checkpoint: Mapping[str, Any], changes: Changes) -> StreamModel:
    return _stream_model(directory, MatrixGameConfig.from_checkpoint(checkpoint["transformer"]), changes)


def _stream_model(name: str, config: MatrixGameConfig, changes: Changes) -> StreamModel:
    check_world("matrix_game", changes)
    variant, dim, keys, mouse = config.variant, config.dim, config.keyboard_width, config.mouse_width
    action = 2 * dim * keys  # the keyboard branch's queries and result
    if config.mouse_dim:
        action += mouse * (dim + config.action_rows * config.mouse_dim + 4 * mouse + dim)
    fields = {
        "window": config.window_frames or variant.window_frames,
        "sinks": 0,
        "denoise": len(variant.steps),
        "image": True,
        "side_flop": 2.0 * action * len(config.action_blocks),
        "side_kv": 2 * mouse * len(config.action_blocks) if config.mouse_dim else 0,
        "context_rows": config.text_len,
        "context_weights": _CLIP_WEIGHTS,
        "context_everywhere": True,
        **changes,
    }
    return StreamModel(name, **transformer_sizes(config, transformer_shapes(config)) | fields)


PLAN = FamilyPlan(sizes=("matrix_game",), named=_named, of_checkpoint=_of_checkpoint)
