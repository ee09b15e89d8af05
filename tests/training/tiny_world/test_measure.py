# SPDX-License-Identifier: Apache-2.0
"""The nearest mean colour, of pictures whose answers are known."""

import pytest
import torch

from training.tiny_world import measure


def test_a_style_is_named_by_the_nearest_mean_colour() -> None:
    means = torch.tensor([[0.5, 0.6, 0.7], [0.3, 0.2, 0.3], [0.9, 0.9, 0.9]])
    clip = means[[2, 0, 1]].view(3, 1, 3, 1, 1).expand(3, 2, 3, 4, 4) + torch.tensor(
        [0.05, -0.05]
    ).view(1, 2, 1, 1, 1)
    assert measure.mean_colour(clip) == pytest.approx(means[[2, 0, 1]])
    assert measure.named_style(measure.mean_colour(clip), means.expand(3, 3, 3)).tolist() == [
        2,
        0,
        1,
    ]
