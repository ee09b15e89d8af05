# SPDX-License-Identifier: Apache-2.0
"""`stacked_frames.stack_frames` and `add_up` as one Triton pass over memory. Import it where Triton is (`HAS_TRITON`).

A program takes some pixels through all frames of a stream, so that a pixel's three frames are written at once.
Held by tests/model_executor/models/wan/test_stack_kernels.py, on a CPU with Triton's interpreter.
"""

# B streams, T frames, N = B T, H rows, W columns, P = H W, C channels; all tensors are contiguous

import torch

from vllm_omni.model_executor.layers.triton_or_names import tl, triton
from vllm_omni.model_executor.models.wan.stacked_frames import Activation, Stacked

_BLOCK = 4096
"""Elements of a program's block, padding channels included."""
_WARPS = 8


@triton.jit
def _stack_kernel(  # type: ignore[no-untyped-def]
    x_ptr, bias_ptr, residual_ptr, gamma_ptr, past_ptr, out_ptr, sum_ptr, newest_ptr,
    T, P, width, edge, scale,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, SLOTS: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, SUM: tl.constexpr, NORM: tl.constexpr, SHUFFLED: tl.constexpr,
):  # fmt: skip
    """SLOTS: 3 frames side by side, 1 = frames behind each other, 0 = the sum alone. edge: pixels above a frame."""
    pixel = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    stream = tl.program_id(1).to(tl.int64)
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
        gamma = tl.load(gamma_ptr + channel, mask=channel < C, other=0.0).to(tl.float32)[None, :] * scale
    out_frame = (P + 2 * edge) * C
    if SLOTS > 0:
        older = tl.load(past_ptr + stream * 2 * frame + at, mask=mask, other=0.0)
        old = tl.load(past_ptr + (stream * 2 + 1) * frame + at, mask=mask, other=0.0)
    if SLOTS == 1:
        first = out_ptr + stream * (T + 2) * out_frame + edge * C + at
        tl.store(first, older, mask=mask)
        tl.store(first + out_frame, old, mask=mask)
    for t in range(T):
        n = stream * T + t
        y = tl.load(x_ptr + n * source_frame + source, mask=mask, other=0.0).to(tl.float32)
        if BIAS:
            y += bias
        if RESIDUAL:
            y += tl.load(residual_ptr + n * frame + at, mask=mask, other=0.0).to(tl.float32)
        if SUM:
            rounded = y.to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + n * frame + at, rounded, mask=mask)
        if NORM:
            norm = tl.sqrt(tl.sum(y * y, axis=1))
            y = y * (1.0 / tl.maximum(norm, 1e-12))[:, None] * gamma
            y = y * tl.sigmoid(y)
        if SLOTS > 0:
            new = y.to(out_ptr.dtype.element_ty)
            if SLOTS == 3:
                wide = out_ptr + (n * out_frame + edge * C) * 3 + pixel[:, None] * (3 * C) + channel[None, :]
                tl.store(wide, older, mask=mask)
                tl.store(wide + C, old, mask=mask)
                tl.store(wide + 2 * C, new, mask=mask)
            else:
                tl.store(out_ptr + (n + 2 * stream + 2) * out_frame + edge * C + at, new, mask=mask)
            older = old
            old = new
    if SLOTS > 0:
        tl.store(newest_ptr + stream * 2 * frame + at, older, mask=mask)
        tl.store(newest_ptr + (stream * 2 + 1) * frame + at, old, mask=mask)


def stack_frames(
    activation: Activation,
    past: torch.Tensor,
    *,
    gamma: torch.Tensor | None = None,
    side_by_side: bool = True,
    edge_rows: int = 0,
    want_sum: bool = False,
) -> Stacked:
    """As `stacked_frames.stack_frames`."""
    streams, _, height, width, channels = past.shape
    frames = len(activation.x) // streams
    rows = height + 2 * edge_rows
    shape = (streams * frames, rows, width, 3 * channels)
    if not side_by_side:
        shape = (streams * (frames + 2), rows, width, channels)
    out = past.new_empty(shape)
    newest = torch.empty_like(past, memory_format=torch.contiguous_format)
    total = None
    if want_sum:
        total = _room_for_sum(activation, (streams * frames, height, width, channels))
    # A sum that was added up before is not written again.
    written = None if activation.is_sum else total
    _launch(activation, past, out, written, newest, gamma, edge_rows, 3 if side_by_side else 1)
    return Stacked(out, newest, total)


def add_up(activation: Activation) -> torch.Tensor:
    """As `stacked_frames.add_up`, written over `activation.x`, which is not shuffled."""
    assert not activation.shuffled
    if not activation.is_sum:
        _launch(activation, activation.x.unsqueeze(1), None, activation.x, None, None, 0, 0)
    return activation.x


def _room_for_sum(activation: Activation, shape: tuple[int, ...]) -> torch.Tensor:
    return activation.x.new_empty(shape) if activation.shuffled else activation.x


def _launch(
    activation: Activation,
    past: torch.Tensor,
    out: torch.Tensor | None,
    total: torch.Tensor | None,
    newest: torch.Tensor | None,
    gamma: torch.Tensor | None,
    edge_rows: int,
    slots: int,
) -> None:
    x, bias, residual = activation.x, activation.bias, activation.residual
    assert all(each is None or each.is_contiguous() for each in (x, bias, residual, past, gamma))
    streams, _, height, width, channels = past.shape
    pixels = height * width
    block_c = triton.next_power_of_2(channels)
    block_p = max(1, min(_BLOCK // block_c, triton.next_power_of_2(pixels)))
    _stack_kernel[(triton.cdiv(pixels, block_p), streams)](
        x, bias, residual, gamma, past, out, total, newest,
        len(x) // streams, pixels, width, edge_rows * width, channels**0.5,
        C=channels, BLOCK_C=block_c, BLOCK_P=block_p, SLOTS=slots, BIAS=bias is not None,
        RESIDUAL=residual is not None, SUM=total is not None, NORM=gamma is not None, SHUFFLED=activation.shuffled,
        num_warps=_WARPS,
    )  # fmt: skip
