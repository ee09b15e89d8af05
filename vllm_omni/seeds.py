# SPDX-License-Identifier: Apache-2.0
"""The rule of seeds, one for every endpoint: a whole number from 0 to 2**64 - 1, or -1, which draws one.

ComfyUI draws 64 bits without a sign, and `torch.Generator` takes them. An endpoint that gets -1 draws the seed itself,
because its response and the recording then hold the drawn one and a replay gives the same result; no engine request
holds -1. Held by tests/test_seeds.py.
"""

import secrets
from typing import Annotated, Final

import msgspec

MAX_SEED: Final = 2**64 - 1
RANDOM_SEED: Final = -1

Seed = Annotated[int, msgspec.Meta(ge=0)]
"""Of an engine request. `check_seed` holds the upper bound: msgspec has none beyond 64 bits with a sign."""
AskedSeed = Annotated[int, msgspec.Meta(ge=RANDOM_SEED)]
"""Of a client's request; the same holds."""


def check_seed(seed: int | None) -> None:
    """Raise ValueError for a seed outside the range; None is no seed."""
    if seed is not None and not RANDOM_SEED <= seed <= MAX_SEED:
        raise ValueError("seed must be a whole number from 0 to 2**64 - 1, or -1 for a random one")


def draw_seed() -> int:
    """Return a random seed. It has 32 bits: JavaScript's numbers hold it exactly."""
    return secrets.randbits(32)


def chosen_seed(seed: int | None) -> int | None:
    """Return the seed of a request: a drawn one for -1, else the given one. None stays, the model's own default."""
    return draw_seed() if seed == RANDOM_SEED else seed


def definite_seed(seed: int | None) -> int:
    """The same, for requests whose seed is drawn if they name none."""
    return draw_seed() if seed is None or seed == RANDOM_SEED else seed


def nth_seed(seed: int, number: int) -> int:
    """Return the seed of result `number` of a request that makes several; behind the largest seed comes 0."""
    return (seed + number) % (MAX_SEED + 1)
