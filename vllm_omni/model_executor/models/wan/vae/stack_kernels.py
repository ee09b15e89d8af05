# SPDX-License-Identifier: Apache-2.0
"""Implements `stack_frames` and `add_up` of `stacked_frames.py` with one Triton kernel. Import this
module only if Triton is available (`HAS_TRITON`).

Each Triton program processes a few pixels in all frames of a stream. For each pixel, it can thus
write all three frames that a convolution reads.
"""

# B streams, T frames, N = B T, H rows, W columns, P = H W, C channels; all tensors are contiguous

import torch

from vllm_omni.model_executor.layers.triton_or_names import tl, triton
from vllm_omni.model_executor.models.wan.vae.stacked_frames import (
    DuplicatedPixels,
    FrameLayout,
    PendingSum,
    StackedFrames,
)
from vllm_omni.model_executor.models.wan.vae.winograd import OF_FRAMES, Matrix, product_dtype

_BLOCK = 4096
"""Number of elements in a program's block, including padding channels."""
_COMBINED_BLOCK = 2048
"""Number of elements in a program's block, including padding channels, if the program holds all
frames at once.
"""
_WARPS = 8


@triton.jit
def _combined(values, MATRIX: tl.constexpr, ROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sum of the blocks in `values`, weighted by row `ROW` of `MATRIX`. There is one
    block for each column of the matrix.
    """
    total = values[0] * MATRIX[ROW][0]
    for column in tl.static_range(1, len(MATRIX[ROW])):
        if MATRIX[ROW][column] != 0:
            total += values[column] * MATRIX[ROW][column]
    return total


@triton.jit
def _duplicate(  # type: ignore[no-untyped-def]
    below_ptr,
    n,
    t: tl.constexpr,
    pixel,
    channel,
    P,
    width,
    C: tl.constexpr,
    mask,
    DUPLICATES: tl.constexpr,
):
    """Return a block of `DuplicatedPixels`. `t` is the frame's index in its stream, and `n` is its
    index in the batch.
    """
    FACTOR: tl.constexpr = DUPLICATES[0]
    GROWN: tl.constexpr = DUPLICATES[1]
    REPEATS: tl.constexpr = DUPLICATES[2]
    row, column = pixel // width, pixel % width
    copy = t % GROWN + FACTOR - GROWN
    copies = (channel[None, :] * FACTOR + copy) * 4 + ((row % 2) * 2 + column % 2)[:, None]
    below = (n // GROWN) * (P // 4) + (row // 2) * (width // 2) + column // 2
    at = below[:, None] * (C * FACTOR * 4 // REPEATS) + copies // REPEATS
    return tl.load(below_ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _stack_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    bias_ptr,
    residual_ptr,
    gamma_ptr,
    past_ptr,
    out_ptr,
    sum_ptr,
    newest_ptr,
    P,
    width,
    edge,
    scale,
    T: tl.constexpr,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    LAYOUT: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SUM: tl.constexpr,
    NORM: tl.constexpr,
    SHUFFLED: tl.constexpr,
    RESULTS: tl.constexpr,
    INPUTS: tl.constexpr,
    DUPLICATES: tl.constexpr,
):
    """Add up, normalise and lay out frames.

    LAYOUT is the value of a `FrameLayout`, or None to write only the sum. `edge` is the number of
    edge pixels above a frame. RESULTS contains the weights that convert products to frames, with
    one row per frame and one column per product. RESULTS is None if `x_ptr` points to frames.
    INPUTS contains the weights that combine frames for `FrameLayout.COMBINED`, with one row per
    combination and one column per frame, including the two past frames. INPUTS is None for other
    layouts. DUPLICATES contains `factor`, `grown` and `repeats` of `DuplicatedPixels`. DUPLICATES
    is None if `residual_ptr` points to whole frames.
    """
    pixel = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    stream = tl.program_id(1).to(tl.int64)
    streams = tl.num_programs(1)
    channel = tl.arange(0, BLOCK_C)
    mask = (pixel < P)[:, None] & (channel < C)[None, :]
    at = pixel[:, None] * C + channel[None, :]
    frame = P * C
    source, source_frame = at, frame
    if SHUFFLED:
        row, column = pixel // width, pixel % width
        across = width // 2 + 1
        cell = (row // 2 + row % 2) * across + column // 2 + column % 2
        source = (cell * 4 + (row % 2) * 2 + column % 2)[:, None] * C + channel[None, :]
        source_frame = ((P // width) // 2 + 1) * across * 4 * C
    if BIAS:
        bias = tl.load(bias_ptr + channel, mask=channel < C, other=0.0).to(tl.float32)[None, :]
    if NORM:
        gamma = (
            tl.load(gamma_ptr + channel, mask=channel < C, other=0.0).to(tl.float32)[None, :]
            * scale
        )
    out_frame = (P + 2 * edge) * C
    if LAYOUT == "alone":
        older = tl.zeros((BLOCK_P, BLOCK_C), out_ptr.dtype.element_ty)
        old = older
    elif LAYOUT is not None:
        older = tl.load(past_ptr + stream * 2 * frame + at, mask=mask, other=0.0)
        old = tl.load(past_ptr + (stream * 2 + 1) * frame + at, mask=mask, other=0.0)
    if LAYOUT == "in turn":
        first = out_ptr + stream * (T + 2) * out_frame + edge * C + at
        tl.store(first, older, mask=mask)
        tl.store(first + out_frame, old, mask=mask)
    if RESULTS is not None:
        products = ()
        for j in tl.static_range(T + 2):
            product = tl.load(x_ptr + (j * streams + stream) * frame + at, mask=mask, other=0.0)
            products = products + (product.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    if INPUTS is not None:
        frames = (older.to(tl.float32), old.to(tl.float32))
    for t in tl.static_range(T):
        n = stream * T + t
        if RESULTS is not None:
            y = _combined(products, RESULTS, t)
        else:
            y = tl.load(x_ptr + n * source_frame + source, mask=mask, other=0.0).to(tl.float32)
        if BIAS:
            y += bias
        if DUPLICATES is not None:
            y += _duplicate(residual_ptr, n, t, pixel, channel, P, width, C, mask, DUPLICATES)
        elif RESIDUAL:
            y += tl.load(residual_ptr + n * frame + at, mask=mask, other=0.0).to(tl.float32)
        if SUM:
            quantized = y.to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + n * frame + at, quantized, mask=mask)
        if NORM:
            norm = tl.sqrt(tl.sum(y * y, axis=1))
            y = y * (1.0 / tl.maximum(norm, 1e-12))[:, None] * gamma
            y = y * tl.sigmoid(y)
        if INPUTS is not None:
            frames = frames + (y,)  # type: ignore[assignment]  # noqa: RUF005
        if LAYOUT is not None:
            new = y.to(older.dtype)
            if LAYOUT == "side by side":
                wide = out_ptr + (n * out_frame + edge * C) * 3
                wide = wide + pixel[:, None] * (3 * C) + channel[None, :]
                tl.store(wide, older, mask=mask)
                tl.store(wide + C, old, mask=mask)
                tl.store(wide + 2 * C, new, mask=mask)
            elif LAYOUT == "alone":
                tl.store(out_ptr + n * out_frame + edge * C + at, new, mask=mask)
            elif LAYOUT == "in turn":
                tl.store(out_ptr + (n + 2 * stream + 2) * out_frame + edge * C + at, new, mask=mask)
            older = old
            old = new
    if INPUTS is not None:
        for j in tl.static_range(T + 2):
            combined = _combined(frames, INPUTS, j).to(out_ptr.dtype.element_ty)
            tl.store(
                out_ptr + (j * streams + stream) * out_frame + edge * C + at, combined, mask=mask
            )
    if newest_ptr is not None:
        tl.store(newest_ptr + stream * 2 * frame + at, older, mask=mask)
        tl.store(newest_ptr + (stream * 2 + 1) * frame + at, old, mask=mask)


def stack_frames(
    activation: PendingSum,
    past: torch.Tensor,
    *,
    layout: FrameLayout,
    gamma: torch.Tensor | None = None,
    edge_rows: int = 0,
    want_sum: bool = False,
    want_newest: bool = True,
) -> StackedFrames:
    """Implement `stacked_frames.stack_frames` with the Triton kernel."""
    streams, _, height, width, channels = past.shape
    frames = activation.frames // streams
    rows = height + 2 * edge_rows
    if layout is FrameLayout.COMBINED:
        out = past.new_empty(
            (frames + 2, streams, rows, width, channels), dtype=product_dtype(past.dtype)
        )
    elif layout is FrameLayout.ALONE:
        assert frames == 1, "a stream has one first frame"
        out = past.new_empty((streams, rows, width, channels))
    elif layout is FrameLayout.SIDE_BY_SIDE:
        out = past.new_empty((streams * frames, rows, width, 3 * channels))
    else:
        out = past.new_empty((streams * (frames + 2), rows, width, channels))
    newest = past.new_empty(past.shape) if want_newest else None
    total = None
    if want_sum:
        total = _room_for_sum(activation, past)
    # If `activation.x` is already the sum, it is not written again.
    written = None if activation.is_sum else total
    _launch(activation, past, out, written, newest, gamma, edge_rows, layout)
    return StackedFrames(out, newest, total)


def add_up(activation: PendingSum) -> torch.Tensor:
    """Implement `stacked_frames.add_up` with the Triton kernel. The sum overwrites `activation.x`
    unless `x` contains products. `activation` must not be shuffled.
    """
    assert not activation.shuffled
    if activation.is_sum:
        return activation.x
    of_streams = activation.x[0].unsqueeze(1) if activation.products else activation.x.unsqueeze(1)
    total = _room_for_sum(activation, of_streams)
    _launch(activation, of_streams, None, total, None, None, 0, None)
    return total


def _room_for_sum(activation: PendingSum, past: torch.Tensor) -> torch.Tensor:
    """Return memory for the sum. A newly allocated tensor has the height, width and number of
    channels of `past`.
    """
    if not (activation.shuffled or activation.products):
        return activation.x
    return activation.x.new_empty((activation.frames, *past.shape[2:]), dtype=activation.dtype)


def _launch(
    activation: PendingSum,
    past: torch.Tensor,
    out: torch.Tensor | None,
    total: torch.Tensor | None,
    newest: torch.Tensor | None,
    gamma: torch.Tensor | None,
    edge_rows: int,
    layout: FrameLayout | None,
) -> None:
    x, bias, residual = activation.x, activation.bias, activation.residual
    duplicates: tuple[int, int, int] | None = None
    if isinstance(residual, DuplicatedPixels):
        duplicates = (residual.factor, residual.grown, residual.repeats)
        residual = residual.x
    streams, _, height, width, channels = past.shape
    read = None if layout in (None, FrameLayout.ALONE) else past
    assert all(each is None or each.is_contiguous() for each in (x, bias, residual, read, gamma))
    frames, pixels = activation.frames // streams, height * width
    results: Matrix | None = OF_FRAMES[frames].results if activation.products else None
    inputs: Matrix | None = OF_FRAMES[frames].inputs if layout is FrameLayout.COMBINED else None
    block_c = triton.next_power_of_2(channels)
    block = _BLOCK if results is None and inputs is None else _COMBINED_BLOCK
    block_p = max(1, min(block // block_c, triton.next_power_of_2(pixels)))
    _stack_kernel[(triton.cdiv(pixels, block_p), streams)](
        x,
        bias,
        residual,
        gamma,
        read,
        out,
        total,
        newest,
        pixels,
        width,
        edge_rows * width,
        channels**0.5,
        T=frames,
        C=channels,
        BLOCK_C=block_c,
        BLOCK_P=block_p,
        LAYOUT=None if layout is None else layout.value,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        SUM=total is not None,
        NORM=gamma is not None,
        SHUFFLED=activation.shuffled,
        RESULTS=results,
        INPUTS=inputs,
        DUPLICATES=duplicates,
        num_warps=_WARPS,
    )
