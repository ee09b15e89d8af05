# SPDX-License-Identifier: Apache-2.0
"""Tests of the scores for start images that do not come from the world's own renderer. The test
world's camera walks as commanded but never turns.
"""

from collections.abc import Sequence

import pytest
import torch
from torch.nn import functional

from training.tiny_world.play import Played
from training.tiny_world.uploads import UPLOADS, load_uploads, score_uploads

SIZE = (96, 160)
GROWTH = 1.05


class _ZoomingWorld:
    """A world that enlarges the start image while `w` is held, and ignores other keys."""

    def play(self, walks: Sequence[Played], images_NHW3: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.stack([_enlarged(image, _factor(walk, frame)) for frame in _frames(walk)])
            for walk, image in zip(walks, images_NHW3, strict=True)
        ]


def _frames(walk: Played) -> range:
    return range(4 * len(walk.keys) - 3)


def _factor(walk: Played, frame: int) -> float:
    return GROWTH ** (frame / 4) if "w" in walk.keys[-1] else 1.0


def _enlarged(image_HW3: torch.Tensor, factor: float) -> torch.Tensor:
    theta = torch.tensor([[[1 / factor, 0, 0], [0, 1 / factor, 0]]])
    image = image_HW3.permute(2, 0, 1)[None].float()
    grid = functional.affine_grid(theta, list(image.shape), align_corners=False)
    return functional.grid_sample(image, grid, align_corners=False)[0].permute(1, 2, 0).byte()


def test_a_world_that_walks_but_does_not_turn_is_noticed() -> None:
    """For a world in which the camera walks but does not turn, the measured image growth per step
    is correct, and the turn ratio is near zero.
    """
    means = torch.tensor([[0.9, 0.9, 0.9], [0.4, 0.4, 0.4], [0.0, 0.0, 0.0]])
    result = score_uploads(_ZoomingWorld(), SIZE, means, seed=1)
    assert result["step"]["growth"] == pytest.approx(GROWTH, abs=0.005)
    assert result["turn"]["ratio"] == pytest.approx(0, abs=0.05)
    assert result["turn"]["latents"] == 20 * len(UPLOADS) and 0 < result["style"] < 1


def test_uploads_are_different_photographs() -> None:
    images = load_uploads(*SIZE)
    assert images.shape == (len(UPLOADS), *SIZE, 3)
    assert len({image.float().mean().item() for image in images}) == len(UPLOADS)
