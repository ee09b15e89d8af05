# SPDX-License-Identifier: Apache-2.0
"""`MemoryPool`: a pool of memory of closed requests and sessions, reused by new ones of the same
sizes.

A CUDA graph reads and writes the tensors of its capture. When a new session takes a pooled ring
buffer, the graphs that were captured for it serve the session from its first pass on. Memory is
cleared when it returns to the pool, because closing a session is less urgent than starting one.

Pooled memory counts as free memory. The pool is emptied before memory of other sizes is allocated,
and `trim` frees as much as live sessions need.
"""

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

if TYPE_CHECKING:  # option checks run without vLLM, which the FP8 kernels import
    from vllm_omni.model_executor.layers.kv_cache.quantized_storage import KVFormat


class Reusable(Protocol):
    """Memory that a new owner can reuse."""

    @property
    def nbytes(self) -> int: ...

    @property
    def sizes(self) -> Hashable:
        """Return a key that is equal for interchangeable objects."""

    def clear(self) -> None:
        """Reset to the state of a new object."""


@dataclass(frozen=True, eq=False)
class Ring:
    """The memory of one K/V window."""

    buffer: torch.Tensor
    """Keys and values, as `format` stores them."""
    format: "KVFormat"
    """Storage format of the buffer, with its scales."""
    orders: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    """Cached token positions in the buffer, by what determines them. They live as long as the
    buffer, so CUDA graphs may read them."""

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes + self.format.nbytes

    @property
    def sizes(self) -> Hashable:
        return self.buffer.shape, self.buffer.dtype, self.buffer.device, self.format.dtype

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """Return all tensors, which a forward pass reads and writes in place."""
        return (self.buffer, *self.format.buffers)

    def clear(self) -> None:
        self.buffer.zero_()
        self.format.clear()

    def another(self) -> "Ring":
        """Allocate a ring buffer of the same sizes, uninitialised."""
        return Ring(torch.empty_like(self.buffer), self.format.fork())

    def copy_from(self, other: "Ring") -> None:
        self.buffer.copy_(other.buffer)
        self.format.take_scales(other.format)


Pooled = TypeVar("Pooled", bound=Reusable)


class MemoryPool(Generic[Pooled]):
    """First-in-first-out pool, so that the buffers of one session are reused in their order."""

    def __init__(self) -> None:
        self._pooled: deque[Pooled] = deque()

    def __len__(self) -> int:
        return len(self._pooled)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._pooled)

    def take_memory(self, sizes: Hashable, make: Callable[[], Pooled]) -> Pooled:
        """Return pooled memory of these `sizes`, or the result of `make` after emptying the
        pool.
        """
        part = next((part for part in self._pooled if part.sizes == sizes), None)
        if part is None:
            self.trim(0)
            return make()
        self._pooled.remove(part)
        return part

    def return_memory(self, part: Pooled) -> None:
        """Clear `piece` and return it to the pool. The caller must hold no other reference that is
        used."""
        # matches how its tensors were created; sessions close between forward passes
        with torch.inference_mode():
            part.clear()
        self._pooled.append(part)

    def trim(self, nbytes: int) -> None:
        """Free the oldest pooled memory until at most `nbytes` remain."""
        while self._pooled and self.nbytes > nbytes:
            self._pooled.popleft()
