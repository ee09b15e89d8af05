# SPDX-License-Identifier: Apache-2.0
"""Noise schedules of few-step flow-matching models: which timestep each step feeds, which sigma it
converts with.

Flow matching with data x0 and noise eps: x_sigma = (1 - sigma) x0 + sigma eps, and the network
predicts v = eps - x0, so x0 = x_sigma - sigma v. A distilled ("DMD") model visits a handful of
entries of a 1000-step table warped by `shift`. Two public conventions exist for the same network
and both are offered:

- `exact`: sigma_i = warp(1 - i/1000), t_i = 1000 sigma_i, a float; one sigma for everything.
- `original`: the table of the UniPC flow scheduler. It starts at 0.999 instead of 1 and truncates t
  to an integer, so neighbouring entries share one t. Looking a sigma up again by t then finds the
  *first* such entry when the flow becomes x0 and the *second* when noise is added, hence two sigmas
  a step.

Everything is computed from (shift, indices); held by tests/model_executor/test_schedules.py.

Noise depends on its use, not on the order of draws: every draw has its own generator, seeded by a
hash of (seed, chunk, step). So a replayed session is bit-identical, whatever else the server does,
on however many ranks.
"""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import torch

from vllm_omni.model_executor.device_async import to_device


def noise_seed(seed: int, chunk_index: int, step: int) -> int:
    """Return the 63-bit generator seed: the head of BLAKE2b over the three numbers in decimal,
    joined by colons.
    """
    digest = hashlib.blake2b(f"{seed}:{chunk_index}:{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def standard_normal(shape: Sequence[int], seed: int, chunk_index: int, step: int) -> torch.Tensor:
    """Return fp32 N(0, 1) noise on the CPU: torch's Mersenne Twister, the same bits on every
    machine.
    """
    generator = torch.Generator().manual_seed(noise_seed(seed, chunk_index, step))
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32)


@dataclass(frozen=True)
class ChunkNoise:
    """One chunk's draws of `shape`, each made only when its step needs it: on a busy device that
    costs no time.
    """

    shape: tuple[int, ...]
    seed: int
    chunk_index: int
    device: torch.device

    def draw(self, step: int) -> torch.Tensor:
        """Return `standard_normal` of this step on the device, without waiting for it."""
        return to_device(
            standard_normal(self.shape, self.seed, self.chunk_index, step), self.device
        )


TRAIN_STEPS = 1000
_SIGMA_MAX = float(np.float32(0.999))
"""The original scheduler keeps its largest sigma in single precision between its two table
constructions.
"""

Convention = Literal["original", "exact"]


@dataclass(frozen=True)
class FewStepSchedule:
    """One row per denoise step, noisiest first.

    timesteps: inputs of the network. sigmas_x0: sigma that turns the step's flow into x0.
    sigmas_noise: sigma used when x0 is re-noised to enter the step (entry 0 is unused: a chunk
    starts as pure noise).
    """

    timesteps: tuple[float, ...]
    sigmas_x0: tuple[float, ...]
    sigmas_noise: tuple[float, ...]

    @property
    def num_steps(self) -> int:
        return len(self.timesteps)

    def advance(
        self, latents: torch.Tensor, flow: torch.Tensor, step: int, noise: ChunkNoise
    ) -> torch.Tensor:
        """Return the latents that `step` leaves, fp32: its x0, noised again by the next step's
        draw if one follows.
        """
        x0 = latents.double() - self.sigmas_x0[step] * flow.double()
        if step + 1 < self.num_steps:
            sigma = self.sigmas_noise[step + 1]
            x0 = (1 - sigma) * x0.float().double() + sigma * noise.draw(step + 1).double()
        return x0.float()


@dataclass(frozen=True)
class EulerSchedule:
    """Euler steps of a rectified flow along `sigmas`, noise levels that fall from 1 to 0.

    dtype: the model's, to which each step's result is rounded.
    """

    sigmas: tuple[float, ...]
    dtype: torch.dtype

    @property
    def num_steps(self) -> int:
        return len(self.sigmas) - 1

    def advance(
        self, latents: torch.Tensor, flow: torch.Tensor, step: int, noise: ChunkNoise | None = None
    ) -> torch.Tensor:
        """Return the latents at the next noise level, fp32. noise: not used, an Euler step draws
        none.
        """
        change = (self.sigmas[step + 1] - self.sigmas[step]) * flow
        return (latents + change).to(self.dtype).float()


def every_second_step(schedule: FewStepSchedule) -> FewStepSchedule:
    """Return `schedule` with its entries 0, 2, 4, ...: as noisy at first, half as many forwards,
    less detail.
    """
    return FewStepSchedule(
        schedule.timesteps[::2], schedule.sigmas_x0[::2], schedule.sigmas_noise[::2]
    )


def warp(sigmas: np.ndarray, shift: float | np.floating) -> np.ndarray:
    """Return shift*sigma / (1 + (shift-1)*sigma), in the type of `sigmas`: monotone on [0, 1],
    fixes both ends.
    """
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def few_step_schedule(
    convention: Convention,
    shift: float,
    indices: Sequence[int],
    precision: type[np.floating] = np.float64,
) -> FewStepSchedule:
    """Return the schedule that visits `indices` (strictly increasing, 0 = noisiest) of the
    1000-step table.

    precision: the float type the `exact` table is computed in; fp32 reproduces SGLang's bits, which
    differ from fp64 by one unit in the last place. Raises ValueError on a shift <= 0 or bad
    indices.
    """
    if not shift > 0:
        raise ValueError(f"schedule shift must be > 0, got {shift}")
    if not indices or any(b <= a for a, b in itertools.pairwise(indices)):
        raise ValueError(
            f"schedule indices must be strictly increasing and not empty, got {list(indices)}"
        )
    if indices[0] < 0 or indices[-1] >= TRAIN_STEPS:
        raise ValueError(f"schedule indices must be in [0, {TRAIN_STEPS - 1}], got {list(indices)}")
    if convention == "exact":
        table = warp((1.0 - np.asarray(indices) / TRAIN_STEPS).astype(precision), precision(shift))
        sigmas = tuple(float(sigma) for sigma in table)
        return FewStepSchedule(
            tuple(float(t) for t in table * precision(TRAIN_STEPS)), sigmas, sigmas
        )
    if convention == "original":
        timesteps, sigmas_table = unipc_flow_table(shift)
        chosen = tuple(int(timesteps[index]) for index in indices)
        same_t = [np.flatnonzero(timesteps == t) for t in chosen]
        return FewStepSchedule(
            tuple(float(t) for t in chosen),
            tuple(float(sigmas_table[matches[0]]) for matches in same_t),
            tuple(float(sigmas_table[matches[min(1, len(matches) - 1)]]) for matches in same_t),
        )
    raise ValueError(f"schedule must be 'original' or 'exact', got {convention!r}")


@cache
def unipc_flow_table(shift: float) -> tuple[np.ndarray, np.ndarray]:
    """Return (timesteps int64 [1000], sigmas fp32 [1000]) of the UniPC flow scheduler run with 1000
    steps.

    Source of the construction: Robbyant/lingbot-world @ a43bec7, wan/utils/fm_solvers_unipc.py,
    `set_timesteps`.
    """
    sigmas = warp(np.linspace(_SIGMA_MAX, 0.0, TRAIN_STEPS + 1)[:-1], shift)
    return (sigmas * TRAIN_STEPS).astype(np.int64), sigmas.astype(np.float32)


def nearest_schedule(shift: float, timesteps: Sequence[float]) -> FewStepSchedule:
    """Return the schedule that feeds exactly `timesteps` (strictly decreasing, in [0, 1000]).

    Each one's sigma is that of the nearest entry of the `exact` table, which ends at 1/1000 of
    warped time: close to t / 1000, never 0. So the causal Wan references look a timestep up (fp32;
    the first of two equally near entries). Raises ValueError on a shift <= 0 or bad timesteps.
    """
    if not shift > 0:
        raise ValueError(f"schedule shift must be > 0, got {shift}")
    if not timesteps or any(b >= a for a, b in itertools.pairwise(timesteps)):
        raise ValueError(
            f"timesteps must be strictly decreasing and not empty, got {list(timesteps)}"
        )
    if not (timesteps[0] <= TRAIN_STEPS and timesteps[-1] >= 0):
        raise ValueError(f"timesteps must be in [0, {TRAIN_STEPS}], got {list(timesteps)}")
    table = warp((1.0 - np.arange(TRAIN_STEPS) / TRAIN_STEPS).astype(np.float32), np.float32(shift))
    nearest = [
        int(np.abs(table * np.float32(TRAIN_STEPS) - np.float32(t)).argmin()) for t in timesteps
    ]
    sigmas = tuple(float(table[index]) for index in nearest)
    return FewStepSchedule(tuple(float(t) for t in timesteps), sigmas, sigmas)
