# SPDX-License-Identifier: Apache-2.0
"""`MemoryPool`: retains the memory of closed requests and sessions, so that new requests and
sessions of the same sizes can reuse it.

A CUDA graph reads and writes the tensors that it was captured with. If a new session takes a pooled
ring buffer, the graphs captured for that buffer serve the session from its first forward pass on.
Memory is cleared when it is returned to the pool, because closing a session is less urgent than
starting one.

Pooled memory counts as free memory. The pool is emptied before memory of other sizes is allocated,
and `trim` frees as much memory as live sessions need. A window that grows with its session
(`omni.kv_growth`) leaves only its address range in the pool, because each new session allocates as
much memory as it needs.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

import torch

from vllm_omni.model_executor.layers.kv_cache.growing_buffer import GrowingBuffer

if TYPE_CHECKING:  # option checks run without vLLM, which the FP8 kernels import
    from vllm_omni.model_executor.layers.kv_cache.quantized_storage import KVFormat


class Reusable(Protocol):
    """Memory that a new owner can reuse."""

    @property
    def nbytes(self) -> int: ...

    @property
    def sizes(self) -> Hashable:
        """Return a key. Pieces of memory with equal keys are interchangeable."""

    def clear(self) -> None:
        """Reset to the state of a new object."""


@dataclass(frozen=True, eq=False)
class Ring:
    """One K/V window's memory."""

    buffer: torch.Tensor
    """Keys and values in the storage format `format`."""
    format: "KVFormat"
    """The buffer's storage format, with its scales."""
    orders: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    """Cached token positions in the buffer, keyed by the values that determine them. The positions
    live as long as the buffer because CUDA graphs read them.
    """
    memory: GrowingBuffer | None = None
    """The `GrowingBuffer` behind `buffer` if the memory grows with the session. None: `buffer` is
    fully allocated.
    """

    @classmethod
    def growing(
        cls,
        shape: Sequence[int],
        format: "KVFormat",
        device: torch.device | str,
        num_tokens: int,
    ) -> Self:
        """Create a ring buffer with memory for its first `num_tokens` token slots."""
        memory = GrowingBuffer(shape, format.storage, torch.device(device), num_tokens)
        return cls(memory.tensor, format, memory=memory)

    @property
    def nbytes(self) -> int:
        held = self.buffer.nbytes if self.memory is None else self.memory.nbytes
        return held + self.format.nbytes

    @property
    def num_tokens(self) -> int:
        """Return the number of token slots that have memory."""
        return self.buffer.shape[2] if self.memory is None else self.memory.num_tokens

    def missing_nbytes(self, num_tokens: int) -> int:
        """Return the number of bytes that `grow(num_tokens)` allocates."""
        if self.memory is None or num_tokens <= self.num_tokens:
            return 0
        return self.memory.nbytes_with(num_tokens) - self.memory.nbytes

    def grow(self, num_tokens: int) -> None:
        """Allocate memory for the first `num_tokens` slots. The call has no effect if these slots
        already have memory.

        Raises:
            torch.OutOfMemoryError: There is not enough memory. The ring buffer is unchanged.
        """
        if self.memory is not None:
            self.memory.grow(num_tokens)

    @property
    def sizes(self) -> Hashable:
        return (
            self.buffer.shape,
            self.buffer.dtype,
            self.buffer.device,
            self.format.dtype,
            self.memory is not None,
        )

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """Return all tensors that a forward pass reads and writes in place."""
        return (self.buffer, *self.format.buffers)

    def clear(self) -> None:
        if self.memory is None:
            self.buffer.zero_()
        else:
            self.memory.free()
        self.format.clear()

    def sizes_on(self, device: torch.device) -> Hashable:
        """Return the `sizes` that this ring buffer would have on another device."""
        return (self.buffer.shape, self.buffer.dtype, device, self.format.dtype, False)

    def another(self) -> Self:
        """Allocate an uninitialised ring buffer of the same sizes."""
        return self._on(self.buffer.device, self.format.fork())

    def copy_on(self, device: torch.device) -> Self:
        """Return a copy on another device. A copy on the host is page-locked."""
        format = self.format.fork()
        format.to(device)
        is_pinned = device.type == "cpu" and self.buffer.is_cuda
        buffer = torch.empty(
            self.buffer.shape, dtype=self.buffer.dtype, device=device, pin_memory=is_pinned
        )
        other = type(self)(buffer, format)
        other._copy_tokens(self)
        return other

    def to(self, device: torch.device | str) -> Self:
        """Return a copy on `device`. The copy and this ring buffer share one `format`, whose
        tensors are moved to `device`, so use only the copy afterwards.
        """
        self.format.to(device)
        other = self._on(torch.device(device), self.format)
        other._copy_tokens(self)
        return other

    def copy_from(self, other: Self) -> None:
        self.grow(other.num_tokens)
        self._copy_tokens(other)
        self.format.take_scales(other.format)

    def _on(self, device: torch.device, format: "KVFormat") -> Self:
        if self.memory is None:
            return type(self)(torch.empty_like(self.buffer, device=device), format)
        return self.growing(self.buffer.shape, format, device, self.num_tokens)

    def _copy_tokens(self, other: Self) -> None:
        held = slice(0, other.num_tokens)
        self.buffer[:, :, held].copy_(other.buffer[:, :, held])


Pooled = TypeVar("Pooled", bound=Reusable)


class MemoryPool(Generic[Pooled]):
    """A first-in-first-out pool, so a new session reuses a closed session's buffers in the same
    order.
    """

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
        """Clear `part` and return it to the pool. The caller must no longer use `part`."""
        # Only inference mode allows in-place changes to these tensors, because they were created in
        # inference mode. Sessions close outside inference mode.
        with torch.inference_mode():
            part.clear()
        self._pooled.append(part)

    def trim(self, nbytes: int) -> None:
        """Free the oldest pooled memory until at most `nbytes` remain. If `nbytes` is 0, also free
        the address ranges of growing windows.
        """
        while self._pooled and (nbytes == 0 or self.nbytes > nbytes):
            self._pooled.popleft()
