# SPDX-License-Identifier: Apache-2.0
"""Tests of the players used to evaluate the tiny world.

The players' walks do what their names say. A perfect world reaches every target, and each
broken world misses at least one.
"""

import io
import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from training.tiny_world import players, score
from training.tiny_world.play import Played, Times
from training.tiny_world.prompts import PROMPTS
from training.tiny_world.recognise import open_views, shipped
from training.tiny_world.render import Renderer
from training.tiny_world.truth import RenderedWorld
from training.tiny_world.village import PITCH_LIMIT_DEGREES, STYLES
from vllm_omni.evaluation.likeness import unit

SEED = 5
TARGETS = ("still", "bot", "wall", "home")


@dataclass(frozen=True)
class Changed:
    """A world that shows the ground truth, except that `change` modifies every video after its
    start image.
    """

    renderer: Renderer
    change: Callable[[torch.Tensor], torch.Tensor]

    def play(self, walks: Sequence[Played], images_NHW3: torch.Tensor) -> list[torch.Tensor]:
        videos = RenderedWorld(self.renderer).play(walks, images_NHW3)
        return [torch.cat((video[:1], self.change(video)[1:])) for video in videos]


@dataclass(frozen=True)
class OtherStyle:
    """A world that shows the ground truth in the style that follows the prompt's style."""

    renderer: Renderer

    def play(self, walks: Sequence[Played], images_NHW3: torch.Tensor) -> list[torch.Tensor]:
        def other(prompt: str) -> str:
            style = next(index for index, name in enumerate(STYLES) if prompt in PROMPTS[name])
            return PROMPTS[STYLES[(style + 1) % len(STYLES)]][0]

        changed = [
            replace(walk, prompts={at: other(text) for at, text in walk.prompts.items()})
            for walk in walks
        ]
        return RenderedWorld(self.renderer).play(changed, images_NHW3)


def _frozen(video: torch.Tensor) -> torch.Tensor:
    return video[:1].expand_as(video)


def _blurred(video: torch.Tensor) -> torch.Tensor:
    soft = torch.nn.functional.avg_pool2d(
        unit(video), 9, stride=1, padding=4, count_include_pad=False
    )
    return (soft * 255).round().to(torch.uint8).movedim(1, -1)


def _mosaic(video: torch.Tensor) -> torch.Tensor:
    """Return the video with a single 8x8 tile repeated over each whole frame."""
    height, width = video.shape[1:3]
    return video[:, 20:28, 36:44].repeat(1, height // 8, width // 8, 1)


def _missed(world: object, renderer: Renderer) -> set[str]:
    """Return the name of each metric for which a world misses the target, without the part after
    the last comma.
    """
    found = players.score_players(world, renderer, seed=SEED, names=TARGETS, walks=1, seconds=2)
    return {row["measure"].rsplit(",", 1)[0] for row in found["table"] if not row["met"]}


def test_a_perfect_world_reaches_every_target(small_renderer: Renderer) -> None:
    """A perfect world reaches every target: each second of each scenario equals the ground truth,
    and the report is valid JSON.
    """
    found = players.score_players(
        RenderedWorld(small_renderer), small_renderer, seed=SEED, walks=1, seconds=2
    )
    found = json.loads(json.dumps(found))
    assert set(found["scenarios"]) == set(players.SCENARIOS)
    for result in found["scenarios"].values():
        assert result["walks"] == 1 and len(result["psnr"][0]) == result["seconds"] >= 2
        assert set(result["psnr"][0]) == {100.0}
        assert set(result["sharpness"][0]) == set(result["contrast"][0]) == {1.0}
        assert set(result["village"][0]) <= {1.0, None}
    assert [row["met"] for row in found["table"]] == [True] * 7
    assert found["scenarios"]["home"]["start_psnr"][0][-1] > 40


def test_a_frozen_world_does_not_follow(renderer: Renderer) -> None:
    """A frozen world always shows a sharp village, so only a comparison with the ground truth's
    moving camera detects that the world does not follow the keys.
    """
    assert _missed(Changed(renderer, _frozen), renderer) == {"bot: PSNR"}


def test_a_blurred_world_is_neither_sharp_nor_a_village(renderer: Renderer) -> None:
    missed = _missed(Changed(renderer, _blurred), renderer)
    assert {"still: sharpness", "bot: share of frames that are a village"} <= missed
    assert "wall: a village again after turning away" in missed


def test_a_mosaic_misses_every_target(renderer: Renderer) -> None:
    assert len(_missed(Changed(renderer, _mosaic), renderer)) == 6


def test_a_village_in_another_style_does_not_match_the_prompt(renderer: Renderer) -> None:
    """A world in another style does not count as the prompt's village, although its edges are as
    sharp as the ground truth's.
    """
    missed = _missed(OtherStyle(renderer), renderer)
    assert {
        "still: PSNR against the start image",
        "bot: share of frames that are a village",
        "bot: PSNR",
    } <= missed
    assert "wall: a village again after turning away" in missed


def test_a_style_may_change_within_a_second_of_its_prompt(renderer: Renderer) -> None:
    """The previous style is accepted for four latent frames after a new prompt, and counts as wrong
    afterwards.
    """
    [player] = players.players("still", SEED, walks=1, seconds=5)
    start = players.truth_of(renderer, player)[:1]
    switched = replace(player.walk, prompts={0: PROMPTS["day"][0], 9: PROMPTS["dusk"][0]})
    player = replace(player, walk=switched)
    truth = players.truth_of(renderer, player)
    assert torch.equal(truth[8], start[0]) and not torch.equal(truth[9], start[0])
    found = players.measured(start.expand_as(truth), truth, player, shipped())
    assert bool(found.judged.all())
    assert found.village.tolist() == [latent < 13 for latent in range(1, len(truth))]


@pytest.mark.parametrize(("difference", "share"), [(4, 1.0), (12, 0.0)])
def test_a_frame_within_30_db_of_the_truth_is_a_village(
    renderer: Renderer, difference: int, share: float
) -> None:
    """A frame with a PSNR of at least 30 dB against the ground truth counts as a village, even if
    the classifier rejects the frame.

    A difference of 4 levels corresponds to 36 dB, and a difference of 12 levels to 27 dB. The
    classifier in this test accepts only the ground truth.
    """
    [player] = players.players("still", SEED, walks=1, seconds=1)
    truth = players.truth_of(renderer, player)
    only_truth: Any = deepcopy(shipped())
    only_truth.villages = lambda frames, styles: torch.tensor(
        [any(torch.equal(frame, true) for true in truth) for frame in frames], dtype=torch.bool
    )
    made = torch.where(truth < 128, truth + difference, truth - difference)
    found = players.measured(made, truth, player, only_truth)
    assert bool(found.judged.any()) and found.share() == share


def test_only_open_views_are_judged(renderer: Renderer) -> None:
    """Only unobstructed views are judged, because the classifier was calibrated on such views. A
    frame that shows only a nearby wall cannot be recognised.
    """
    [player] = players.players("wall", SEED, walks=1, seconds=2)
    truth, path = players.truth_of(renderer, player), player.walk.walk()
    everything = deepcopy(shipped())
    everything.threshold.fill_(-torch.inf)
    found = players.measured(truth, truth, player, everything)
    is_open = open_views(path.positions[0], path.yaw[0], path.pitch[0])[1:]
    assert torch.equal(found.judged, is_open)
    assert 0 < int(is_open.sum()) < len(is_open) and found.share() == 1.0
    assert players.Seconds({}, found.village, torch.zeros_like(is_open)).share() is None


@pytest.mark.parametrize("seconds", [20, 300])
def test_home_ends_where_it_started(seconds: int) -> None:
    """The `home` walk undoes every key. The camera moves away and is back at the start pose in the
    last second.

    No walk reaches the served world's pitch limit, which would stop the camera's rotation.
    """
    for player in players.players("home", SEED, seconds=seconds):
        path = player.walk.walk()
        assert len(player.walk.keys) >= 1 + 4 * seconds + 4 * seconds + 1 + 4
        assert float(path.pitch.rad2deg().abs().max()) < PITCH_LIMIT_DEGREES
        away = (path.positions[0] - path.positions[0, :1]).norm(dim=1)
        assert float(away.max()) > 2 and float(away[-4:].max()) < 1e-3
        for angle in (path.yaw[0], path.pitch[0]):
            assert float((angle[-4:] - angle[0]).abs().max()) < 1e-4


def test_score_prints_one_json_object(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """`score` prints one JSON object. `--players NAME` plays only the named scenario. Without a
    name, all scenarios are played.
    """

    @dataclass(frozen=True)
    class Engine(RenderedWorld):
        times: Times

        def close(self) -> None: ...

    out = io.StringIO()
    monkeypatch.setattr(
        score, "make_world", lambda *_: (Engine(renderer, Times()), {"size": [48, 80]})
    )
    monkeypatch.setattr(score, "own_stdout", lambda: out)
    monkeypatch.setattr(score, "make_truth", lambda _: score.Truth(renderer))
    arguments = "score --model DIR --seed 5 --players still --player-walks 2 --player-seconds 1"
    monkeypatch.setattr("sys.argv", arguments.split())
    score.main()
    found = json.loads(out.getvalue())
    assert found["model"] == "DIR" and found["seed"] == 5
    assert list(found["scenarios"]) == ["still"] and found["scenarios"]["still"]["walks"] == 2
    parse = score.make_parser().parse_args
    assert parse(["--model", "DIR", "--players"]).players == []
    assert parse(["--model", "DIR"]).players is None
