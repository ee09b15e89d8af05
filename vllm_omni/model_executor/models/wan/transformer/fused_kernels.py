# SPDX-License-Identifier: Apache-2.0
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Triton kernels for the fused pointwise ops in `fused_ops.py`. Import this module only if Triton
is available (`HAS_TRITON`).

`fused_ops.py` defines what each op computes. A Triton program holds one token in registers, so each
token is read and written only once. The program computes in fp32 and rounds once, at the end.
Shifts, scales, gates and rotations can be broadcast in any way and are read without a copy. The
launch parameters never depend on values in tensors. `benchmarks/elementwise_kernels.py` measures
the kernels' speed.
"""

# B batch entries, T tokens, D width (of this rank), C = H/2 rotary channels of a head. Kernel
# parameters have only Triton's own annotations, because Triton interprets annotations itself.

from typing import Any

import torch
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation

from vllm_omni.model_executor.layers.linear.quantized_input import Input
from vllm_omni.model_executor.layers.linear.quantized_input import quantized as quantized_rows
from vllm_omni.model_executor.layers.quantization.e4m3 import FP8
from vllm_omni.model_executor.layers.quantization.fp8_triton import narrowed
from vllm_omni.model_executor.layers.triton_or_names import tl, triton
from vllm_omni.model_executor.layers.triton_rows import over_largest

WARPS = 4
"""Number of warps per program. With 5120 channels, 8 warps were slower than 4, and 16 warps were
slower still.
"""
GELU_WARPS = 8
"""Number of warps per GELU program. A program processes one FFN token of up to 13824 channels."""


@triton.jit(do_not_specialize=["tokens"])
def _residual_kernel(
    x, update, gate, factor, offset, scale, shift, total, normed, token_scales,
    tokens, gate_batch, gate_token, scale_batch, scale_token, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, PLUS_ONE: tl.constexpr,
):  # fmt: skip
    """Compute total = (x + gate * update) * factor + offset and normed = LN(total) * scale + shift.
    Terms and results whose arguments are None are skipped.

    If `token_scales` is given, each token of `normed` is divided by its own scale, and the kernel
    writes the scales to `token_scales`.
    """
    row = tl.program_id(0)
    batch, token = (row // tokens).to(tl.int64), (row % tokens).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    at = row.to(tl.int64) * D + column
    value = tl.load(x + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if update is not None:
        change = tl.load(update + at, mask=inside, other=0.0, eviction_policy="evict_first").to(
            tl.float32
        )
        if gate is not None:
            change *= tl.load(
                gate + batch * gate_batch + token * gate_token + column, mask=inside, other=0.0
            )
        value = (value + change).to(total.dtype.element_ty).to(tl.float32)
        if factor is not None:
            value *= tl.load(factor + at, mask=inside, other=0.0).to(tl.float32)
            value += tl.load(offset + at, mask=inside, other=0.0).to(tl.float32)
            value = value.to(total.dtype.element_ty).to(tl.float32)
        tl.store(total + at, value.to(total.dtype.element_ty), mask=inside)
    if normed is not None:
        centred = tl.where(inside, value - tl.sum(value, axis=0) / D, 0.0)
        value = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / D + eps)
        modulation = batch * scale_batch + token * scale_token + column
        multiplier = tl.load(scale + modulation, mask=inside, other=0.0).to(tl.float32)
        if PLUS_ONE:
            multiplier += 1.0
        value = value * multiplier + tl.load(shift + modulation, mask=inside, other=0.0).to(
            tl.float32
        )
        if token_scales is not None:
            value = over_largest(value, token_scales + row)
        tl.store(normed + at, value.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _quantized_gelu_kernel(x, out, token_scales, D: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    at = row.to(tl.int64) * D + column
    value = tl.load(x + at, mask=column < D, other=0.0, eviction_policy="evict_first").to(
        tl.float32
    )
    value *= tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    value = over_largest(value, token_scales + row)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=column < D)


@triton.jit(do_not_specialize=["tokens"])
def _rms_kernel(
    x, squares, weight, cos, sin, out,
    tokens, x_batch, x_token, squares_batch, squares_token, turn_batch, turn_token, dim, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Compute out = x / rms(x) * weight and rotate pairs of channels. `squares` is None if `x`
    contains all `dim` channels.
    """
    row = tl.program_id(0)
    batch, token = (row // tokens).to(tl.int64), (row % tokens).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    source = x + batch * x_batch + token * x_token + column
    value = tl.load(source, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if squares is None:
        total = tl.sum(value * value, axis=0)
    else:
        total = tl.load(squares + batch * squares_batch + token * squares_token)
    value *= tl.rsqrt(total / dim + eps) * tl.load(weight + column, mask=inside, other=0.0).to(
        tl.float32
    )
    if cos is not None:
        pair = tl.arange(0, BLOCK // 2)
        turn = batch * turn_batch + token * turn_token + pair % C
        cosine = tl.load(cos + turn, mask=pair < D // 2, other=0.0)
        sine = tl.load(sin + turn, mask=pair < D // 2, other=0.0)
        even, odd = tl.split(tl.reshape(value, (BLOCK // 2, 2)))
        value = tl.reshape(
            tl.join(even * cosine - odd * sine, even * sine + odd * cosine), (BLOCK,)
        )
    tl.store(out + row.to(tl.int64) * D + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _store_kernel(
    k, squares, weight, cos, sin, v, scales, out,
    k_token, squares_token, turn_token, v_token, out_kind, out_token, dim, eps,
    N: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Write keys, processed as in `_rms_kernel`, to index 0 of `out` and values to index 1. If
    `scales` is given, each head's keys and values are divided by the head's scale.

    A program holds all heads of one token: N heads of 2 C channels, padded to HEADS heads of 2
    PAIRS channels.
    """
    token, kind = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, thread = tl.arange(0, HEADS)[:, None], tl.arange(0, 2 * PAIRS)[None, :]
    column = head * 2 * C + thread
    inside = (head < N) & (thread < 2 * C)
    if kind == 0:
        value = tl.load(
            k + token * k_token + column, mask=inside, other=0.0, eviction_policy="evict_first"
        )
        value = value.to(tl.float32)
        total = (
            tl.sum(value * value) if squares is None else tl.load(squares + token * squares_token)
        )
        value *= tl.rsqrt(total / dim + eps) * tl.load(weight + column, mask=inside, other=0.0).to(
            tl.float32
        )
        pair = tl.arange(0, PAIRS)[None, :]
        cosine = tl.load(cos + token * turn_token + pair, mask=pair < C, other=0.0)
        sine = tl.load(sin + token * turn_token + pair, mask=pair < C, other=0.0)
        even, odd = tl.split(tl.reshape(value, (HEADS, PAIRS, 2)))
        value = tl.join(even * cosine - odd * sine, even * sine + odd * cosine)
        value = tl.reshape(value, (HEADS, 2 * PAIRS)).to(k.dtype.element_ty).to(tl.float32)
    else:
        value = tl.load(
            v + token * v_token + column, mask=inside, other=0.0, eviction_policy="evict_first"
        )
        value = value.to(tl.float32)
    if scales is not None:
        value = narrowed(value, tl.load(scales + kind * N + head, mask=head < N, other=1.0))
    target = out + kind.to(tl.int64) * out_kind + token * out_token + column
    tl.store(target, value.to(out.dtype.element_ty), mask=inside)


def modulated_norm(
    x: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    quantized: bool = False,
) -> Input:
    """Implement `fused_ops.modulated_norm` with a Triton kernel."""
    return _residual(x, None, None, None, (scale, shift), eps, dtype, quantized)


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
    """Implement `fused_ops.after_self_attention` with a Triton kernel."""
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    return total, _residual(
        x,
        update,
        gate,
        total,
        (weight, bias),
        eps,
        weight.dtype,
        quantized,
        moved=moved,
        plus_one=False,
    )


def after_cross_attention(
    x: torch.Tensor,
    update: torch.Tensor,
    shift: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    quantized: bool = False,
) -> tuple[torch.Tensor, Input]:
    """Implement `fused_ops.after_cross_attention` with a Triton kernel."""
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    return total, _residual(x, update, None, total, (scale, shift), eps, update.dtype, quantized)


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
    """Implement `fused_ops.after_ffn` with a Triton kernel."""
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    return total, _residual(x, update, gate, total, (scale, shift), eps, dtype, quantized)


def gelu_to_fp8(x: torch.Tensor) -> QuantizedActivation:
    """Implement `fused_ops.gelu_to_fp8` with a Triton kernel."""
    x = x.contiguous()
    data = torch.empty_like(x, dtype=FP8)
    token_scales = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    width = x.shape[-1]
    _quantized_gelu_kernel[(x[..., 0].numel(),)](
        x, data, token_scales, D=width, BLOCK=triton.next_power_of_2(width), num_warps=GELU_WARPS
    )
    return quantized_rows(data, token_scales, x.dtype)


def gated_add(x: torch.Tensor, update: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Implement `fused_ops.gated_add` with a Triton kernel."""
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    _add_and_norm(x, update, gate, total, None, None)
    return total


def rms_scale(
    x: torch.Tensor, squares: torch.Tensor | None, weight: torch.Tensor, dim: int, eps: float
) -> torch.Tensor:
    """Implement `fused_ops.rms_scale` with a Triton kernel."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rms(x, squares, weight, None, out, dim, eps)
    return out


def rms_rope(
    x: torch.Tensor,
    squares: torch.Tensor | None,
    weight: torch.Tensor,
    cos_TC: torch.Tensor,
    sin_TC: torch.Tensor,
    dim: int,
    eps: float,
) -> torch.Tensor:
    """Implement `fused_ops.rms_rope` with a Triton kernel."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rms(x, squares, weight, (cos_TC, sin_TC), out, dim, eps)
    return out.unflatten(-1, (-1, 2 * cos_TC.shape[-1]))


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
    """Implement `fused_ops.store_keys_values` with a Triton kernel."""
    heads, width = stored_2TNH.shape[2:]
    out_kind, out_token, *of_head = stored_2TNH.stride()
    assert of_head == [width, 1] and k.stride(-1) == v.stride(-1) == cos_TC.stride(-1) == 1
    assert cos_TC.stride() == sin_TC.stride() and (scales_2N is None or scales_2N.is_contiguous())
    _store_kernel[(len(k), 2)](
        k,
        squares,
        weight,
        cos_TC,
        sin_TC,
        v,
        scales_2N,
        stored_2TNH,
        k.stride(0),
        0 if squares is None else squares.stride(0),
        cos_TC.stride(0),
        v.stride(0),
        out_kind,
        out_token,
        dim,
        eps,
        N=heads,
        C=width // 2,
        HEADS=triton.next_power_of_2(heads),
        PAIRS=triton.next_power_of_2(width // 2),
        num_warps=WARPS,
    )


KERNELS = (
    modulated_norm,
    after_self_attention,
    after_cross_attention,
    after_ffn,
    gelu_to_fp8,
    gated_add,
    rms_scale,
    rms_rope,
    store_keys_values,
)


def _residual(
    x: torch.Tensor,
    update: torch.Tensor | None,
    gate: torch.Tensor | None,
    total: torch.Tensor | None,
    modulation: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    dtype: torch.dtype,
    quantized: bool,
    **others: Any,
) -> Input:
    """Write the sum to `total`, and return the normalised sum, in `dtype` or quantized."""
    normed = torch.empty_like(
        x, dtype=FP8 if quantized else dtype, memory_format=torch.contiguous_format
    )
    if not quantized:
        _add_and_norm(x, update, gate, total, normed, None, modulation, eps, **others)
        return normed
    token_scales = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    _add_and_norm(x, update, gate, total, normed, token_scales, modulation, eps, **others)
    return quantized_rows(normed, token_scales, dtype)


def _add_and_norm(
    x: torch.Tensor,
    update: torch.Tensor | None,
    gate: torch.Tensor | None,
    total: torch.Tensor | None,
    normed: torch.Tensor | None,
    token_scales: torch.Tensor | None,
    modulation: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    eps: float = 0.0,
    *,
    moved: tuple[torch.Tensor, torch.Tensor] | None = None,
    plus_one: bool = True,
) -> None:
    """Launch `_residual_kernel`. `modulation` contains the factor and the offset to apply after the
    norm. These two tensors must have equal strides.
    """
    shape, (scale, shift) = x.shape, modulation
    buffers = _strides(scale, shape)
    assert buffers == _strides(shift, shape)
    factor, offset = (None, None) if moved is None else (part.contiguous() for part in moved)
    _residual_kernel[(x[..., 0].numel(),)](
        x.contiguous(),
        None if update is None else update.contiguous(),
        gate,
        factor,
        offset,
        scale,
        shift,
        total,
        normed,
        token_scales,
        shape[-2],
        *_strides(gate, shape),
        *buffers,
        eps,
        D=shape[-1],
        PLUS_ONE=plus_one,
        **_block(shape[-1]),
    )


def _rms(
    x: torch.Tensor,
    squares: torch.Tensor | None,
    weight: torch.Tensor,
    turn: tuple[torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor,
    dim: int,
    eps: float,
) -> None:
    shape = x.shape
    cos, sin = turn or (None, None)
    buffers = _strides(cos, shape)
    assert buffers == _strides(sin, shape)
    _rms_kernel[(x[..., 0].numel(),)](
        x, squares, weight, cos, sin, out,
        shape[-2], *_strides(x, shape), *_strides(squares, shape), *buffers, dim, eps,
        D=shape[-1], C=1 if cos is None else cos.shape[-1], **_block(shape[-1]),
    )  # fmt: skip


def _strides(tensor: torch.Tensor | None, shape: torch.Size) -> tuple[int, int]:
    """Return the batch and token strides of `tensor` after broadcasting it to `shape`, [(B,) T, D].
    The channels of `tensor` must be contiguous in memory.
    """
    if tensor is None:
        return 0, 0
    assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    *batch, token = tensor.expand(*shape[:-1], tensor.shape[-1]).stride()[:-1]
    return (batch[0] if batch else 0), token


def _block(width: int) -> dict[str, int]:
    return {"BLOCK": triton.next_power_of_2(width), "num_warps": WARPS}
