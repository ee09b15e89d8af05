# SPDX-License-Identifier: Apache-2.0
"""The decoder's arithmetic between matrix products and attention, as pure functions that torch.compile can fuse.

All compute in fp32 and round once at the end. Compiled for a varying number of tokens: requests of every size share one
kernel. Held by tests/model_executor/models/lance/test_lance_transformer.py.
"""

# T tokens, D width, N heads, H head dim, C = H/2 rotary lanes

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from vllm_omni.model_executor.layers import chains


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, in the type of `x_TD`."""
    x = x_TD.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_D.float()).to(x_TD.dtype)


def add_norm(
    x_TD: torch.Tensor, update_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x + update, its RMS norm)."""
    x_TD = x_TD + update_TD
    return x_TD, rms_norm(x_TD, weight_D, eps)


def query_key(
    qkv_TF: torch.Tensor,
    cos_TC: torch.Tensor,
    sin_TC: torch.Tensor,
    q_weight_H: torch.Tensor,
    k_weight_H: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut queries [T, N, H] and keys [T, K, H] out of [queries | keys | values]: each head normed, then rotated."""
    head_dim = q_weight_H.shape[0]
    heads_TNH = qkv_TF.unflatten(-1, (-1, head_dim))
    queries = norm_rope(heads_TNH[:, :num_heads], q_weight_H, cos_TC, sin_TC, eps)
    keys = norm_rope(heads_TNH[:, num_heads : num_heads + num_kv_heads], k_weight_H, cos_TC, sin_TC, eps)
    return queries, keys


def norm_rope(
    x_TNH: torch.Tensor, weight_H: torch.Tensor, cos_TC: torch.Tensor, sin_TC: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMS norm of each head, then rotation of lane m with lane m + H/2, in the type of `x_TNH`."""
    x = x_TNH.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_H.float()
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos_TC.unsqueeze(1), sin_TC.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_TNH.dtype)


def silu_mul(gate_up_TF: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, of the two halves of the last dimension."""
    gate, up = gate_up_TF.chunk(2, dim=-1)
    return functional.silu(gate) * up


@dataclass(frozen=True)
class Chains(chains.Chains):
    """The functions above, plain or compiled."""

    rms_norm: Callable[..., torch.Tensor] = rms_norm
    add_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]] = add_norm
    query_key: Callable[..., tuple[torch.Tensor, torch.Tensor]] = query_key
    silu_mul: Callable[..., torch.Tensor] = silu_mul

    @staticmethod
    def fuse(function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile for any number of tokens from the first call on; every other size is fixed in the kernel."""
        fused = torch.compile(function)

        def call(x_TD: torch.Tensor, *rest: Any) -> Any:
            tokens = x_TD.shape[0]
            for argument in (x_TD, *rest):
                if isinstance(argument, torch.Tensor) and argument.dim() > 1 and argument.shape[0] == tokens:
                    torch._dynamo.maybe_mark_dynamic(argument, 0)
            return fused(x_TD, *rest)

        return call
