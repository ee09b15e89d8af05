# SPDX-License-Identifier: Apache-2.0
"""Random seeds, in the format that all endpoints accept: an integer from 0 to 2**64 - 1, or -1 for
a random choice.

The range includes unsigned 64-bit seeds, because ComfyUI generates them and `torch.Generator`
accepts them. An endpoint that receives -1 generates a seed itself. The response and the recording
then contain the actual seed, so a replay reproduces the result. An engine request never contains
-1.
"""

import secrets
from typing import Annotated, Final

import msgspec

MAX_SEED: Final = 2**64 - 1
RANDOM_SEED: Final = -1

Seed = Annotated[int, msgspec.Meta(ge=0)]
"""Seed in an engine request. `check_seed` checks the upper bound, which exceeds msgspec's int64."""
RequestedSeed = Annotated[int, msgspec.Meta(ge=RANDOM_SEED)]
"""Seed in a client's request, where -1 requests a random seed. `check_seed` checks the upper
bound."""


def check_seed(seed: int | None) -> None:
    """Check the range of a seed. None is accepted.

    Raises:
        ValueError: The seed is out of range.
    """
    if seed is not None and not RANDOM_SEED <= seed <= MAX_SEED:
        raise ValueError("seed must be an integer from 0 to 2**64 - 1, or -1 for a random seed")


def draw_seed() -> int:
    """Return a random seed of 32 bits, which JavaScript can represent exactly."""
    return secrets.randbits(32)


def chosen_seed(seed: int | None) -> int | None:
    """Return the seed of a request, or a random seed if the request's seed is -1. None, which
    selects the model's default, is returned unchanged.
    """
    return draw_seed() if seed == RANDOM_SEED else seed


def definite_seed(seed: int | None) -> int:
    """Return the seed of a request, or a random seed if the request's seed is -1 or None."""
    return draw_seed() if seed is None or seed == RANDOM_SEED else seed


def nth_seed(seed: int, number: int) -> int:
    """Return the seed for result number `number` of a request with several results. Seeds wrap
    around to 0.
    """
    return (seed + number) % (MAX_SEED + 1)
