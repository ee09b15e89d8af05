# SPDX-License-Identifier: Apache-2.0
"""`Chains`: a network's arithmetic between matrix products and attention, as a table of pure functions.

Run eagerly, each operation of a chain reads and writes its tensors once; compiled, the whole chain does.
Held by the transformer tests of the models: tests/model_executor/models/lance/test_lance_transformer.py,
tests/model_executor/models/lingbot_world/test_lingbot_transformer.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch


@dataclass(frozen=True)
class Chains:
    """Base of a network's table: a subclass has a field for each function, which is its default."""

    @classmethod
    def build(cls, compiled: bool) -> Self:
        """Return the functions, plain or each compiled by `fuse`."""
        functions: dict[str, Any] = vars(cls())
        return cls(**{name: cls.fuse(function) for name, function in functions.items()}) if compiled else cls()

    @staticmethod
    def fuse(function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile for the static shapes that the function meets."""
        return torch.compile(function, dynamic=False)
