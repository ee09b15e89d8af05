# SPDX-License-Identifier: Apache-2.0
"""What can be set of the token2wav stage: per engine (`omni.model`) and per request (`DiffusionParams.options`)."""

from typing import Annotated

import msgspec

SAMPLE_RATE = 24_000
"""Hertz; fixed by the vocoder's training, stored nowhere in the checkpoint."""

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]


class Token2WavModelOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """max_codes: the most codec tokens one request may bring (codes of context included)."""

    max_codes: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 4096


class Token2WavRequestOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """voice: a name in `spk_dict.pt`. sway_coefficient: bends the solver's time grid, as in the reference.

    first_code: None = the codes are a whole clip, and the noise is the reference's (one draw from a generator with the
    request's seed). A number = they are a piece of a longer clip and this is the index of the first one: noise then
    depends on seed and code index only, so pieces that overlap agree where they overlap.
    left_codes, right_codes: codes at either end that are context only; their sound is not returned.
    """

    voice: str
    sway_coefficient: Annotated[float, msgspec.Meta(ge=-1, le=1)] = -1.0
    first_code: Count | None = None
    left_codes: Count = 0
    right_codes: Count = 0
