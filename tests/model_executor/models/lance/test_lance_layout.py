# SPDX-License-Identifier: Apache-2.0
"""Tests of positions and rotary tables of packed sequences. test_lance_parity.py compares
positions and other tables with recordings.
"""

import torch

from vllm_omni.model_executor.models.lance.tasks.sequence_layout import (
    SequenceSegment,
    positions,
    rope_tables,
)


def text(count: int, user: bool = False) -> SequenceSegment:
    return SequenceSegment("text", ids=tuple(range(count)), user=user)


def test_understanding_is_anchored_only_on_request() -> None:
    sequence = [text(5), SequenceSegment("vit", grid=(1, 2, 2)), text(2)]
    assert positions(sequence)[1][0, 0] == 5
    assert positions(sequence, anchor_vit=True)[1][0, 0] == 1000


def test_equal_positions_give_ordinary_rotary_embedding() -> None:
    cos, sin = rope_tables(torch.arange(4).expand(3, -1), 16, (2, 3, 3), 1e6)
    angles = torch.outer(torch.arange(4.0), 1e6 ** (-torch.arange(0, 16, 2) / 16))
    torch.testing.assert_close(cos, angles.cos())
    torch.testing.assert_close(sin, angles.sin())
