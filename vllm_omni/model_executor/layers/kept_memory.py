# SPDX-License-Identifier: Apache-2.0
"""`KeptMemory`: memory of requests and sessions that have ended, for later ones of the same sizes.

A CUDA graph reads and writes the tensors of its capture. When a new session takes the ring of one that has ended, the
graphs that were captured for that ring serve it from its first pass on. A given piece is emptied at once: a session
that ends has more time than one that begins.

It counts as free memory: none is left when a piece of other sizes must be made, and `trim` drops as much as live
sessions need. Held by tests/model_executor/layers/test_kept_memory.py.
"""

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

if TYPE_CHECKING:  # options are checked without importing vLLM, which kernels of number formats need
    from vllm_omni.model_executor.layers.kv_format import KVFormat


class Reusable(Protocol):
    """A piece of memory that somebody else may use after its owner."""

    @property
    def nbytes(self) -> int: ...

    @property
    def sizes(self) -> Hashable:
        """Equal for pieces that can stand for each other."""

    def clear(self) -> None:
        """Make it as a new one."""


@dataclass(frozen=True, eq=False)
class Ring:
    """A window's memory. buffer: its keys and values, as `format` stores them.

    orders: positions of tokens in the buffer, by what they depend on; as long as the ring, so graphs may read them.
    """

    buffer: torch.Tensor
    format: "KVFormat"
    orders: dict[Hashable, torch.Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return self.buffer.nbytes + self.format.nbytes

    @property
    def sizes(self) -> Hashable:
        return self.buffer.shape, self.buffer.dtype, self.buffer.device, self.format.dtype

    @property
    def places(self) -> tuple[torch.Tensor, ...]:
        """All its tensors: a forward reads and writes them in place."""
        return (self.buffer, *self.format.places)

    def clear(self) -> None:
        self.buffer.zero_()
        self.format.clear()

    def another(self) -> "Ring":
        """Return one of the same sizes, with any numbers in it."""
        return Ring(torch.empty_like(self.buffer), self.format.fork())

    def copy_from(self, other: "Ring") -> None:
        self.buffer.copy_(other.buffer)
        self.format.take_scales(other.format)


Piece = TypeVar("Piece", bound=Reusable)


class KeptMemory(Generic[Piece]):
    """Kept pieces, the one that was given first is taken first: a session's come back in their order."""

    def __init__(self) -> None:
        self._kept: deque[Piece] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self._kept)

    def take(self, sizes: Hashable, make: Callable[[], Piece]) -> Piece:
        """Return a piece of these `sizes`: a kept one or one of `make`, for which all kept ones make room."""
        piece = next((piece for piece in self._kept if piece.sizes == sizes), None)
        if piece is None:
            self.trim(0)
            return make()
        self._kept.remove(piece)
        return piece

    def give(self, piece: Piece) -> None:
        """Keep a piece that nobody else will use again, empty."""
        with torch.inference_mode():  # as its tensors were made; sessions are closed between forwards
            piece.clear()
        self._kept.append(piece)

    def trim(self, nbytes: int) -> None:
        """Drop pieces, those kept for longest first, until they hold at most `nbytes`."""
        while self._kept and self.nbytes > nbytes:
            self._kept.popleft()
