# SPDX-License-Identifier: Apache-2.0
"""The passes between the convolutions of a fused Wan autoencoder, in plain torch: the reference of `stack_kernels.py`.

The pass before a causal convolution over three frames adds the bias and residual that the layer before has left,
normalises, applies SiLU, and lays frames out so that 2-D convolutions serve: combined for F(m, 3) (`winograd.py`), or,
of a stream's first frame, alone. Nearest upsampling followed by a 3x3 convolution is one of 2x2 before it: weights that
meet the same cell are summed, for each of a cell's four pixels, whose results lie in four groups of channels until the
next pass.

Held by tests/model_executor/models/wan/test_fused_decoder.py and test_fused_encoder.py there.
"""

# B streams, T frames, N = B T frames of all streams, H rows, W columns, R rows with edges, C channels, O channels of a
# result; activations are [N, H, W, C] in memory

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch.nn import functional

from vllm_omni.model_executor.models.wan.winograd import OF_FRAMES, product_dtype


class Layout(Enum):
    """How a convolution finds a frame's two predecessors in its input."""

    ALONE = "alone"
    """[B, R, W, C]: a stream's first frame, whose predecessors are zeros."""
    SIDE_BY_SIDE = "side by side"
    """[N, R, W, 3 C], oldest first."""
    IN_TURN = "in turn"
    """[B (T + 2), R, W, C]."""
    COMBINED = "combined"
    """[T + 2, B, R, W, C] of `product_dtype`, by F(T, 3): T is a key of `OF_FRAMES`."""


@dataclass(frozen=True, eq=False)
class Activation:
    """A tensor [N, H, W, C] as the sum that the next pass adds up: `x + bias + residual`.

    x: [N, H, W, C], or [N, H/2 + 1, W/2 + 1, 4 C] if `shuffled`, the result of a `subpixel` convolution, or, if
    `products`, [T + 2, B, H, W, C], the results of convolutions of combined frames. bias: [C]. residual: [N, H, W, C].
    Whoever adds up may write the sum over an `x` that is neither.
    """

    x: torch.Tensor
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    shuffled: bool = False
    products: bool = False

    def __post_init__(self) -> None:
        assert self.bias is not None or not self.products, "a sum takes its dtype from the bias"

    @property
    def is_sum(self) -> bool:
        """Whether nothing is left to add."""
        return self.bias is None and self.residual is None and not (self.shuffled or self.products)

    @property
    def dtype(self) -> torch.dtype:
        """Of the sum."""
        return self.x.dtype if self.bias is None else self.bias.dtype

    @property
    def frames(self) -> int:
        """N, the frames of all streams."""
        return (len(self.x) - 2) * self.x.shape[1] if self.products else len(self.x)


@dataclass(frozen=True, eq=False)
class Stacked:
    """A convolution's input and its stream's memory of it.

    frames: see `Layout`; edge rows are left as they come. newest: the last two frames [B, 2, H, W, C]. total: the sum
    [N, H, W, C], None if nobody wanted it.
    """

    frames: torch.Tensor
    newest: torch.Tensor
    total: torch.Tensor | None


class StackFrames(Protocol):
    """SiLU(RMS norm over channels) of a sum, behind the frames before it; without `gamma` the sum alone.

    activation: any float dtype, fp32 inside, rounded once. past: the two frames before, [B, 2, H, W, C], not read for
    `Layout.ALONE`. gamma: [C]. edge_rows: above and below every frame. want_sum: see `Stacked`.
    """

    def __call__(
        self,
        activation: Activation,
        past: torch.Tensor,
        *,
        layout: Layout,
        gamma: torch.Tensor | None = None,
        edge_rows: int = 0,
        want_sum: bool = False,
    ) -> Stacked: ...


def add_up(activation: Activation) -> torch.Tensor:
    """The sum [N, H, W, C], added in fp32."""
    return _sum_fp32(activation).to(activation.dtype)


def _sum_fp32(activation: Activation) -> torch.Tensor:
    total = activation.x.float()
    if activation.shuffled:
        total = _spread(total)
    if activation.products:
        results = total.new_tensor(OF_FRAMES[len(total) - 2].results)
        total = torch.einsum("tj,jb...->bt...", results, total).flatten(0, 1)
    for term in (activation.bias, activation.residual):
        if term is not None:
            total = total + term.float()
    return total


def stack_frames(
    activation: Activation,
    past: torch.Tensor,
    *,
    layout: Layout,
    gamma: torch.Tensor | None = None,
    edge_rows: int = 0,
    want_sum: bool = False,
) -> Stacked:
    """`StackFrames` in plain torch."""
    total = y = _sum_fp32(activation)
    if gamma is not None:
        y = functional.silu(functional.normalize(total, dim=-1) * gamma.float() * total.shape[-1] ** 0.5)
    joined = torch.cat((past, y.to(past.dtype).unflatten(0, (len(past), -1))), dim=1)
    if layout is Layout.COMBINED:
        exact = torch.cat((past.float(), y.unflatten(0, (len(past), -1))), dim=1)
        inputs = exact.new_tensor(OF_FRAMES[joined.shape[1] - 2].inputs)
        stacked = torch.einsum("jt,bt...->jb...", inputs, exact).to(product_dtype(past.dtype))
    elif layout is Layout.ALONE:
        joined[:, :2] = 0
        stacked = joined[:, 2]
    elif layout is Layout.SIDE_BY_SIDE:
        taps = [joined[:, tap : joined.shape[1] - 2 + tap] for tap in range(3)]
        stacked = torch.cat(taps, dim=-1).flatten(0, 1)
    else:
        stacked = joined.flatten(0, 1)
    stacked = functional.pad(stacked, (0, 0, 0, 0, edge_rows, edge_rows))
    return Stacked(stacked.contiguous(), joined[:, -2:].clone(), total.to(past.dtype) if want_sum else None)


def _spread(cells_NhwX: torch.Tensor) -> torch.Tensor:
    """[N, H/2 + 1, W/2 + 1, 4 C] -> [N, H, W, C]: each pixel from the cell and the phase that hold it."""
    phases = cells_NhwX.unflatten(-1, (2, 2, -1))
    rows = [
        torch.stack([phases[:, row : phases.shape[1] - 1 + row, column : phases.shape[2] - 1 + column, row, column]
                     for column in range(2)], dim=3)
        for row in range(2)
    ]  # fmt: skip
    return torch.stack(rows, dim=2).flatten(3, 4).flatten(1, 2)


def subpixel(weight_OCHW: torch.Tensor) -> torch.Tensor:
    """[O, C, 3, 3] behind nearest upsampling -> [4 O, C, 2, 2] before it, channels-last; phases row by row."""
    a, b, c = weight_OCHW.float().unbind(2)
    rows = torch.stack((torch.stack((a, b + c), 2), torch.stack((a + b, c), 2)))  # [phase, O, C, 2, 3]
    a, b, c = rows.unbind(-1)
    both = torch.stack((torch.stack((a, b + c), -1), torch.stack((a + b, c), -1)), 1)  # [phase, phase, O, C, 2, 2]
    return both.flatten(0, 2).to(weight_OCHW.dtype).contiguous(memory_format=torch.channels_last)


def taps_as_channels(weight_OCTHW: torch.Tensor, multiple: int = 16) -> torch.Tensor:
    """[O, C, 3, 3, 3] -> [3 O and zeros up to a multiple, C, 3, 3], channels-last: the taps' results side by side.

    For few channels O: `sum_of_taps` adds them, and the input need not lie side by side.
    """
    weight = weight_OCTHW.transpose(1, 2).transpose(0, 1).flatten(0, 1)
    missing = -len(weight) % multiple
    padded = functional.pad(weight, (0, 0, 0, 0, 0, 0, 0, missing))
    return padded.contiguous(memory_format=torch.channels_last)


def sum_of_taps(of_taps_BTHWX: torch.Tensor, bias_O: torch.Tensor) -> torch.Tensor:
    """[B, T + 2, H, W, at least 3 O], of a `taps_as_channels` convolution -> [B, T, H, W, O], added in fp32."""
    channels, frames = len(bias_O), of_taps_BTHWX.shape[1] - 2
    total = bias_O.float()
    for tap in range(3):
        total = total + of_taps_BTHWX[:, tap : tap + frames, ..., tap * channels : (tap + 1) * channels]
    return total.to(of_taps_BTHWX.dtype)
