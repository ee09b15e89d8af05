# SPDX-License-Identifier: Apache-2.0
"""Tiny causal Wan checkpoints with random weights in all released layouts.

A tensor's values depend only on the seed and the tensor's name, so for a given seed, all layouts
contain the same model. Sizes are divisible by 2 and 4, so that the model can run on several ranks.
"""

from pathlib import Path
from typing import Any

import torch

from vllm_omni.model_executor.models.causal_wan.checkpoint.layout import LAYOUTS
from vllm_omni.model_executor.models.causal_wan.config import CausalWanConfig
from vllm_omni.model_executor.models.wan.checkpoint.layout import TINY_VAE_FILE
from vllm_omni.model_executor.models.wan.transformer.weights import transformer_shapes
from vllm_omni.testing.tiny.wan import (
    Tensors,
    random_tensors,
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
}
_CONFIG = {
    "_class_name": "WanModel",
    "model_type": "t2v",
    "dim": 64,
    "num_heads": 4,
    "in_dim": 16,
    "out_dim": 16,
}


def make_tiny(out: Path, seed: int, layout: str) -> None:
    """Write a checkpoint into the empty or new directory `out`. `layout` is one of `LAYOUTS`."""
    start_folder(out, layout, LAYOUTS)
    write_tiny_vae(out / TINY_VAE_FILE, seed)
    if layout == "diffusers":
        _write_diffusers(out, seed)
        return
    write_original_components(out, seed)
    config = {**_CONFIG, **_SIZES, "dtype": "float32"}
    write_component(out, config, "config.json")
    network = {
        f"model.{name}": tensor for name, tensor in _transformer_tensors(config, seed).items()
    }
    if layout == "original":
        # A training checkpoint also contains the network before weight averaging. That network is
        # not used.
        raw = {
            f"model.{name}": tensor
            for name, tensor in _transformer_tensors(config, seed + 1).items()
        }
        _save_state(
            {"generator": raw, "generator_ema": network},
            out / "checkpoints" / "self_forcing_dmd.pt",
        )
    else:
        _save_state({"generator": network}, out / "wan_causal_dmd_v2v" / "model.pt")


def _write_diffusers(out: Path, seed: int) -> None:
    write_diffusers_components(out, seed, flow_shift=5.0)
    config = {
        "_class_name": "CausalWanTransformer3DModel",
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "in_channels": 16,
        "out_channels": 16,
        "patch_size": [1, 2, 2],
        "qk_norm": "rms_norm_across_heads",
        "cross_attn_norm": True,
        "rope_max_seq_len": 1024,
        "image_dim": None,
        "added_kv_proj_dim": None,
        "pos_embed_seq_len": None,
        **_SIZES,
        "dtype": "float32",
    }
    write_diffusers_transformer(
        out,
        "WanCausalDMDPipeline",
        config,
        _transformer_tensors(config, seed),
        scheduler="UniPCMultistepScheduler",
    )


def _save_state(state: dict[str, Tensors], path: Path) -> None:
    path.parent.mkdir(parents=True)
    torch.save(state, path)


def _transformer_tensors(config: dict[str, Any], seed: int) -> Tensors:
    return random_tensors(transformer_shapes(CausalWanConfig.from_checkpoint(config)), seed)
