# SPDX-License-Identifier: Apache-2.0
"""Names of tensors in one library's files -> those in another's, by tables of regular expressions.

Held by tests/model_executor/models/lingbot_world/test_weights.py.
"""

import re
from functools import lru_cache

Rules = tuple[tuple[str, str], ...]
"""(regular expression, replacement), applied in order."""
_REMEMBERED = 1 << 14
"""A file's names are looked up when its shapes are read, when it is loaded and for the model's
own: thrice at least.
"""


@lru_cache(_REMEMBERED)
def rename(name: str, rules: Rules) -> str:
    """Apply every rule to `name`, in order."""
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name
