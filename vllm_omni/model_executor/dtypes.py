# SPDX-License-Identifier: Apache-2.0
"""Dtypes of model parameters and sessions' K/V caches.

This module does not import vLLM, because `vllm-omni verify` must work without vLLM.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_KV_CACHE_DTYPES = {"auto": None, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}
"""Dtype for each value of `--kv-cache-dtype` that a `KVWindow` supports. None: the model's dtype.
"""
KV_CACHE_DTYPES = tuple(_KV_CACHE_DTYPES)


def kv_cache_dtype(name: str) -> torch.dtype | None:
    """Return the dtype for `--kv-cache-dtype`. None means the model's dtype.

    Raises:
        ValueError: This package does not support this `--kv-cache-dtype` value.
    """
    if name not in _KV_CACHE_DTYPES:
        raise ValueError(f"--kv-cache-dtype {name}: allowed: {', '.join(KV_CACHE_DTYPES)}")
    return _KV_CACHE_DTYPES[name]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Context manager within which torch creates parameters in `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
