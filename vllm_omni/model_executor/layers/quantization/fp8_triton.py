# SPDX-License-Identifier: Apache-2.0
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Triton kernels for `fp8_kernels.py`. Call the functions of `fp8_kernels.py` instead of this
module, which requires Triton.

Kernel parameters have only Triton's own annotations, because Triton interprets annotations.
"""

# K kinds (keys, values), T tokens of a chunk, S stored tokens, N heads, H head dim

import torch

from vllm_omni.model_executor.layers.quantization.e4m3 import LARGEST, MANTISSA
from vllm_omni.model_executor.layers.triton_or_names import tl, triton

_LARGEST = tl.constexpr(LARGEST)
_MANTISSA = tl.constexpr(MANTISSA)
_MAGNITUDE = tl.constexpr((1 << 31) - 1)
_INFINITY = tl.constexpr(0x7F800000)
"""Bit pattern of fp32 infinity. With the sign bit cleared, every NaN has a larger bit pattern."""
_SPLITS = 16
"""Number of programs that share a head's tokens in `fit_scales`. Without splitting, there would be
fewer programs than a GPU has multiprocessors.
"""
ROWS = 32
"""Number of (token, head) pairs per program. If heads are 128 wide, a program processes 4096
elements, and each load reads 16 bytes per thread.
"""


@triton.jit
def _dequantize_kernel(
    stored,
    scales,
    tokens,
    out,
    rows,
    stored_kind,
    stored_token,
    out_kind,
    out_token,
    N: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
):
    """Dequantize stored keys and values with one scale per kind and head.

    `rows` is S * N. `tokens` contains the stored position of each of the S tokens, or is None.
    """
    kind = tl.program_id(1)
    row = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.arange(0, B)
    inside = (row < rows)[:, None] & (column < H)[None, :]
    head = row % N
    token = row // N
    target = kind.to(tl.int64) * out_kind + token.to(tl.int64) * out_token + head * H
    if tokens is not None:
        token = tl.load(tokens + token, mask=row < rows, other=0)
    source = kind.to(tl.int64) * stored_kind + token.to(tl.int64) * stored_token + head * H
    x = tl.load(stored + source[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    x *= tl.load(scales + kind * N + head)[:, None]
    tl.store(out + target[:, None] + column[None, :], x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def narrowed(x, scale):
    """Divide fp32 values by powers of two and clamp them to the e4m3 range. NaN stays NaN."""
    return tl.clamp(
        x * tl.div_rn(1.0, scale), -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL
    )


@triton.jit
def _quantize_kernel(
    first,
    second,
    scales,
    out,
    rows,
    first_token,
    first_head,
    second_token,
    second_head,
    out_kind,
    out_token,
    N: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
):
    """Quantize `first` into kind 0 of `out`. If the launch grid has a second row, also quantize
    `second` into kind 1. `rows` is T * N.
    """
    kind = tl.program_id(1)
    row = tl.program_id(0) * R + tl.arange(0, R)
    column = tl.arange(0, B)
    inside = (row < rows)[:, None] & (column < H)[None, :]
    head = row % N
    token = (row // N).to(tl.int64)
    if kind == 0:
        x = tl.load(
            first + (token * first_token + head * first_head)[:, None] + column[None, :],
            mask=inside,
        )
    else:
        x = tl.load(
            second + (token * second_token + head * second_head)[:, None] + column[None, :],
            mask=inside,
        )
    x = narrowed(x.to(tl.float32), tl.load(scales + kind * N + head)[:, None])
    target = kind.to(tl.int64) * out_kind + token * out_token + head * H
    tl.store(out + target[:, None] + column[None, :], x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _largest_kernel(
    first,
    second,
    out,
    tokens,
    first_token,
    first_head,
    second_token,
    second_head,
    N: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    B: tl.constexpr,
):
    """Write a head's largest magnitude in one of `_SPLITS` parts of the tokens, as fp32 bits.

    Without sign bits, fp32 bit patterns are ordered like the magnitudes, and NaN comes after all
    numbers.
    """
    head, split, kind = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(1)
    column = tl.arange(0, B)
    largest = tl.zeros((R, B), tl.int32)
    for start in range(split * R, tokens, splits * R):
        token = (start + tl.arange(0, R)).to(tl.int64)
        inside = (token < tokens)[:, None] & (column < H)[None, :]
        if kind == 0:
            x = tl.load(
                first + (token * first_token + head * first_head)[:, None] + column[None, :],
                mask=inside,
                other=0.0,
            )
        else:
            x = tl.load(
                second + (token * second_token + head * second_head)[:, None] + column[None, :],
                mask=inside,
                other=0.0,
            )
        largest = tl.maximum(largest, x.to(tl.float32).to(tl.int32, bitcast=True) & _MAGNITUDE)
    tl.store(out + (kind * N + head) * splits + split, tl.max(tl.max(largest, axis=1), axis=0))


@triton.jit
def _scale_kernel(largest, scales, limit, least, SPLITS: tl.constexpr):
    """Write the scale of one head, given its largest magnitude in each part of the tokens."""
    number = tl.program_id(0)
    bits = tl.max(tl.load(largest + number * SPLITS + tl.arange(0, SPLITS)), axis=0)
    scale = tl.div_rn(tl.maximum(bits.to(tl.float32, bitcast=True), least), limit)
    rounded = (scale.to(tl.int32, bitcast=True) + _MANTISSA) & ~_MANTISSA
    bits = tl.where(bits > _INFINITY, bits, rounded)
    tl.store(scales + number, bits.to(tl.float32, bitcast=True))


def dequantize(
    stored_KSNH: torch.Tensor,
    scales_KN: torch.Tensor,
    dtype: torch.dtype,
    tokens_S: torch.Tensor | None = None,
    rows: int = ROWS,
) -> torch.Tensor:
    """See `fp8_kernels.dequantize`. `rows` is the number of (token, head) pairs per program (see
    `ROWS`).
    """
    kinds, count, heads, width = stored_KSNH.shape
    count = count if tokens_S is None else len(tokens_S)
    out = torch.empty(kinds, count, heads, width, dtype=dtype, device=stored_KSNH.device)
    dequantize_into(stored_KSNH, scales_KN, out, tokens_S, rows)
    return out


def dequantize_into(
    stored_KSNH: torch.Tensor,
    scales_KN: torch.Tensor,
    out_KSNH: torch.Tensor,
    tokens_S: torch.Tensor | None = None,
    rows: int = ROWS,
) -> None:
    """See `fp8_kernels.dequantize_into`."""
    kinds, count, heads, width = out_KSNH.shape
    assert (
        stored_KSNH.stride()[2:] == out_KSNH.stride()[2:] == (width, 1)
        and scales_KN.is_contiguous()
    )
    _dequantize_kernel[(triton.cdiv(count * heads, rows), kinds)](
        stored_KSNH,
        scales_KN,
        tokens_S,
        out_KSNH,
        count * heads,
        *stored_KSNH.stride()[:2],
        *out_KSNH.stride()[:2],
        N=heads,
        H=width,
        R=rows,
        B=triton.next_power_of_2(width),
    )


def quantize(
    parts: tuple[torch.Tensor, ...], scales_KN: torch.Tensor, target_KTNH: torch.Tensor
) -> None:
    """See `fp8_kernels.quantize`."""
    kinds, count, heads, width = target_KTNH.shape
    assert kinds == len(parts) <= 2 and target_KTNH.stride()[2:] == (width, 1)
    first, second = (x if x.stride(-1) == 1 else x.contiguous() for x in (parts[0], parts[-1]))
    _quantize_kernel[(triton.cdiv(count * heads, ROWS), kinds)](
        first,
        second,
        scales_KN.contiguous(),
        target_KTNH,
        count * heads,
        *first.stride()[:2],
        *second.stride()[:2],
        *target_KTNH.stride()[:2],
        N=heads,
        H=width,
        R=ROWS,
        B=triton.next_power_of_2(width),
    )


def fit_scales(
    parts: tuple[torch.Tensor, ...], limit: float, least: float, scales_KN: torch.Tensor
) -> None:
    """See `fp8_kernels.fit_scales`."""
    kinds, heads = scales_KN.shape
    tokens, _, width = parts[0].shape
    assert kinds == len(parts) <= 2 and scales_KN.is_contiguous()
    first, second = (x if x.stride(-1) == 1 else x.contiguous() for x in (parts[0], parts[-1]))
    largest = torch.empty(kinds, heads, _SPLITS, dtype=torch.int32, device=scales_KN.device)
    _largest_kernel[(heads, _SPLITS, kinds)](
        first,
        second,
        largest,
        tokens,
        *first.stride()[:2],
        *second.stride()[:2],
        N=heads,
        H=width,
        R=ROWS,
        B=triton.next_power_of_2(width),
    )
    _scale_kernel[(kinds * heads,)](largest, scales_KN, limit, least, SPLITS=_SPLITS)
