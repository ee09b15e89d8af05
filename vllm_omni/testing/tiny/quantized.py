# SPDX-License-Identifier: Apache-2.0
"""Tiny transformers with quantized weights: the sizes of the transformers in
tests/golden/quantized, and a function that writes Wan's weights in ComfyUI's scaled FP8 format.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from vllm_omni.testing.tiny.wan import TEXT, normal

SIZES: Mapping[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": TEXT["d_model"],
    "freq_dim": 32,
    "ffn_dim": 64,
    "num_layers": 2,
    "rope_max_seq_len": 64,
}
"""Constructor arguments of diffusers' `WanTransformer3DModel`."""

_E4M3_MAX = 448.0


def draw(model: nn.Module, seed: int = 0) -> None:
    """Set all parameters to random values that depend only on the seed and the parameter's name."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = normal(name, tuple(parameter.shape), seed)
            if parameter.dim() > 1 and "scale_shift" not in name:
                parameter.copy_(1.5 * parameter[0].numel() ** -0.5 * values)
            elif name.endswith("weight"):
                parameter.copy_(1.0 + 0.1 * values)
            else:
                parameter.copy_(0.1 * values)


def write_fp8_scaled(
    source: Path, out: Path, *, retained: tuple[str, ...] = ("blocks.",), prefix: str = ""
) -> None:
    """Convert a safetensors file to scaled FP8, which stores linear weights in e4m3 with one scale
    per tensor.

    Args:
        source: Safetensors file to convert.
        out: Scaled FP8 file to write.
        retained: Prefixes of the layers to quantize.
        prefix: Prefix of all names in the new file, for example `model.diffusion_model.`.
    """
    tensors: dict[str, torch.Tensor] = {
        f"{prefix}scaled_fp8": torch.empty(2, dtype=torch.float8_e4m3fn)
    }
    for name, tensor in load_file(source).items():
        if tensor.dim() != 2 or not name.endswith(".weight") or not name.startswith(retained):
            tensors[prefix + name] = tensor
            continue
        scale = tensor.abs().max().float() / _E4M3_MAX
        tensors[prefix + name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
        tensors[f"{prefix}{name.removesuffix('weight')}scale_weight"] = scale
    save_file(tensors, out, {"format": "pt"})
