# SPDX-License-Identifier: Apache-2.0
"""Walks through the village: the held keys and the resulting poses.

The package's own integrator (`vllm_omni.worlds.movement`) moves the walkers among the walls of the
village, so training, ground truth and server agree. A walk's first latent frame is the start image,
which held keys do not affect. The network receives the motion that actually took place, for example
after a collision. All random numbers are drawn on the CPU from one seed, so a walk is the same on
every machine. Tested by tests/training/tiny_world/test_walks.py.
"""

# N walks, L latent frames, T = 4 (L - 1) + 1 video frames

import math
from dataclasses import dataclass, fields
from functools import cache
from typing import ClassVar

import torch

from training.tiny_world.village import PERIOD, PITCH_LIMIT_DEGREES, Village, wrap
from vllm_omni.model_executor.models.lingbot_world.camera import ACTION_SPACE
from vllm_omni.worlds import movement
from vllm_omni.worlds.grid import OccupancyGrid
from vllm_omni.worlds.movement import (
    PITCH_DEGREES,
    YAW_DEGREES,
    CameraMotion,
    inverse_poses,
    move_cameras,
    rotation,
)

STEP_M = 0.5
"""Distance in metres that a walker moves per latent frame while a movement key is held. The
corresponding speed is 2 m/s at 16 frames per second.
"""
_GRID_CELLS = 300
"""Cells per side of the occupancy grid. Each cell is 10 cm wide."""
_COMMON_PITCH, _RARE_PITCH = 48, 85
"""Largest angles in degrees by which walkers look up or down: the first for most walkers, the
second for one in four.
"""
KEYS = ACTION_SPACE.button_names
_BIT = {key: 1 << index for index, key in enumerate(KEYS)}

_LOOK_VERTICALLY = _BIT["i"] | _BIT["k"]

# (keys, weight) from which a random walker's next held keys are drawn
_HABITS = (
    ("w", 0.40),
    ("wl", 0.13),
    ("wj", 0.13),
    ("l", 0.05),
    ("j", 0.05),
    ("", 0.03),
    ("s", 0.04),
    ("a", 0.03),
    ("d", 0.03),
    ("wa", 0.015),
    ("wd", 0.015),
    ("i", 0.05),
    ("k", 0.05),
    ("li", 0.02),
    ("jk", 0.02),
)


@dataclass(frozen=True)
class Walks:
    """Several walks.

    `keys`, uint8 [N, L], is a bitmask in the order of `KEYS`. `positions`, [N, L, 2], holds x, z in
    metres, and `yaw` and `pitch`, [N, L], are in radians. `relative`, fp32 [N, L, 3, 4], holds each
    pose relative to the previous one, with one step as the unit of length.
    """

    keys: torch.Tensor
    positions: torch.Tensor
    yaw: torch.Tensor
    pitch: torch.Tensor
    relative: torch.Tensor

    def __len__(self) -> int:
        return len(self.keys)

    def frames(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the video frames' positions [N, T, 2], yaw and pitch [N, T], interpolated
        linearly.
        """
        return (
            _between(self.positions),
            _between(self.yaw[..., None])[..., 0],
            _between(self.pitch[..., None])[..., 0],
        )

    def held(self, walk: int) -> list[str]:
        """Return one walk's held keys, one string per latent frame."""
        return [
            "".join(key for key in KEYS if bits & _BIT[key]) for bits in self.keys[walk].tolist()
        ]

    def world_poses(self) -> torch.Tensor:
        """Return camera-to-world poses in metres, fp64 [N, L, 4, 4]."""
        return poses_of(self.positions, self.yaw, self.pitch)

    def part(self, start: int, end: int) -> "Walks":
        return Walks(*(getattr(self, field.name)[start:end] for field in fields(self)))


def poses_of(positions: torch.Tensor, yaw: torch.Tensor, pitch: torch.Tensor) -> torch.Tensor:
    """Return the poses, fp64 [..., 4, 4], of cameras at positions x, z [..., 2] with the given yaw
    and pitch [...] in radians.
    """
    yaw_N, pitch_N = (torch.rad2deg(angle.double().flatten()) for angle in (yaw, pitch))
    poses = torch.eye(4, dtype=torch.float64).repeat(len(yaw_N), 1, 1)
    poses[:, :3, :3] = rotation(1, yaw_N) @ rotation(0, pitch_N)
    poses[:, 0:3:2, 3] = positions.double().flatten(0, -2)
    return poses.view(*yaw.shape, 4, 4)


@cache
def village_grid() -> OccupancyGrid:
    """Return the occupancy grid. A cell is blocked if it is inside an obstacle, or closer to an
    obstacle than the obstacle's clearance.
    """
    middle = (torch.arange(_GRID_CELLS, dtype=torch.float64) + 0.5) / _GRID_CELLS - 0.5
    z, x = torch.meshgrid(-middle * PERIOD, middle * PERIOD, indexing="ij")
    return OccupancyGrid(
        _obstructed(torch.stack((x, z), dim=-1), Village.build().obstacles_N6.double()), PERIOD
    )


def random_walks(number: int, length: int, seed: int, *, drills: float = 0.1) -> Walks:
    """Draw random walks, which start at free positions and may come close to walls.

    A walker alternates between several ways of playing: it wanders and turns away from walls, walks
    into walls, stands still for up to a minute, spins, presses random keys, holds arbitrary keys
    for up to eight seconds, looks up or down, or moves with a stick at varying speeds. A fraction
    `drills` of the walkers perform drills instead (`_drills`).
    """
    generator = torch.Generator().manual_seed(seed)
    start, yaw = free_places(number, generator)
    drill = _drills(number, length, generator)
    is_drill = torch.rand(number, generator=generator) < drills
    walker = _Walker(start, yaw)
    draws = _Habits(number, generator)
    for latent in range(length):
        keys, scale = draws.next(walker)
        keys = torch.where(is_drill, drill[:, latent], keys)
        walker.step(walker.level(keys, draws.largest_pitch), torch.where(is_drill, 1.0, scale))
    return walker.walks()


def scripted_walks(
    start_N2: torch.Tensor,
    yaw_N: torch.Tensor,
    keys_NL: torch.Tensor,
    pitch_N: torch.Tensor | None = None,
) -> Walks:
    """Move cameras from given positions with given keys (a bitmask as in `Walks.keys`), as the
    served world would. `pitch_N` is in radians.
    """
    walker = _Walker(start_N2, yaw_N, pitch_N, PITCH_LIMIT_DEGREES)
    for latent in range(keys_NL.shape[1]):
        walker.step(keys_NL[:, latent])
    return walker.walks()


def key_bits(keys: str) -> int:
    return sum(_BIT[key] for key in keys)


def free_places(number: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return free positions, [number, 2] in metres, and headings in radians."""
    draws = (torch.rand(number * 4 + 64, 2, generator=generator) - 0.5) * PERIOD
    free = draws[~village_grid().blocked(draws.double())][:number]
    yaw = torch.rand(number, generator=generator) * 2 * math.pi
    assert len(free) == number, "most of the village is free"
    return free, yaw


class _Habits:
    """Draws the keys for many random walkers. Each walker plays in one way for a while, and then a
    new way is drawn.
    """

    # Way of playing -> (weight, shortest and longest number of latent frames). The number is drawn
    # log-uniformly.
    WAYS: ClassVar[dict[str, tuple[float, int, int]]] = {
        "wander": (0.46, 8, 60),
        "careless": (0.12, 4, 24),
        "idle": (0.12, 2, 240),
        "spin": (0.03, 8, 120),
        "mash": (0.07, 2, 24),
        "stick": (0.08, 4, 40),
        "hold": (0.07, 16, 80),
        "gaze": (0.08, 2, 16),
    }

    def __init__(self, number: int, generator: torch.Generator) -> None:
        self.number, self.generator = number, generator
        self.codes = torch.tensor([key_bits(keys) for keys, _ in _HABITS], dtype=torch.uint8)
        self.weights = torch.tensor([weight for _, weight in _HABITS])
        self.ways = torch.tensor([weight for weight, _, _ in self.WAYS.values()])
        self.spans = torch.tensor(
            [[low, high] for _, low, high in self.WAYS.values()], dtype=torch.float64
        )
        self.way = torch.zeros(number, dtype=torch.long)
        self.way_left = torch.zeros(number)
        self.keys = torch.zeros(number, dtype=torch.uint8)
        self.keys_left = torch.zeros(number, dtype=torch.long)
        self.scale = torch.ones(number, dtype=torch.float64)
        self.evading = torch.zeros(number, dtype=torch.bool)
        rare = self._uniform() < 1 / 4
        self.largest_pitch = torch.where(rare, _RARE_PITCH, _COMMON_PITCH)

    def next(self, walker: "_Walker") -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys that each walker holds in the next latent frame, uint8 [N], and the scale
        of its motion.
        """
        names = list(self.WAYS)
        fresh = self.way_left <= 0
        way = torch.multinomial(self.ways, self.number, replacement=True, generator=self.generator)
        low, high = self.spans[way].unbind(1)
        self.way = torch.where(fresh, way, self.way)
        self.way_left = torch.where(fresh, low * (high / low) ** self._uniform(), self.way_left) - 1
        is_way = {name: self.way == index for index, name in enumerate(names)}

        over = fresh | (self.keys_left <= 0) | is_way["mash"]
        drawn = self.codes[
            torch.multinomial(self.weights, self.number, replacement=True, generator=self.generator)
        ]
        mashed = torch.randint(256, (self.number,), generator=self.generator).to(torch.uint8)
        mashed &= torch.randint(256, (self.number,), generator=self.generator).to(torch.uint8)
        drawn = torch.where(is_way["mash"], mashed, drawn)
        side = torch.where(self._uniform() < 0.5, _BIT["j"], _BIT["l"]).to(torch.uint8)
        drawn = torch.where(is_way["spin"], side, torch.where(is_way["idle"], 0, drawn))
        vertical = torch.where(self._uniform() < 0.5, _BIT["i"], _BIT["k"]).to(torch.uint8)
        drawn = torch.where(is_way["gaze"], (mashed & ~_LOOK_VERTICALLY) | vertical, drawn)
        drawn = torch.where(is_way["hold"], mashed, drawn).to(torch.uint8)
        whole_way = is_way["spin"] | is_way["idle"] | is_way["gaze"]
        span = torch.where(
            whole_way, 10_000, torch.randint(2, 9, (self.number,), generator=self.generator)
        )
        span = torch.where(is_way["hold"], (2 * 16 ** self._uniform()).long(), span)
        self.keys = torch.where(over, drawn, self.keys)
        self.keys_left = torch.where(over, span, self.keys_left) - 1
        speed = torch.where(is_way["stick"], 0.15 + 2.0 * self._uniform(), 1.0)
        self.scale = torch.where(over, speed, self.scale)

        # A wanderer turns away from an obstacle until the way is free, and then walks on.
        blocked = walker.blocked_ahead()
        free_again = self.evading & ~blocked & ~fresh
        self.keys = torch.where(free_again, _BIT["w"], self.keys).to(torch.uint8)
        stuck = is_way["wander"] & ((self.keys & _BIT["w"]) > 0) & blocked
        slides = self._uniform() < 0.6  # keep moving along the obstacle while turning
        self.keys = torch.where(
            stuck & ~self.evading, torch.where(slides, side | _BIT["w"], side), self.keys
        )
        self.keys_left = torch.where((stuck & ~self.evading) | free_again, span, self.keys_left)
        self.evading = stuck | (self.evading & blocked & ~over)
        return self.keys, self.scale

    def _uniform(self) -> torch.Tensor:
        return torch.rand(self.number, generator=self.generator, dtype=torch.float64)


def _drills(number: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Return the drill keys, uint8 [number, length]. A drill turns in one direction throughout, or
    repeatedly turns away for some latent frames and back for the same number. Drills may start with
    a short pause, and some of them also walk forward.
    """
    direction = torch.where(torch.rand(number, generator=generator) < 0.5, _BIT["j"], _BIT["l"])
    back = torch.where(direction == _BIT["j"], _BIT["l"], _BIT["j"])
    period = torch.randint(3, 16, (number,), generator=generator)
    pause = torch.randint(0, 3, (number,), generator=generator)
    returns = torch.rand(number, generator=generator) < 0.6
    walks = torch.rand(number, generator=generator) < 0.15
    latent = torch.arange(length)[None] - pause[:, None]
    phase = torch.remainder(latent, 2 * period[:, None])
    keys = torch.where(
        returns[:, None] & (phase >= period[:, None]), back[:, None], direction[:, None]
    )
    keys = keys | torch.where(walks, _BIT["w"], 0)[:, None]
    return torch.where(latent < 0, 0, keys).to(torch.uint8)


class _Walker:
    """State of many walkers, with a record of every latent frame."""

    def __init__(
        self,
        start_N2: torch.Tensor,
        yaw_N: torch.Tensor,
        pitch_N: torch.Tensor | None = None,
        pitch_limit_degrees: float = movement.PITCH_LIMIT_DEGREES,
    ) -> None:
        self.pitch_limit_degrees = pitch_limit_degrees
        self.yaw = torch.rad2deg(yaw_N.double())
        self.degrees = (
            torch.zeros_like(self.yaw) if pitch_N is None else torch.rad2deg(pitch_N.double())
        )
        self.poses = poses_of(start_N2, yaw_N, torch.deg2rad(self.degrees))
        self.rows: list[tuple[torch.Tensor, ...]] = []

    def level(self, keys: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        """Replace look keys that would tilt the camera beyond `largest` degrees with the opposite
        keys.
        """
        up = ((keys & _BIT["i"]) > 0) & (self.degrees + 3 * PITCH_DEGREES > largest)
        down = ((keys & _BIT["k"]) > 0) & (self.degrees - 3 * PITCH_DEGREES < -largest)
        return torch.where(up, _BIT["k"], torch.where(down, _BIT["i"], keys)).to(torch.uint8)

    def blocked_ahead(self) -> torch.Tensor:
        ahead = torch.stack((torch.deg2rad(self.yaw).sin(), torch.deg2rad(self.yaw).cos()), dim=1)
        position = self.poses[:, 0:3:2, 3]
        probes = torch.stack([position + ahead * STEP_M * step for step in (1, 2)])
        return village_grid().blocked(probes).any(dim=0)

    def step(self, keys_N: torch.Tensor, scale_N: torch.Tensor | float = 1.0) -> None:
        before = self.poses
        if self.rows:  # the first latent frame is the start image
            motion = _motion(keys_N, scale_N)
            self.poses, degrees = move_cameras(
                before, self.degrees, motion, STEP_M, village_grid(), self.pitch_limit_degrees
            )
            self.yaw, self.degrees = self.yaw + motion.yaw_degrees, degrees
        relative = (inverse_poses(before) @ self.poses)[:, :3]
        relative[:, :, 3] /= STEP_M
        position = self.poses[:, 0:3:2, 3]
        yaw, pitch = torch.deg2rad(self.yaw), torch.deg2rad(self.degrees)
        self.rows.append(
            (keys_N.to(torch.uint8), position.float(), yaw.float(), pitch.float(), relative.float())
        )

    def walks(self) -> Walks:
        return Walks(*(torch.stack(values, dim=1) for values in zip(*self.rows, strict=True)))


def _motion(keys_N: torch.Tensor, scale_N: torch.Tensor | float) -> CameraMotion:
    """Return the motion for keys given as a bitmask. `scale_N` scales the motion, as an analogue
    stick does.
    """
    held = {key: ((keys_N & bit) > 0).double() * scale_N for key, bit in _BIT.items()}
    return CameraMotion(
        ahead=held["w"] - held["s"],
        aside=held["d"] - held["a"],
        up=torch.zeros_like(held["w"]),
        yaw_degrees=YAW_DEGREES * (held["l"] - held["j"]),
        pitch_degrees=PITCH_DEGREES * (held["i"] - held["k"]),
    )


def _obstructed(slots: torch.Tensor, obstacles_N6: torch.Tensor) -> torch.Tensor:
    """Return whether each position [..., 2] is closer to any obstacle (a rotated rectangle) than
    that obstacle's clearance.
    """
    x, z, width, depth, heading, clearance = obstacles_N6.to(slots.dtype).unbind(1)
    dx, dz = slots[..., :1] - x, slots[..., 1:] - z
    dx, dz = wrap(dx), wrap(dz)
    cos, sin = heading.cos(), heading.sin()
    along = ((cos * dx - sin * dz).abs() - width).clamp(min=0)
    away = ((sin * dx + cos * dz).abs() - depth).clamp(min=0)
    return (torch.hypot(along, away) < clearance).any(dim=-1)


def _between(values_NLC: torch.Tensor) -> torch.Tensor:
    """Interpolate values [N, L, C] at latent frames to [N, 4 (L - 1) + 1, C] at video frames."""
    before, after = values_NLC[:, :-1], values_NLC[:, 1:]
    weights = torch.arange(1, 5, device=values_NLC.device)[:, None] / 4
    between = torch.lerp(before[:, :, None], after[:, :, None], weights).flatten(1, 2)
    return torch.cat((values_NLC[:, :1], between), dim=1)
