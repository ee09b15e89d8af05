# SPDX-License-Identifier: Apache-2.0
"""`Chains`: a network's arithmetic between matrix products and attention, as a table of pure functions.

Run eagerly, each operation of a chain reads and writes its tensors once; compiled, or as one kernel, the whole chain
does.
Held by the transformer tests of the models: tests/model_executor/models/lance/test_lance_transformer.py,
tests/model_executor/models/lingbot_world/test_lingbot_transformer.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from vllm.triton_utils import HAS_TRITON


@dataclass(frozen=True)
class Chains:
    """Base of a network's table: a subclass has a field for each function, which is its default."""

    @classmethod
    def build(cls, compiled: bool) -> Self:
        """Return the functions, plain or each compiled by `fuse`; for tensors on CUDA those of `kernels`."""
        functions: dict[str, Any] = dict(vars(cls()))
        if compiled:
            functions = {name: cls.fuse(function) for name, function in functions.items()}
        if HAS_TRITON and torch.cuda.is_available():
            functions |= {kernel.__name__: on_cuda(kernel, functions[kernel.__name__]) for kernel in cls.kernels()}
        return cls(**functions)

    @staticmethod
    def kernels() -> Sequence[Callable[..., Any]]:
        """Triton kernels of functions, by their names; asked for where Triton is."""
        return ()

    @staticmethod
    def fuse(function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile for the static shapes that the function meets."""
        return torch.compile(function, dynamic=False)


def on_cuda(kernel: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a tensor first: `kernel` for one on CUDA, else `other`."""

    def chosen(x: torch.Tensor, *args: Any) -> Any:
        return (kernel if x.is_cuda else other)(x, *args)

    return chosen
