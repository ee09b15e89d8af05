# SPDX-License-Identifier: Apache-2.0
"""Noise schedules of few-step flow-matching models: the timestep and the sigmas of each step.

In flow matching with data x0 and noise eps, x_sigma = (1 - sigma) x0 + sigma eps, and the network
predicts v = eps - x0, so x0 = x_sigma - sigma v. A distilled (DMD) model uses a few entries of a
1000-step table that is warped by `shift`. Public code uses two conventions for the same networks:

- `exact`: sigma_i = warp(1 - i/1000), and t_i = 1000 sigma_i is a float. Each step has one sigma.
- `original`: the table of the UniPC flow scheduler. This table starts at 0.999 instead of 1, and
  its t is truncated to an integer, so neighbouring entries can have the same t. The original code
  looks up sigma by t: it uses the *first* entry with a given t to convert the flow to x0, and the
  *second* one to add noise. Each step therefore has two sigmas.

Every noise tensor is drawn from its own generator, which is seeded with a hash of the seed, the
chunk index and the step. The noise therefore does not depend on the order in which tensors are
drawn, and a replayed session is bit-identical regardless of the server's load and the number of
ranks.
"""

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import numpy as np
import torch

from vllm_omni.model_executor.device_async import to_device


def noise_seed(seed: int, chunk_index: int, step: int) -> int:
    """Return the 63-bit seed of the generator that draws the noise for one step of a chunk.

    The seed is the start of the BLAKE2b digest of the three arguments in decimal, joined by colons.
    """
    digest = hashlib.blake2b(f"{seed}:{chunk_index}:{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def standard_normal(shape: Sequence[int], seed: int, chunk_index: int, step: int) -> torch.Tensor:
    """Return fp32 N(0, 1) noise from torch's CPU generator, which produces the same values on all
    machines.
    """
    generator = torch.Generator().manual_seed(noise_seed(seed, chunk_index, step))
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32)


@dataclass(frozen=True)
class ChunkNoise:
    """Noise of one chunk. The tensor of each step is generated on the host only when the step needs
    it, while the device is busy.
    """

    shape: tuple[int, ...]
    """Shape of the noise tensor for each step."""
    seed: int
    """Seed of the session that the chunk belongs to."""
    chunk_index: int
    """Index of the chunk in its session."""
    device: torch.device
    """Device that the noise is copied to."""

    def draw(self, step: int) -> torch.Tensor:
        """Return the noise of a step (`standard_normal`), copied asynchronously to the device."""
        return to_device(
            standard_normal(self.shape, self.seed, self.chunk_index, step), self.device
        )


TRAIN_STEPS = 1000
_SIGMA_MAX = float(np.float32(0.999))
"""Largest sigma of the original scheduler. The value is rounded to single precision, because the
scheduler computes its table in two passes and stores the sigma in single precision between them.
"""

Convention = Literal["original", "exact"]


@dataclass(frozen=True)
class FewStepSchedule:
    """Denoise steps of a chunk, noisiest first."""

    timesteps: tuple[float, ...]
    """Timestep that the network receives in each step."""
    sigmas_x0: tuple[float, ...]
    """Sigma used to convert the predicted flow of each step to x0."""
    sigmas_noise: tuple[float, ...]
    """Sigma of the noise added to x0 before each step. Entry 0 is unused, because a chunk starts as
    pure noise.
    """

    @property
    def num_steps(self) -> int:
        return len(self.timesteps)

    def advance(
        self, latents: torch.Tensor, flow: torch.Tensor, step: int, noise: ChunkNoise
    ) -> torch.Tensor:
        """Return the latents after `step`, fp32.

        The latents are x0. Unless this is the last step, the noise for the next step is added to
        x0.
        """
        x0 = latents.double() - self.sigmas_x0[step] * flow.double()
        if step + 1 < self.num_steps:
            sigma = self.sigmas_noise[step + 1]
            x0 = (1 - sigma) * x0.float().double() + sigma * noise.draw(step + 1).double()
        return x0.float()

    def log_prob(self, step: int, noise: ChunkNoise, given_frames: int = 0) -> torch.Tensor:
        """Return the log-density of the latents after `step`, given the latents before `step`, in
        fp64.

        After every step except the last, each value of the latents is Gaussian with mean (1 -
        sigma) x0 and standard deviation sigma. The result is the natural logarithm of the density,
        summed over all values.

        Args:
            step: Index of the denoise step, less than `num_steps - 1`.
            noise: Noise of the chunk [C, F, h, w].
            given_frames: Number of frames at the start of the chunk that are not random and are
                therefore excluded.
        """
        drawn = noise.draw(step + 1)[:, given_frames:].double()
        sigma = self.sigmas_noise[step + 1]
        constant = math.log(sigma) + math.log(2 * math.pi) / 2
        return -drawn.square().sum() / 2 - drawn.numel() * constant


@dataclass
class Trajectory:
    """Record of the denoise steps of one chunk (`DiffusionParams.trajectory`)."""

    schedule: FewStepSchedule
    """Schedule of the denoise steps."""
    latents: list[torch.Tensor] = field(default_factory=list)
    """Latents before each step, fp32 [C, F, h, w]."""
    log_probs: list[torch.Tensor] = field(default_factory=list)
    """`FewStepSchedule.log_prob` of each step except the last."""

    def add_step(
        self, latents: torch.Tensor, step: int, noise: ChunkNoise, given_frames: int
    ) -> None:
        """Record a step. `latents` are the latents before the step, and the other arguments are
        passed to `FewStepSchedule.log_prob`.
        """
        self.latents.append(latents)
        if step + 1 < self.schedule.num_steps:
            self.log_probs.append(self.schedule.log_prob(step, noise, given_frames))

    def results(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a result contains: `step_latents`, fp32 [S, C, F, h, w], and
        `step_log_probs`, fp64 [S - 1].
        """
        latents = torch.stack(self.latents)
        return {
            "step_latents": latents,
            "step_log_probs": torch.stack(self.log_probs)
            if self.log_probs
            else latents.new_empty(0, dtype=torch.float64),
        }


@dataclass(frozen=True)
class EulerSchedule:
    """Euler steps of a rectified flow."""

    sigmas: tuple[float, ...]
    """Noise level before each step and after the last, decreasing from 1 to 0."""
    dtype: torch.dtype
    """Dtype of the model. The result of each step is rounded to this dtype."""

    @property
    def num_steps(self) -> int:
        return len(self.sigmas) - 1

    def advance(
        self, latents: torch.Tensor, flow: torch.Tensor, step: int, noise: ChunkNoise | None = None
    ) -> torch.Tensor:
        """Return the latents at the next noise level, fp32. The `noise` argument is not used."""
        change = (self.sigmas[step + 1] - self.sigmas[step]) * flow
        return (latents + change).to(self.dtype).float()


def with_most_steps(schedule: FewStepSchedule, max_steps: int | None) -> FewStepSchedule:
    """Return a schedule with at most `max_steps` evenly spaced entries, including the first one.

    For example, entries 0 and 2 remain if four entries are reduced to two. If `max_steps` is None,
    all entries remain.
    """
    length = schedule.num_steps
    if max_steps is None or max_steps >= length:
        return schedule
    kept = [-(-step * length // max_steps) for step in range(max_steps)]
    parts = (schedule.timesteps, schedule.sigmas_x0, schedule.sigmas_noise)
    return FewStepSchedule(*(tuple(part[index] for index in kept) for part in parts))


def warp(sigmas: np.ndarray, shift: float | np.floating) -> np.ndarray:
    """Return shift*sigma / (1 + (shift-1)*sigma) in the dtype of `sigmas`.

    This warp is monotone on [0, 1] and maps 0 and 1 to themselves.
    """
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def few_step_schedule(
    convention: Convention,
    shift: float,
    indices: Sequence[int],
    precision: type[np.floating] = np.float64,
) -> FewStepSchedule:
    """Return a schedule that consists of the given entries of the 1000-step table.

    Args:
        convention: Convention of the table. The module docstring describes both conventions.
        shift: Parameter of `warp` for the table, greater than 0.
        indices: Indices of the entries, strictly increasing. Index 0 is the noisiest entry.
        precision: Dtype to compute the `exact` table in. With fp32, the table is bit-identical to
            SGLang's, which differs from an fp64 table in the last place.

    Raises:
        ValueError: The shift or an index is out of range.
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
    """Return timesteps, int64 [1000], and sigmas, fp32 [1000], of the UniPC flow scheduler.

    Reference: Robbyant/lingbot-world @ a43bec7, wan/utils/fm_solvers_unipc.py, `set_timesteps`.
    """
    sigmas = warp(np.linspace(_SIGMA_MAX, 0.0, TRAIN_STEPS + 1)[:-1], shift)
    return (sigmas * TRAIN_STEPS).astype(np.int64), sigmas.astype(np.float32)


def nearest_schedule(shift: float, timesteps: Sequence[float]) -> FewStepSchedule:
    """Return the schedule with the given timesteps, as in the reference implementations of causal
    Wan.

    The sigma of a timestep is that of the nearest entry in the `exact` table, which is computed in
    fp32. If two entries are equally near, the first one is used. This sigma is close to t / 1000
    and is never 0, because the last entry of the table is the warp of 1/1000.

    Args:
        shift: Parameter of `warp` for the table, greater than 0.
        timesteps: Timestep of each denoise step, strictly decreasing, in [0, 1000].

    Raises:
        ValueError: The shift or a timestep is out of range.
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
