# SPDX-License-Identifier: Apache-2.0
"""Writes the text encoder, VAE and image encoder of tiny Wan checkpoints in both released layouts,
and provides helpers for the other components.

A tensor's values depend only on the seed and the tensor's name, so for a given seed, all layouts
contain the same components.
"""

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from transformers import UMT5Config, UMT5EncoderModel

from vllm_omni.model_executor.checkpoint.loading import Rules, rename, shapes_of
from vllm_omni.model_executor.models.wan.architecture import (
    CLIP_HEAD_DIM,
    CLIP_VIT_H,
    UMT5_XXL,
    WAN_2_2_VAE,
    VAEConfig,
    clip_tokens,
)
from vllm_omni.model_executor.models.wan.checkpoint.component_names import CLIP_RULES
from vllm_omni.model_executor.models.wan.vae.tiny_vae import TinyVAEDecoder
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE
from vllm_omni.testing.tiny.text_tokenizers import write_t5_tokenizer

Tensors = dict[str, torch.Tensor]

VAE = VAEConfig(base_dim=4)
VAE_2_2 = replace(WAN_2_2_VAE, base_dim=4, decoder_base_dim=None)
CLIP = {
    **CLIP_VIT_H,
    "hidden_size": CLIP_HEAD_DIM,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 1,
    "image_size": 28,
}
TEXT = {
    **UMT5_XXL,
    "vocab_size": 512,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
}

_RESIDUAL_NAMES: Rules = (
    (r"\.(down_blocks\.\d+|resnets\.\d+)\.norm1\.", r".\1.residual.0."),
    (r"\.(down_blocks\.\d+|resnets\.\d+)\.conv1\.", r".\1.residual.2."),
    (r"\.(down_blocks\.\d+|resnets\.\d+)\.norm2\.", r".\1.residual.3."),
    (r"\.(down_blocks\.\d+|resnets\.\d+)\.conv2\.", r".\1.residual.6."),
    (r"\.conv_shortcut\.", ".shortcut."),
)
"""Rules for renaming the layers of a VAE's residual blocks from diffusers' names to Wan's."""
_OUTER_NAMES: Rules = (
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
"""Rules for renaming a VAE's modules outside the residual blocks from diffusers' names to Wan's."""
_WAN_VAE_NAMES: Rules = (
    *_RESIDUAL_NAMES,
    *(
        (rf"\.up_blocks\.{n // 4}\.resnets\.{n % 4}\.", f".upsamples.{n}.")
        for n in range(16)
        if n % 4 < 3
    ),
    *(
        (rf"\.up_blocks\.{level}\.upsamplers\.0\.", f".upsamples.{4 * level + 3}.")
        for level in range(3)
    ),
    *_OUTER_NAMES,
)
"""Inverse of `component_names.VAE_RULES` for the VAE of Wan 2.1."""
WAN_2_2_VAE_NAMES: Rules = (
    *_RESIDUAL_NAMES,
    (r"\.down_blocks\.(\d+)\.downsampler\.", r".downsamples.\1.downsamples.2."),
    (r"\.up_blocks\.(\d+)\.upsampler\.", r".upsamples.\1.upsamples.3."),
    (r"\.down_blocks\.(\d+)\.resnets\.", r".downsamples.\1.downsamples."),
    (r"\.up_blocks\.(\d+)\.resnets\.", r".upsamples.\1.upsamples."),
    *_OUTER_NAMES,
)
"""Inverse of `component_names.VAE_RULES` for the VAE of Wan 2.2."""

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
"""Inverse of `component_names.TEXT_RULES`."""


DIFFUSERS_NAMES: Rules = (
    (r"^text_embedding\.0\.", "condition_embedder.text_embedder.linear_1."),
    (r"^text_embedding\.2\.", "condition_embedder.text_embedder.linear_2."),
    (r"^time_embedding\.0\.", "condition_embedder.time_embedder.linear_1."),
    (r"^time_embedding\.2\.", "condition_embedder.time_embedder.linear_2."),
    (r"^time_projection\.1\.", "condition_embedder.time_proj."),
    (r"^head\.modulation\Z", "scale_shift_table"),
    (r"^head\.head\.", "proj_out."),
    (r"\.modulation\Z", ".scale_shift_table"),
    (r"_attn\.(q|k|v)\.", r"_attn.to_\1."),
    (r"_attn\.o\.", "_attn.to_out.0."),
    (r"\.self_attn\.", ".attn1."),
    (r"\.cross_attn\.", ".attn2."),
    (r"\.norm3\.", ".norm2."),
    (r"\.ffn\.0\.", ".ffn.net.0.proj."),
    (r"\.ffn\.2\.", ".ffn.net.2."),
)
"""Inverse of `weights.TRANSFORMER_RULES`."""


def start_folder(out: Path, layout: str, layouts: Collection[str]) -> None:
    """Create the directory of a checkpoint. Raises ValueError if the layout is unknown."""
    if layout not in layouts:
        raise ValueError(f"unknown layout {layout!r}; allowed: {', '.join(layouts)}")
    out.mkdir(parents=True, exist_ok=True)


def write_original_components(out: Path, seed: int, vae: VAEConfig = VAE) -> None:
    """Write the text encoder, VAE and tokenizer with Wan's own file and tensor names."""
    write_t5_tokenizer(out / "google" / "umt5-xxl")
    text = {rename(name, _WAN_TEXT_NAMES): tensor for name, tensor in text_tensors(seed).items()}
    torch.save(text, out / "models_t5_umt5-xxl-enc-bf16.pth")
    write_original_vae(out, seed, vae)


def write_original_vae(out: Path, seed: int, vae: VAEConfig = VAE) -> None:
    """Write `Wan2.1_VAE.pth`, or `Wan2.2_VAE.pth` for a Wan 2.2 VAE."""
    release, names = ("2.2", WAN_2_2_VAE_NAMES) if vae.is_residual else ("2.1", _WAN_VAE_NAMES)
    torch.save(
        {rename(name, names): t for name, t in _vae_tensors(seed, vae).items()},
        out / f"Wan{release}_VAE.pth",
    )


def write_original_clip(out: Path, seed: int) -> None:
    """Write the vision tower of CLIP with Wan's own names, and with some tensors of the text
    tower.
    """
    tensors = {f"visual.{name}": tensor for name, tensor in _clip_tensors(seed).items()}
    tensors |= {"textual.norm.weight": torch.ones(8), "log_scale": torch.zeros(())}
    torch.save(tensors, out / "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth")


def write_diffusers_clip(out: Path, seed: int) -> None:
    """Write the `image_encoder` directory of a diffusers checkpoint (`CLIPVisionModel`)."""
    tensors: Tensors = {}
    for name, tensor in _clip_tensors(seed).items():
        stacked = ".to_qkv." in name
        for kind, part in zip("qkv", tensor.chunk(3) if stacked else (tensor,), strict=False):
            target = rename(name.replace(".to_qkv.", f".to_{kind}."), CLIP_RULES)
            if target in ("embeddings.class_embedding", "embeddings.position_embedding.weight"):
                part = part.squeeze()
            tensors[f"vision_model.{target}"] = part.contiguous()
    write_component(
        out / "image_encoder", {"model_type": "clip_vision_model", **CLIP}, "config.json"
    )
    save_tensors(tensors, out / "image_encoder" / "model.safetensors")


def write_diffusers_vae(out: Path, seed: int, vae: VAEConfig = VAE) -> None:
    write_component(
        out / "vae", {"_class_name": "AutoencoderKLWan", **vae.to_dict()}, "config.json"
    )
    save_tensors(_vae_tensors(seed, vae), out / "vae" / "diffusion_pytorch_model.safetensors")


def write_diffusers_components(
    out: Path, seed: int, flow_shift: float, vae: VAEConfig = VAE
) -> None:
    """Write the `tokenizer`, `text_encoder`, `vae` and `scheduler` directories of a diffusers
    checkpoint.
    """
    write_t5_tokenizer(out / "tokenizer")
    write_component(
        out / "text_encoder", UMT5Config(**TEXT, dtype="bfloat16").to_diff_dict(), "config.json"
    )
    save_tensors(text_tensors(seed), out / "text_encoder" / "model.safetensors")
    write_diffusers_vae(out, seed, vae)
    scheduler = {
        "_class_name": "UniPCMultistepScheduler",
        "flow_shift": flow_shift,
        "num_train_timesteps": 1000,
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
    }
    write_component(out / "scheduler", scheduler, "scheduler_config.json")


def write_diffusers_transformer(
    out: Path,
    pipeline: str,
    config: Mapping[str, Any],
    tensors: Tensors,
    *,
    scheduler: str = "FlowMatchEulerDiscreteScheduler",
    tokenizer: str = "T5TokenizerFast",
) -> None:
    """Write a transformer in diffusers' layout, and `model_index.json`.

    Args:
        out: Directory to write the checkpoint to.
        pipeline: Pipeline class in `model_index.json`.
        config: Contents of the transformer's `config.json`.
        tensors: Tensors of the transformer, keyed by the original code's parameter names.
        scheduler: Scheduler class in `model_index.json`.
        tokenizer: Tokenizer class in `model_index.json`.
    """
    write_component(out / "transformer", config, "config.json")
    write_shards(
        out / "transformer",
        {rename(name, DIFFUSERS_NAMES): tensor for name, tensor in tensors.items()},
    )
    index = {
        "_class_name": pipeline,
        "scheduler": ["diffusers", scheduler],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", tokenizer],
        "transformer": ["diffusers", config["_class_name"]],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    write_component(out, index, "model_index.json")


def write_shards(folder: Path, tensors: Tensors, stem: str = "diffusion_pytorch_model") -> None:
    """Write tensors as two safetensors shards and their index."""
    names = sorted(tensors)
    shards = {
        f"{stem}-{number:05d}-of-00002.safetensors": names[half]
        for number, half in ((1, slice(0, len(names) // 2)), (2, slice(len(names) // 2, None)))
    }
    for file, members in shards.items():
        save_tensors({name: tensors[name] for name in members}, folder / file)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: file for file, members in shards.items() for name in members},
    }
    write_component(folder, index, f"{stem}.safetensors.index.json")


def save_tensors(tensors: Tensors, path: Path) -> None:
    path.write_bytes(save(tensors, {"format": "pt"}))


def write_component(folder: Path, content: Mapping[str, Any], file: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _vae_tensors(seed: int, vae: VAEConfig = VAE) -> Tensors:
    with torch.device("meta"):
        shapes = shapes_of(StreamingWanVAE(vae))
    return random_tensors(shapes, seed, offset=0.02, gains=VAE_GAINS)


def text_tensors(seed: int) -> Tensors:
    with torch.device("meta"):
        shapes = shapes_of(UMT5EncoderModel(UMT5Config(**TEXT)))
    tensors = random_tensors(shapes, seed)
    for name in tensors:
        if name == "shared.weight" or "relative_attention_bias" in name:
            tensors[name] = normal(name, shapes[name], seed)
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}


def _clip_tensors(seed: int) -> Tensors:
    """Return the tensors of CLIP's vision tower, keyed by Wan's own names."""
    dim, mlp, side = CLIP["hidden_size"], CLIP["intermediate_size"], CLIP["patch_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "cls_embedding": (1, 1, dim),
        "patch_embedding.weight": (dim, 3, side, side),
        "pos_embedding": (1, clip_tokens(CLIP), dim),
        **{
            f"{norm}.{kind}": (dim,)
            for norm in ("pre_norm", "post_norm")
            for kind in ("weight", "bias")
        },
    }
    layers = {
        "attn.to_qkv": (3 * dim, dim),
        "attn.proj": (dim, dim),
        "mlp.0": (mlp, dim),
        "mlp.2": (dim, mlp),
    }
    for layer in range(CLIP["num_hidden_layers"]):
        for name, (rows, columns) in layers.items():
            shapes |= {
                f"transformer.{layer}.{name}.weight": (rows, columns),
                f"transformer.{layer}.{name}.bias": (rows,),
            }
        shapes |= {
            f"transformer.{layer}.norm{n}.{kind}": (dim,)
            for n in (1, 2)
            for kind in ("weight", "bias")
        }
    tensors: Tensors = {}
    for name, shape in shapes.items():
        values = normal(f"clip {name}", shape, seed)
        if "norm" in name and name.endswith("weight"):
            tensors[name] = 1 + 0.1 * values
        elif len(shape) == 2 or name == "patch_embedding.weight":
            tensors[name] = values / math.sqrt(math.prod(shape[1:]))
        else:
            tensors[name] = 0.1 * values
    return tensors


VAE_GAINS = {"decoder.conv_out.weight": 0.5}
"""Gain of the last convolution, which sets the contrast. With this value, pixel values reach about
+-0.5.
"""


def random_tensors(
    shapes: Mapping[str, tuple[int, ...]],
    seed: int,
    *,
    norms: str = "norm",
    offset: float = 0.1,
    gains: Mapping[str, float] | None = None,
) -> Tensors:
    """Return random tensors that preserve the scale of a network's signals.

    Args:
        shapes: Shape of each tensor, keyed by name.
        seed: Seed of the values.
        norms: Regular expression for the names of norms. The weights of norms are drawn around 1.
        offset: Standard deviation of biases and modulation.
        gains: Factors that scale other tensors, keyed by a substring of the tensors' names.
            Default: 1.
    """
    tensors: Tensors = {}
    for name, shape in shapes.items():
        values = normal(name, shape, seed)
        if name.endswith(("weight", "gamma")) and re.search(norms, name):
            tensors[name] = 1 + 0.1 * values
        elif name.endswith(("bias", "modulation", "v_lamb")):
            tensors[name] = offset * values
        else:
            gain = next((gain for part, gain in (gains or {}).items() if part in name), 1.0)
            tensors[name] = gain / math.sqrt(math.prod(shape[1:])) * values
    return tensors


def normal(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return fp32 standard normal values that depend only on name, shape and seed."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    )


def write_tiny_vae(
    path: Path, seed: int, channels: Sequence[int] = (8, 8, 4, 4), vae: VAEConfig = VAE
) -> None:
    """Write a narrow TAEHV decoder with random weights for the latents of `vae`."""
    with torch.device("meta"):
        shapes = shapes_of(TinyVAEDecoder(channels, vae))
    torch.save(random_tensors(shapes, seed, offset=0.02), path)
