# SPDX-License-Identifier: Apache-2.0
"""Tiny Matrix-Game 2.0 checkpoints with random weights: all variants in all released layouts.

A tensor's values depend only on the seed and the tensor's name, so for a given variant and seed,
all layouts contain the same model. Sizes are divisible by 2 and 4, so that the model can run on
several ranks. The weights are scaled so that the image, the keys and the mouse change the frames
visibly, and so that the values remain finite in long sessions.
"""

from pathlib import Path
from typing import Any

import torch

from vllm_omni.model_executor.checkpoint.loading import Rules, rename
from vllm_omni.model_executor.models.matrix_game.checkpoint import (
    FOLDERS,
    LAYOUTS,
    transformer_shapes,
)
from vllm_omni.model_executor.models.matrix_game.config import MatrixGameConfig
from vllm_omni.model_executor.models.wan.checkpoint.layout import TINY_VAE_FILE
from vllm_omni.testing.tiny.wan import (
    CLIP,
    DIFFUSERS_NAMES,
    Tensors,
    random_tensors,
    save_tensors,
    start_folder,
    write_component,
    write_diffusers_clip,
    write_diffusers_vae,
    write_original_clip,
    write_original_vae,
    write_shards,
    write_tiny_vae,
)

_FILES = {
    "base_distilled_model": "base_distill",
    "gta_distilled_model": "gta_keyboard2dim",
    "templerun_distilled_model": "templerun_7dim_onlykey",
}
_KEYS = {"universal": 4, "gta_drive": 2, "templerun": 7}
_ACTION: dict[str, Any] = {
    "blocks": [0, 1],
    "enable_keyboard": True,
    "enable_mouse": True,
    "heads_num": 4,
    "hidden_size": 16,
    "img_hidden_size": 64,
    "keyboard_hidden_dim": 64,
    "mouse_dim_in": 2,
    "mouse_hidden_dim": 64,
    "mouse_qk_dim_list": [8, 4, 4],
    "patch_size": [1, 2, 2],
    "qk_norm": True,
    "qkv_bias": False,
    "rope_dim_list": [8, 4, 4],
    "rope_theta": 256,
    "vae_time_compression_ratio": 4,
    "windows_size": 3,
}
_SIZES = {
    "ffn_dim": 112,
    "freq_dim": 32,
    "num_layers": 4,
    "eps": 1e-6,
    "text_len": 512,
    "dtype": "float32",
}
_NAMES: Rules = (
    *DIFFUSERS_NAMES,
    (r"^img_emb\.proj\.0\.", "condition_embedder.image_embedder.norm1."),
    (r"^img_emb\.proj\.1\.", "condition_embedder.image_embedder.ff.net.0.proj."),
    (r"^img_emb\.proj\.3\.", "condition_embedder.image_embedder.ff.net.2."),
    (r"^img_emb\.proj\.4\.", "condition_embedder.image_embedder.norm2."),
)


def make_tiny(out: Path, seed: int, layout: str) -> None:
    """Write a checkpoint into the empty or new directory `out`. `layout` is one of `LAYOUTS`."""
    start_folder(out, layout, LAYOUTS)
    kind, _, name = layout.partition("_")
    variant = {"": "universal", "gta": "gta_drive", "templerun": "templerun"}[name]
    write_tiny_vae(out / TINY_VAE_FILE, seed)
    config = tiny_config(variant)
    tensors = _transformer_tensors(config, seed)
    if kind == "diffusers":
        _write_diffusers(out, seed, config, tensors)
        return
    write_original_vae(out, seed)
    write_original_clip(out, seed)
    folder = next(folder for folder, served in FOLDERS.items() if served == variant)
    # As in the release, the universal and gta models have an outdated config for the base model.
    stale = {key: value for key, value in config.items() if key != "local_attn_size"} | {
        "_class_name": "WanModel"
    }
    write_component(out / folder, config if variant == "templerun" else stale, "config.json")
    save_tensors(
        {f"model.{name}": t for name, t in tensors.items()},
        out / folder / f"{_FILES[folder]}.safetensors",
    )


def tiny_config(variant: str) -> dict[str, Any]:
    """Return the `config.json` of a tiny transformer, with the keys of the original."""
    action = {**_ACTION, "keyboard_dim_in": _KEYS[variant]}
    if variant == "templerun":
        action = {
            key: value
            for key, value in action.items()
            if not key.startswith("mouse_") or "qk" in key
        }
        action["enable_mouse"] = False
    return {
        "_class_name": "CausalWanModel",
        "model_type": "i2v",
        "action_config": action,
        "dim": 64,
        "num_heads": 4,
        "in_dim": 36,
        "out_dim": 16,
        "image_dim": CLIP["hidden_size"],
        "inject_sample_info": False,
        "local_attn_size": 4 if variant == "gta_drive" else 6,
        "sink_size": 0,
        **_SIZES,
    }


def _write_diffusers(out: Path, seed: int, config: dict[str, Any], tensors: Tensors) -> None:
    write_diffusers_vae(out, seed)
    write_diffusers_clip(out, seed)
    values = {
        "_class_name": "CausalMatrixGameWanModel",
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "in_channels": 36,
        "out_channels": 16,
        "patch_size": [1, 2, 2],
        "qk_norm": "rms_norm_across_heads",
        "cross_attn_norm": True,
        "rope_max_seq_len": 1024,
        "image_dim": CLIP["hidden_size"],
        "text_dim": 0,
        "local_attn_size": -1,
        "action_config": config["action_config"],
        **_SIZES,
    }
    write_component(out / "transformer", values, "config.json")
    write_shards(
        out / "transformer", {rename(name, _NAMES): tensor for name, tensor in tensors.items()}
    )
    index = {
        "_class_name": "MatrixGameCausalDMDPipeline",
        "image_encoder": ["transformers", "CLIPVisionModel"],
        "image_processor": ["transformers", "CLIPImageProcessor"],
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "transformer": ["diffusers", "CausalMatrixGameWanModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    write_component(out, index, "model_index.json")


def _transformer_tensors(config: dict[str, Any], seed: int) -> Tensors:
    shapes = transformer_shapes(MatrixGameConfig.from_checkpoint(config))
    tensors = random_tensors(shapes, seed, norms=r"norm|\.proj\.[04]\.|mouse_mlp\.3\.")
    untrained = ("attn_q_norm.weight", "attn_k_norm.weight")
    ones = {name: torch.ones(shape) for name, shape in shapes.items() if name.endswith(untrained)}
    return tensors | ones
