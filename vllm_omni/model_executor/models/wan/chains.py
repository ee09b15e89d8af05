# SPDX-License-Identifier: Apache-2.0
"""The transformer's arithmetic between matrix products and attention, as pure functions.

At full size each of these moves about 100 MB per operation when run eagerly; fused, each reads its inputs once: by the
kernels of `chain_kernels.py` for tensors on CUDA, else by torch.compile. All compute in fp32 and round once at the end.
Held by tests/model_executor/models/lingbot_world/test_lingbot_transformer.py and
tests/model_executor/models/causal_wan/test_causal_wan_parallel.py.
"""

# x: the residual stream [..., T, D]; N heads, H head dim, C = H/2 rotary lanes

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation

from vllm_omni.model_executor.layers import chains
from vllm_omni.model_executor.layers.kv_format import store
from vllm_omni.model_executor.layers.rope import apply_rope
from vllm_omni.model_executor.layers.rounded_input import Input, round_tokens

# rounded: whether the result is rounded to FP8 for the linear layer that takes it (`rounded_input.takes_rounded`)


def modulated_norm(
    x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, eps: float, dtype: torch.dtype, rounded: bool = False
) -> Input:
    """LN(x) * (1 + scale) + shift as `dtype`; shift and scale are fp32 and broadcast over tokens."""
    normed = functional.layer_norm(x.float(), x.shape[-1:], eps=eps) * (1 + scale) + shift
    return round_tokens(normed, dtype) if rounded else normed.to(dtype)


def after_self_attention(
    x: torch.Tensor,
    update: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    moved: tuple[torch.Tensor, torch.Tensor] | None = None,
    rounded: bool = False,
) -> tuple[torch.Tensor, Input]:
    """Add the gated attention; returns (x, its affine LayerNorm in the type of `weight`).

    moved: factor and offset of the sum, shaped like `x` (the camera of LingBot World).
    """
    x = (x + gate * update.float()).to(x.dtype)
    if moved is not None:
        x = (x * moved[0] + moved[1]).to(x.dtype)
    normed = functional.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps)
    return x, round_tokens(normed, weight.dtype) if rounded else normed.to(weight.dtype)


def after_cross_attention(
    x: torch.Tensor,
    update: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    rounded: bool = False,
) -> tuple[torch.Tensor, Input]:
    """Add the cross-attention; returns (x, its modulated LayerNorm in the type of `update`)."""
    x = (x + update).to(x.dtype)
    return x, modulated_norm(x, shift, scale, eps, update.dtype, rounded)


def after_ffn(
    x: torch.Tensor,
    update: torch.Tensor,
    gate: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    rounded: bool = False,
) -> tuple[torch.Tensor, Input]:
    """`gated_add`, then the next block's `modulated_norm` of that; returns both."""
    x = gated_add(x, update, gate)
    return x, modulated_norm(x, shift, scale, eps, dtype, rounded)


def rounded_gelu(x: torch.Tensor) -> QuantizedActivation:
    """GELU, by its formula with tanh, rounded to FP8."""
    return round_tokens(functional.gelu(x.float(), approximate="tanh"), x.dtype)


def gated_add(x: torch.Tensor, update: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x + gate * update, in the residual's type."""
    return (x + gate * update.float()).to(x.dtype)


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """Over channels (of this rank), fp32, last dimension kept."""
    return x.float().square().sum(-1, keepdim=True)


def rms_scale(
    x: torch.Tensor, squares: torch.Tensor | None, weight: torch.Tensor, dim: int, eps: float
) -> torch.Tensor:
    """RMS normalisation in the type of `x`.

    squares: the sum of squares over all `dim` channels; None = `x` has them all.
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
    """`rms_scale`, cut into heads [..., T, N, H] and rotated, in the type of `x`."""
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
    """Write `rms_rope` of keys [T, D], and values [T, D], to where a window keeps them (`KVPlace`)."""
    keys = rms_rope(k, squares, weight, cos_TC, sin_TC, dim, eps)
    values = v.unflatten(-1, keys.shape[-2:])
    store((keys, values), scales_2N, stored_2TNH)


def _scaled(x: torch.Tensor, squares: torch.Tensor | None, weight: torch.Tensor, dim: int, eps: float) -> torch.Tensor:
    squares = sum_of_squares(x) if squares is None else squares
    return x.float() * torch.rsqrt(squares / dim + eps) * weight.float()


@dataclass(frozen=True)
class Chains(chains.Chains):
    """The functions above: plain, each compiled for the static shapes it meets, or, for tensors on CUDA, a kernel."""

    modulated_norm: Callable[..., Any] = modulated_norm
    after_self_attention: Callable[..., tuple[torch.Tensor, Any]] = after_self_attention
    after_cross_attention: Callable[..., tuple[torch.Tensor, Any]] = after_cross_attention
    after_ffn: Callable[..., tuple[torch.Tensor, Any]] = after_ffn
    rounded_gelu: Callable[..., QuantizedActivation] = rounded_gelu
    gated_add: Callable[..., torch.Tensor] = gated_add
    sum_of_squares: Callable[..., torch.Tensor] = sum_of_squares
    rms_scale: Callable[..., torch.Tensor] = rms_scale
    rms_rope: Callable[..., torch.Tensor] = rms_rope
    store_keys_values: Callable[..., None] = store_keys_values

    @staticmethod
    def kernels() -> Sequence[Callable[..., Any]]:
        from vllm_omni.model_executor.models.wan import chain_kernels

        return chain_kernels.KERNELS
