# SPDX-License-Identifier: Apache-2.0
"""Tests of rotary position embedding over frames, rows and columns."""

import math

import pytest
import torch

from vllm_omni.model_executor.layers.attention.rope import apply_rope, axis_dims, rope_tables


@pytest.mark.parametrize(
    ("head_dim", "dims"), [(128, (44, 42, 42)), (16, (8, 4, 4)), (6, (2, 2, 2))]
)
def test_a_head_is_split_over_the_three_axes(head_dim: int, dims: tuple[int, int, int]) -> None:
    assert axis_dims(head_dim) == dims
    assert sum(dims) == head_dim


def test_each_pair_rotates_by_its_axis_position_times_its_frequency() -> None:
    """For example, for the token at frame 7, row 1 and column 2, pair 1 of the temporal axis
    rotates by 7 * 10000^(-2/8) radians. The head size is 16.
    """
    cos, sin = rope_tables(16, range(5, 8), 2, 3)
    token = (2 * 2 + 1) * 3 + 2
    angles = [
        7.0,
        7 * 10000 ** (-2 / 8),
        7 * 10000 ** (-4 / 8),
        7 * 10000 ** (-6 / 8),
        1,
        1 / 100,
        2,
        2 / 100,
    ]
    assert cos[token].tolist() == pytest.approx([math.cos(angle) for angle in angles], abs=1e-7)
    assert sin[token].tolist() == pytest.approx([math.sin(angle) for angle in angles], abs=1e-7)


def test_rotation_multiplies_interleaved_pairs_as_complex_numbers() -> None:
    torch.manual_seed(0)
    x = torch.randn(12, 3, 16)
    cos, sin = rope_tables(16, range(3, 5), 2, 3)
    expected = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.complex(cos, sin).unsqueeze(
        1
    )
    torch.testing.assert_close(apply_rope(x, cos, sin), torch.view_as_real(expected).flatten(-2))


def test_a_score_depends_on_the_distance_only_however_late_the_frame() -> None:
    """After 10 hours at 4 latent frames per second, the attention score of two tokens one frame
    apart has drifted by less than 1e-4 in fp32.
    """
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)

    def score(frame: int) -> float:
        at, after = (
            rope_tables(16, range(frame, frame + 1), 1, 1),
            rope_tables(16, range(frame + 1, frame + 2), 1, 1),
        )
        return float((apply_rope(q, *after) * apply_rope(k, *at)).sum())

    assert score(144_000) == pytest.approx(score(0), abs=1e-4)
