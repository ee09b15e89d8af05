# SPDX-License-Identifier: Apache-2.0
"""`GrowingBuffer`: a tensor at a fixed address whose memory is allocated as it fills
(`omni.kv_growth`).

A K/V window's buffer has the shape `[layers, 2, tokens, heads, head_dim]`. A window fills its token
slots in order, so it needs memory for the first tokens of each of the `layers * 2` rows. The whole
buffer's address range is reserved at the start, which takes no memory, and pages are added as
needed. Attention can therefore read the buffer in place at every length, and captured CUDA graphs
remain valid. Slots without memory must not be accessed.

On a CPU, the operating system allocates a page at its first write (`HostPages`). On CUDA, the
driver maps memory into the range (`cuda_pages.py`).
"""

# L layers, T token slots, N heads, H head dim

import mmap
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import torch


class Pages(Protocol):
    """A reserved address range whose pages are allocated on demand."""

    def tensor(self) -> torch.Tensor:
        """Return the range as a uint8 tensor. The range's first page must have been allocated. The
        tensor owns the range.
        """

    def allocate(self, runs: Sequence[range]) -> None:
        """Allocate memory for runs of pages that have none.

        Raises:
            torch.OutOfMemoryError: There is not enough memory. No page has been allocated.
        """

    def free(self, runs: Sequence[range]) -> None:
        """Free all allocated pages, which the caller passes as `runs`. The address range remains
        reserved.
        """


class HostPages:
    """Host memory from the operating system. New pages are filled with zeros.

    Memory from `torch.empty` would also be allocated at the first write, but could not be freed
    page by page.
    """

    def __init__(self, nbytes: int) -> None:
        self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def tensor(self) -> torch.Tensor:
        return torch.frombuffer(self._memory, dtype=torch.uint8)

    def allocate(self, runs: Sequence[range]) -> None:
        """Do nothing, because the first write to a page allocates it."""

    def free(self, runs: Sequence[range]) -> None:
        self._memory.madvise(mmap.MADV_DONTNEED)


def page_bytes(device: torch.device) -> int:
    """Return the page size of `device` in bytes."""
    if device.type == "cuda":
        from vllm_omni.model_executor.layers.kv_cache.cuda_pages import cuda_page_bytes

        return cuda_page_bytes(device)
    return mmap.PAGESIZE


def reserve_pages(nbytes: int, device: torch.device) -> Pages:
    """Reserve an address range of `nbytes` bytes, which must be a multiple of the page size."""
    if device.type == "cuda":
        from vllm_omni.model_executor.layers.kv_cache.cuda_pages import CudaPages

        return CudaPages(nbytes, device)
    return HostPages(nbytes)


def needed_pages(rows: int, row_bytes: int, used_bytes: int, page: int) -> list[range]:
    """Return the pages that hold the first `used_bytes` of each of `rows` consecutive rows.

    Args:
        rows: Number of rows.
        row_bytes: Row length in bytes.
        used_bytes: Number of bytes that need memory at the start of each row.
        page: Page size in bytes.

    Returns:
        Runs of pages in ascending order, separated by gaps.
    """
    runs: list[range] = []
    for row in range(rows if used_bytes else 0):
        start = row * row_bytes
        pages = range(start // page, -(-(start + used_bytes) // page))
        if runs and pages.start <= runs[-1].stop:
            runs[-1] = range(runs[-1].start, pages.stop)
        else:
            runs.append(pages)
    return runs


def grown_nbytes(shape: Sequence[int], itemsize: int, num_tokens: int, page: int) -> int:
    """Return the size in bytes of a `GrowingBuffer` that has memory for `num_tokens` token
    slots.
    """
    layers, kv, tokens, heads, head_dim = shape
    token_bytes = heads * head_dim * itemsize
    runs = needed_pages(layers * kv, tokens * token_bytes, num_tokens * token_bytes, page)
    return page * sum(len(run) for run in runs)


class GrowingBuffer:
    """A tensor `[L, 2, T, N, H]` of which only the first token slots have memory.

    Args:
        shape: The tensor's shape.
        dtype: The tensor's dtype.
        device: The tensor's device.
        num_tokens: Number of token slots that have memory initially; at least 1.
        page: Page size in bytes.
        reserve: Function that reserves the address range.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        num_tokens: int,
        *,
        page: int | None = None,
        reserve: Callable[[int, torch.device], Pages] = reserve_pages,
    ) -> None:
        self._page = page_bytes(device) if page is None else page
        self._shape, self._itemsize = tuple(shape), dtype.itemsize
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        self._pages = reserve(-(-nbytes // self._page) * self._page, device)
        self.num_tokens = 0
        """Number of token slots that have memory."""
        self.grow(num_tokens)
        self.tensor = self._pages.tensor()[:nbytes].view(dtype).view(*shape)
        """The whole buffer. Only slots that have memory may be accessed."""

    @property
    def nbytes(self) -> int:
        """Return the size of the allocated pages in bytes."""
        return self.nbytes_with(self.num_tokens)

    def nbytes_with(self, num_tokens: int) -> int:
        """Return the size in bytes of the pages that `num_tokens` token slots need."""
        return grown_nbytes(self._shape, self._itemsize, num_tokens, self._page)

    def grow(self, num_tokens: int) -> None:
        """Allocate memory for the first `num_tokens` slots. Existing memory is not changed.

        Raises:
            torch.OutOfMemoryError: There is not enough memory. The buffer is unchanged.
        """
        if num_tokens <= self.num_tokens:
            return
        held, new = self._runs(self.num_tokens), []
        for run in self._runs(num_tokens):
            # Allocate only the gaps between those parts of this run that already have memory.
            inside = [part for part in held if run.start <= part.start < run.stop]
            edges = [run.start, *(edge for part in inside for edge in (part.start, part.stop))]
            pairs = list(pairwise([*edges, run.stop]))[::2]
            new += [range(start, stop) for start, stop in pairs if start < stop]
        self._pages.allocate(new)
        self.num_tokens = num_tokens

    def free(self) -> None:
        """Free all memory, but retain the address range. Call `grow` before the next access."""
        self._pages.free(self._runs(self.num_tokens))
        self.num_tokens = 0

    def _runs(self, num_tokens: int) -> list[range]:
        layers, kv, tokens, heads, head_dim = self._shape
        token_bytes = heads * head_dim * self._itemsize
        return needed_pages(layers * kv, tokens * token_bytes, num_tokens * token_bytes, self._page)
