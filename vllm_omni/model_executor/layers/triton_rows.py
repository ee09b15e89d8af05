# SPDX-License-Identifier: Apache-2.0
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Quantization of tokens, to e4m3 or int8, in Triton kernels that run one program per token. This
module requires Triton.
"""

# T tokens, D channels

import torch
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
from vllm.model_executor.layers.quantization.utils.quant_utils import kInt8DynamicTokenSym

from vllm_omni.model_executor.layers.linear.quantized_input import LEAST_SCALE, quantized
from vllm_omni.model_executor.layers.quantization.e4m3 import FP8, LARGEST
from vllm_omni.model_executor.layers.triton_or_names import tl, triton

_LARGEST, _LEAST_SCALE = tl.constexpr(LARGEST), tl.constexpr(LEAST_SCALE)
_LARGEST_INT8 = tl.constexpr(127.0)
_ROUNDER = tl.constexpr(1.5 * 2**23)
"""Adding and subtracting this number rounds smaller fp32 values to the nearest integer."""
_WARPS = 8


@triton.jit
def over_largest(value, token_scale):
    """Store the scale that maps the token's largest magnitude to the e4m3 maximum, and return the
    values divided by the scale.

    The function divides only once per token, because the kernels took nearly twice as long with one
    division per value.
    """
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(value), axis=0), _LARGEST), _LEAST_SCALE)
    tl.store(token_scale, scale)
    return tl.clamp(
        value * tl.div_rn(1.0, scale), -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL
    )


@triton.jit
def _quantize_kernel(x, out, token_scales, x_token, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    value = tl.load(x + row * x_token + column, mask=inside, other=0.0).to(tl.float32)
    value = over_largest(value, token_scales + row)
    tl.store(out + row * D + column, value.to(out.dtype.element_ty), mask=inside)


def quantize_rows(x: torch.Tensor) -> QuantizedActivation:
    """Implement `quantized_input.quantize_tokens` for a tensor [..., D] with a Triton kernel."""
    x_TD = x.reshape(-1, x.shape[-1])
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    tokens, width = x_TD.shape
    out = torch.empty(x.shape, dtype=FP8, device=x.device)
    scale = torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)
    if tokens:
        _quantize_kernel[(tokens,)](
            x_TD, out, scale, x_TD.stride(0),
            D=width, BLOCK=triton.next_power_of_2(width), num_warps=_WARPS,
        )  # fmt: skip
    return quantized(out, scale, x.dtype)


@triton.jit
def _int8_kernel(
    x, term, out, token_scales, D: tl.constexpr, BLOCK: tl.constexpr, SILU: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside, at = column < D, row * D + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        value *= tl.sigmoid(value)
    if term is not None:
        value += tl.load(term + at, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(value), axis=0)
    tl.store(token_scales + row, largest / _LARGEST_INT8)
    value *= _LARGEST_INT8 / tl.maximum(largest, 1e-30)
    tl.store(out + at, ((value + _ROUNDER) - _ROUNDER).to(tl.int8), mask=inside)


def int8_rows(
    x_TD: torch.Tensor, term_TD: torch.Tensor | None = None, *, silu: bool = False
) -> QuantizedActivation:
    """Quantize x + term, or silu(x) + term, to int8 with one scale per token, as vLLM's int8 layers
    quantize their inputs. The sum is computed in fp32 and not rounded before it is quantized.
    """
    tokens, width = x_TD.shape
    out = torch.empty(tokens, width, dtype=torch.int8, device=x_TD.device)
    scale = torch.empty(tokens, 1, dtype=torch.float32, device=x_TD.device)
    if tokens:
        _int8_kernel[(tokens,)](
            x_TD.contiguous(), None if term_TD is None else term_TD.contiguous(), out, scale,
            D=width, BLOCK=triton.next_power_of_2(width), SILU=silu, num_warps=_WARPS,
        )  # fmt: skip
    return QuantizedActivation(out, scale, x_TD.dtype, x_TD.shape, kInt8DynamicTokenSym)
