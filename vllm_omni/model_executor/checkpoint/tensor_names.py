# SPDX-License-Identifier: Apache-2.0
"""Converts tensor names between libraries with tables of regular expressions."""

import re
from functools import lru_cache

Rules = tuple[tuple[str, str], ...]
"""Pairs of (regular expression, replacement), applied in order."""
_REMEMBERED = 1 << 14
"""Size of the cache for converted names. Every name is converted at least three times: when shapes
are read, when data is loaded, and for the model's parameters.
"""


@lru_cache(_REMEMBERED)
def rename(name: str, rules: Rules) -> str:
    """Apply every rule to `name`, in order."""
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name
