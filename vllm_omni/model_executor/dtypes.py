# SPDX-License-Identifier: Apache-2.0
"""Types of parameters, and of sessions' keys and values.

Imports no vLLM: `vllm-omni verify` works without.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_KV_CACHE_DTYPES = {"auto": None, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}
"""vLLM's `--kv-cache-dtype`, those that a `KVWindow` can have; None = the model's."""
KV_CACHE_DTYPES = tuple(_KV_CACHE_DTYPES)


def kv_cache_dtype(name: str) -> torch.dtype | None:
    """Return the type that `--kv-cache-dtype` names, None = the model's. Raises ValueError."""
    if name not in _KV_CACHE_DTYPES:
        raise ValueError(f"--kv-cache-dtype {name}: allowed: {', '.join(KV_CACHE_DTYPES)}")
    return _KV_CACHE_DTYPES[name]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Create parameters in `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
