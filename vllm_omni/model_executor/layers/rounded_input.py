# SPDX-License-Identifier: Apache-2.0
"""Inputs of linear layers that reach them in FP8: whoever makes them rounds them in the same pass over memory.

vLLM's layers round their input themselves, a token at a time, before the product: one pass that reads 2 bytes a number
and writes 1. Its kernels take rounded inputs (`QuantizedActivation`), yet on NVIDIA cards announce only those with one
static scale; the product itself takes a scale of each token.
Held by tests/model_executor/layers/test_rounded_input.py.
"""

# T tokens, D channels

from typing import Any

import torch
from torch import nn
from vllm import envs
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassFP8ScaledMMLinearKernel
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym

from vllm_omni.model_executor.layers.fp8_kernels import FP8, LARGEST

LEAST_SCALE = 1 / (LARGEST * 512)
"""vLLM's: of a token whose numbers are all nearly zero."""
Input = torch.Tensor | QuantizedActivation
"""Of a linear layer: [..., D]."""


def takes_rounded(layer: nn.Module) -> bool:
    """Whether `layer` multiplies inputs in e4m3 with a scale of each token. One with an adapter does not: an adapter
    reads the input, too.
    """
    kernel = _kernel(layer)
    if not isinstance(kernel, CutlassFP8ScaledMMLinearKernel) or envs.VLLM_BATCH_INVARIANT:
        return False
    return bool(kernel.config.activation_quant_key == kFp8DynamicTokenSym)


def product(layer: Any, x: QuantizedActivation, bias: torch.Tensor | None) -> torch.Tensor:
    """The matrix product of a layer that `takes_rounded`, in the type that `x` was rounded from."""
    rows_TD, width = x.data.view(-1, x.data.shape[-1]), layer.weight.shape[1]
    result: torch.Tensor = _kernel(layer).apply_scaled_mm(
        A=rows_TD,
        B=layer.weight,
        out_dtype=x.orig_dtype,
        As=x.scale.view(-1, 1),
        Bs=layer.weight_scale,
        bias=bias,
        output_shape=[*x.orig_shape[:-1], width],
    )
    return result


def rounded(data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> QuantizedActivation:
    """data: e4m3 [..., D]. scale: fp32 [..., 1], numbers of `data` times it are the input's. dtype: of the input."""
    return QuantizedActivation(data, scale, dtype, data.shape, kFp8DynamicTokenSym)


def round_tokens(x: torch.Tensor, dtype: torch.dtype) -> QuantizedActivation:
    """Round [..., D] as vLLM's layers do: a token's largest number becomes e4m3's largest. dtype: see `rounded`."""
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / LARGEST).clamp_(min=LEAST_SCALE)
    return rounded((x / scale).clamp_(-LARGEST, LARGEST).to(FP8), scale, dtype)


def split_tokens(x: Input, count: int) -> list[Input]:
    """Cut [T, D] into parts of `count` tokens, the last of the rest."""
    if isinstance(x, torch.Tensor):
        return list(x.split(count))
    parts = zip(x.data.split(count), x.scale.split(count), strict=True)
    return [rounded(data, scale, x.orig_dtype) for data, scale in parts]


def _kernel(layer: nn.Module) -> Any:
    return getattr(getattr(layer, "quant_method", None), "fp8_linear", None)
