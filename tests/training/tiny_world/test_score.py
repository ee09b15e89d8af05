# SPDX-License-Identifier: Apache-2.0
"""The scorer finds no error in a world that shows the ground truth, and detects the errors of
broken worlds.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from training.tiny_world import score
from training.tiny_world.play import Played
from training.tiny_world.render import Renderer
from training.tiny_world.truth import Palette, RenderedWorld, Truth, rendered
from training.tiny_world.village import STYLES

SEED = 11
MOVING_SEED = 26
"""Seed for which key presses alone move the walkers in nearly every latent frame.

With other seeds, walkers may stand still for a while or use an analogue stick, whose speed cannot
be derived from the keys. With this seed, no start image has the mean colour of a view in another
style.
"""


@pytest.fixture(autouse=True)
def _few_reference_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.tiny_world.truth._REFERENCE_PLACES", 8)


@pytest.fixture
def few_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use only a few latents in each drill. A few latents suffice, because each metric is a median
    over latents.
    """
    monkeypatch.setattr(score, "TURN_LATENTS", 8)
    monkeypatch.setattr(score, "STEP_LATENTS", 4)


@pytest.fixture(scope="module")
def truth(small_renderer: Renderer) -> Truth:
    """Return the ground truth, which all tests in this file share because rendering it takes most
    of their time.

    The ground truth's coarse images have the same size as its other images, so both use the same
    ground texture.
    """
    truth = Truth(small_renderer)
    assert (truth.palette.renderer.height, truth.palette.renderer.width) == (24, 40)
    truth.palette = Palette(small_renderer)
    return truth


@dataclass(frozen=True)
class Deaf:
    """A world that ignores keys and new prompts: every frame is the start image."""

    def play(self, walks: Sequence[Played], images_NHW3: torch.Tensor) -> list[torch.Tensor]:
        frames = [4 * len(walk.keys) - 3 for walk in walks]
        return [
            image.repeat(count, 1, 1, 1) for image, count in zip(images_NHW3, frames, strict=True)
        ]


def test_the_truth_is_perfect(
    small_renderer: Renderer, truth: Truth, tmp_path: Path, few_latents: None
) -> None:
    """The ground truth gets a perfect score in every row of the table.

    The result can be stored as JSON. The image strip has two rows per walk and one column per
    chunk.
    """
    world = RenderedWorld(small_renderer)
    found = score.score(world, truth, seed=SEED, walks=3, chunks=2, strip=tmp_path / "strip.png")
    found = json.loads(json.dumps(found))
    assert found["psnr"] == [100.0, 100.0]
    assert found["ssim"] == pytest.approx([1.0, 1.0])
    assert found["sharpness"] == pytest.approx([1.0, 1.0])
    assert found["style"] == [1.0, 1.0]
    assert found["switch"]["share"] == [1.0, 1.0]
    assert found["loop"] == {"psnr": 100.0, "worst": 100.0, "walks": 3}
    assert found["turn"]["wrong_sign"] == 0 and found["turn"]["latents"] == 24
    assert found["turn"]["ratio"] == pytest.approx(1.0, abs=0.03)  # 0.01 if frames have 48 rows
    assert found["step"]["ratio"] == pytest.approx(1.0, abs=0.05)
    assert found["level"]["difference"] == found["level"]["difference_of_truth"]
    assert set(found["level"]["difference"]) == set(STYLES)
    with Image.open(tmp_path / "strip.png") as strip:
        assert strip.size == (2 * 40, 6 * 24)


def test_a_world_that_obeys_nothing_scores_badly(truth: Truth, few_latents: None) -> None:
    found = score.score(Deaf(), truth, seed=MOVING_SEED, walks=3, chunks=2)
    assert found["psnr"][-1] < 20 < found["psnr"][0] + 10
    assert abs(found["turn"]["ratio"]) < 0.05
    assert found["step"]["ratio"] < 0.2
    assert max(found["switch"]["share"]) == 0.0
    assert found["loop"]["psnr"] == 100.0  # a frozen world gets this score too


def test_a_mirrored_turn_has_the_wrong_sign(renderer: Renderer) -> None:
    [walk] = score.turning(1, SEED)
    walk = replace(walk, keys=walk.keys[:5])
    [video] = RenderedWorld(renderer).play([walk], torch.empty(0))
    found = score.turn_score([video.flip(2)], [walk])
    assert found["wrong_sign"] == 4 and found["ratio"] == pytest.approx(-1.0, abs=0.02)


def test_the_first_frame_counts_as_one_frame() -> None:
    """A chunk's PSNR is computed from video frames, so the start image counts as only one of the
    first chunk's nine frames.
    """
    truth = torch.full((1, 6, 16, 16, 3), 100, dtype=torch.uint8)
    made = truth.clone()
    made[:, [0, 3]] += 51  # a fifth of the range
    first, second = score.against_truth(made, truth)["psnr"]
    assert first == pytest.approx(-10 * math.log10(0.04 / 9), abs=1e-3)
    assert second == pytest.approx(-10 * math.log10(0.04 / 3), abs=1e-3)


def test_a_blank_wall_does_not_decide_the_sharpness() -> None:
    """A chunk's sharpness is a single ratio of edge strengths over all walks, so the result hardly
    changes if one walk's ground truth shows no edges.
    """
    truth = torch.zeros(2, 3, 16, 16, 3, dtype=torch.uint8)
    truth[0, :, :, ::2] = 200
    made = truth.clone()
    made[1, :, :, 8:] = 4
    [sharpness] = score.against_truth(made, truth)["sharpness"]
    assert sharpness == pytest.approx(1.0, abs=0.01)


def test_a_style_is_not_recognised_in_an_image_of_another_style(small_renderer: Renderer) -> None:
    """The style of every ground truth view is recognised as correct, and that of the same view in
    another style is not.
    """
    walks = score.wandering(6, 1, SEED)
    truth = rendered(small_renderer, walks)
    palette = Palette(small_renderer).of_walks(walks)
    style = torch.tensor([walk.style for walk in walks])
    assert score.style_shares(truth, style, palette) == [1.0]
    other = rendered(small_renderer, [replace(walk, style=(walk.style + 1) % 3) for walk in walks])
    assert score.style_shares(other, style, palette) == [0.0]


def test_the_loop_score_compares_frames_at_which_the_camera_has_returned(
    small_renderer: Renderer,
) -> None:
    """The loop score compares frames before and after the camera returns to the same pose, so a
    world that returns to a different place gets a low score.
    """
    walks = score.looping(1, SEED)
    [video] = RenderedWorld(small_renderer).play(walks, torch.empty(0))
    assert score.loop_score([video])["psnr"] == 100.0
    elsewhere = video.clone()
    elsewhere[-12:] = elsewhere[-12:].flip(2)
    assert score.loop_score([elsewhere])["psnr"] < 20


@pytest.mark.parametrize(("steps", "expected"), [(4, [0, 250, 500, 750]), (2, [0, 500]), (1, [0])])
def test_fewer_steps_are_chosen_from_the_checkpoints_own_steps(
    lingbot_world_v2: Path, steps: int, expected: list[int]
) -> None:
    args = score.make_parser().parse_args(
        [
            "--model",
            str(lingbot_world_v2),
            "--steps",
            str(steps),
            "--decoder",
            "tiny",
            "--window",
            "9",
            "--sink",
            "3",
        ]
    )
    assert score.model_options(args) == {
        "decoder": "tiny",
        "denoise_indices": expected,
        "window_frames": 9,
        "sink_frames": 3,
    }


@pytest.fixture
def lingbot_world_v2(tmp_path: Path) -> Path:
    from vllm_omni.model_executor.models.registry import get_family

    get_family("lingbot_world").make_tiny(tmp_path / "v2", 0, "v2")
    return tmp_path / "v2"
