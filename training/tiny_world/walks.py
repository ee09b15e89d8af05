# SPDX-License-Identifier: Apache-2.0
"""Walks through the village: held keys, and where they lead.

One set of held keys a latent frame, turned into positions as `camera.py` does it: look first, then move in the plane.
What the network is told (`relative`) is the command; walls and trunks stop or deflect the walker all the same.
Everything is drawn from one seed on the CPU, so a walk is the same on every machine.
Held by tests/training/tiny_world/test_walks.py.
"""

# N walks, L latent frames, T = 4 (L - 1) + 1 video frames

import math
from dataclasses import dataclass

import torch

from training.tiny_world.village import PERIOD, Village, wrap
from vllm_omni.model_executor.models.lingbot_world.camera import ACTION_SPACE, PITCH_DEGREES, YAW_DEGREES

STEP_M = 0.5
"""What one latent frame with a movement key covers: 2 m/s at 16 frames a second."""
_LARGEST_PITCH = 33
KEYS = ACTION_SPACE.button_names
_BIT = {key: 1 << index for index, key in enumerate(KEYS)}

# (keys, weight): what a random walker holds next
_HABITS = (
    ("w", 0.34), ("wl", 0.12), ("wj", 0.12), ("l", 0.10), ("j", 0.10), ("", 0.04), ("s", 0.03), ("a", 0.03),
    ("d", 0.03), ("wa", 0.015), ("wd", 0.015), ("i", 0.02), ("k", 0.02), ("li", 0.01), ("jk", 0.01),
)  # fmt: skip


@dataclass(frozen=True)
class Walks:
    """keys: uint8 [N, L], bits in the order of `KEYS`. positions [N, L, 2] in metres (x, z), yaw and pitch [N, L] in
    radians. relative: fp32 [N, L, 3, 4], the commanded pose relative to the one before, a step being one unit long.
    """

    keys: torch.Tensor
    positions: torch.Tensor
    yaw: torch.Tensor
    pitch: torch.Tensor
    relative: torch.Tensor

    def __len__(self) -> int:
        return len(self.keys)

    def frames(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Positions [N, T, 2], yaw and pitch [N, T] of the video frames, linear between latent frames."""
        return _between(self.positions), _between(self.yaw[..., None])[..., 0], _between(self.pitch[..., None])[..., 0]

    def held(self, walk: int) -> list[str]:
        """The keys of one walk as `integrate_actions` takes them."""
        return ["".join(key for key in KEYS if bits & _BIT[key]) for bits in self.keys[walk].tolist()]

    def part(self, begin: int, end: int) -> "Walks":
        return Walks(*(value[begin:end] for value in (self.keys, self.positions, self.yaw, self.pitch, self.relative)))


def random_walks(number: int, length: int, seed: int, *, drills: float = 0.3) -> Walks:
    """Draw walks from free places. drills: share that turns in place, or away and back, instead of wandering."""
    generator = torch.Generator().manual_seed(seed)
    start, yaw = free_places(number, generator)
    drill = _drills(number, length, generator)
    is_drill = torch.rand(number, generator=generator) < drills
    walker = _Walker(start, yaw)
    weights = torch.tensor([weight for _, weight in _HABITS])
    codes = torch.tensor([sum(_BIT[key] for key in keys) for keys, _ in _HABITS], dtype=torch.uint8)
    holding = torch.zeros(number, dtype=torch.uint8)
    left = torch.zeros(number, dtype=torch.long)
    for latent in range(length):
        fresh = codes[torch.multinomial(weights, number, replacement=True, generator=generator)]
        span = torch.randint(2, 8, (number,), generator=generator)
        evade = torch.where(torch.rand(number, generator=generator) < 0.5, _BIT["j"], _BIT["l"]).to(torch.uint8)
        careless = torch.rand(number, generator=generator) < 0.03
        over = left <= 0
        holding, left = torch.where(over, fresh, holding), torch.where(over, span, left) - 1
        # a walker turns away from what is in the way, and keeps turning until the way is free
        stuck = ((holding & _BIT["w"]) > 0) & walker.blocked_ahead() & ~careless
        turning = ((holding & (_BIT["j"] | _BIT["l"])) > 0) & ((holding & _BIT["w"]) == 0)
        evade = torch.where(turning, holding, evade)
        holding = torch.where(stuck, evade, holding)
        left = torch.where(stuck, torch.randint(3, 9, (number,), generator=generator), left)
        holding = walker.level(holding)
        walker.step(torch.where(is_drill, drill[:, latent], holding))
    return walker.walks()


def scripted_walks(start_N2: torch.Tensor, yaw_N: torch.Tensor, keys_NL: torch.Tensor) -> Walks:
    """Walk given keys (bits as in `Walks.keys`) from given places."""
    walker = _Walker(start_N2, yaw_N)
    for latent in range(keys_NL.shape[1]):
        walker.step(keys_NL[:, latent])
    return walker.walks()


def key_bits(keys: str) -> int:
    return sum(_BIT[key] for key in keys)


def free_places(number: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Places where nothing is in the way, [number, 2] metres, and headings in radians."""
    obstacles = Village.build().obstacles_N6
    draws = (torch.rand(number * 4 + 64, 2, generator=generator) - 0.5) * PERIOD
    free = draws[~_blocked(draws, obstacles, 0.2)][:number]
    yaw = torch.rand(number, generator=generator) * 2 * math.pi
    assert len(free) == number, "most of the village is free"
    return free, yaw


def _drills(number: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """uint8 [number, length]: one direction all along, or away for some latents and back for as many."""
    direction = torch.where(torch.rand(number, generator=generator) < 0.5, _BIT["j"], _BIT["l"])
    back = torch.where(direction == _BIT["j"], _BIT["l"], _BIT["j"])
    period = torch.randint(3, 10, (number,), generator=generator)
    pause = torch.randint(0, 3, (number,), generator=generator)
    returns = torch.rand(number, generator=generator) < 0.6
    walks = torch.rand(number, generator=generator) < 0.15
    latent = torch.arange(length)[None] - pause[:, None]
    phase = torch.remainder(latent, 2 * period[:, None])
    keys = torch.where(returns[:, None] & (phase >= period[:, None]), back[:, None], direction[:, None])
    keys = keys | torch.where(walks, _BIT["w"], 0)[:, None]
    return torch.where(latent < 0, 0, keys).to(torch.uint8)


class _Walker:
    """Many walkers at once; remembers every latent frame."""

    def __init__(self, start_N2: torch.Tensor, yaw_N: torch.Tensor) -> None:
        self.position, self.yaw = start_N2.clone().double(), yaw_N.clone().double()
        self.pitch = torch.zeros_like(self.yaw)
        self.degrees = torch.zeros_like(self.yaw)
        self.obstacles = Village.build().obstacles_N6.double()
        self.rows: list[tuple[torch.Tensor, ...]] = []

    def level(self, keys: torch.Tensor) -> torch.Tensor:
        """Let go of look keys that would go beyond what the walks show."""
        up = ((keys & _BIT["i"]) > 0) & (self.degrees + PITCH_DEGREES > _LARGEST_PITCH)
        down = ((keys & _BIT["k"]) > 0) & (self.degrees - PITCH_DEGREES < -_LARGEST_PITCH)
        return torch.where(up, _BIT["k"], torch.where(down, _BIT["i"], keys)).to(torch.uint8)

    def blocked_ahead(self) -> torch.Tensor:
        ahead = torch.stack((self.yaw.sin(), self.yaw.cos()), dim=1)
        probes = torch.stack([self.position + ahead * STEP_M * step for step in (1, 2, 4)])
        return _blocked(probes, self.obstacles).any(dim=0)

    def step(self, keys_N: torch.Tensor) -> None:
        held = {key: ((keys_N & bit) > 0).double() for key, bit in _BIT.items()}
        pitch_before = self.pitch
        turn = math.radians(YAW_DEGREES) * (held["l"] - held["j"])
        look = PITCH_DEGREES * (held["i"] - held["k"])
        self.degrees = self.degrees + look
        self.pitch = torch.deg2rad(self.degrees)
        ahead, aside = held["w"] - held["s"], held["d"] - held["a"]
        # the command, seen from the pose before: R_before^T R and R_before^T (step)
        relative = torch.zeros(len(keys_N), 3, 4, dtype=torch.float64)
        before = _rotation_x(pitch_before)
        relative[:, :, :3] = before.mT @ _rotation_y(turn) @ _rotation_x(self.pitch)
        step = torch.stack(
            (turn.cos() * aside + turn.sin() * ahead, torch.zeros_like(turn), turn.cos() * ahead - turn.sin() * aside),
            dim=1,
        )
        relative[:, :, 3] = (before.mT @ step[..., None])[..., 0]
        self.yaw = self.yaw + turn
        cos, sin = self.yaw.cos(), self.yaw.sin()
        move = STEP_M * torch.stack((cos * aside + sin * ahead, cos * ahead - sin * aside), dim=1)
        if self.rows:  # the first latent frame is the picture the walk starts from
            self._move(move)
        self.rows.append(
            (keys_N.to(torch.uint8), self.position.float(), self.yaw.float(), self.pitch.float(), relative.float())
        )

    def _move(self, move_N2: torch.Tensor) -> None:
        goal = self.position
        done = torch.zeros(len(goal), dtype=torch.bool)
        for part in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0)):  # whole, else along x, else along z, else not at all
            candidate = self.position + move_N2 * torch.tensor(part, dtype=torch.float64)
            free = ~_blocked(candidate, self.obstacles) & ~done
            goal = torch.where(free[:, None], candidate, goal)
            done |= free
        self.position = goal

    def walks(self) -> Walks:
        return Walks(*(torch.stack(values, dim=1) for values in zip(*self.rows, strict=True)))


def _blocked(places: torch.Tensor, obstacles_N6: torch.Tensor, extra: float = 0.0) -> torch.Tensor:
    """Whether a place [..., 2] is nearer to an obstacle (a turned rectangle) than its clearance."""
    x, z, width, depth, heading, clearance = obstacles_N6.to(places.dtype).unbind(1)
    dx, dz = places[..., :1] - x, places[..., 1:] - z
    dx, dz = wrap(dx), wrap(dz)
    cos, sin = heading.cos(), heading.sin()
    along = ((cos * dx - sin * dz).abs() - width).clamp(min=0)
    away = ((sin * dx + cos * dz).abs() - depth).clamp(min=0)
    return (torch.hypot(along, away) < clearance + extra).any(dim=-1)


def _rotation_x(angle_N: torch.Tensor) -> torch.Tensor:
    cos, sin, one, zero = angle_N.cos(), angle_N.sin(), torch.ones_like(angle_N), torch.zeros_like(angle_N)
    return torch.stack((one, zero, zero, zero, cos, -sin, zero, sin, cos), dim=1).view(-1, 3, 3)


def _rotation_y(angle_N: torch.Tensor) -> torch.Tensor:
    cos, sin, one, zero = angle_N.cos(), angle_N.sin(), torch.ones_like(angle_N), torch.zeros_like(angle_N)
    return torch.stack((cos, zero, sin, zero, one, zero, -sin, zero, cos), dim=1).view(-1, 3, 3)


def _between(values_NLC: torch.Tensor) -> torch.Tensor:
    """[N, L, C] at latent frames -> [N, 4 (L - 1) + 1, C] at video frames."""
    before, after = values_NLC[:, :-1], values_NLC[:, 1:]
    weights = torch.arange(1, 5, device=values_NLC.device)[:, None] / 4
    between = torch.lerp(before[:, :, None], after[:, :, None], weights).flatten(1, 2)
    return torch.cat((values_NLC[:, :1], between), dim=1)
