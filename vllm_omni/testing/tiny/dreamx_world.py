# SPDX-License-Identifier: Apache-2.0
"""Tiny DreamX-World checkpoints with random weights in both layouts.

A tensor's values depend only on the seed and the tensor's name, so for a given seed, both layouts
contain the same model. Sizes are divisible by 2 and 4, so that the model can run on several ranks.
One block has no camera branch.
"""

from pathlib import Path
from typing import Any

from vllm_omni.model_executor.models.dreamx_world.checkpoint import LAYOUTS, transformer_shapes
from vllm_omni.model_executor.models.dreamx_world.config import DreamXConfig
from vllm_omni.model_executor.models.wan.checkpoint.layout import TINY_VAE_FILES
from vllm_omni.testing.tiny.wan import (
    VAE_2_2,
    random_tensors,
    save_tensors,
    start_folder,
    write_component,
    write_diffusers_components,
    write_diffusers_transformer,
    write_diffusers_vae,
    write_original_components,
    write_tiny_vae,
)

_SIZES: dict[str, Any] = {
    "model_type": "ti2v",
    "patch_size": [1, 2, 2],
    "ffn_dim": 112,
    "freq_dim": 32,
    "text_dim": 32,
    "text_len": 64,
    "num_layers": 4,
    "eps": 1e-6,
    "local_attn_size": 12,
    "sink_size": 3,
    "cam_method": "prope",
    "attn_compress": 4,
    "cam_self_attn_layers": [0, 1, 3],
    "cross_attn_norm": True,
    "qk_norm": True,
    "add_control_adapter": True,
    "in_dim_control_adapter": 24,
    "downscale_factor_control_adapter": 16,
    "dtype": "float32",
}
CONFIG: dict[str, Any] = {"dim": 64, "num_heads": 4, "in_dim": 48, "out_dim": 48, **_SIZES}


def make_tiny(out: Path, seed: int, layout: str) -> None:
    """Write a checkpoint into the empty or new directory `out`. `layout` is one of `LAYOUTS`."""
    start_folder(out, layout, LAYOUTS)
    write_tiny_vae(out / TINY_VAE_FILES["2.2"], seed, vae=VAE_2_2)
    shapes = transformer_shapes(DreamXConfig.from_checkpoint(CONFIG))
    tensors = random_tensors(shapes, seed)
    if layout == "original":
        write_original_components(out, seed, VAE_2_2)
        write_component(out, CONFIG, "config.json")
        save_tensors(tensors, out / "model.safetensors")
        return
    write_diffusers_components(out, seed, flow_shift=5.0)
    write_diffusers_vae(out, seed, VAE_2_2)
    values = {
        "_class_name": "DreamXWorldARTransformer3DModel",
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "in_channels": 48,
        "out_channels": 48,
        "num_frames_per_block": 3,
        **_SIZES,
    }
    write_diffusers_transformer(
        out, "DreamXWorldARPipeline", values, tensors, tokenizer="AutoTokenizer"
    )
