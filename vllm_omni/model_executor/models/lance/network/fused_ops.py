# SPDX-License-Identifier: Apache-2.0
"""The decoder's fused pointwise ops between the matrix products and attention, as pure functions.

For tensors on CUDA, each op is a kernel (`fused_kernels.py`). For other tensors, each op is either
a plain function or a function that torch compiles for a dynamic number of tokens, so requests of
all sizes share the compiled code. All ops run in fp32 and round once, at the end.
"""

# T tokens, D width, N heads, K key/value heads, H head dim, C = H/2 rotary channels, F feed-forward
# width
# quantized: whether to quantize the result to FP8 for the following linear layer
# (`quantized_input.takes_quantized`)

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from vllm_omni.model_executor.layers import fused_ops
from vllm_omni.model_executor.layers.linear.quantized_input import Input, quantize_tokens


def rms_norm(
    x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, quantized: bool = False
) -> Input:
    """Apply RMS normalisation over the last dimension. The result has the dtype of `x_TD` unless it
    is quantized.
    """
    x = x_TD.float()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_D.float()
    return quantize_tokens(normed, x_TD.dtype) if quantized else normed.to(x_TD.dtype)


def add_norm(
    x_TD: torch.Tensor,
    update_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    quantized: bool = False,
) -> tuple[torch.Tensor, Input]:
    """Return the sum x + update and its RMS normalisation."""
    x_TD = x_TD + update_TD
    return x_TD, rms_norm(x_TD, weight_D, eps, quantized)


def norm_rope(
    x_TNH: torch.Tensor,
    weight_H: torch.Tensor,
    cos_TC: torch.Tensor,
    sin_TC: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Apply RMS normalisation to each head, then rotate each pair of channels m and m + H/2. The
    result has the dtype of `x_TNH`.
    """
    x = x_TNH.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_H.float()
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos_TC.unsqueeze(1), sin_TC.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(
        x_TNH.dtype
    )


def store_key_value(
    kv_TF: torch.Tensor,
    cos_TC: torch.Tensor,
    sin_TC: torch.Tensor,
    weight_H: torch.Tensor,
    keys_TKH: torch.Tensor,
    values_TKH: torch.Tensor,
    eps: float,
) -> None:
    """Normalise and rotate the keys, and write them to `keys_TKH` and the values to `values_TKH`.

    `kv_TF` is the concatenation [keys | values] of all heads.
    """
    k_TKH, v_TKH = kv_TF.unflatten(-1, (-1, weight_H.shape[0])).chunk(2, dim=1)
    keys_TKH.copy_(norm_rope(k_TKH, weight_H, cos_TC, sin_TC, eps))
    values_TKH.copy_(v_TKH)


def silu_mul(gate_up_TF: torch.Tensor, quantized: bool = False) -> Input:
    """Return silu(gate) * up. `gate` and `up` are the two halves of the last dimension."""
    gate, up = gate_up_TF.chunk(2, dim=-1)
    if quantized:
        return quantize_tokens(functional.silu(gate.float()) * up.float(), gate_up_TF.dtype)
    return functional.silu(gate) * up


@dataclass(frozen=True)
class FusedOps(fused_ops.FusedOps):
    """The functions of this module in their fastest form: Triton kernels for tensors on CUDA,
    compiled functions, or plain functions.
    """

    rms_norm: Callable[..., Any] = rms_norm
    add_norm: Callable[..., tuple[torch.Tensor, Any]] = add_norm
    norm_rope: Callable[..., torch.Tensor] = norm_rope
    store_key_value: Callable[..., None] = store_key_value
    silu_mul: Callable[..., Any] = silu_mul

    @staticmethod
    def kernels() -> Sequence[Callable[..., Any]]:
        from vllm_omni.model_executor.models.lance.network import fused_kernels

        return fused_kernels.KERNELS

    @staticmethod
    def fuse(function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile `function` on its first call, for any number of tokens. All other sizes are
        constants in the compiled code.
        """
        fused = torch.compile(function)

        def call(x_TD: torch.Tensor, *rest: Any) -> Any:
            tokens = x_TD.shape[0]
            for argument in (x_TD, *rest):
                if (
                    isinstance(argument, torch.Tensor)
                    and argument.dim() > 1
                    and argument.shape[0] == tokens
                ):
                    torch._dynamo.maybe_mark_dynamic(argument, 0)
            return fused(x_TD, *rest)

        return call
