# SPDX-License-Identifier: Apache-2.0
"""Seeds of all endpoints: an integer from 0 to 2**64 - 1, or -1 for a random seed.

ComfyUI generates unsigned 64-bit seeds, and `torch.Generator` accepts them. An endpoint that
receives -1 generates the seed itself, so that its response and the recording contain the seed and a
replay gives the same result. An engine request never contains -1.
"""

import secrets
from typing import Annotated, Final

import msgspec

MAX_SEED: Final = 2**64 - 1
RANDOM_SEED: Final = -1

Seed = Annotated[int, msgspec.Meta(ge=0)]
"""Seed of an engine request. `check_seed` checks the upper bound, which exceeds msgspec's int64."""
RequestedSeed = Annotated[int, msgspec.Meta(ge=RANDOM_SEED)]
"""Seed of a client's request. `check_seed` checks the upper bound."""


def check_seed(seed: int | None) -> None:
    """Check the range of a seed. None is accepted.

    Raises:
        ValueError: The seed is out of range.
    """
    if seed is not None and not RANDOM_SEED <= seed <= MAX_SEED:
        raise ValueError("seed must be an integer from 0 to 2**64 - 1, or -1 for a random seed")


def draw_seed() -> int:
    """Return a random seed of 32 bits, which JavaScript represents exactly."""
    return secrets.randbits(32)


def chosen_seed(seed: int | None) -> int | None:
    """Return the seed of a request. For -1, a random seed is generated. None is returned unchanged
    and selects the model's default.
    """
    return draw_seed() if seed == RANDOM_SEED else seed


def definite_seed(seed: int | None) -> int:
    """Return the seed of a request, for endpoints that also generate a seed if the request has
    none.
    """
    return draw_seed() if seed is None or seed == RANDOM_SEED else seed


def nth_seed(seed: int, number: int) -> int:
    """Return the seed of result `number` of a request with several results. Wraps around to 0."""
    return (seed + number) % (MAX_SEED + 1)
