# SPDX-License-Identifier: Apache-2.0
"""`default_dtype`: the type in which code creates parameters. Imports no vLLM: `vllm-omni verify` works without."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create parameters in `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
