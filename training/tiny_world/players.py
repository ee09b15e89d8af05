# SPDX-License-Identifier: Apache-2.0
"""Walks as people play them, and a comparison of each second of a generated walk with the rendered
ground truth.

    python -m training.tiny_world.score --model DIR --seed 1 --players               # all scenarios
    python -m training.tiny_world.score --model DIR --seed 1 --players still bot

The held-out walks of `score.py` come from the same random walker as the training data. The players
in this module behave differently: they stand still for minutes, walk into walls, hold one key while
they cross the border of the periodic village, and switch prompts at any time. Positions are
computed with the same integrator and occupancy grid that the server uses.

Latent frames (four per second) are measured, excluding the start image. The following values are
computed for each second of a walk:

    psnr, start_psnr    PSNR against the ground truth, and against the start image (`still` and
                        `home`)
    sharpness           mean horizontal difference of neighbouring pixels, divided by that of the
                        ground truth
    contrast            standard deviation divided by that of the ground truth
    village             share of frames that `recognise.py` recognises as a village in the prompt's
                        style, or that show the same view as the ground truth (`SAME_VIEW_DB`). A
                        frame is judged only if its view is open (`recognise.open_views`), as in the
                        calibration of the classifier, and if the classifier recognises the ground
                        truth. None: no frame was judged. In the second after a prompt, the previous
                        style is also accepted

`table` lists the measures that have a target and whether each target is met. Tested by
tests/training/tiny_world/test_players.py.
"""

# L latent frames, N walks

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from training.tiny_world.play import LATENTS_A_CHUNK, Played, World
from training.tiny_world.prompts import PROMPTS
from training.tiny_world.recognise import Recogniser, open_views, shipped
from training.tiny_world.render import Renderer
from training.tiny_world.truth import HELD_OUT
from training.tiny_world.village import PERIOD, STYLES
from training.tiny_world.walks import STEP_M, free_places, key_bits, scripted_walks, village_grid
from vllm_omni.evaluation import likeness
from vllm_omni.evaluation.likeness import unit
from vllm_omni.worlds.movement import (
    PITCH_DEGREES,
    YAW_DEGREES,
    CameraMotion,
    move_cameras,
    world_pose,
)

LATENTS_A_SECOND = 4
HALF_TURN = round(180 / YAW_DEGREES)
"""Number of latent frames for which a look key must be held to turn the camera around."""
BURST_S = 0.5, 8.0
"""Shortest and longest time in seconds for which a player holds the same keys. Times are drawn
log-uniformly.
"""
PAUSE_S = 2.0, 20.0
IDLE_SHARE = 0.3
"""Share of the bot's periods in which it holds no key."""
SWITCH_S = 10.0, 40.0
"""Shortest and longest time in seconds between two prompts of a bot."""
LARGEST_PITCH = 32.0
"""Largest angle in degrees by which players look up or down. Most training walks reach nearly the
same angle.
"""
APPROACH_LATENTS = 24
"""Maximum number of latent frames that a walk into a wall takes to reach the wall."""
AGAIN_S = 3.0
"""Seconds within which a world must show a village again after the camera has turned away from a
wall.
"""

SAME_VIEW_DB = 30.0
"""Minimum PSNR between a frame and its ground truth at which the frame counts as a village whenever
the classifier accepts the ground truth.

Near its threshold, the classifier can reject a frame with a PSNR of 36 dB even though it accepts
the ground truth.
"""

# (keys, weight) from which a player's next held keys are drawn
_HABITS = (
    ("w", 0.34),
    ("wl", 0.11),
    ("wj", 0.11),
    ("l", 0.09),
    ("j", 0.09),
    ("s", 0.06),
    ("a", 0.05),
    ("d", 0.05),
    ("wa", 0.02),
    ("wd", 0.02),
    ("i", 0.02),
    ("k", 0.02),
    ("wli", 0.01),
    ("jk", 0.01),
)
_OPPOSITE = str.maketrans("wsadjlik", "swdaljki")
_STYLE_OF = {prompt: style for style, name in enumerate(STYLES) for prompt in PROMPTS[name]}


@dataclass(frozen=True)
class Player:
    """A player's walk. At latent frame `turned_at`, the player has finished turning around. If
    `turned_at` is None, the scenario includes no such turn.
    """

    walk: Played
    turned_at: int | None = None

    @property
    def seconds(self) -> int:
        """Number of whole seconds measured."""
        return (len(self.walk.keys) - 1) // LATENTS_A_SECOND

    def styles(self) -> torch.Tensor:
        """Return the style that the prompt names at each latent frame, [L]."""
        shown = torch.zeros(len(self.walk.keys), dtype=torch.long)
        for latent, prompt in self.walk.prompts.items():
            shown[latent:] = _STYLE_OF[prompt]
        return shown

    def styles_before(self) -> torch.Tensor:
        """Return `styles` with each prompt delayed by one second, [L]."""
        styles = self.styles()
        late = LATENTS_A_SECOND
        return torch.cat((styles[:1].expand(late), styles))[: len(styles)]


@dataclass(frozen=True)
class Scenario:
    """How to draw a scenario's walks. `walks` is the default number of walks, and `seconds` is the
    default maximum duration.

    `make` maps (walks, seconds, seed, generator) to players. A scenario may add an ending, which
    makes its walks longer than `seconds`.
    """

    walks: int
    seconds: int
    make: Callable[[int, int, int, torch.Generator], list[Player]]


# -- scenarios -------------------------------------------------------------------------------------


def _still(number: int, seconds: int, seed: int, generator: torch.Generator) -> list[Player]:
    """Hold no keys."""
    return _players(_open_places(number, generator), [_rest(seconds)] * number, seed, generator)


def _idle_spells(number: int, seconds: int, seed: int, generator: torch.Generator) -> list[Player]:
    """Hold random keys, with a pause after each period."""
    latents = LATENTS_A_SECOND * seconds
    keys = [_played_keys(latents, generator, idle=1.0, idle_s=PAUSE_S) for _ in range(number)]
    return _players(free_places(number, generator), keys, seed, generator)


def _straight(number: int, seconds: int, seed: int, generator: torch.Generator) -> list[Player]:
    """Hold `w` along the longest free path that crosses the border of the period, then turn around
    and walk back.
    """
    latents = LATENTS_A_SECOND * seconds
    starts, yaw = free_places(128 * number, generator)
    path = _along(starts, yaw, latents)
    walked = path.diff(dim=1).norm(dim=2).sum(dim=1)
    cell = torch.floor(path / PERIOD + 0.5)
    crosses = (cell != cell[:, :1]).any(dim=2).any(dim=1)
    chosen = (walked + crosses * latents * STEP_M).argsort(descending=True, stable=True)[:number]
    keys = [
        ["w"] * latents + [side] * HALF_TURN + ["w"] * 5 * LATENTS_A_SECOND
        for side in _sides(number)
    ]
    return _players(
        (starts[chosen], yaw[chosen]), keys, seed, generator, turned_at=1 + latents + HALF_TURN
    )


def _wall(number: int, seconds: int, seed: int, generator: torch.Generator) -> list[Player]:
    """Walk into a wall, stay there (every second player continues to hold `w`), turn around and
    walk away.
    """
    latents = LATENTS_A_SECOND * seconds
    starts, yaw = free_places(64 * number, generator)
    moved = _along(starts, yaw, APPROACH_LATENTS + 8).diff(dim=1).norm(dim=2)
    stopped = (moved[:, APPROACH_LATENTS - 4 :].amax(dim=1) < 1e-4) & (
        moved[:, :4].amin(dim=1) > 0.9 * STEP_M
    )
    chosen = stopped.nonzero()[:number, 0]
    assert len(chosen) == number, "a way in twelve ends at a wall"
    keys = [
        ["w"] * APPROACH_LATENTS + [held] * latents + [side] * HALF_TURN + ["w"] * latents
        for held, side in zip(["w", ""] * number, _sides(number), strict=False)
    ]
    turned_at = 1 + APPROACH_LATENTS + latents + HALF_TURN
    return _players((starts[chosen], yaw[chosen]), keys, seed, generator, turned_at=turned_at)


def _spin(number: int, seconds: int, seed: int, generator: torch.Generator) -> list[Player]:
    """Hold one look key."""
    keys = [[side] * (LATENTS_A_SECOND * seconds) for side in _sides(number)]
    return _players(free_places(number, generator), keys, seed, generator)


def _back_and_forth(
    number: int, seconds: int, seed: int, generator: torch.Generator
) -> list[Player]:
    """Hold one key for one to four seconds, then its opposite for the same time, and so on.
    Successive players start, in turn, with walking forward, moving left and looking right.
    """
    keys = []
    for index in range(number):
        key = "wal"[index % 3]
        period = round(LATENTS_A_SECOND * _between(1.0, 4.0, generator))
        there_and_back = [key] * period + [key.translate(_OPPOSITE)] * period
        latents = LATENTS_A_SECOND * seconds
        keys.append((there_and_back * math.ceil(latents / len(there_and_back)))[:latents])
    return _players(_open_places(number, generator), keys, seed, generator)


def _bot(number: int, seconds: int, seed: int, generator: torch.Generator) -> list[Player]:
    """Hold random keys or, in a share `IDLE_SHARE` of the periods, no keys, and switch the prompt
    from time to time. Each start position is used for three walks.
    """
    latents = LATENTS_A_SECOND * seconds
    starts, yaw = _open_places(math.ceil(number / len(STYLES)), generator)
    three = torch.arange(number) // len(STYLES)
    keys = [_bot_keys(latents, generator) for _ in range(number)]
    return _players((starts[three], yaw[three]), keys, seed, generator, switches=True)


def _home(number: int, seconds: int, seed: int, generator: torch.Generator) -> list[Player]:
    """Walk away for `seconds`, undo every key, and rest for a second at the start position."""
    starts, yaw = _open_places(number, generator)
    away = _free_keys(starts, yaw, LATENTS_A_SECOND * seconds, generator)
    return _players(
        (starts, yaw), [[*keys, *undone(keys), *_rest(1)] for keys in away], seed, generator
    )


SCENARIOS: dict[str, Scenario] = {
    "still": Scenario(3, 120, _still),
    "idle_spells": Scenario(3, 120, _idle_spells),
    "straight": Scenario(5, 60, _straight),
    "wall": Scenario(5, 10, _wall),
    "spin": Scenario(3, 60, _spin),
    "back_and_forth": Scenario(3, 60, _back_and_forth),
    "bot": Scenario(9, 300, _bot),
    "home": Scenario(3, 300, _home),
}


def players(
    name: str, seed: int, *, walks: int | None = None, seconds: int | None = None
) -> list[Player]:
    """Draw a scenario's walks, which depend only on the seed. `walks` is the number of walks (None:
    the scenario's own number), and `seconds` is the maximum duration.
    """
    scenario = SCENARIOS[name]
    generator = torch.Generator().manual_seed(
        seed + HELD_OUT + 10_000 * (1 + list(SCENARIOS).index(name))
    )
    length = scenario.seconds if seconds is None else min(scenario.seconds, seconds)
    return scenario.make(scenario.walks if walks is None else walks, length, seed, generator)


def undone(keys: Sequence[str]) -> list[str]:
    """Return the keys that would lead back to the start of `keys` if there were no obstacles. The
    result is one latent frame longer than `keys`.

    In each latent frame, the camera first turns and then moves. On the way back, it must therefore
    move first: each movement is undone together with the next latent frame's turn.
    """
    looks = [_only(held, "jlik").translate(_OPPOSITE) for held in keys]
    moves = [_only(held, "wsad").translate(_OPPOSITE) for held in keys]
    back = [move + look for move, look in zip(moves, [*looks[1:], ""], strict=True)]
    return [*reversed(back), looks[0]]


def _players(
    positions: tuple[torch.Tensor, torch.Tensor],
    keys: Sequence[Sequence[str]],
    seed: int,
    generator: torch.Generator,
    *,
    turned_at: int | None = None,
    switches: bool = False,
) -> list[Player]:
    """Return players with these keys. The first latent frame of a walk is the start image, and the
    styles alternate between players.

    Walks are extended to whole chunks of three latent frames.
    """
    out = []
    for index, held in enumerate(keys):
        fill = -(1 + len(held)) % LATENTS_A_CHUNK
        style = index % len(STYLES)
        prompts = {0: _prompt(style, generator)}
        while switches:
            gap = LATENTS_A_SECOND * _between(*SWITCH_S, generator)
            at = LATENTS_A_CHUNK * round((max(prompts) + gap) / LATENTS_A_CHUNK)
            if at >= len(held):
                break
            last = _STYLE_OF[prompts[max(prompts)]]
            prompts[at] = _prompt(
                (last + int(torch.randint(1, 3, (), generator=generator))) % 3, generator
            )
        x_m, z_m = positions[0][index].tolist()
        all_keys = ("", *held, *[""] * fill)
        walk = Played(
            (x_m, z_m), float(positions[1][index]), all_keys, style, prompts, seed * 1000 + index
        )
        out.append(Player(walk, turned_at))
    return out


def _open_places(number: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw positions with three metres of free space ahead, because a wall at arm's length has no
    edges for comparing sharpness.
    """
    starts, yaw = free_places(16 * number, generator)
    path = _along(starts, yaw, 6)
    free = ((path[:, -1] - path[:, 0]).norm(dim=1) > 0.999 * 6 * STEP_M).nonzero()[:number, 0]
    assert len(free) == number, "a way in three is free for so far"
    return starts[free], yaw[free]


def _along(starts: torch.Tensor, yaw: torch.Tensor, latents: int) -> torch.Tensor:
    """Return the positions [N, 1 + latents, 2] of walkers that hold `w`."""
    keys = torch.full((len(starts), 1 + latents), key_bits("w"), dtype=torch.uint8)
    return scripted_walks(starts, yaw, keys).positions


def _bot_keys(latents: int, generator: torch.Generator) -> list[str]:
    """Return random keys with pauses. Pauses make up a share `IDLE_SHARE` of all periods. Because a
    pause never follows another pause, a larger share of the periods with keys must be followed by a
    pause.
    """
    return _played_keys(latents, generator, idle=IDLE_SHARE / (1 - IDLE_SHARE), idle_s=BURST_S)


def _played_keys(
    latents: int, generator: torch.Generator, *, idle: float, idle_s: tuple[float, float]
) -> list[str]:
    """Return periods of held keys, each with keys that differ from those of the previous period.
    With probability `idle`, a period is followed by a pause. `idle_s` is the shortest and longest
    duration of a pause in seconds.
    """
    out: list[str] = []
    held, pitch, may_pause = "", 0.0, False
    while len(out) < latents:
        if may_pause and float(torch.rand((), generator=generator)) < idle:
            out += [""] * _latents(*idle_s, generator)
            may_pause = False
            continue
        drawn = _other_keys(held, generator)
        count = _latents(*BURST_S, generator)
        if _only(drawn, "ik"):  # look in the direction with more room
            drawn = _only(drawn, "wsadjl") + ("k" if pitch > 0 else "i")
            if drawn == held:
                continue
            count = min(count, int((LARGEST_PITCH + abs(pitch)) // PITCH_DEGREES))
            pitch += count * (PITCH_DEGREES if "i" in drawn else -PITCH_DEGREES)
        held, may_pause = drawn, True
        out += [held] * count
    return out[:latents]


def _other_keys(last: str, generator: torch.Generator) -> str:
    weights = torch.tensor([weight * (keys != last) for keys, weight in _HABITS])
    return _HABITS[int(torch.multinomial(weights, 1, generator=generator))][0]


def _free_keys(
    starts: torch.Tensor, yaw: torch.Tensor, latents: int, generator: torch.Generator
) -> list[list[str]]:
    """For each start position, return the keys of a bot whose walk can be undone. The bot turns
    instead of touching a wall, and never looks further up or down than `LARGEST_PITCH`.
    """
    number = len(starts)
    wished = [_bot_keys(latents, generator) for _ in range(number)]
    headings = torch.rad2deg(yaw.double()).tolist()
    positions = starts.double().tolist()
    poses = torch.stack(
        [world_pose(x, z, heading) for (x, z), heading in zip(positions, headings, strict=True)]
    )
    pitch = torch.zeros(number, dtype=torch.float64)
    out: list[list[str]] = [[] for _ in range(number)]
    evading = [0] * number
    sides = _sides(number)
    for latent in range(latents):
        held = [
            sides[index] if evading[index] else wished[index][latent] for index in range(number)
        ]
        _, looked = move_cameras(poses, pitch, CameraMotion.of_keys(held), STEP_M)
        held = [
            _only(keys, "wsadjl") if beyond else keys
            for keys, beyond in zip(held, (looked.abs() > LARGEST_PITCH).tolist(), strict=True)
        ]
        free, _ = move_cameras(poses, pitch, CameraMotion.of_keys(held), STEP_M)
        after, _ = move_cameras(poses, pitch, CameraMotion.of_keys(held), STEP_M, village_grid())
        touches = ((free - after)[:, 0:3:2, 3].norm(dim=1) > 1e-9).tolist()
        for index in range(number):
            evading[index] = 6 if touches[index] else max(0, evading[index] - 1)
            held[index] = sides[index] if touches[index] else held[index]
            out[index].append(held[index])
        poses, pitch = move_cameras(
            poses, pitch, CameraMotion.of_keys(held), STEP_M, village_grid()
        )
    return out


def _sides(number: int) -> list[str]:
    return ["lj"[index % 2] for index in range(number)]


def _rest(seconds: int) -> list[str]:
    return [""] * (LATENTS_A_SECOND * seconds)


def _only(held: str, keys: str) -> str:
    return "".join(key for key in held if key in keys)


def _between(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator))


def _latents(shortest_s: float, longest_s: float, generator: torch.Generator) -> int:
    """Draw a time as a number of latent frames, log-uniformly."""
    return round(
        LATENTS_A_SECOND * math.exp(_between(math.log(shortest_s), math.log(longest_s), generator))
    )


def _prompt(style: int, generator: torch.Generator) -> str:
    prompts = PROMPTS[STYLES[style]]
    return prompts[int(torch.randint(len(prompts), (), generator=generator))]


# -- measures --------------------------------------------------------------------------------------


def truth_of(renderer: Renderer, player: Player) -> torch.Tensor:
    """Render a walk's expected frames, uint8 [L, H, W, 3] on the CPU. Identical views are rendered
    only once.
    """
    path, styles = player.walk.walk(), player.styles()
    views = torch.cat(
        (path.positions[0].double(), path.yaw[0, :, None], path.pitch[0, :, None], styles[:, None]),
        dim=1,
    )
    views, which = torch.unique(views, dim=0, return_inverse=True)
    images = renderer.render(
        views[:, :2].float(), views[:, 2].float(), views[:, 3].float(), views[:, 4].long()
    )
    return images.cpu()[which]


@dataclass(frozen=True)
class Seconds:
    """Measures of one walk, with one value per second.

    `village` (bool [L]) marks the latent frames in which a village is recognised, and `judged`
    (bool [L]) marks the frames that are judged.
    """

    values: dict[str, list[float | None]]
    village: torch.Tensor
    judged: torch.Tensor

    def share(self) -> float | None:
        """Return the share of judged frames in which a village is recognised, or None if no frame
        is judged.
        """
        judged = self.village[self.judged].float()
        return _rounded(judged.mean()) if len(judged) else None


def measured(
    made_LHW3: torch.Tensor, truth_LHW3: torch.Tensor, player: Player, recogniser: Recogniser
) -> Seconds:
    """Measure one walk. Frames are uint8, one per latent frame, with the start image first."""
    styles, before = player.styles(), player.styles_before()
    accepted = recogniser.villages(made_LHW3, styles)
    late = before != styles
    accepted[late] |= recogniser.villages(made_LHW3[late], before[late])
    accepted |= _same_view(made_LHW3, truth_LHW3)
    path = player.walk.walk()
    judged_L = recogniser.villages(truth_LHW3, styles)
    judged_L &= open_views(path.positions[0], path.yaw[0], path.pitch[0])
    accepted, judged_L = accepted[1:], judged_L[1:]
    values: dict[str, list[float | None]] = {
        name: [] for name in ("psnr", "start_psnr", "sharpness", "contrast", "village")
    }
    start = unit(truth_LHW3[:1])
    for second in range(player.seconds):
        part = slice(LATENTS_A_SECOND * second, LATENTS_A_SECOND * (second + 1))
        made, truth = unit(made_LHW3[1:][part])[None], unit(truth_LHW3[1:][part])[None]
        values["psnr"].append(_rounded(likeness.psnr(made, truth)))
        values["start_psnr"].append(_rounded(likeness.psnr(made, start.expand_as(made[0])[None])))
        values["sharpness"].append(_rounded(likeness.sharpness(made, truth)))
        values["contrast"].append(_rounded(_deviation(made) / _deviation(truth).clamp(min=1e-6)))
        judged = judged_L[part]
        values["village"].append(
            _rounded(accepted[part][judged].float().mean()) if bool(judged.any()) else None
        )
    return Seconds(values, accepted, judged_L)


def _same_view(made_LHW3: torch.Tensor, truth_LHW3: torch.Tensor) -> torch.Tensor:
    """Return whether each frame's PSNR against the ground truth is at least `SAME_VIEW_DB`,
    bool [L].
    """
    error_L = (made_LHW3.float() - truth_LHW3.float()).square().mean(dim=(1, 2, 3))
    return error_L <= 255**2 / 10 ** (SAME_VIEW_DB / 10)


def again(seconds: Seconds, turned_at: int) -> float | None:
    """Return the seconds from the end of a turn until a village is recognised in three of four
    consecutive frames, or None if this never happens.

    Frames that are not judged are ignored.
    """
    judged = seconds.village[turned_at - 1 :][seconds.judged[turned_at - 1 :]].float()
    if len(judged) < LATENTS_A_SECOND:
        return None
    found = (judged.unfold(0, LATENTS_A_SECOND, 1).sum(dim=1) >= LATENTS_A_SECOND - 1).nonzero()
    return float(found[0]) / LATENTS_A_SECOND if len(found) else None


def tens(values: Sequence[float | None]) -> list[float]:
    """Return the mean over each ten seconds, or a single mean if the walk is shorter."""
    numbers = [value for value in values if value is not None]
    step = min(10, len(numbers))
    return [
        round(sum(numbers[at : at + step]) / step, 3)
        for at in range(0, len(numbers) - step + 1, step)
    ]


def _deviation(frames_1T3HW: torch.Tensor) -> torch.Tensor:
    """Return the standard deviation of a frame's values, averaged over frames."""
    return frames_1T3HW.flatten(2).std(dim=2).mean()


def _rounded(value: torch.Tensor) -> float:
    return round(float(value), 3)


# -- everything together ---------------------------------------------------------------------------


def score_players(
    world: World,
    renderer: Renderer,
    *,
    seed: int,
    names: Sequence[str] = (),
    walks: int | None = None,
    seconds: int | None = None,
) -> dict[str, Any]:
    """Measure a world in the named scenarios, or in all scenarios if `names` is empty. `walks` and
    `seconds` are the arguments of `players`.
    """
    recogniser = shipped()
    scenarios: dict[str, Any] = {}
    for name in names or SCENARIOS:
        drawn = players(name, seed, walks=walks, seconds=seconds)
        truths = [truth_of(renderer, player) for player in drawn]
        print(f"{name}: {len(drawn)} walks of {drawn[0].seconds} s", file=sys.stderr, flush=True)
        videos = world.play(
            [player.walk for player in drawn], torch.stack([truth[0] for truth in truths])
        )
        found = [
            measured(video[::4], truth, player, recogniser)
            for video, truth, player in zip(videos, truths, drawn, strict=True)
        ]
        scenarios[name] = _summary(name, drawn, found)
    return {"seed": seed, "scenarios": scenarios, "table": table(scenarios)}


def _summary(name: str, drawn: Sequence[Player], found: Sequence[Seconds]) -> dict[str, Any]:
    out: dict[str, Any] = {
        "walks": len(drawn),
        "seconds": drawn[0].seconds,
        "styles": [STYLES[player.walk.style] for player in drawn],
        "lowest_ten_seconds_psnr": min(min(tens(walk.values["psnr"])) for walk in found),
        "village_share": [walk.share() for walk in found],
        "judged": [_rounded(walk.judged.float().mean()) for walk in found],
    }
    turned = [(walk, player.turned_at) for walk, player in zip(found, drawn, strict=True)]
    if name in ("straight", "wall"):
        out["again_s"] = [again(walk, at) for walk, at in turned if at is not None]
    retained = ["psnr", "sharpness", "contrast", "village"]
    retained += ["start_psnr"] if name in ("still", "home") else []
    return out | {key: [walk.values[key] for walk in found] for key in retained}


def table(scenarios: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the measures that have a target, for the scenarios played. Each entry holds the
    measure, its value, its target, and whether the target is met.
    """
    rows: list[dict[str, Any]] = []

    def add(measure_: str, value: Any, target: str, met: bool, aim: str = "") -> None:
        rows.append(
            {"measure": measure_, "value": value, "target": target, "met": met}
            | ({"aim": aim} if aim else {})
        )

    if still := scenarios.get("still"):
        lowest = min(min(walk) for walk in still["start_psnr"])
        add(
            "still: PSNR against the start image, lowest second",
            lowest,
            ">= 22 dB",
            lowest >= 22,
            "27 dB",
        )
        low, high = (
            min(min(walk) for walk in still["sharpness"]),
            max(max(walk) for walk in still["sharpness"]),
        )
        add(
            "still: sharpness, lowest and highest second",
            [low, high],
            "0.8 to 1.2",
            low >= 0.8 and high <= 1.2,
        )
    if bot := scenarios.get("bot"):
        lowest = bot["lowest_ten_seconds_psnr"]
        add("bot: PSNR, lowest mean of ten seconds", lowest, ">= 18 dB", lowest >= 18, "22 dB")
        shares = [share or 0.0 for share in bot["village_share"]]  # None: no frame was judged
        share = round(statistics.fmean(shares, bot["judged"]), 4) if any(bot["judged"]) else 0.0
        add("bot: share of frames that are a village", share, ">= 0.98", share >= 0.98, "1")
        share = min((share for share in bot["village_share"] if share is not None), default=0.0)
        add(
            "bot: share of frames that are a village, lowest walk",
            share,
            ">= 0.98",
            share >= 0.98,
            "1",
        )
    walls = [name for name in ("straight", "wall") if name in scenarios]
    turned = [value for name in walls for value in scenarios[name].get("again_s", ())]
    if turned:
        soon = sum(value is not None and value <= AGAIN_S for value in turned)
        target = f"{len(turned)} of {len(turned)} within {AGAIN_S:g} s"
        add(
            f"{' and '.join(walls)}: a village again after turning away",
            soon,
            target,
            soon == len(turned),
        )
    if home := scenarios.get("home"):
        lowest = min(walk[-1] for walk in home["start_psnr"])
        add(
            "home: PSNR against the start image, last second",
            lowest,
            ">= 20 dB",
            lowest >= 20,
            "24 dB",
        )
    return rows
