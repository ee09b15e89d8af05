# SPDX-License-Identifier: Apache-2.0
"""Tests that the compiled and the eager renderer yield the same image, that the world repeats, and
that walls are where they should be.
"""

import math

import pytest
import torch

from training.tiny_world.render import Renderer
from training.tiny_world.village import HOUSES, PERIOD, WALLS

# x, z, yaw, pitch, style
VIEWS = torch.tensor([(1.2, -4.0, 0.0, 0.0, 0), (2.6, 7.4, 3.4, 0.2, 1), (-7.0, 1.5, 1.1, -0.3, 2)])
# Mean colour of each view, and mean difference of neighbouring pixels, in levels of 255. When the
# world is meant to look different, replace these values with the output of `digest(renderer)`.
GOLDEN = [
    [117.62, 127.68, 120.68, 6.39],
    [96.48, 60.53, 63.2, 4.15],
    [142.18, 146.41, 153.9, 6.13],
]


def render(renderer: Renderer, views: torch.Tensor = VIEWS) -> torch.Tensor:
    return renderer.render(views[:, :2], views[:, 2], views[:, 3], views[:, 4])


def digest(renderer: Renderer) -> torch.Tensor:
    """Return the mean red, green and blue values and the detail of each view. Shape: [views, 4]."""
    frames = render(renderer).float()
    detail = (frames[:, :, 1:] - frames[:, :, :-1]).abs().mean(dim=(1, 2, 3))
    return torch.cat((frames.mean(dim=(1, 2)), detail[:, None]), dim=1)


@pytest.mark.nightly
def test_compiled_and_eager_make_the_same_image(renderer: Renderer) -> None:
    """The compiled and the eager renderer yield the same image, except for individual rays at
    edges.

    Such a ray can fall on the other side of the edge, because the renderers sum fp32 values in a
    different order.
    """
    compiled = Renderer("cpu", renderer.height, renderer.width, compiled=True, frames_per_call=1)
    error = (render(compiled).float() - render(renderer).float()).abs()
    assert float(error.mean()) < 0.05 and float((error > 3).float().mean()) < 0.002


def test_the_village_looks_as_recorded(renderer: Renderer) -> None:
    """The village looks as recorded. The tolerance of half a level (out of 255) allows for
    different rounding on other processors.

    A moved house or different lighting changes the values by more than the tolerance.
    """
    assert digest(renderer).flatten().tolist() == pytest.approx(
        [value for row in GOLDEN for value in row], abs=0.5
    )


def test_the_world_repeats(renderer: Renderer) -> None:
    """The world is periodic: one period further east or south, the image is the same except for
    rays at edges.

    Rounding can put such a ray on the other side of the edge.
    """
    for shift in ((PERIOD, 0.0), (0.0, -PERIOD), (2 * PERIOD, PERIOD)):
        moved = VIEWS.clone()
        moved[:, :2] += torch.tensor(shift)
        error = (render(renderer, moved).float() - render(renderer).float()).abs()
        assert float(error.mean()) < 0.1 and float((error > 8).float().mean()) < 0.005


def test_a_house_is_where_the_village_says(renderer: Renderer) -> None:
    """A house is where the village definition places it: seen from 5 m in front of the house's
    longest side, its wall fills the middle of the image.
    """
    for (x, z, _, depth, _, heading), wall in zip(HOUSES, WALLS, strict=False):
        turn = math.radians(heading)
        away = depth + 2.5
        here = (x - away * math.sin(turn), z - away * math.cos(turn))
        view = torch.tensor([(*here, turn, 0.0, 0)])
        frame = render(renderer, view)[0].float() / 255
        # Next to windows and the door, compare the hue, because each side of a house is lit
        # differently.
        middle = frame[renderer.height // 2 - 2 : renderer.height // 2 + 2].reshape(-1, 3)
        hue = middle / middle.norm(dim=1, keepdim=True)
        expected = torch.tensor(wall) / torch.tensor(wall).norm()
        assert float((hue @ expected > 0.985).float().mean()) > 0.15, (x, z)
