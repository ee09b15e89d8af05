# SPDX-License-Identifier: Apache-2.0
"""Alternative kernels for the fused Wan decoder. `vae_kernels.py` compares these kernels; the
server does not use them.

There are two alternatives. One is the pass before a convolution, with one Triton program per frame.
(In the served kernel, each program processes some pixels of all frames.) The other is the
convolution as implicit GEMMs in Triton.
"""

# T frames, H rows, W columns, P = H W pixels, C input channels, OUT output channels; activations
# are [T, H, W, C] in memory

import torch
import triton
import triton.language as tl
from torch.nn import functional


@triton.jit
def _stack_kernel(
    x_ptr,
    bias_ptr,
    residual_ptr,
    gamma_ptr,
    past_ptr,
    out_ptr,
    sum_ptr,
    keep_ptr,
    T,
    P,
    width,
    scale,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SLOTS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SUM: tl.constexpr,
    NORM: tl.constexpr,
    SHUFFLED: tl.constexpr,
):
    pixel = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    frame = tl.program_id(1).to(tl.int64)  # index into the past frames followed by the new frames
    channel = tl.arange(0, BLOCK_C)
    mask = (pixel < P)[:, None] & (channel < C)[None, :]
    at = pixel[:, None] * C + channel[None, :]
    if frame < 2:
        y = tl.load(past_ptr + frame * P * C + at, mask=mask, other=0.0).to(tl.float32)
    else:
        t = frame - 2
        if SHUFFLED:
            row, column = pixel // width, pixel % width
            height = P // width
            cell = (
                (t * (height // 2 + 1) + row // 2 + row % 2) * (width // 2 + 1)
                + column // 2
                + column % 2
            )
            source = (cell * 4 + (row % 2) * 2 + column % 2)[:, None] * C + channel[None, :]
            y = tl.load(x_ptr + source, mask=mask, other=0.0).to(tl.float32)
        else:
            y = tl.load(x_ptr + t * P * C + at, mask=mask, other=0.0).to(tl.float32)
        if BIAS:
            y += tl.load(bias_ptr + channel, mask=channel < C, other=0.0).to(tl.float32)[None, :]
        if RESIDUAL:
            y += tl.load(residual_ptr + t * P * C + at, mask=mask, other=0.0).to(tl.float32)
        if SUM:
            tl.store(sum_ptr + t * P * C + at, y.to(sum_ptr.dtype.element_ty), mask=mask)
        if NORM:
            norm = tl.sqrt(tl.sum(y * y, axis=1))
            gamma = tl.load(gamma_ptr + channel, mask=channel < C, other=0.0).to(tl.float32)
            y = y * (scale / tl.maximum(norm, 1e-12))[:, None] * gamma[None, :]
            y = y * tl.sigmoid(y)
    y = y.to(out_ptr.dtype.element_ty)
    if SLOTS == 3:
        wide = pixel[:, None] * (3 * C) + channel[None, :]
        for tap in tl.static_range(3):
            if (frame >= tap) & (frame - tap < T):
                tl.store(out_ptr + (frame - tap) * P * (3 * C) + tap * C + wide, y, mask=mask)
    else:
        tl.store(out_ptr + frame * P * C + at, y, mask=mask)
    if frame >= T:
        tl.store(keep_ptr + (frame - T) * P * C + at, y, mask=mask)


def stack(
    x,
    past,
    *,
    bias=None,
    residual=None,
    gamma=None,
    want_sum=False,
    shuffled=False,
    slots=3,
    block=4096,
    warps=8,
):
    """Compute SiLU(RMS norm(x + bias + residual)), append the result to `past`, and place every
    frame next to its two predecessors.

    `x` is [T, H, W, C] or, if shuffled, [T, H/2+1, W/2+1, 4C]. `past` is [2, H, W, C]. Return the
    result [T, H, W, 3C] (with slots=3) or [T+2, H, W, C] (with slots=1), the last two frames [2, H,
    W, C], and the sum [T, H, W, C] or None.
    """
    _, height, width, channels = past.shape
    frames = x.shape[0]
    assert (
        x.is_contiguous()
        and past.is_contiguous()
        and (residual is None or residual.is_contiguous())
    )
    out_shape = (
        (frames, height, width, 3 * channels)
        if slots == 3
        else (frames + 2, height, width, channels)
    )
    out = x.new_empty(out_shape)
    keep = torch.empty_like(past)
    total = x.new_empty(frames, height, width, channels) if want_sum else None
    pixels = height * width
    block_c = triton.next_power_of_2(channels)
    block_p = max(1, min(block // block_c, triton.next_power_of_2(pixels)))
    _stack_kernel[(triton.cdiv(pixels, block_p), frames + 2)](
        x,
        bias,
        residual,
        gamma,
        past,
        out,
        total,
        keep,
        frames,
        pixels,
        width,
        channels**0.5,
        C=channels,
        BLOCK_C=block_c,
        BLOCK_P=block_p,
        SLOTS=slots,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        SUM=want_sum,
        NORM=gamma is not None,
        SHUFFLED=shuffled,
        num_warps=warps,
    )
    return out, keep, total


@triton.jit
def _conv_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    T,
    H,
    W,
    OUT,
    C: tl.constexpr,
    BH: tl.constexpr,
    BW: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """Compute a convolution as an implicit GEMM: x [T+2, H, W, C], w [27 C, O] -> out [T, H, W, O].
    Each program computes a tile of BH x BW pixels in one frame.
    """
    across = tl.cdiv(W, BW)
    down = tl.cdiv(H, BH)
    pid = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    t = pid // (across * down)
    tile = pid % (across * down)
    local = tl.arange(0, BH * BW)
    row = (tile // across) * BH + local // BW
    column = (tile % across) * BW + local % BW
    k = tl.arange(0, BK)
    acc = tl.zeros((BH * BW, BN), dtype=tl.float32)
    for step in range(27 * (C // BK)):
        tap = step // (C // BK)
        c = (step % (C // BK)) * BK
        r = row + (tap // 3) % 3 - 1
        q = column + tap % 3 - 1
        seen = (r >= 0) & (r < H) & (q >= 0) & (q < W)
        base = (((t + tap // 9) * H + r).to(tl.int64) * W + q) * C + c
        a = tl.load(x_ptr + base[:, None] + k[None, :], mask=seen[:, None], other=0.0)
        b = tl.load(
            w_ptr + (tap * C + c + k)[:, None] * OUT + n[None, :],
            mask=(n < OUT)[None, :],
            other=0.0,
        )
        acc = tl.dot(a, b, acc)
    acc += tl.load(bias_ptr + n, mask=n < OUT, other=0.0).to(tl.float32)[None, :]
    inside = ((row < H) & (column < W))[:, None] & (n < OUT)[None, :]
    at = ((t * H + row).to(tl.int64) * W + column)[:, None] * OUT + n[None, :]
    if RESIDUAL:
        acc += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


def conv_pointers(x, w_KO, bias, config, residual=None):
    bh, bw, bn, bk, warps, stages = config
    frames, height, width, channels = x.shape
    out = x.new_empty(frames - 2, height, width, w_KO.shape[1])
    grid = (
        (frames - 2) * triton.cdiv(height, bh) * triton.cdiv(width, bw),
        triton.cdiv(w_KO.shape[1], bn),
    )
    _conv_kernel[grid](
        x,
        w_KO,
        bias,
        residual,
        out,
        frames - 2,
        height,
        width,
        w_KO.shape[1],
        C=channels,
        BH=bh,
        BW=bw,
        BN=bn,
        BK=bk,
        RESIDUAL=residual is not None,
        num_warps=warps,
        num_stages=stages,
    )
    return out


@triton.jit
def _conv_tma_kernel(
    x_desc, w_desc, bias_ptr, out_ptr, T, H, W, OUT,
    C: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute the same convolution as `_conv_kernel`, using the copy engine (TMA). The copy engine
    loads each shifted box of pixels and fills pixels outside the frame with zeros.
    """
    across = tl.cdiv(W, BW)
    down = tl.cdiv(H, BH)
    pid = tl.program_id(0)
    n0 = tl.program_id(1) * BN
    t = pid // (across * down)
    tile = pid % (across * down)
    row0 = (tile // across) * BH
    column0 = (tile % across) * BW
    acc = tl.zeros((BH * BW, BN), dtype=tl.float32)
    for step in range(27 * (C // BK)):
        tap = step // (C // BK)
        c = (step % (C // BK)) * BK
        a = x_desc.load([t + tap // 9, row0 + (tap // 3) % 3 - 1, column0 + tap % 3 - 1, c])
        b = w_desc.load([tap * C + c, n0])
        acc = tl.dot(a.reshape(BH * BW, BK), b, acc)
    n = n0 + tl.arange(0, BN)
    local = tl.arange(0, BH * BW)
    row, column = row0 + local // BW, column0 + local % BW
    acc += tl.load(bias_ptr + n, mask=n < OUT, other=0.0).to(tl.float32)[None, :]
    inside = ((row < H) & (column < W))[:, None] & (n < OUT)[None, :]
    at = ((t * H + row).to(tl.int64) * W + column)[:, None] * OUT + n[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


def conv_tma(x, w_KO, bias, config):
    from triton.tools.tensor_descriptor import TensorDescriptor

    bh, bw, bn, bk, warps, stages = config
    frames, height, width, channels = x.shape
    out = x.new_empty(frames - 2, height, width, w_KO.shape[1])
    grid = (
        (frames - 2) * triton.cdiv(height, bh) * triton.cdiv(width, bw),
        triton.cdiv(w_KO.shape[1], bn),
    )
    _conv_tma_kernel[grid](
        TensorDescriptor.from_tensor(x, [1, bh, bw, bk]),
        TensorDescriptor.from_tensor(w_KO, [bk, bn]),
        bias,
        out,
        frames - 2,
        height,
        width,
        w_KO.shape[1],
        C=channels,
        BH=bh,
        BW=bw,
        BN=bn,
        BK=bk,
        num_warps=warps,
        num_stages=stages,
    )
    return out


# Plain arithmetic
# --------------------------------------------------------------------------------------------------


def rms_silu(x, gamma):
    """Compute SiLU(RMS norm(x)) for `x` of shape [1, C, T, H, W]."""
    return functional.silu(
        functional.normalize(x.float(), dim=1).to(x.dtype)
        * x.shape[1] ** 0.5
        * gamma.view(1, -1, 1, 1, 1)
    )


def causal(x, past, w, b):
    x = torch.cat((past, x), dim=2)
    side = w.shape[-1] // 2
    return functional.conv3d(functional.pad(x, (side, side, side, side, 0, 0)), w, b), x[
        :, :, -2:
    ].clone()


def nchw(x):
    return x.permute(0, 3, 1, 2)


def nhwc(x):
    return x.permute(0, 2, 3, 1)
