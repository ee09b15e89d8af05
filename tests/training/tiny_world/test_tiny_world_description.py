# SPDX-License-Identifier: Apache-2.0
"""The shipped world description equals the training code's output, and the shipped tour shows the
same frames as a new render.
"""

from pathlib import Path

import numpy as np
import torch

from training.tiny_world.description import (
    describe_world,
    draw_map,
    render_tour,
    tour_styles,
    tour_walk,
)
from training.tiny_world.render import Renderer
from training.tiny_world.village import STYLES
from vllm_omni.entrypoints.media.mp4 import decode_mp4
from vllm_omni.worlds.description import read_description


def test_the_shipped_description_is_the_written_one(village: Path) -> None:
    """The shipped description equals the training code's output, except for the decoder, which was
    chosen based on measurements.
    """
    shipped = read_description(village)
    assert shipped is not None
    assert shipped == describe_world(decoder=shipped.model["decoder"])


def test_nothing_is_in_the_tours_way() -> None:
    """No obstacle shortens a step of the tour, so the tour's path depends only on the keys."""
    description = describe_world()
    walk = tour_walk(description)
    assert description.tour is not None
    moved_m = (walk.positions[0, 1:] - walk.positions[0, :-1]).norm(dim=1)
    expected_m = torch.tensor([0.5 if "w" in held else 0.0 for held in description.tour.keys[1:]])
    torch.testing.assert_close(moved_m, expected_m, atol=1e-3, rtol=0)
    assert expected_m.sum() > 8


def test_the_truth_is_the_tour(village: Path) -> None:
    """Newly rendered frames of the tour differ from the shipped video only by H.264's loss.

    The tour includes a prompt change.
    """
    description = read_description(village)
    assert description is not None
    assert description.tour is not None
    assert description.tour.truth is not None
    truth_THWC, _ = decode_mp4((village / description.tour.truth).read_bytes())
    styles = tour_styles(description)
    switch = int((styles != styles[0]).nonzero()[0])
    assert STYLES[int(styles[switch])] == description.tour.prompts[1][1]
    renderer = Renderer(frames_per_call=1)
    for frame in (0, switch - 1, switch, len(styles) - 1):
        made = render_tour(description, renderer, slice(frame, frame + 1))[0].astype(float)
        psnr = 10 * np.log10(255**2 / ((made - truth_THWC[frame]) ** 2).mean())
        assert psnr > 28, (frame, psnr)
        apart = 10 * np.log10(255**2 / ((made - truth_THWC[frame - 8]) ** 2).mean())
        assert psnr > apart + 3, "another frame would not do"


def test_the_map_matches_the_village() -> None:
    """The map shows the village with north at the top: the pond is blue, a red tower is in the
    north-east, and grass is green.
    """
    image = np.asarray(draw_map(120)).astype(int)

    def colour(x: float, z: float) -> np.ndarray:
        return image[round(60 - z * 4), round(60 + x * 4)]

    pond, tower, grass = colour(3.8, -4.6), colour(12.0, 12.5), colour(-10.0, 3.0)
    assert pond[2] > pond[0] + 50
    assert tower[0] > tower[1] + 80
    assert grass[1] > grass[0] + 20
