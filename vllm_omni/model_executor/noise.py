# SPDX-License-Identifier: Apache-2.0
"""Noise that depends on its use, not on the order of draws.

Every draw has its own generator, seeded by a hash of (seed, chunk, step). So a replayed session is bit-identical,
whatever else the server does, in whatever order, on however many ranks. Held by tests/model_executor/test_noise.py.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_omni.model_executor.host_copies import to_device


def noise_seed(seed: int, chunk_index: int, step: int) -> int:
    """Return the 63-bit generator seed: the head of BLAKE2b over the three numbers in decimal, joined by colons."""
    digest = hashlib.blake2b(f"{seed}:{chunk_index}:{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def standard_normal(shape: Sequence[int], seed: int, chunk_index: int, step: int) -> torch.Tensor:
    """Return fp32 N(0, 1) noise on the CPU: torch's Mersenne Twister, the same bits on every machine."""
    generator = torch.Generator().manual_seed(noise_seed(seed, chunk_index, step))
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32)


@dataclass(frozen=True)
class ChunkNoise:
    """One chunk's draws of `shape`, each made only when its step needs it: on a busy device that costs no time."""

    shape: tuple[int, ...]
    seed: int
    chunk_index: int
    device: torch.device

    def draw(self, step: int) -> torch.Tensor:
        """Return `standard_normal` of this step on the device, without waiting for it."""
        return to_device(standard_normal(self.shape, self.seed, self.chunk_index, step), self.device)
