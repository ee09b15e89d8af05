# SPDX-License-Identifier: Apache-2.0
"""`FusedOps`: a network's fused pointwise ops, as a table of pure functions.

Pointwise ops are the operations between matrix products and attention. In eager mode, each of these
operations reads its inputs from memory and writes its result back. A fused op, whether compiled or
written as a Triton kernel, reads its inputs and writes its results only once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from vllm_omni.model_executor.layers.fast_path import (
    FastPath,
    lacks_gpu,
    lacks_triton,
    this_device,
)


@dataclass(frozen=True)
class FusedOps:
    """Base class for a network's table of fused pointwise ops.

    A subclass has one field per function. Each field's default is the uncompiled function.
    """

    @classmethod
    def build(cls, compiled: bool) -> Self:
        """Return a table of uncompiled or compiled functions. For tensors on CUDA, the Triton
        kernels in `kernels` replace functions of the same name.

        Args:
            compiled: Whether each function is compiled with `fuse`.
        """
        functions: dict[str, Any] = dict(vars(cls()))
        if compiled:
            functions = {name: cls.fuse(function) for name, function in functions.items()}
        if pointwise_kernels(this_device()).is_on:
            functions |= {
                kernel.__name__: on_cuda(kernel, functions[kernel.__name__])
                for kernel in cls.kernels()
            }
        return cls(**functions)

    @staticmethod
    def kernels() -> Sequence[Callable[..., Any]]:
        """Return the Triton kernels that replace the functions with the same names. This method is
        called only if Triton is installed.
        """
        return ()

    @staticmethod
    def fuse(function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile `function` separately for each set of shapes that it is called with."""
        return torch.compile(function, dynamic=False)


def pointwise_kernels(device: torch.device) -> FastPath:
    """Return whether fused pointwise ops run as Triton kernels for tensors on this device."""
    lack = lacks_gpu(device) or lacks_triton()
    return lack.of("pointwise_kernels", "torch.compile, or single operations of torch")


def on_cuda(kernel: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `kernel` if its first argument is on CUDA, else `other`."""

    def chosen(x: torch.Tensor, *args: Any) -> Any:
        return (kernel if x.is_cuda else other)(x, *args)

    return chosen
