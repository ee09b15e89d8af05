# SPDX-License-Identifier: Apache-2.0
"""The transformer's tensors of a LingBot World checkpoint, as tables, and strict loading of all pieces.

Every component is compared with its full list of names and shapes before any data is read (`model_executor/weights.py`,
`models/wan/weights.py`). Knows nothing of folders; `checkpoint.py` finds the files.
Held by tests/model_executor/models/lingbot_world/test_weights.py.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from vllm_omni.model_executor.models.lingbot_world.config import LingBotWorldConfig
from vllm_omni.model_executor.models.wan.weights import load_components
from vllm_omni.model_executor.tensor_files import Shape, open_tensors
from vllm_omni.model_executor.weights import load_strict

if TYPE_CHECKING:
    from vllm_omni.model_executor.models.lingbot_world.checkpoint import CheckpointLayout
    from vllm_omni.model_executor.models.wan.text_encoder import TextEncoder
    from vllm_omni.model_executor.models.wan.vae import StreamingWanVAE

TRANSFORMER_TENSORS = {
    "patch_embedding.weight": ("D", "I", 1, 2, 2),
    "patch_embedding.bias": ("D",),
    "patch_embedding_wancamctrl.weight": ("D", "C"),
    "patch_embedding_wancamctrl.bias": ("D",),
    "c2ws_hidden_states_layer1.weight": ("D", "D"),
    "c2ws_hidden_states_layer1.bias": ("D",),
    "c2ws_hidden_states_layer2.weight": ("D", "D"),
    "c2ws_hidden_states_layer2.bias": ("D",),
    "text_embedding.0.weight": ("D", "X"),
    "text_embedding.0.bias": ("D",),
    "text_embedding.2.weight": ("D", "D"),
    "text_embedding.2.bias": ("D",),
    "time_embedding.0.weight": ("D", "Q"),
    "time_embedding.0.bias": ("D",),
    "time_embedding.2.weight": ("D", "D"),
    "time_embedding.2.bias": ("D",),
    "time_projection.1.weight": ("6D", "D"),
    "time_projection.1.bias": ("6D",),
    "head.modulation": (1, 2, "D"),
    "head.head.weight": ("O", "D"),
    "head.head.bias": ("O",),
}
"""The transformer's tensors outside its blocks. D width, I input channels, C folded camera channels, X text width,
Q time frequencies, O output channels of one 2x2 patch."""

BLOCK_TENSORS = {
    "modulation": (1, 6, "D"),
    **{
        f"{attention}.{layer}.{kind}": ("D", "D") if kind == "weight" else ("D",)
        for attention in ("self_attn", "cross_attn")
        for layer in ("q", "k", "v", "o")
        for kind in ("weight", "bias")
    },
    **{f"{attention}.norm_{qk}.weight": ("D",) for attention in ("self_attn", "cross_attn") for qk in ("q", "k")},
    "norm3.weight": ("D",),
    "norm3.bias": ("D",),
    "ffn.0.weight": ("F", "D"),
    "ffn.0.bias": ("F",),
    "ffn.2.weight": ("D", "F"),
    "ffn.2.bias": ("D",),
    **{
        f"{layer}.{kind}": ("D", "D") if kind == "weight" else ("D",)
        for layer in ("cam_injector_layer1", "cam_injector_layer2", "cam_scale_layer", "cam_shift_layer")
        for kind in ("weight", "bias")
    },
}
"""The tensors of each block, named `blocks.N.<name>`. F width of the feed-forward layer."""


def transformer_shapes(config: LingBotWorldConfig) -> dict[str, Shape]:
    """Return name -> shape of every transformer tensor a checkpoint of this architecture holds (1421 when released)."""
    patch = config.patch_size[1] * config.patch_size[2]
    sizes: dict[int | str, int] = {
        "D": config.dim,
        "6D": 6 * config.dim,
        "F": config.ffn_dim,
        "I": config.in_channels,
        "C": config.camera_channels * patch,
        "X": config.text_dim,
        "Q": config.freq_dim,
        "O": config.out_channels * patch,
    }
    tensors = dict(TRANSFORMER_TENSORS)
    for block in range(config.num_layers):
        tensors |= {f"blocks.{block}.{name}": shape for name, shape in BLOCK_TENSORS.items()}
    return {
        name: tuple(sizes[size] if isinstance(size, str) else size for size in shape) for name, shape in tensors.items()
    }


def load_pipeline_weights(
    layout: "CheckpointLayout",
    config: LingBotWorldConfig,
    transformer: nn.Module,
    vae: "StreamingWanVAE | None" = None,
    text_encoder: "TextEncoder | None" = None,
) -> None:
    """Fill every component this rank has (None = not here); a missing piece is reported before anything is read."""
    if text_encoder is not None:
        layout.require("text_encoder", "tokenizer")
    if vae is not None:
        layout.require("vae")
    layout.require("transformer")
    load_transformer(transformer, layout.transformer, config)
    load_components(layout, vae, text_encoder)


def load_transformer(transformer: nn.Module, path: Path, config: LingBotWorldConfig) -> None:
    """Load the transformer, or the stage and slice of it that `transformer` is, from a folder of safetensors."""
    load_strict(transformer, open_tensors(path), transformer_shapes(config), what="transformer")
