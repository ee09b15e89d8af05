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
def _norm_rope(
    x,
    out,
    cos,
    sin,
    weight,
    eps,
    N: tl.constexpr,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Normalise and rotate the N heads of one token. Each rotation pairs a channel of a head's
    first half with the corresponding channel of its second half.
    """
    head, thread = tl.arange(0, HEADS)[:, None], tl.arange(0, LANES)[None, :]
    inside = (head < N) & (thread < C)
    position = head * 2 * C + thread
    first = tl.load(x + position, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + position + C, mask=inside, other=0.0).to(tl.float32)
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    scale = tl.rsqrt(squares / (2 * C) + eps)[:, None]
    first *= scale * tl.load(weight + thread, mask=thread < C, other=0.0).to(tl.float32)
    second *= scale * tl.load(weight + C + thread, mask=thread < C, other=0.0).to(tl.float32)
    cosine = tl.load(cos + thread, mask=thread < C, other=0.0)
    sine = tl.load(sin + thread, mask=thread < C, other=0.0)
    target = out + position
    tl.store(target, (first * cosine - second * sine).to(out.dtype.element_ty), mask=inside)
    tl.store(target + C, (second * cosine + first * sine).to(out.dtype.element_ty), mask=inside)


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
    """Normalise and rotate each token's heads. `x` is [T, N * 2 C] with a token stride of
    `x_token`.
    """
    row = tl.program_id(0).to(tl.int64)
    target = out + row * N * 2 * C
    _norm_rope(
        x + row * x_token, target, cos + row * C, sin + row * C, weight, eps, N, C, HEADS, LANES
    )


@triton.jit
def _store_key_value_kernel(
    kv,
    cos,
    sin,
    weight,
    keys,
    values,
    kv_token,
    eps,
    N: tl.constexpr,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write each token's normalised and rotated keys to `keys`, and its values to `values`.

    `kv` is [T, 2 * N * 2 C] with a token stride of `kv_token`.
    """
    row = tl.program_id(0).to(tl.int64)
    source, target = kv + row * kv_token, row * N * 2 * C
    _norm_rope(source, keys + target, cos + row * C, sin + row * C, weight, eps, N, C, HEADS, LANES)
    column = tl.arange(0, BLOCK)
    inside = column < N * 2 * C
    value = tl.load(source + N * 2 * C + column, mask=inside)
    tl.store(values + target + column, value, mask=inside)


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


def norm_rope(
    x_TNH: torch.Tensor,
    weight_H: torch.Tensor,
    cos_TC: torch.Tensor,
    sin_TC: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Implement `fused_ops.norm_rope` with a Triton kernel. A token's heads must be contiguous."""
    out = torch.empty(x_TNH.shape, dtype=x_TNH.dtype, device=x_TNH.device)
    assert x_TNH[:1].is_contiguous()
    if len(x_TNH):
        _norm_rope_kernel[(len(x_TNH),)](
            x_TNH, cos_TC.contiguous(), sin_TC.contiguous(), weight_H, out, x_TNH.stride(0), eps,
            **_head_sizes(x_TNH.shape[1], cos_TC.shape[-1]),
        )  # fmt: skip
    return out


def store_key_value(
    kv_TF: torch.Tensor,
    cos_TC: torch.Tensor,
    sin_TC: torch.Tensor,
    weight_H: torch.Tensor,
    keys_TKH: torch.Tensor,
    values_TKH: torch.Tensor,
    eps: float,
) -> None:
    """Implement `fused_ops.store_key_value` with a Triton kernel. `keys_TKH` and `values_TKH` must
    be contiguous.
    """
    assert kv_TF.stride(1) == 1 and keys_TKH.is_contiguous() and values_TKH.is_contiguous()
    if len(kv_TF):
        _store_key_value_kernel[(len(kv_TF),)](
            kv_TF, cos_TC.contiguous(), sin_TC.contiguous(), weight_H, keys_TKH, values_TKH,
            kv_TF.stride(0), eps, BLOCK=triton.next_power_of_2(kv_TF.shape[1] // 2),
            **_head_sizes(keys_TKH.shape[1], cos_TC.shape[-1]),
        )  # fmt: skip


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


KERNELS = (rms_norm, add_norm, norm_rope, store_key_value, silu_mul)


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


def _head_sizes(heads: int, lanes: int) -> dict[str, int]:
    """Return the arguments for a kernel that processes this number of heads, each with this number
    of rotary channels.

    The number of warps is such that no head is divided between warps, because every sum over a
    divided head needs barriers. With two warps, Triton would divide each head.
    """
    rows, columns = triton.next_power_of_2(heads), triton.next_power_of_2(lanes)
    warps = 1 if rows * columns <= 128 else max(4, min(8, rows * columns // 256))
    return {"N": heads, "C": lanes, "HEADS": rows, "LANES": columns, "num_warps": warps}


def _rows(
    like: torch.Tensor, tokens: int, width: int, quantized: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Allocate a result tensor and, if `quantized` is set, a tensor for its per-token scales."""
    out = torch.empty(tokens, width, dtype=FP8 if quantized else like.dtype, device=like.device)
    return out, torch.empty(
        tokens, 1, dtype=torch.float32, device=like.device
    ) if quantized else None
