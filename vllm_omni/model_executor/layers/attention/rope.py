# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding over (frame, row, column), for Wan-family video transformers.

A head of size H has H/2 complex channels, which consist of the interleaved pairs (2i, 2i+1) and are
divided among the three axes. Channel j of an axis that has n real dimensions is rotated by
position * theta^(-2j/n). Angles are computed in fp64 from absolute positions, and their cosines and
sines are rounded once to fp32. There is no precomputed table, so frame indices are not limited.
"""

# L tokens of a chunk in (frame, row, column) order, N heads, H head dim, C = H/2 complex channels

import torch

THETA = 10000.0
"""Base of the rotation frequencies (theta) in all Wan-family networks."""


def axis_dims(head_dim: int) -> tuple[int, int, int]:
    """Return the number of real dimensions of a head for (frame, row, column), for example (44, 42,
    42) for a head size of 128.
    """
    spatial = 2 * (head_dim // 6)
    return head_dim - 2 * spatial, spatial, spatial


def temporal_frequencies(head_dim: int) -> torch.Tensor:
    """Return each temporal channel's rotation angle per frame, fp64 on the CPU. A head's temporal
    channels come first.
    """
    return _frequencies(axis_dims(head_dim)[0], THETA)


def _frequencies(dim: int, theta: float) -> torch.Tensor:
    return theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def axis_tables(positions: range, dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cos, sin) for one axis, fp32 on the CPU. Shape of each: [positions, dim / 2]."""
    angles = torch.outer(
        torch.arange(positions.start, positions.stop, dtype=torch.float64), _frequencies(dim, theta)
    )
    return angles.cos().float(), angles.sin().float()


def rope_tables(
    head_dim: int, frames: range, height: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cos_LC, sin_LC), fp32 on the CPU, for tokens of `frames` (absolute indices) x
    `height` x `width`.
    """
    sizes = (len(frames), height, width)
    starts = (frames.start, 0, 0)
    cos_pairs: list[torch.Tensor] = []
    sin_pairs: list[torch.Tensor] = []
    for axis, (dim, size, start) in enumerate(zip(axis_dims(head_dim), sizes, starts, strict=True)):
        # Tables are computed per axis, because an axis has far fewer positions than there are
        # tokens.
        cos, sin = axis_tables(range(start, start + size), dim, THETA)
        shape = [1, 1, 1, dim // 2]
        shape[axis] = size
        cos_pairs.append(cos.view(shape).expand(*sizes, dim // 2))
        sin_pairs.append(sin.view(shape).expand(*sizes, dim // 2))
    return torch.cat(cos_pairs, dim=-1).flatten(0, 2), torch.cat(sin_pairs, dim=-1).flatten(0, 2)


def apply_rope(x_LNH: torch.Tensor, cos_LC: torch.Tensor, sin_LC: torch.Tensor) -> torch.Tensor:
    """Rotate each interleaved pair in `x_LNH`, which may have additional dimensions before L. The
    computation and the result are fp32.
    """
    even, odd = x_LNH.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos_LC.unsqueeze(-2), sin_LC.unsqueeze(-2)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
