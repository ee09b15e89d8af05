# SPDX-License-Identifier: Apache-2.0
"""A simulated Hopper GPU with its Python packages, so that fast-path checks can be tested on any
machine.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

import pytest
import torch

from vllm_omni.model_executor.layers.attention import attention, fp8_attention
from vllm_omni.model_executor.layers.linear import int8_weights
from vllm_omni.model_executor.layers.quantization import fp8_kernels

_CACHED: tuple[Any, ...] = (
    attention.flash_attention_3,
    attention.cudnn_cross_attention,
    fp8_attention.cudnn_fp8_attention,
    fp8_kernels.quantization_kernels,
    int8_weights.int8_products,
)


class _Packages:
    """A module finder that hides some packages and pretends that others exist."""

    def __init__(self, hidden: Sequence[str], added: Sequence[str]) -> None:
        self._hidden, self._added = hidden, added

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in self._added:
            return ModuleSpec(name, None)
        return None if name in self._hidden else PathFinder.find_spec(name, path, target)


@contextmanager
def fake_hopper(
    *,
    without: Sequence[str] = (),
    with_packages: Sequence[str] = (),
    capability: tuple[int, int] = (9, 0),
    cuda: str = "13.0",
) -> Iterator[pytest.MonkeyPatch]:
    """Make torch report one GPU, and make Python packages appear present or missing.

    Args:
        without: Packages that cannot be imported.
        with_packages: Packages that can be found but not imported.
        capability: Compute capability of the GPU.
        cuda: CUDA version that torch appears to be built for.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        patch.setattr(torch.version, "cuda", cuda)
        for name in (*without, *with_packages):
            patch.delitem(sys.modules, name, raising=False)
        finders = [finder for finder in sys.meta_path if finder is not PathFinder]
        patch.setattr(sys, "meta_path", [*finders, _Packages(without, with_packages)])
        try:
            _clear_caches()
            yield patch
        finally:
            _clear_caches()


def _clear_caches() -> None:
    for choice in _CACHED:
        choice.cache_clear()
