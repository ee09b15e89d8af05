# SPDX-License-Identifier: Apache-2.0
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Quantization of tokens in Triton kernels that run one program per token. This module requires
Triton.
"""

# T tokens, D channels

import torch
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation

from vllm_omni.model_executor.layers.linear.quantized_input import LEAST_SCALE, quantized
from vllm_omni.model_executor.layers.quantization.e4m3 import FP8, LARGEST
from vllm_omni.model_executor.layers.triton_or_names import tl, triton

_LARGEST, _LEAST_SCALE = tl.constexpr(LARGEST), tl.constexpr(LEAST_SCALE)
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
