# SPDX-License-Identifier: Apache-2.0
"""Tiny ABot-World-0 checkpoints with random weights in both layouts.

A tensor's values depend only on the seed and the tensor's name, so for a given seed, both layouts
contain the same model. Sizes are divisible by 2 and 4, so that the model can run on several ranks.
Reference images are 64 x 64 pixels.
"""

from pathlib import Path
from typing import Any

from vllm_omni.model_executor.models.abot_world.checkpoint import (
    LAYOUTS,
    TRANSFORMER_FILE,
    transformer_shapes,
)
from vllm_omni.model_executor.models.abot_world.config import AbotWorldConfig
from vllm_omni.model_executor.models.wan.checkpoint.layout import TINY_VAE_FILES
from vllm_omni.testing.tiny.wan import (
    VAE_2_2,
    Tensors,
    random_tensors,
    save_tensors,
    start_folder,
    write_component,
    write_diffusers_components,
    write_diffusers_transformer,
    write_original_components,
    write_tiny_vae,
)

_SIZES = {
    "ffn_dim": 112,
    "freq_dim": 32,
    "text_dim": 32,
    "text_len": 64,
    "num_layers": 4,
    "eps": 1e-6,
    "act_control_in_dim": 32,
    "downscale_factor_control_adapter": 16,
    "ref_resolution": 64,
    "local_attn_size": 9,
    "dtype": "float32",
}


def make_tiny(out: Path, seed: int, layout: str) -> None:
    """Write a checkpoint into the empty or new directory `out`. `layout` is one of `LAYOUTS`."""
    start_folder(out, layout, LAYOUTS)
    write_tiny_vae(out / TINY_VAE_FILES["2.2"], seed, vae=VAE_2_2)
    config = tiny_config()
    shapes = transformer_shapes(AbotWorldConfig.from_checkpoint(config))
    tensors = random_tensors(shapes, seed)
    if layout == "diffusers":
        _write_diffusers(out, seed, tensors)
        return
    write_original_components(out, seed, VAE_2_2)
    write_component(out, config, "config.json")
    save_tensors(tensors, out / TRANSFORMER_FILE)


def tiny_config() -> dict[str, Any]:
    """Return the `config.json` of a tiny transformer, with the keys of the original."""
    sizes = {"dim": 64, "num_heads": 4, "in_dim": 48, "out_dim": 48}
    return {"_class_name": "WanModel", "model_type": "ti2v", **sizes, **_SIZES}


def _write_diffusers(out: Path, seed: int, tensors: Tensors) -> None:
    write_diffusers_components(out, seed, flow_shift=5.0, vae=VAE_2_2)
    values = {
        "_class_name": "ABotWorldTransformer3DModel",
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "in_channels": 48,
        "out_channels": 48,
        "patch_size": [1, 2, 2],
        "qk_norm": "rms_norm_across_heads",
        "cross_attn_norm": True,
        "rope_max_seq_len": 1024,
        **_SIZES,
    }
    write_diffusers_transformer(out, "ABotWorldPipeline", values, tensors)
