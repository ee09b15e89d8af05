# SPDX-License-Identifier: Apache-2.0
"""The transformer's tensors of a causal Wan checkpoint, as tables: Wan's own names, and diffusers' mapped to them.

Strict: names and shapes of the whole network are compared before any data is read (`model_executor/weights.py`).
Held by tests/model_executor/models/causal_wan/test_causal_wan_weights.py.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from vllm_omni.model_executor.models.causal_wan.config import CausalWanConfig
from vllm_omni.model_executor.models.wan.weights import load_components
from vllm_omni.model_executor.tensor_files import Shape, TensorSource, open_tensors
from vllm_omni.model_executor.weights import Rules, load_strict

if TYPE_CHECKING:
    from vllm_omni.model_executor.models.causal_wan.checkpoint import CheckpointLayout
    from vllm_omni.model_executor.models.wan.text_encoder import TextEncoder
    from vllm_omni.model_executor.models.wan.vae import StreamingWanVAE

STATE_KEYS = ("generator_ema", "generator", "state_dict")
"""Where a training checkpoint (`.pt`) keeps the network, best first; without any, the file is the network itself."""

TRANSFORMER_RULES: Rules = (
    (r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|_orig_mod\.", ""),
    (r"^model\.", ""),
    (r"^condition_embedder\.text_embedder\.linear_1\.", "text_embedding.0."),
    (r"^condition_embedder\.text_embedder\.linear_2\.", "text_embedding.2."),
    (r"^condition_embedder\.time_embedder\.linear_1\.", "time_embedding.0."),
    (r"^condition_embedder\.time_embedder\.linear_2\.", "time_embedding.2."),
    (r"^condition_embedder\.time_proj\.", "time_projection.1."),
    (r"^scale_shift_table$", "head.modulation"),
    (r"^proj_out\.", "head.head."),
    (r"\.scale_shift_table$", ".modulation"),
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"_attn\.to_(q|k|v)\.", r"_attn.\1."),
    (r"_attn\.to_out\.0\.", "_attn.o."),
    (r"^(blocks\.\d+)\.norm2\.", r"\1.norm3."),
    (r"\.ffn\.net\.0\.proj\.", ".ffn.0."),
    (r"\.ffn\.net\.2\.", ".ffn.2."),
)
"""Training wrappers' prefixes and diffusers names -> Wan's own, which pass unchanged."""

TRANSFORMER_TENSORS = {
    "patch_embedding.weight": ("D", "I", 1, 2, 2),
    "patch_embedding.bias": ("D",),
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
"""The tensors outside the blocks. D width, I input channels, X text width, Q time frequencies, O output channels of one
2x2 patch."""

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
}
"""The tensors of each block, named `blocks.N.<name>`. F width of the feed-forward layer."""


def transformer_shapes(config: CausalWanConfig) -> dict[str, Shape]:
    """Return name -> shape of every tensor of this architecture (825 at 1.3B, 1095 at 14B)."""
    patch = config.patch_size[1] * config.patch_size[2]
    sizes: dict[int | str, int] = {
        "D": config.dim,
        "6D": 6 * config.dim,
        "F": config.ffn_dim,
        "I": config.in_channels,
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


def open_transformer(path: Path) -> TensorSource:
    """Open a folder of safetensors, one weight file, or a training checkpoint, of which the best state is taken."""
    return open_tensors(path, STATE_KEYS)


def load_transformer(transformer: nn.Module, source: TensorSource, config: CausalWanConfig) -> None:
    """Load the transformer, or the stage and slice of it that `transformer` is."""
    load_strict(transformer, source, transformer_shapes(config), TRANSFORMER_RULES, what="transformer")


def load_pipeline_weights(
    layout: "CheckpointLayout",
    config: CausalWanConfig,
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
    load_transformer(transformer, open_transformer(layout.transformer), config)
    load_components(layout, vae, text_encoder)
