# SPDX-License-Identifier: Apache-2.0
"""A tiny random Lance checkpoint in the real layout, with the files, names and tokens of a real
one.

Every tensor's values depend only on the seed and its name. Sizes divide by 2 for tensor-parallel
runs. Weights are scaled so that prompt, reference, seed and step all change the result visibly.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from vllm_omni.model_executor.models.lance.checkpoint import (
    IMAGE_FOLDER,
    LAYOUTS,
    VIDEO_FOLDER,
    VISION_FOLDER,
)
from vllm_omni.model_executor.models.lance.config import LanceConfig, VisionConfig
from vllm_omni.model_executor.models.lance.network.transformer import LancePositionEmbedding3D
from vllm_omni.model_executor.models.lance.network.vae import LanceVAEConfig
from vllm_omni.model_executor.models.lance.weights import (
    BUNDLED_VISION,
    POSITIONS,
    network_shapes,
    vae_shapes,
    vision_shapes,
)

Tensors = dict[str, torch.Tensor]

VIDEO_LATENT_FRAMES = 5
"""Latent frames of the tiny video decoder: clips of up to 17 frames."""

_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""Qwen2.5's special tokens in the order of their ids; they follow the 256 bytes."""

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2.5's tokenizer cuts text before it looks words up."""

_VISION = {
    "depth": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "in_channels": 3,
    "out_hidden_size": 64,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "tokens_per_second": 2,
    "window_size": 112,
    "fullatt_block_indexes": [1],
}
_VAE = LanceVAEConfig(base_dim=4, decoder_base_dim=4)


def make_tiny(out: Path, seed: int, layout: str) -> None:
    """Write a checkpoint into the empty or new directory `out`. `layout`: one of `LAYOUTS`."""
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; allowed: {', '.join(LAYOUTS)}")
    out.mkdir(parents=True, exist_ok=True)
    if layout in ("image", "repository"):
        _write_decoder(out / IMAGE_FOLDER, seed, frames=1)
    if layout in ("video", "repository"):
        _write_decoder(out / VIDEO_FOLDER, seed, frames=VIDEO_LATENT_FRAMES)
    if layout in ("image", "repository"):  # alone, the video decoder brings its bundled tower
        folder = out / VISION_FOLDER
        _write_json(folder / "config.json", {"model_type": "qwen2_5_vl", **_VISION})
        (folder / "vit.safetensors").write_bytes(save(_vision_tensors(seed), {"format": "pt"}))
    torch.save(_vae_tensors(seed), out / "Wan2.2_VAE.pth")
    directories = [folder for folder in (IMAGE_FOLDER, VIDEO_FOLDER) if (out / folder).is_dir()]
    _write_json(out / "config.json", {"model_name": "Lance", "checkpoint_directories": directories})


def _write_decoder(folder: Path, seed: int, frames: int) -> None:
    folder.mkdir(parents=True)
    special = write_tokenizer(folder)
    llm = {
        "model_type": "qwen2_5_vl",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "tie_word_embeddings": True,
        "vocab_size": 288,
        "bos_token_id": special["<|endoftext|>"],
        "eos_token_id": special["<|im_end|>"],
        "vision_start_token_id": special["<|vision_start|>"],
        "vision_end_token_id": special["<|vision_end|>"],
        "vision_token_id": special["<|vision_pad|>"],
        "image_token_id": special["<|image_pad|>"],
        "video_token_id": special["<|video_pad|>"],
        "vision_config": _VISION,
    }
    _write_json(folder / "llm_config.json", llm)
    _write_json(
        folder / "generation_config.json",
        {"eos_token_id": special["<|im_end|>"], "do_sample": False},
    )
    config = LanceConfig.from_checkpoint(llm, _VISION, max_latent_frames=frames)
    tensors = _network_tensors(config, seed)
    if folder.name == VIDEO_FOLDER:
        tensors |= {
            f"{BUNDLED_VISION}{name}": tensor for name, tensor in _vision_tensors(seed).items()
        }
        _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"})
    (folder / "model.safetensors").write_bytes(save(tensors, {"format": "pt"}))


def write_tokenizer(folder: Path) -> dict[str, int]:
    """Write `tokenizer.json`, `vocab.json` and `merges.txt`: a token per byte and Qwen2.5's
    special tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {
        symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in _SPECIAL]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "vocab.json", vocabulary)
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return {token: len(vocabulary) + number for number, token in enumerate(_SPECIAL)}


def _network_tensors(config: LanceConfig, seed: int) -> Tensors:
    tensors: Tensors = {}
    for name, shape in network_shapes(config).items():
        if name == POSITIONS:
            size, frames = config.max_latent_size, config.max_latent_frames
            tensors[name] = LancePositionEmbedding3D(config.hidden_size, frames, size).rows(
                frames, size, size
            )
        elif "norm" in name:
            tensors[name] = 1 + 0.1 * _normal(name, shape, seed)
        elif name.endswith("bias"):
            tensors[name] = 0.1 * _normal(name, shape, seed)
        elif "embed_tokens" in name:
            tensors[name] = _normal(name, shape, seed)
        else:
            gain = 2.0 if name.endswith("lm_head.weight") else 1.0
            tensors[name] = gain / math.sqrt(shape[1]) * _normal(name, shape, seed)
    return tensors


def _vision_tensors(seed: int) -> Tensors:
    tensors: Tensors = {}
    for name, shape in vision_shapes(VisionConfig.from_dict(_VISION)).items():
        if "norm" in name or name.endswith("ln_q.weight"):
            tensors[name] = 1 + 0.1 * _normal(name, shape, seed)
        elif name.endswith("bias"):
            tensors[name] = 0.1 * _normal(name, shape, seed)
        else:
            tensors[name] = _normal(name, shape, seed) / math.sqrt(math.prod(shape[1:]))
    return tensors


def _vae_tensors(seed: int) -> Tensors:
    """Return the tensors under Wan's own names."""
    tensors: Tensors = {}
    for name, shape in vae_shapes(_VAE).items():
        if name.endswith("gamma"):
            tensor = 1 + 0.1 * _normal(name, shape, seed)
        elif name.endswith("bias"):
            tensor = 0.02 * _normal(name, shape, seed)
        else:
            gain = 0.5 if name == "decoder.conv_out.weight" else 1.0
            tensor = gain / math.sqrt(math.prod(shape[1:])) * _normal(name, shape, seed)
        tensors[wan_name(name)] = tensor
    return tensors


def wan_name(name: str) -> str:
    """Return Wan 2.2's own name of a diffusers VAE tensor."""
    parts = name.split(".")
    if parts[0] in ("quant_conv", "post_quant_conv"):
        return ".".join(("conv1" if parts[0] == "quant_conv" else "conv2", *parts[1:]))
    inner = {
        "norm1": "residual.0",
        "conv1": "residual.2",
        "norm2": "residual.3",
        "conv2": "residual.6",
    }
    outer = {"conv_in": "conv1", "norm_out": "head.0", "conv_out": "head.2"}
    if parts[1] in outer:
        return ".".join((parts[0], outer[parts[1]], *parts[2:]))
    if parts[1] == "mid_block":
        position = {
            ("resnets", "0"): "middle.0",
            ("attentions", "0"): "middle.1",
            ("resnets", "1"): "middle.2",
        }
        head, rest = [parts[0], position[parts[2], parts[3]]], parts[4:]
    else:
        stage = "downsamples" if parts[1] == "down_blocks" else "upsamples"
        if parts[3] in ("downsampler", "upsampler"):
            number = "2" if stage == "downsamples" else "3"
            return ".".join((parts[0], stage, parts[2], stage, number, *parts[4:]))
        head, rest = [parts[0], stage, parts[2], stage, parts[4]], parts[5:]
    rest[0] = inner.get(rest[0], "shortcut" if rest[0] == "conv_shortcut" else rest[0])
    return ".".join((*head, *rest))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _normal(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return fp32 standard normal values that depend only on name, shape and seed."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    )
