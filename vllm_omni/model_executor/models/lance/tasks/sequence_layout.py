# SPDX-License-Identifier: Apache-2.0
"""Represent a request as a sequence of segments with token ids, attention modes and 3-D positions.

A sequence consists of text runs and visual blocks. A visual block consists of a start marker, one
token per grid cell in (t, h, w) order, and an end marker. Attention is causal within text and
bidirectional within a visual block. No other segment attends to a `noise` block.

Positions (time, height, width) are derived from a running counter P. A text run of n tokens has the
positions P .. P+n-1 on all axes. In a block with grid (T, h, w), the start marker has position (P,
P, P), cell (t, i, j) has position (P+1+2t, P+1+i, P+1+j), and the end marker's position is one more
than the largest cell position. In sequences with a reference, the positions are adjusted: vision
blocks start at time 1000, and a `noise` block that has as many tokens as the reference has the
reference's positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

TIME_STEP = 2
"""Number of temporal positions per latent frame or temporal patch: `tokens_per_second` (2) times
one second per grid step.
"""
VIT_TIME_ORIGIN = 1000

Kind = Literal["text", "vit", "reference", "noise"]
Grid = tuple[int, int, int]


@dataclass(frozen=True)
class SequenceSegment:
    """A text run or a visual block."""

    kind: Kind
    """Segment kind: text, vision embeddings, reference latents, or latents to generate."""
    ids: tuple[int, ...] = ()
    """Token ids of a text run."""
    grid: Grid = (0, 0, 0)
    """Grid (T, h, w) of a block in decoder tokens."""
    user: bool = False
    """Whether this run is the user's text."""

    @property
    def num_cells(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def length(self) -> int:
        return len(self.ids) if self.kind == "text" else self.num_cells + 2

    @property
    def mode(self) -> str:
        """Return the original's name for the segment's attention mode."""
        return {"text": "causal", "vit": "full", "reference": "full_noise", "noise": "noise"}[
            self.kind
        ]

    @property
    def modality(self) -> int:
        """Return the original's code for the segment's kind."""
        if self.kind == "text":
            return 0 if self.user else -1
        return {"vit": 4, "reference": 2, "noise": 1}[self.kind]


def raw_positions(segments: Sequence[SequenceSegment]) -> list[torch.Tensor]:
    """Return the positions of each segment, int64 [3, length], without the adjustments for a
    reference.
    """
    counter, result = 0, []
    for segment in segments:
        if segment.kind == "text":
            positions = torch.arange(counter, counter + segment.length).expand(3, -1)
            counter += segment.length
        else:
            positions = block_positions(counter, segment.grid)
            counter = int(positions[0, -1]) + 1
        result.append(positions)
    return result


def positions(
    segments: Sequence[SequenceSegment], *, anchor_vit: bool | None = None
) -> list[torch.Tensor]:
    """Return each segment's final positions, int64 [3, length].

    If `anchor_vit` is true, vision blocks start at time 1000. Default: true only if the sequence
    contains a reference block.
    """
    placed = raw_positions(segments)
    reference = next(
        (index for index, segment in enumerate(segments) if segment.kind == "reference"), None
    )
    if anchor_vit is None:
        anchor_vit = reference is not None
    for index, segment in enumerate(segments):
        if segment.kind == "vit" and anchor_vit:
            shift = torch.tensor([[VIT_TIME_ORIGIN - int(placed[index][0, 0])], [0], [0]])
            placed[index] = placed[index] + shift
        if (
            segment.kind == "noise"
            and reference is not None
            and segment.length == segments[reference].length
        ):
            placed[index] = placed[reference]
    return placed


def block_positions(start: int, grid: Grid) -> torch.Tensor:
    """Return the positions of a visual block, including its markers, int64 [3, length]. The start
    marker has position `start` on all axes.
    """
    frames, height, width = grid
    first = start + 1
    cells = torch.stack(
        torch.meshgrid(
            first + TIME_STEP * torch.arange(frames),
            first + torch.arange(height),
            first + torch.arange(width),
            indexing="ij",
        )
    ).flatten(1)
    end = first + max(TIME_STEP * (frames - 1), height - 1, width - 1) + 1
    return torch.cat((torch.full((3, 1), start), cells, torch.full((3, 1), end)), dim=1)


def rope_tables(
    positions_3T: torch.Tensor, head_dim: int, sections: tuple[int, int, int], theta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rotary tables (cos_TC, sin_TC), fp32 [T, head_dim / 2]. Each frequency belongs to
    one axis, and its angle is proportional to the position on that axis.

    The first `sections[0]` frequencies are for time, the next `sections[1]` for height, and the
    last `sections[2]` for width. For tokens that have equal positions on all axes, these tables are
    ordinary 1-D rotary embeddings. Angles are computed in fp64, on the device of the positions.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions_3T.device)
    frequencies = theta ** (-exponents / head_dim)
    axes = zip(positions_3T.double(), frequencies.split(sections), strict=True)
    angles_TC = torch.cat([torch.outer(position, each) for position, each in axes], dim=1)
    return angles_TC.cos().float(), angles_TC.sin().float()
