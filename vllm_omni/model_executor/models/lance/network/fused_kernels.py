# SPDX-License-Identifier: Apache-2.0
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Triton kernels for the fused pointwise ops in `fused_ops.py`. Import this module only if Triton
is available (`HAS_TRITON`).

`fused_ops.py` defines what each op computes. A Triton program holds one token in registers, so each
token is read and written only once. The program computes in fp32 and rounds once, at the end. The
same kernel handles any number of tokens.
"""

# T tokens, D width, N heads, K key/value heads, H head dim, C = H/2 rotary channels, F feed-forward
# width

import torch

from vllm_omni.model_executor.layers.linear.quantized_input import Input
from vllm_omni.model_executor.layers.linear.quantized_input import quantized as quantized_rows
from vllm_omni.model_executor.layers.quantization.e4m3 import FP8
from vllm_omni.model_executor.layers.triton_or_names import tl, triton
from vllm_omni.model_executor.layers.triton_rows import over_largest

_NORM_WARPS = 8
_SILU_WARPS = 8
"""Number of warps per SiLU program. A program processes one token of the feed-forward layer, 11008
channels in the released model.
"""
_NUMBERS_PER_WARP = 1024
"""Number of elements of a token's heads that each warp processes: 32 per thread."""


@triton.jit
def _norm_kernel(
    x, update, weight, total, normed, token_scales, eps, D: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute total = x + update and normed = total / rms(total) * weight. Terms and results whose
    arguments are None are skipped.

    If `token_scales` is given, each token of `normed` is divided by its own scale, and the kernel
    writes the scales to `token_scales`.
    """
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < D
    at = row.to(tl.int64) * D + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if update is not None:
        value += tl.load(update + at, mask=inside, other=0.0, eviction_policy="evict_first").to(
            tl.float32
        )
        value = value.to(total.dtype.element_ty).to(tl.float32)
        tl.store(total + at, value.to(total.dtype.element_ty), mask=inside)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / D + eps)
    value *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if token_scales is not None:
        value = over_largest(value, token_scales + row)
    tl.store(normed + at, value.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul_kernel(gate_up, out, token_scales, F: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < F
    source = gate_up + row * 2 * F + column
    gate = tl.load(source, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    up = tl.load(source + F, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    if token_scales is not None:
        value = over_largest(value, token_scales + row)
    tl.store(out + row * F + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_rope_kernel(
    x,
    cos,
    sin,
    weight,
    out,
    x_token,
    eps,
    N: tl.constexpr,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Normalise and rotate the heads of a token. Each rotation pairs a channel of a head's first
    half with the corresponding channel of its second half.

    `x` is [T, N * 2 C] with a token stride of `x_token`.
    """
    row = tl.program_id(0).to(tl.int64)
    head, thread = tl.arange(0, HEADS)[:, None], tl.arange(0, LANES)[None, :]
    inside = (head < N) & (thread < C)
    position = head * 2 * C + thread
    first = tl.load(x + row * x_token + position, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + row * x_token + position + C, mask=inside, other=0.0).to(tl.float32)
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    scale = tl.rsqrt(squares / (2 * C) + eps)[:, None]
    first *= scale * tl.load(weight + thread, mask=thread < C, other=0.0).to(tl.float32)
    second *= scale * tl.load(weight + C + thread, mask=thread < C, other=0.0).to(tl.float32)
    cosine = tl.load(cos + row * C + thread, mask=thread < C, other=0.0)
    sine = tl.load(sin + row * C + thread, mask=thread < C, other=0.0)
    target = out + row * N * 2 * C + position
    tl.store(target, (first * cosine - second * sine).to(out.dtype.element_ty), mask=inside)
    tl.store(target + C, (second * cosine + first * sine).to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, quantized: bool = False
) -> Input:
    """Implement `fused_ops.rms_norm` with a Triton kernel."""
    return _norm(x_TD.contiguous(), None, None, weight_D, eps, quantized)


def add_norm(
    x_TD: torch.Tensor,
    update_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    quantized: bool = False,
) -> tuple[torch.Tensor, Input]:
    """Implement `fused_ops.add_norm` with a Triton kernel."""
    total = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    return total, _norm(x_TD.contiguous(), update_TD.contiguous(), total, weight_D, eps, quantized)


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
    """Implement `fused_ops.query_key` with a Triton kernel."""
    width = num_heads * q_weight_H.shape[0]
    turn = cos_TC.contiguous(), sin_TC.contiguous()
    keys = qkv_TF[:, width : width + num_kv_heads * k_weight_H.shape[0]]
    return _norm_rope(qkv_TF[:, :width], *turn, q_weight_H, eps), _norm_rope(
        keys, *turn, k_weight_H, eps
    )


def silu_mul(gate_up_TF: torch.Tensor, quantized: bool = False) -> Input:
    """Implement `fused_ops.silu_mul` with a Triton kernel."""
    tokens, width = gate_up_TF.shape[0], gate_up_TF.shape[1] // 2
    out, token_scales = _rows(gate_up_TF, tokens, width, quantized)
    if tokens:
        _silu_mul_kernel[(tokens,)](
            gate_up_TF.contiguous(),
            out,
            token_scales,
            F=width,
            BLOCK=triton.next_power_of_2(width),
            num_warps=_SILU_WARPS,
        )
    return out if token_scales is None else quantized_rows(out, token_scales, gate_up_TF.dtype)


KERNELS = (rms_norm, add_norm, query_key, silu_mul)


def _norm(
    x_TD: torch.Tensor,
    update_TD: torch.Tensor | None,
    total_TD: torch.Tensor | None,
    weight_D: torch.Tensor,
    eps: float,
    quantized: bool,
) -> Input:
    tokens, width = x_TD.shape
    normed, token_scales = _rows(x_TD, tokens, width, quantized)
    if tokens:
        _norm_kernel[(tokens,)](
            x_TD, update_TD, weight_D, total_TD, normed, token_scales, eps,
            D=width, BLOCK=triton.next_power_of_2(width), num_warps=_NORM_WARPS,
        )  # fmt: skip
    return normed if token_scales is None else quantized_rows(normed, token_scales, x_TD.dtype)


def _norm_rope(
    x_TF: torch.Tensor,
    cos_TC: torch.Tensor,
    sin_TC: torch.Tensor,
    weight_H: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Normalise and rotate the heads in a slice [T, N H] of a wider tensor, and return them as [T,
    N, H].
    """
    lanes = cos_TC.shape[-1]
    heads = x_TF.shape[1] // (2 * lanes)
    out = torch.empty(x_TF.shape[0], heads, 2 * lanes, dtype=x_TF.dtype, device=x_TF.device)
    rows, columns = triton.next_power_of_2(heads), triton.next_power_of_2(lanes)
    warps = max(1, min(8, 2 * rows * columns // _NUMBERS_PER_WARP))
    assert x_TF.stride(1) == 1
    if len(x_TF):
        _norm_rope_kernel[(len(x_TF),)](
            x_TF, cos_TC, sin_TC, weight_H, out, x_TF.stride(0), eps,
            N=heads, C=lanes, HEADS=rows, LANES=columns, num_warps=warps,
        )  # fmt: skip
    return out


def _rows(
    like: torch.Tensor, tokens: int, width: int, quantized: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Allocate a result tensor and, if `quantized` is set, a tensor for its per-token scales."""
    out = torch.empty(tokens, width, dtype=FP8 if quantized else like.dtype, device=like.device)
    return out, torch.empty(
        tokens, 1, dtype=torch.float32, device=like.device
    ) if quantized else None
