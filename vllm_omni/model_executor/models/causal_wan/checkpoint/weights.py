# SPDX-License-Identifier: Apache-2.0
"""Load a causal Wan checkpoint strictly, using the name tables in `wan/transformer/weights.py`.

All names and shapes are checked before any data is read (`model_executor/checkpoint/loading.py`).
Tested by tests/model_executor/models/causal_wan/test_causal_wan_weights.py.
"""

from torch import nn

from vllm_omni.model_executor.checkpoint.loading import load_strict
from vllm_omni.model_executor.checkpoint.tensor_files import TensorSource
from vllm_omni.model_executor.layers.lora.target import AdapterTarget
from vllm_omni.model_executor.models.causal_wan.config import CausalWanConfig
from vllm_omni.model_executor.models.wan.transformer.weights import (
    TRANSFORMER_RULES,
    transformer_shapes,
)


def load_transformer(transformer: nn.Module, source: TensorSource, config: CausalWanConfig) -> None:
    """Load the transformer, or the stage and shard that `transformer` represents."""
    load_strict(
        transformer, source, transformer_shapes(config), TRANSFORMER_RULES, what="transformer"
    )


def adapter_target(transformer: nn.Module, config: CausalWanConfig) -> AdapterTarget:
    """Return the transformer as an `AdapterTarget` for LoRA adapters."""
    # Imported here, because code that only describes a checkpoint does not need this class.
    from vllm_omni.model_executor.models.wan.transformer.layers import PatchEmbedding

    return AdapterTarget(
        transformer, transformer_shapes(config), TRANSFORMER_RULES, linear_types=(PatchEmbedding,)
    )
