# SPDX-License-Identifier: Apache-2.0
"""Players: their walks are what they are called, a perfect world reaches every target, broken
ones do not.
"""

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import pytest
import torch

from training.tiny_world import players, score
from training.tiny_world.play import Played, Times
from training.tiny_world.prompts import PROMPTS
from training.tiny_world.recognise import shipped
from training.tiny_world.render import Renderer
from training.tiny_world.truth import RenderedWorld, unit
from training.tiny_world.village import PERIOD, STYLES
from training.tiny_world.walks import STEP_M

SEED = 5
TARGETS = ("still", "bot", "wall", "home")


@dataclass(frozen=True)
class Changed:
    """The truth, but what `change` makes of a video after its start image."""

    renderer: Renderer
    change: Callable[[torch.Tensor], torch.Tensor]

    def play(self, walks: Sequence[Played], images_NHW3: torch.Tensor) -> list[torch.Tensor]:
        videos = RenderedWorld(self.renderer).play(walks, images_NHW3)
        return [torch.cat((video[:1], self.change(video)[1:])) for video in videos]


@dataclass(frozen=True)
class OtherStyle:
    """The truth in the style after the prompt's."""

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
    """One tile of 8x8 pixels everywhere."""
    height, width = video.shape[1:3]
    return video[:, 20:28, 36:44].repeat(1, height // 8, width // 8, 1)


def _missed(world: object, renderer: Renderer) -> set[str]:
    """Measures whose target a world misses, by their first words."""
    found = players.score_players(world, renderer, seed=SEED, names=TARGETS, walks=3, seconds=2)
    return {row["measure"].rsplit(",", 1)[0] for row in found["table"] if not row["met"]}


def test_a_perfect_world_reaches_every_target(renderer: Renderer) -> None:
    """In every scenario each second equals the truth, and the report is JSON."""
    found = players.score_players(RenderedWorld(renderer), renderer, seed=SEED, walks=1, seconds=2)
    found = json.loads(json.dumps(found))
    assert set(found["scenarios"]) == set(players.SCENARIOS)
    for result in found["scenarios"].values():
        assert result["walks"] == 1 and len(result["psnr"][0]) == result["seconds"] >= 2
        assert set(result["psnr"][0]) == {100.0}
        assert set(result["sharpness"][0]) == set(result["contrast"][0]) == {1.0}
        assert set(result["village"][0]) <= {1.0, None}
    assert [row["met"] for row in found["table"]] == [True] * 6
    assert found["scenarios"]["home"]["start_psnr"][0][-1] > 40


def test_a_frozen_world_does_not_follow(renderer: Renderer) -> None:
    """It shows a sharp village for ever, at home too: only the truth of a moving camera tells."""
    assert _missed(Changed(renderer, _frozen), renderer) == {"bot: PSNR"}


def test_a_blurred_world_is_not_sharp_and_no_village(renderer: Renderer) -> None:
    missed = _missed(Changed(renderer, _blurred), renderer)
    assert {"still: sharpness", "bot: share of frames that are a village"} <= missed
    assert "straight and wall: a village again after turning away" in missed


def test_a_mosaic_misses_every_target(renderer: Renderer) -> None:
    assert len(_missed(Changed(renderer, _mosaic), renderer)) == 6


def test_another_style_is_no_village_of_the_prompt(renderer: Renderer) -> None:
    """Its edges are as sharp as the truth's."""
    missed = _missed(OtherStyle(renderer), renderer)
    assert {
        "still: PSNR against the start image",
        "bot: share of frames that are a village",
        "bot: PSNR",
    } <= missed
    assert "straight and wall: a village again after turning away" in missed


def test_a_style_may_change_within_a_second_of_its_prompt(renderer: Renderer) -> None:
    """The old style is right for four latent frames after the switch, and wrong afterwards."""
    [player] = players.players("still", SEED, walks=1, seconds=5)
    start = players.truth_of(renderer, player)[:1]
    switched = replace(player.walk, prompts={0: PROMPTS["day"][0], 9: PROMPTS["dusk"][0]})
    player = replace(player, walk=switched)
    truth = players.truth_of(renderer, player)
    assert torch.equal(truth[8], start[0]) and not torch.equal(truth[9], start[0])
    found = players.measured(start.expand_as(truth), truth, player, shipped())
    assert bool(found.village_of_truth.all())
    assert found.village.tolist() == [latent < 13 for latent in range(1, len(truth))]


def test_again_counts_from_the_end_of_the_turn() -> None:
    """Three of four frames must be villages; frames that cannot be judged do not count."""
    village = torch.tensor([True] * 4 + [False] * 6 + [True, False, True, True, True, True])
    judged = torch.ones(16, dtype=torch.bool)
    assert players.again(players.Seconds({}, village, judged), 5) == 6 / 4
    judged[5:7] = False
    assert players.again(players.Seconds({}, village, judged), 5) == 4 / 4
    assert players.again(players.Seconds({}, ~torch.ones_like(village), judged), 5) is None


def test_tens_are_means_of_whole_ten_seconds() -> None:
    assert players.tens([1.0] * 10 + [3.0] * 10 + [9.0] * 5) == [1.0, 3.0]
    assert players.tens([2.0, 4.0]) == [3.0]


def _spells(keys: Sequence[str]) -> list[tuple[str, int]]:
    """Keys and latent frames of each spell, but the last one, which the end cuts."""
    return [(held, len(list(spell))) for held, spell in groupby(keys)][:-1]


def test_bots_hold_keys_and_pause_as_stated() -> None:
    """Bursts and pauses of 0.5 to 8 s, 30 % of the time idle, prompts of other styles 10 to 40 s
    apart.
    """
    bots = players.players("bot", SEED)
    assert len(bots) == 9 and {bot.seconds for bot in bots} == {300}
    assert len({bot.walk.start for bot in bots}) == 3
    assert [bot.walk.style for bot in bots] == [0, 1, 2] * 3
    spells = [spell for bot in bots for spell in _spells(bot.walk.keys[1:1201])]
    assert {2, 32} <= {latents for _, latents in spells} <= set(range(2, 33))
    idle = sum(latents for held, latents in spells if not held) / sum(
        latents for _, latents in spells
    )
    assert idle == pytest.approx(0.3, abs=0.05)
    for bot in bots[:3]:
        at = list(bot.walk.prompts)
        gaps = [after - before for before, after in pairwise(at)]
        assert len(at) > 5 and all(40 - 2 <= gap <= 160 + 2 for gap in gaps)
        styles = bot.styles()[at]
        assert bool((styles[1:] != styles[:-1]).all())
        assert float(bot.walk.walk().pitch.abs().max()) < 0.6
    first, other = (players.players("bot", seed, walks=1) for seed in (SEED, SEED + 1))
    assert first == players.players("bot", SEED, walks=1) != other


def test_idle_spells_are_pauses_between_keys() -> None:
    for player in players.players("idle_spells", SEED):
        spells = _spells(player.walk.keys[1:481])
        assert all(bool(held) == (index % 2 == 0) for index, (held, _) in enumerate(spells))
        assert all(8 <= latents <= 80 for held, latents in spells if not held)


def test_home_ends_where_it_started() -> None:
    """Every key is undone, so the camera's last second is the start pose; on the way it was
    elsewhere.
    """
    for player in players.players("home", SEED, seconds=20):
        path = player.walk.walk()
        assert len(player.walk.keys) >= 1 + 80 + 81 + 4
        away = (path.positions[0] - path.positions[0, :1]).norm(dim=1)
        assert float(away.max()) > 2 and float(away[-4:].max()) < 1e-3
        for angle in (path.yaw[0], path.pitch[0]):
            assert float((angle[-4:] - angle[0]).abs().max()) < 1e-4


def test_straight_walks_cross_the_border_and_turn_around() -> None:
    for player in players.players("straight", SEED, walks=2, seconds=20):
        path, turned = player.walk.walk(), player.turned_at
        cells = torch.floor(path.positions[0, : 1 + 80] / PERIOD + 0.5)
        assert bool((cells != cells[:1]).any())
        assert float(path.positions[0, :81].diff(dim=0).norm(dim=1).sum()) > 0.7 * 80 * STEP_M
        assert abs(float(path.yaw[0, turned - 1] - path.yaw[0, 0])) == pytest.approx(
            torch.pi, abs=1e-4
        )
        assert player.walk.keys[turned - 1] in "lj" and player.walk.keys[turned] == "w"


def test_walls_stop_a_player_for_ten_seconds() -> None:
    """Then it turns around and walks the way it came."""
    for player in players.players("wall", SEED, walks=2):
        positions, turned = player.walk.walk().positions[0], player.turned_at
        stay = positions[players.APPROACH_LATENTS : turned]
        assert len(stay) >= 40 and float((stay - stay[0]).norm(dim=1).max()) < 1e-3
        assert float((positions[0] - stay[0]).norm()) > 1.5
        assert float((positions[turned + 3] - stay[0]).norm()) > 1.5
    assert {player.walk.keys[40] for player in players.players("wall", SEED, walks=2)} == {"w", ""}


def test_spins_and_ways_back_and_forth_hold_what_they_say() -> None:
    assert {player.walk.keys[1:241] for player in players.players("spin", SEED)} == {
        ("l",) * 240,
        ("j",) * 240,
    }
    pairs = [set(player.walk.keys[1:241]) for player in players.players("back_and_forth", SEED)]
    assert pairs == [{"w", "s"}, {"a", "d"}, {"l", "j"}]


def test_score_prints_one_json_object(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--players NAME` plays that scenario alone; without a name all are meant."""

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
