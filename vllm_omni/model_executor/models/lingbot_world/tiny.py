# SPDX-License-Identifier: Apache-2.0
"""A tiny random LingBot World checkpoint in each real layout, with the files, names and types of a real one.

Every tensor's values depend only on the seed and its name, so the layouts of one seed hold the same model. Sizes divide
by 2 and 4, for tensor, sequence and pipeline parallel runs. Weights are scaled so that every path (camera, prompt,
gates, condition) changes the frames visibly and long sessions stay finite.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from transformers import UMT5Config, UMT5EncoderModel

from vllm_omni.model_executor.models.lingbot_world.checkpoint import LAYOUTS
from vllm_omni.model_executor.models.lingbot_world.config import LingBotWorldConfig
from vllm_omni.model_executor.models.lingbot_world.weights import Rules, rename, shapes_of, transformer_shapes
from vllm_omni.model_executor.models.wan.components import UMT5_XXL, VAEConfig
from vllm_omni.model_executor.models.wan.tiny_tokenizer import write_tokenizer
from vllm_omni.model_executor.models.wan.vae import StreamingWanVAE

Tensors = dict[str, torch.Tensor]

_SIZES = {"ffn_dim": 112, "freq_dim": 32, "text_dim": 32, "text_len": 64, "num_layers": 4, "eps": 1e-6}
_WINDOW = {"sliding_window_num_frames": 18, "num_frames_per_block": 3}
_VAE = VAEConfig(base_dim=4)
_TEXT = {**UMT5_XXL, "vocab_size": 512, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}

_WAN_VAE_NAMES: Rules = (
    (r"\.(down_blocks\.\d+|resnets\.\d+)\.norm1\.", r".\1.residual.0."),
    (r"\.(down_blocks\.\d+|resnets\.\d+)\.conv1\.", r".\1.residual.2."),
    (r"\.(down_blocks\.\d+|resnets\.\d+)\.norm2\.", r".\1.residual.3."),
    (r"\.(down_blocks\.\d+|resnets\.\d+)\.conv2\.", r".\1.residual.6."),
    (r"\.conv_shortcut\.", ".shortcut."),
    *((rf"\.up_blocks\.{n // 4}\.resnets\.{n % 4}\.", f".upsamples.{n}.") for n in range(16) if n % 4 < 3),
    *((rf"\.up_blocks\.{level}\.upsamplers\.0\.", f".upsamples.{4 * level + 3}.") for level in range(3)),
    (r"\.down_blocks\.", ".downsamples."),
    (r"\.mid_block\.resnets\.0\.", ".middle.0."),
    (r"\.mid_block\.attentions\.0\.", ".middle.1."),
    (r"\.mid_block\.resnets\.1\.", ".middle.2."),
    (r"\.norm_out\.", ".head.0."),
    (r"\.conv_out\.", ".head.2."),
    (r"\.conv_in\.", ".conv1."),
    (r"^quant_conv\.", "conv1."),
    (r"^post_quant_conv\.", "conv2."),
)
"""The way back from `weights.VAE_RULES`."""

_WAN_TEXT_NAMES: Rules = (
    (r"^shared\.", "token_embedding."),
    (r"^encoder\.final_layer_norm\.", "norm."),
    (r"^encoder\.block\.", "blocks."),
    (r"\.layer\.0\.layer_norm\.", ".norm1."),
    (r"\.layer\.1\.layer_norm\.", ".norm2."),
    (r"\.layer\.0\.SelfAttention\.relative_attention_bias\.", ".pos_embedding.embedding."),
    (r"\.layer\.0\.SelfAttention\.", ".attn."),
    (r"\.layer\.1\.DenseReluDense\.wi_0\.", ".ffn.gate.0."),
    (r"\.layer\.1\.DenseReluDense\.wi_1\.", ".ffn.fc1."),
    (r"\.layer\.1\.DenseReluDense\.wo\.", ".ffn.fc2."),
)
"""The way back from `weights.TEXT_RULES`."""


def make_tiny(out: Path, seed: int, layout: str) -> None:
    """Write a checkpoint into the empty or new directory `out`. `layout`: one of `LAYOUTS`."""
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; allowed: {', '.join(LAYOUTS)}")
    out.mkdir(parents=True, exist_ok=True)
    if layout == "diffusers":
        _write_diffusers(out, seed)
    else:
        _write_original(out, seed, "transformers" if layout == "v2" else "lingbot_world_fast")


def _write_original(out: Path, seed: int, transformer: str) -> None:
    write_tokenizer(out / "google" / "umt5-xxl")
    text = {rename(name, _WAN_TEXT_NAMES): tensor for name, tensor in _text_tensors(seed).items()}
    torch.save(text, out / "models_t5_umt5-xxl-enc-bf16.pth")
    torch.save({rename(name, _WAN_VAE_NAMES): t for name, t in _vae_tensors(seed).items()}, out / "Wan2.1_VAE.pth")
    config = {
        "_class_name": "WanModelFast",
        "model_type": "i2v",
        "control_type": "cam",
        "dim": 64,
        "num_heads": 4,
        "in_dim": 36,
        "out_dim": 16,
        **_SIZES,
        **_WINDOW,
        "sink_size": 6 if transformer == "transformers" else 9,
        "dtype": "float32",
    }
    _write_transformer(out / transformer, config, seed)


def _write_diffusers(out: Path, seed: int) -> None:
    write_tokenizer(out / "tokenizer")
    _write_component(out / "text_encoder", UMT5Config(**_TEXT, dtype="bfloat16").to_diff_dict(), "config.json")
    _save(_text_tensors(seed), out / "text_encoder" / "model.safetensors")
    _write_component(out / "vae", {"_class_name": "AutoencoderKLWan", **_VAE.to_dict()}, "config.json")
    _save(_vae_tensors(seed), out / "vae" / "diffusion_pytorch_model.safetensors")
    scheduler = {
        "_class_name": "UniPCMultistepScheduler",
        "flow_shift": 10.0,
        "num_train_timesteps": 1000,
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
    }
    _write_component(out / "scheduler", scheduler, "scheduler_config.json")
    config = {
        "_class_name": "CausalLingBotWorldTransformer3DModel",
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "in_channels": 36,
        "out_channels": 16,
        "patch_size": [1, 2, 2],
        "qk_norm": "rms_norm_across_heads",
        "cross_attn_norm": True,
        "rope_max_seq_len": 1024,
        "image_dim": None,
        "added_kv_proj_dim": None,
        "pos_embed_seq_len": None,
        "local_attn_size": -1,
        **_SIZES,
        **_WINDOW,
        "sink_size": 9,
        "dtype": "float32",
    }
    _write_transformer(out / "transformer", config, seed)
    index = {
        "_class_name": "LingBotWorldCausalDMDPipeline",
        "boundary_ratio": 0.9,
        "image_encoder": [None, None],
        "image_processor": [None, None],
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "CausalLingBotWorldTransformer3DModel"],
        "transformer_2": [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    _write_component(out, index, "model_index.json")


def _write_transformer(folder: Path, config: Mapping[str, Any], seed: int) -> None:
    """Write `config.json`, two safetensors shards and their index."""
    _write_component(folder, config, "config.json")
    tensors = _transformer_tensors(LingBotWorldConfig.from_checkpoint(config), seed)
    names = sorted(tensors)
    shards = {
        f"diffusion_pytorch_model-{number:05d}-of-00002.safetensors": names[half]
        for number, half in ((1, slice(0, len(names) // 2)), (2, slice(len(names) // 2, None)))
    }
    for file, members in shards.items():
        _save({name: tensors[name] for name in members}, folder / file)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: file for file, members in shards.items() for name in members},
    }
    _write_component(folder, index, "diffusion_pytorch_model.safetensors.index.json")


def _save(tensors: Tensors, path: Path) -> None:
    path.write_bytes(save(tensors, {"format": "pt"}))


def _write_component(folder: Path, content: Mapping[str, Any], file: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _transformer_tensors(config: LingBotWorldConfig, seed: int) -> Tensors:
    tensors: Tensors = {}
    for name, shape in transformer_shapes(config).items():
        if "norm" in name and name.endswith("weight"):
            tensors[name] = 1 + 0.1 * _normal(name, shape, seed)
        elif name.endswith(("bias", "modulation")):
            tensors[name] = 0.1 * _normal(name, shape, seed)
        else:
            # The camera enters multiplicatively in every block: a smaller gain keeps the residual stream in range.
            gain = 0.4 if ".cam_" in name else 1.0
            tensors[name] = gain / math.sqrt(math.prod(shape[1:])) * _normal(name, shape, seed)
    return tensors


def _vae_tensors(seed: int) -> Tensors:
    with torch.device("meta"):
        shapes = shapes_of(StreamingWanVAE(_VAE))
    tensors: Tensors = {}
    for name, shape in shapes.items():
        if name.endswith("gamma"):
            tensors[name] = 1 + 0.1 * _normal(name, shape, seed)
        elif name.endswith("bias"):
            tensors[name] = 0.02 * _normal(name, shape, seed)
        else:
            # The last convolution sets the contrast: pixels of about +-0.5.
            gain = 0.5 if name == "decoder.conv_out.weight" else 1.0
            tensors[name] = gain / math.sqrt(math.prod(shape[1:])) * _normal(name, shape, seed)
    return tensors


def _text_tensors(seed: int) -> Tensors:
    with torch.device("meta"):
        shapes = shapes_of(UMT5EncoderModel(UMT5Config(**_TEXT)))
    tensors: Tensors = {}
    for name, shape in shapes.items():
        if "layer_norm" in name:
            tensor = 1 + 0.1 * _normal(name, shape, seed)
        elif name == "shared.weight" or "relative_attention_bias" in name:
            tensor = _normal(name, shape, seed)
        else:
            tensor = _normal(name, shape, seed) / math.sqrt(shape[1])
        tensors[name] = tensor.to(torch.bfloat16)
    return tensors


def _normal(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return fp32 standard normal values that depend only on name, shape and seed."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1))
