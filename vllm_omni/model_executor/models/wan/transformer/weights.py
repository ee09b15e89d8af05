# SPDX-License-Identifier: Apache-2.0
"""Tensor names and shapes of a text-conditioned Wan transformer, and tables that rename diffusers'
names to Wan's own.

Causal and bidirectional networks have the same tensors. A network with a camera input has
additional tensors. The model families use these tables to load weights.
"""

import re
from collections.abc import Mapping
from typing import Literal

from vllm_omni.model_executor.checkpoint.loading import Rules
from vllm_omni.model_executor.checkpoint.tensor_files import Shape
from vllm_omni.model_executor.models.wan.architecture import WanConfig

HEAD_DIM = 128
"""Number of channels per head in all released networks. It cannot be derived from tensor shapes.
"""

Sizes = tuple[int | str, ...]
"""Shape of a tensor. A letter stands for a size that depends on the config."""


TRANSFORMER_RULES: Rules = (
    (r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|_orig_mod\.", ""),
    (r"^((base_model|module|generator|model|diffusion_model)\.)+", ""),
    (r"^condition_embedder\.text_embedder\.linear_1\.", "text_embedding.0."),
    (r"^condition_embedder\.text_embedder\.linear_2\.", "text_embedding.2."),
    (r"^condition_embedder\.time_embedder\.linear_1\.", "time_embedding.0."),
    (r"^condition_embedder\.time_embedder\.linear_2\.", "time_embedding.2."),
    (r"^condition_embedder\.time_proj\.", "time_projection.1."),
    (r"^scale_shift_table\Z", "head.modulation"),
    (r"^proj_out\.", "head.head."),
    (r"\.scale_shift_table\Z", ".modulation"),
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"_attn\.to_(q|k|v)\.", r"_attn.\1."),
    (r"_attn\.to_out\.0\.", "_attn.o."),
    (r"^(blocks\.\d+)\.norm2\.", r"\1.norm3."),
    (r"\.ffn\.net\.0\.proj\.", ".ffn.0."),
    (r"\.ffn\.net\.2\.", ".ffn.2."),
)
"""Mapping to Wan's own tensor names. It removes the prefixes that training wrappers add, and
renames diffusers' names. Wan's own names do not change.
"""

IMAGE_RULES: Rules = (
    (r"^condition_embedder\.image_embedder\.norm1\.", "img_emb.proj.0."),
    (r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj\.", "img_emb.proj.1."),
    (r"^condition_embedder\.image_embedder\.ff\.net\.2\.", "img_emb.proj.3."),
    (r"^condition_embedder\.image_embedder\.norm2\.", "img_emb.proj.4."),
)
"""Mapping from diffusers' names to Wan's own names for `IMAGE_TENSORS`."""

TRANSFORMER_TENSORS: dict[str, Sizes] = {
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
"""Tensors outside the blocks. The letters are D width, I input channels, X text width, Q time
frequencies, and O output values of one 2x2 patch."""

IMAGE_TENSORS: dict[str, Sizes] = {
    "img_emb.proj.0.weight": ("X",),
    "img_emb.proj.0.bias": ("X",),
    "img_emb.proj.1.weight": ("X", "X"),
    "img_emb.proj.1.bias": ("X",),
    "img_emb.proj.3.weight": ("D", "X"),
    "img_emb.proj.3.bias": ("D",),
    "img_emb.proj.4.weight": ("D",),
    "img_emb.proj.4.bias": ("D",),
}
"""Additional tensors of a network that attends to an image. X is the width of the image
embeddings."""

BLOCK_TENSORS: dict[str, Sizes] = {
    "modulation": (1, 6, "D"),
    **{
        f"{attention}.{layer}.{kind}": ("D", "D") if kind == "weight" else ("D",)
        for attention in ("self_attn", "cross_attn")
        for layer in ("q", "k", "v", "o")
        for kind in ("weight", "bias")
    },
    **{
        f"{attention}.norm_{qk}.weight": ("D",)
        for attention in ("self_attn", "cross_attn")
        for qk in ("q", "k")
    },
    "norm3.weight": ("D",),
    "norm3.bias": ("D",),
    "ffn.0.weight": ("F", "D"),
    "ffn.0.bias": ("F",),
    "ffn.2.weight": ("D", "F"),
    "ffn.2.bias": ("D",),
}
"""Tensors of each block, named `blocks.N.<name>`. F is the feed-forward layer's width."""


def transformer_shapes(config: WanConfig) -> dict[str, Shape]:
    """Return the shape of every tensor in this architecture, keyed by name. A 1.3B model has 825
    tensors, and a 14B model has 1095.
    """
    return network_shapes(config, TRANSFORMER_TENSORS, BLOCK_TENSORS)


def stored_sizes(
    shapes: Mapping[str, Shape],
    where: str,
    num_heads: int | None = None,
    *,
    context: Literal[
        "text_embedding.0.weight", "img_emb.proj.3.weight"
    ] = "text_embedding.0.weight",
) -> dict[str, int]:
    """Derive a network's dimensions from its tensor shapes, and return them under the original's
    `config.json` keys.

    Args:
        shapes: Tensor shapes, keyed by Wan's own names.
        where: Name of the weights in error messages.
        num_heads: Number of heads in the config. None if the config does not specify it.
        context: Name of the layer that projects the encoder's embeddings.

    Raises:
        ValueError: The tensors do not match these tables, or the number of heads is unknown.
    """
    try:
        (dim, context_dim), (_, freq_dim) = shapes[context], shapes["time_embedding.0.weight"]
        (ffn_dim, _), in_dim = shapes["blocks.0.ffn.0.weight"], shapes["patch_embedding.weight"][1]
    except (KeyError, ValueError, IndexError) as error:
        raise ValueError(f"{where} holds no Wan transformer; download it again") from error
    if num_heads is None and dim % HEAD_DIM:
        raise ValueError(
            f"{where} has no config.json that states num_heads, and its width {dim} is no multiple "
            f"of {HEAD_DIM}, the "
            "size of a head of every released model; add a config.json with num_heads"
        )
    return {
        "dim": dim,
        "ffn_dim": ffn_dim,
        "freq_dim": freq_dim,
        "text_dim" if context.startswith("text") else "image_dim": context_dim,
        "in_dim": in_dim,
        "num_heads": num_heads or dim // HEAD_DIM,
        "num_layers": 1
        + max(int(name.split(".")[1]) for name in shapes if re.match(r"blocks\.\d+\.", name)),
    }


def network_shapes(
    config: WanConfig, outside: Mapping[str, Sizes], block: Mapping[str, Sizes], **more_sizes: int
) -> dict[str, Shape]:
    """Return the tensor shapes of the network that the `outside` and `block` tables describe.
    `more_sizes` defines additional letters.
    """
    patch = config.patch_size[1] * config.patch_size[2]
    sizes: dict[str, int] = {
        "D": config.dim,
        "6D": 6 * config.dim,
        "F": config.ffn_dim,
        "I": config.in_channels,
        "X": config.text_dim,
        "Q": config.freq_dim,
        "O": config.out_channels * patch,
        **more_sizes,
    }
    tensors = dict(outside)
    for index in range(config.num_layers):
        tensors |= {f"blocks.{index}.{name}": shape for name, shape in block.items()}
    return {
        name: tuple(sizes[size] if isinstance(size, str) else size for size in shape)
        for name, shape in tensors.items()
    }
