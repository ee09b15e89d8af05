# SPDX-License-Identifier: Apache-2.0
"""Positions, masks and rotary tables of packed sequences (the recorded ones are in
test_lance_parity.py).
"""

import torch

from vllm_omni.model_executor.models.lance.tasks.sequence_layout import (
    Segment,
    positions,
    raw_positions,
    rope_tables,
)
from vllm_omni.testing.parity.lance.tasks import attention_allowed


def text(count: int, user: bool = False) -> Segment:
    return Segment("text", ids=tuple(range(count)), user=user)


def test_a_block_takes_its_markers_and_grid_from_the_counter() -> None:
    """Start at P, cells behind it with two positions per frame, end one past the largest."""
    _, block, after = raw_positions([text(3), Segment("noise", grid=(2, 1, 4)), text(1)])
    assert block[:, 0].tolist() == [3, 3, 3]
    assert block[0, 1:-1].tolist() == [4, 4, 4, 4, 6, 6, 6, 6]
    assert block[2, 1:-1].tolist() == [4, 5, 6, 7] * 2
    assert block[:, -1].tolist() == [8, 8, 8]
    assert after[:, 0].tolist() == [9, 9, 9]


def test_an_edit_is_anchored() -> None:
    """Vision starts at time 1000 without moving the counter; the target takes over its
    reference's positions.
    """
    vit, reference, noise = (
        Segment(kind, grid=(1, 2, 2)) for kind in ("vit", "reference", "noise")
    )  # type: ignore[arg-type]
    placed = positions([text(5), vit, reference, text(2), noise])
    assert placed[1][:, 0].tolist() == [1000, 5, 5]
    assert placed[2][:, 0].tolist() == [9, 9, 9]
    assert torch.equal(placed[4], placed[2])
    larger = positions([text(5), vit, reference, text(2), Segment("noise", grid=(1, 2, 3))])
    assert larger[4][0, 0] == larger[3][0, -1] + 1


def test_understanding_is_anchored_only_on_demand() -> None:
    sequence = [text(5), Segment("vit", grid=(1, 2, 2)), text(2)]
    assert positions(sequence)[1][0, 0] == 5
    assert positions(sequence, anchor_vit=True)[1][0, 0] == 1000


def test_no_one_sees_a_noise_block_but_itself() -> None:
    allowed = attention_allowed(
        [text(2), Segment("vit", grid=(1, 1, 2)), Segment("noise", grid=(1, 1, 1)), text(1)]
    )
    assert allowed[0].tolist() == [True] + [False] * 9
    assert allowed[2, :6].all() and not allowed[2, 6:].any()
    assert allowed[6, :9].all()
    assert not allowed[9, 6:9].any() and allowed[9, :6].all()


def test_equal_positions_give_ordinary_rotary_embedding() -> None:
    cos, sin = rope_tables(torch.arange(4).expand(3, -1), 16, (2, 3, 3), 1e6)
    angles = torch.outer(torch.arange(4.0), 1e6 ** (-torch.arange(0, 16, 2) / 16))
    torch.testing.assert_close(cos, angles.cos())
    torch.testing.assert_close(sin, angles.sin())
