# SPDX-License-Identifier: Apache-2.0
"""The operations between the convolutions of a fused Wan autoencoder, in plain torch. They are the
reference for `stack_kernels.py`.

One pass runs before each causal convolution over three frames. It adds the bias and residual of the
previous layer, normalises, applies SiLU, and arranges the frames for 2-D convolutions
(`FrameLayout`). For example, frames are combined for F(m, 3) (`winograd.py`). Nearest upsampling
followed by a 3x3 convolution is replaced by a 2x2 convolution before the upsampling. For each of
the four pixels that a cell is upsampled to, the weights that would be applied to copies of the same
cell are summed. Until the next pass, the results for the four pixels are stored as four groups of
channels.
"""

# B streams, T frames, N = B T frames of all streams, H rows, W columns, R rows with edges, C
# channels, O channels of a result; activations are [N, H, W, C] in memory

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch.nn import functional

from vllm_omni.model_executor.models.wan.vae.winograd import OF_FRAMES, product_dtype


class FrameLayout(Enum):
    """Layouts of a convolution's input, which contains each frame and its two predecessors."""

    ALONE = "alone"
    """Only the first frame of each stream, [B, R, W, C]. Its predecessors are zeros."""
    SIDE_BY_SIDE = "side by side"
    """Three frames concatenated along the channels, [N, R, W, 3 C], oldest first."""
    IN_TURN = "in turn"
    """For each stream, its two past frames followed by all its new frames, [B (T + 2), R, W, C]."""
    COMBINED = "combined"
    """Frames combined by F(T, 3), [T + 2, B, R, W, C], in `product_dtype`. T must be a key of
    `OF_FRAMES`."""


@dataclass(frozen=True, eq=False)
class DuplicatedPixels:
    """The shortcut around an upsampling level of Wan 2.2. It consists of copies of the level's
    input. The next pass creates these copies.

    Each channel of `x` is repeated. The channels are then interpreted as [C, factor, 2, 2]: the
    result channel, and the frame, row and column within the cell of `x`.
    """

    x: torch.Tensor
    """Input of the level, [N', H/2, W/2, C']."""
    factor: int
    """Number of frames created from each frame of `x`, 1 or 2."""
    repeats: int
    """Number of copies of each channel, `4 * factor * C / C'`."""
    last: bool
    """Whether only the last frame created from each frame of `x` is used. True for the first latent
    frame of a stream.
    """

    @property
    def grown(self) -> int:
        """Return the number of frames in the result for each frame of `x`."""
        return 1 if self.last else self.factor

    def spread(self) -> torch.Tensor:
        """Return the copies as a tensor [N, H, W, C]."""
        _, height, width, _ = self.x.shape
        x = self.x.repeat_interleave(self.repeats, dim=-1).unflatten(-1, (-1, self.factor, 2, 2))
        x = x[:, :, :, :, self.factor - self.grown :]  # [N', H/2, W/2, C, frames, 2, 2]
        return x.permute(0, 4, 1, 5, 2, 6, 3).reshape(-1, 2 * height, 2 * width, x.shape[3])


@dataclass(frozen=True, eq=False)
class PendingSum:
    """A tensor [N, H, W, C] that the next pass computes as the sum `x + bias + residual`.

    The pass may overwrite `x` with the sum, unless `x` is shuffled or contains products.
    """

    x: torch.Tensor
    """First term. Shape: [N, H/2 + 1, W/2 + 1, 4 C] if `shuffled`, [T + 2, B, H, W, C] if
    `products`, and [N, H, W, C] otherwise.
    """
    bias: torch.Tensor | None = None
    """Bias of the previous layer, [C]."""
    residual: torch.Tensor | DuplicatedPixels | None = None
    """Residual, [N, H, W, C]."""
    shuffled: bool = False
    """Whether `x` is the result of a `subpixel` convolution."""
    products: bool = False
    """Whether `x` contains the results of convolutions of combined frames."""

    def __post_init__(self) -> None:
        assert self.bias is not None or not self.products, "a sum takes its dtype from the bias"

    @property
    def is_sum(self) -> bool:
        """Return whether `x` is already the sum."""
        return self.bias is None and self.residual is None and not (self.shuffled or self.products)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the sum."""
        return self.x.dtype if self.bias is None else self.bias.dtype

    @property
    def size(self) -> tuple[int, int]:
        """Return H and W, the number of rows and columns of the sum."""
        if self.shuffled:
            return 2 * (self.x.shape[1] - 1), 2 * (self.x.shape[2] - 1)
        height, width = self.x.shape[-3:-1]
        return height, width

    @property
    def frames(self) -> int:
        """Return N, the number of frames of all streams."""
        return (len(self.x) - 2) * self.x.shape[1] if self.products else len(self.x)


@dataclass(frozen=True, eq=False)
class StackedFrames:
    """The input of a convolution, and the frames that the feature cache retains."""

    frames: torch.Tensor
    """Input of the convolution in a `FrameLayout`. Edge rows are uninitialised."""
    newest: torch.Tensor | None
    """The last two frames, [B, 2, H, W, C], or None if they were not requested."""
    total: torch.Tensor | None
    """The sum [N, H, W, C], or None if it was not requested."""


class StackFrames(Protocol):
    """Computes SiLU(RMS norm over channels) of a sum, and appends the result to the previous
    frames. Without `gamma`, the sum itself is appended.

    Args:
        activation: The pending sum, in any float dtype. It is computed in fp32 and rounded once.
        past: The two previous frames, [B, 2, H, W, C]. They are not read for `FrameLayout.ALONE`.
        layout: Layout of the result.
        gamma: Gain of the norm, [C], or None to skip both the norm and SiLU.
        edge_rows: Number of rows to reserve above and below every frame.
        want_sum: Whether to return the sum as well.
        want_newest: Whether to return the last two frames as well.
    """

    def __call__(
        self,
        activation: PendingSum,
        past: torch.Tensor,
        *,
        layout: FrameLayout,
        gamma: torch.Tensor | None = None,
        edge_rows: int = 0,
        want_sum: bool = False,
        want_newest: bool = True,
    ) -> StackedFrames: ...


def add_up(activation: PendingSum) -> torch.Tensor:
    """Return the sum [N, H, W, C]. Its terms are added in fp32."""
    return _sum_fp32(activation).to(activation.dtype)


def _sum_fp32(activation: PendingSum) -> torch.Tensor:
    total = activation.x.float()
    if activation.shuffled:
        total = _spread(total)
    if activation.products:
        results = total.new_tensor(OF_FRAMES[len(total) - 2].results)
        total = torch.einsum("tj,jb...->bt...", results, total).flatten(0, 1)
    residual = activation.residual
    if isinstance(residual, DuplicatedPixels):
        residual = residual.spread()
    for term in (activation.bias, residual):
        if term is not None:
            total = total + term.float()
    return total


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
    """Implement `StackFrames` in plain torch."""
    total = y = _sum_fp32(activation)
    if gamma is not None:
        y = functional.silu(
            functional.normalize(total, dim=-1) * gamma.float() * total.shape[-1] ** 0.5
        )
    joined = torch.cat((past, y.to(past.dtype).unflatten(0, (len(past), -1))), dim=1)
    if layout is FrameLayout.COMBINED:
        exact = torch.cat((past.float(), y.unflatten(0, (len(past), -1))), dim=1)
        inputs = exact.new_tensor(OF_FRAMES[joined.shape[1] - 2].inputs)
        stacked = torch.einsum("jt,bt...->jb...", inputs, exact).to(product_dtype(past.dtype))
    elif layout is FrameLayout.ALONE:
        joined[:, :2] = 0
        stacked = joined[:, 2]
    elif layout is FrameLayout.SIDE_BY_SIDE:
        taps = [joined[:, tap : joined.shape[1] - 2 + tap] for tap in range(3)]
        stacked = torch.cat(taps, dim=-1).flatten(0, 1)
    else:
        stacked = joined.flatten(0, 1)
    stacked = functional.pad(stacked, (0, 0, 0, 0, edge_rows, edge_rows))
    return StackedFrames(
        stacked.contiguous(),
        joined[:, -2:].clone() if want_newest else None,
        total.to(past.dtype) if want_sum else None,
    )


def _spread(cells_NhwX: torch.Tensor) -> torch.Tensor:
    """Rearrange the result of a `subpixel` convolution, [N, H/2 + 1, W/2 + 1, 4 C], into pixels
    [N, H, W, C].
    """
    phases = cells_NhwX.unflatten(-1, (2, 2, -1))
    rows = [
        torch.stack(
            [
                phases[
                    :,
                    row : phases.shape[1] - 1 + row,
                    column : phases.shape[2] - 1 + column,
                    row,
                    column,
                ]
                for column in range(2)
            ],
            dim=3,
        )
        for row in range(2)
    ]
    return torch.stack(rows, dim=2).flatten(3, 4).flatten(1, 2)


def subpixel(weight_OCHW: torch.Tensor) -> torch.Tensor:
    """Convert the weight [O, C, 3, 3] of a convolution after nearest upsampling to the weight [4 O,
    C, 2, 2] of an equivalent convolution before it.

    The result is channels-last. The four groups of output channels correspond to the pixels of a
    cell, row by row.
    """
    a, b, c = weight_OCHW.float().unbind(2)
    # [phase, O, C, 2, 3]
    rows = torch.stack((torch.stack((a, b + c), 2), torch.stack((a + b, c), 2)))
    a, b, c = rows.unbind(-1)
    # [phase, phase, O, C, 2, 2]
    both = torch.stack((torch.stack((a, b + c), -1), torch.stack((a + b, c), -1)), 1)
    return both.flatten(0, 2).to(weight_OCHW.dtype).contiguous(memory_format=torch.channels_last)


def taps_as_channels(weight_OCTHW: torch.Tensor, multiple: int = 16) -> torch.Tensor:
    """Convert a weight [O, C, 3, 3, 3] to a 2-D weight [3 O padded to a multiple, C, 3, 3].

    The converted convolution returns the results of the three temporal taps as groups of channels,
    and `sum_of_taps` adds them. This is suitable for small O, and the input frames need not be
    adjacent in memory. The result is channels-last.
    """
    weight = weight_OCTHW.transpose(1, 2).transpose(0, 1).flatten(0, 1)
    missing = -len(weight) % multiple
    padded = functional.pad(weight, (0, 0, 0, 0, 0, 0, 0, missing))
    return padded.contiguous(memory_format=torch.channels_last)


def sum_of_taps(
    of_taps_BTHWX: torch.Tensor, bias_O: torch.Tensor, *, first: bool = False
) -> torch.Tensor:
    """Sum the taps of a `taps_as_channels` convolution in fp32. The shape changes from [B, T + 2,
    H, W, >= 3 O] to [B, T, H, W, O].

    `first` is true for the first frame of each stream, [B, 1, H, W, >= 3 O]. It has no past frames,
    so only its last tap is added.
    """
    channels, frames = len(bias_O), of_taps_BTHWX.shape[1] - (0 if first else 2)
    total = bias_O.float()
    for tap in (2,) if first else range(3):
        start = 0 if first else tap
        of_tap = of_taps_BTHWX[..., tap * channels : (tap + 1) * channels]
        total = total + of_tap[:, start : start + frames]
    return total.to(of_taps_BTHWX.dtype)
