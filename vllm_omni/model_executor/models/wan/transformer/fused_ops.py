# SPDX-License-Identifier: Apache-2.0
"""The transformer's fused pointwise ops between the matrix products and attention, as pure
functions.

In eager mode, each elementary operation moves about 100 MB for the released models. A fused
function reads its inputs only once. For tensors on CUDA, the functions run as the kernels in
`fused_kernels.py`. For other tensors, torch.compile compiles the functions. All functions run in
fp32 and round once, at the end.
"""

# x: the residual stream [..., T, D]; N heads, H head dim, C = H/2 rotary channels

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation

from vllm_omni.model_executor.layers import fused_ops
from vllm_omni.model_executor.layers.attention.rope import apply_rope
from vllm_omni.model_executor.layers.kv_cache.quantized_storage import store
from vllm_omni.model_executor.layers.linear.quantized_input import Input, quantize_tokens

# quantized: whether to quantize the result to FP8 for the following linear layer
# (`quantized_input.takes_quantized`)


def modulated_norm(
    x: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    quantized: bool = False,
) -> Input:
    """Return LN(x) * (1 + scale) + shift in `dtype`. `shift` and `scale` are fp32 and can be
    broadcast over tokens.
    """
    normed = functional.layer_norm(x.float(), x.shape[-1:], eps=eps) * (1 + scale) + shift
    return quantize_tokens(normed, dtype) if quantized else normed.to(dtype)


def after_self_attention(
    x: torch.Tensor,
    update: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    moved: tuple[torch.Tensor, torch.Tensor] | None = None,
    quantized: bool = False,
) -> tuple[torch.Tensor, Input]:
    """Add the gated attention result to `x`, and return the sum and its affine LayerNorm in the
    dtype of `weight`.

    `moved` contains a factor and an offset to apply to the sum before the norm. Both have the shape
    of `x`. LingBot World uses them to condition on the camera.
    """
    x = (x + gate * update.float()).to(x.dtype)
    if moved is not None:
        x = (x * moved[0] + moved[1]).to(x.dtype)
    normed = functional.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps)
    return x, quantize_tokens(normed, weight.dtype) if quantized else normed.to(weight.dtype)


def after_cross_attention(
    x: torch.Tensor,
    update: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    quantized: bool = False,
) -> tuple[torch.Tensor, Input]:
    """Add the cross-attention result to `x`, and return the sum and its modulated LayerNorm in the
    dtype of `update`.
    """
    x = (x + update).to(x.dtype)
    return x, modulated_norm(x, shift, scale, eps, update.dtype, quantized)


def after_ffn(
    x: torch.Tensor,
    update: torch.Tensor,
    gate: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    quantized: bool = False,
) -> tuple[torch.Tensor, Input]:
    """Add the gated FFN result to `x`, and return the sum and its modulated norm for the next
    block.
    """
    x = gated_add(x, update, gate)
    return x, modulated_norm(x, shift, scale, eps, dtype, quantized)


def gelu_to_fp8(x: torch.Tensor) -> QuantizedActivation:
    """Apply the tanh approximation of GELU and quantize the result to FP8."""
    return quantize_tokens(functional.gelu(x.float(), approximate="tanh"), x.dtype)


def gated_add(x: torch.Tensor, update: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return x + gate * update in the residual stream's dtype."""
    return (x + gate * update.float()).to(x.dtype)


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares over this rank's channels, in fp32. The last dimension is kept."""
    return x.float().square().sum(-1, keepdim=True)


def rms_scale(
    x: torch.Tensor, squares: torch.Tensor | None, weight: torch.Tensor, dim: int, eps: float
) -> torch.Tensor:
    """Apply RMS normalisation. The result has the dtype of `x`.

    `squares` is the sum of squares over all `dim` channels, or None if `x` contains all `dim`
    channels.
    """
    return _scaled(x, squares, weight, dim, eps).to(x.dtype)


def rms_rope(
    x: torch.Tensor,
    squares: torch.Tensor | None,
    weight: torch.Tensor,
    cos_TC: torch.Tensor,
    sin_TC: torch.Tensor,
    dim: int,
    eps: float,
) -> torch.Tensor:
    """Apply `rms_scale`, split the channels into heads [..., T, N, H], and rotate the heads. The
    result has the dtype of `x`.
    """
    heads = _scaled(x, squares, weight, dim, eps).unflatten(-1, (-1, 2 * cos_TC.shape[-1]))
    return apply_rope(heads, cos_TC, sin_TC).to(x.dtype)


def store_keys_values(
    k: torch.Tensor,
    squares: torch.Tensor | None,
    weight: torch.Tensor,
    cos_TC: torch.Tensor,
    sin_TC: torch.Tensor,
    dim: int,
    eps: float,
    v: torch.Tensor,
    stored_2TNH: torch.Tensor,
    scales_2N: torch.Tensor | None,
) -> None:
    """Apply `rms_rope` to the keys [T, D], and write the keys and the values [T, D] to a window's
    `KVSlot`.
    """
    keys = rms_rope(k, squares, weight, cos_TC, sin_TC, dim, eps)
    values = v.unflatten(-1, keys.shape[-2:])
    store((keys, values), scales_2N, stored_2TNH)


def _scaled(
    x: torch.Tensor, squares: torch.Tensor | None, weight: torch.Tensor, dim: int, eps: float
) -> torch.Tensor:
    squares = sum_of_squares(x) if squares is None else squares
    return x.float() * torch.rsqrt(squares / dim + eps) * weight.float()


@dataclass(frozen=True)
class FusedOps(fused_ops.FusedOps):
    """The functions of this module in their fastest form: Triton kernels for tensors on CUDA, code
    compiled for static shapes, or plain functions.
    """

    modulated_norm: Callable[..., Any] = modulated_norm
    after_self_attention: Callable[..., tuple[torch.Tensor, Any]] = after_self_attention
    after_cross_attention: Callable[..., tuple[torch.Tensor, Any]] = after_cross_attention
    after_ffn: Callable[..., tuple[torch.Tensor, Any]] = after_ffn
    gelu_to_fp8: Callable[..., QuantizedActivation] = gelu_to_fp8
    gated_add: Callable[..., torch.Tensor] = gated_add
    sum_of_squares: Callable[..., torch.Tensor] = sum_of_squares
    rms_scale: Callable[..., torch.Tensor] = rms_scale
    rms_rope: Callable[..., torch.Tensor] = rms_rope
    store_keys_values: Callable[..., None] = store_keys_values

    @staticmethod
    def kernels() -> Sequence[Callable[..., Any]]:
        from vllm_omni.model_executor.models.wan.transformer import fused_kernels

        return fused_kernels.KERNELS
