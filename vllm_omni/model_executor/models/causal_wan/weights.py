# SPDX-License-Identifier: Apache-2.0
"""Strict loading of a causal Wan checkpoint; the tables of names are `wan/transformer_weights.py`'s.

Names and shapes of the whole network are compared before any data is read (`model_executor/weights.py`).
Held by tests/model_executor/models/causal_wan/test_causal_wan_weights.py.
"""

from typing import TYPE_CHECKING

from torch import nn

from vllm_omni.model_executor.models.causal_wan.checkpoint import CheckpointLayout, open_transformer
from vllm_omni.model_executor.models.causal_wan.config import CausalWanConfig
from vllm_omni.model_executor.models.wan.transformer_weights import TRANSFORMER_RULES, transformer_shapes
from vllm_omni.model_executor.models.wan.weights import load_pieces
from vllm_omni.model_executor.tensor_files import TensorSource
from vllm_omni.model_executor.weights import load_strict

if TYPE_CHECKING:
    from vllm_omni.model_executor.models.wan.text_encoder import TextEncoder
    from vllm_omni.model_executor.models.wan.vae import StreamingWanVAE


def load_transformer(transformer: nn.Module, source: TensorSource, config: CausalWanConfig) -> None:
    """Load the transformer, or the stage and slice of it that `transformer` is."""
    load_strict(transformer, source, transformer_shapes(config), TRANSFORMER_RULES, what="transformer")


def load_pipeline_weights(
    layout: CheckpointLayout,
    config: CausalWanConfig,
    transformer: nn.Module,
    vae: "StreamingWanVAE | None" = None,
    text_encoder: "TextEncoder | None" = None,
) -> None:
    """`load_pieces`, with this model's transformer."""
    load_pieces(
        layout, lambda: load_transformer(transformer, open_transformer(layout.transformer), config), vae, text_encoder
    )
