# SPDX-License-Identifier: Apache-2.0
"""Rows of a batch, and copies of them.

Held by tests/model_executor/layers/test_head_exchange.py.
"""

from collections.abc import Sequence

import torch


def stack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack along a new first dimension; a view when there is one part."""
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(list(parts))


def in_words(x: torch.Tensor) -> torch.Tensor:
    """A view of `x` in numbers of eight bytes where its last dimension allows: strided copies of shorter are slow.

    `x` itself in compiled code, whose loops read as wide as they can.
    """
    if torch.compiler.is_compiling() or x.shape[-1] * x.itemsize % torch.int64.itemsize:
        return x
    return x.view(torch.int64)
