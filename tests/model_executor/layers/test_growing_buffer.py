# SPDX-License-Identifier: Apache-2.0
"""A growing buffer has a fixed address, and its memory is allocated as the buffer fills."""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from vllm_omni.model_executor.layers.kv_cache.growing_buffer import (
    GrowingBuffer,
    grown_nbytes,
    needed_pages,
)
from vllm_omni.model_executor.layers.kv_cache.memory_pool import MemoryPool, Ring
from vllm_omni.model_executor.layers.kv_cache.window import KVWindow, kv_window_nbytes

MIB = 1 << 20
CPU = torch.device("cpu")


class FakePages:
    """Fake device memory with pages of 64 bytes. Allocation fails beyond `limit` pages."""

    def __init__(self, nbytes: int, device: torch.device, limit: int = 1000) -> None:
        self.bytes, self.limit = torch.full((nbytes,), 255, dtype=torch.uint8), limit
        self.allocated: set[int] = set()

    def tensor(self) -> torch.Tensor:
        assert 0 in self.allocated
        return self.bytes

    def allocate(self, runs: Sequence[range]) -> None:
        pages = [page for run in runs for page in run]
        assert not self.allocated & set(pages)
        if len(self.allocated) + len(pages) > self.limit:
            raise torch.OutOfMemoryError
        self.allocated |= set(pages)

    def free(self, runs: Sequence[range]) -> None:
        assert self.allocated == {page for run in runs for page in run}
        self.allocated = set()


def rss() -> int:
    """Return this process's resident memory in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("page", [1, 7, 64, 4096])
def test_the_pages_of_each_rows_first_bytes(page: int) -> None:
    """`needed_pages` returns exactly the pages that contain a needed byte. A page shared by several
    rows is returned only once.
    """
    for used in (0, 1, 30, 99, 100):
        runs = needed_pages(5, 100, used, page)
        pages = [number for run in runs for number in run]
        needed = {(row * 100 + byte) // page for row in range(5) for byte in range(used)}
        assert pages == sorted(needed)
        assert all(a.stop < b.start for a, b in itertools.pairwise(runs))


@pytest.mark.parametrize("page", [16, 64, 100])
def test_growth_allocates_only_the_pages_that_are_missing(page: int) -> None:
    """When a buffer grows, its address and content stay the same. Freed memory can be allocated
    again.
    """
    shape = (2, 2, 12, 1, 2)
    made: list[FakePages] = []

    def reserve(nbytes: int, device: torch.device) -> FakePages:
        made.append(FakePages(nbytes, device))
        return made[-1]

    buffer = GrowingBuffer(shape, torch.float32, CPU, 2, page=page, reserve=reserve)
    (pages,), address = made, buffer.tensor.data_ptr()
    buffer.tensor[:, :, :2] = 7
    for tokens in (3, 3, 7, 12):
        buffer.grow(tokens)
        assert len(pages.allocated) * page == buffer.nbytes == grown_nbytes(shape, 4, tokens, page)
        assert buffer.tensor.data_ptr() == address and bool((buffer.tensor[:, :, :2] == 7).all())
    buffer.free()
    assert buffer.nbytes == 0 == len(pages.allocated)
    buffer.grow(4)
    assert buffer.num_tokens == 4 and buffer.tensor.data_ptr() == address


def test_a_failed_growth_changes_nothing() -> None:
    buffer = GrowingBuffer(
        (1, 2, 8, 1, 16),
        torch.float32,
        CPU,
        2,
        page=64,
        reserve=lambda nbytes, device: FakePages(nbytes, device, limit=8),
    )
    with pytest.raises(torch.OutOfMemoryError):
        buffer.grow(5)
    assert (buffer.num_tokens, buffer.nbytes) == (2, 4 * 64)
    buffer.grow(4)


SIZES = {
    "num_layers": 4,
    "window_frames": 32,
    "tokens_per_frame": 512,
    "num_heads": 4,
    "head_dim": 256,
    "dtype": torch.float32,
}
"""Sizes of a 512 MiB window: 8 rows of 64 MiB, and 16 MiB per frame."""


def write(window: KVWindow, frames: range) -> None:
    tokens = len(frames) * window.tokens_per_frame
    for layer in range(4):
        window.write(layer, frames, *torch.full((2, tokens, 4, 256), 1.0 + frames.start))
    window.commit(frames.stop)


def test_a_large_window_takes_the_memory_of_its_frames() -> None:
    """A large window takes up resident memory only for the frames that it holds. A pooled window
    keeps its address but takes up no memory.
    """
    rings: MemoryPool[Ring] = MemoryPool()
    before = rss()
    window = KVWindow(sink_frames=1, device="cpu", first_frames=2, rings=rings, **SIZES)  # type: ignore[arg-type]
    assert window.buffer.nbytes == 512 * MIB
    assert window.nbytes == 32 * MIB == kv_window_nbytes(first_frames=2, **SIZES)  # type: ignore[arg-type]
    write(window, range(2))
    assert 24 * MIB < rss() - before < 64 * MIB
    assert window.missing_nbytes(4) == 32 * MIB
    window.grow(4)
    write(window, range(2, 4))
    assert window.nbytes == 64 * MIB and 56 * MIB < rss() - before < 96 * MIB
    fork, address = window.fork(), window.buffer.data_ptr()
    assert fork.nbytes == 64 * MIB and rss() - before < 160 * MIB
    assert torch.equal(fork.visible(3, range(2, 4))[0], window.visible(3, range(2, 4))[0])
    addresses = {address, fork.buffer.data_ptr()}
    fork.close()
    window.close()
    assert rings.nbytes == 0 and rss() - before < 32 * MIB
    again = KVWindow(sink_frames=1, device="cpu", first_frames=2, rings=rings, **SIZES)  # type: ignore[arg-type]
    assert again.buffer.data_ptr() in addresses and again.nbytes == 32 * MIB


def test_a_window_moves_with_the_memory_that_it_has() -> None:
    window = KVWindow(sink_frames=1, device="cpu", first_frames=2, **SIZES)  # type: ignore[arg-type]
    write(window, range(2))
    window.to("cpu")
    assert window.nbytes == 32 * MIB and bool((window.visible(0, range(2))[0] == 1).all())
    window.grow(3)
    assert window.nbytes == 48 * MIB


def test_a_window_that_stops_growing_equals_a_short_window() -> None:
    """After a window stops growing, every later chunk sees the same keys and values as with a short
    window, although the growing window's buffer is longer.
    """
    long = KVWindow(sink_frames=1, device="cpu", first_frames=5, **SIZES)  # type: ignore[arg-type]
    short = KVWindow(sink_frames=1, device="cpu", **{**SIZES, "window_frames": 6})  # type: ignore[arg-type]
    long.grow(6)
    for start in range(0, 14, 2):
        frames = range(start, start + 2)
        if start == 6:
            long.stop_growing(6, 1)
        for window in (long, short):
            window.check_frames(frames)
            write(window, frames)
        assert long.graph_key(frames) == short.graph_key(frames)
        for ours, theirs in zip(long.visible(3, frames), short.visible(3, frames), strict=True):
            assert torch.equal(ours, theirs)
    assert long.missing_nbytes(100) == 0 and long.nbytes == 96 * MIB


on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="the memory of a GPU")


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@pytest.mark.cuda
@pytest.mark.whole_gpu
@on_cuda
def test_device_memory_is_mapped_as_the_buffer_grows() -> None:
    """Device memory is mapped at a fixed address, so captured graphs stay valid, and is released
    when the buffer is freed.
    """
    device = torch.device("cuda", 0)
    torch.ones(1, device=device)
    before = free_bytes()
    buffer = GrowingBuffer((40, 2, 16384, 8, 128), torch.bfloat16, device, 1024)
    assert buffer.nbytes == 160 * MIB  # 80 rows of 32 MiB, 2 MiB of each backed by memory
    assert 160 * MIB <= before - free_bytes() < 320 * MIB
    address = buffer.tensor.data_ptr()
    buffer.tensor[:, :, :1024] = 1
    graph, total = torch.cuda.CUDAGraph(), torch.zeros((), device=device)
    torch.sum(buffer.tensor[0, 0, :8], dtype=torch.float32)
    with torch.cuda.graph(graph):
        total.copy_(buffer.tensor[39, 1, :1024].sum(dtype=torch.float32))
    graph.replay()
    assert total.item() == 1024 * 8 * 128
    buffer.grow(4096)
    assert buffer.nbytes == 640 * MIB and buffer.tensor.data_ptr() == address
    assert 640 * MIB <= before - free_bytes() < 800 * MIB
    assert bool((buffer.tensor[:, :, :1024] == 1).all())
    buffer.tensor[:, :, :4096] = 2
    graph.replay()
    assert total.item() == 2 * 1024 * 8 * 128
    buffer.free()
    assert before - free_bytes() < 160 * MIB
    buffer.grow(1024)
    buffer.tensor[:, :, :1024] = 3
    graph.replay()
    assert total.item() == 3 * 1024 * 8 * 128
    del buffer, graph
    assert before - free_bytes() < 160 * MIB


@pytest.mark.cuda
@pytest.mark.whole_gpu
@on_cuda
def test_a_buffer_larger_than_the_device_fails_without_a_trace() -> None:
    """A buffer can reserve more address space than the device has memory. An attempt to grow the
    buffer beyond the device's memory fails and does not change it.
    """
    device = torch.device("cuda", 0)
    torch.ones(1, device=device)
    total = torch.cuda.mem_get_info()[1]
    tokens = -(-2 * total // (4 * 2 * 8 * 128 * 2)) // 1024 * 1024
    buffer = GrowingBuffer((4, 2, tokens, 8, 128), torch.bfloat16, device, 1024)
    before = free_bytes()
    with pytest.raises(torch.OutOfMemoryError):
        buffer.grow(tokens)
    assert buffer.num_tokens == 1024 and before - free_bytes() < 64 * MIB
    buffer.grow(2048)
    buffer.tensor[:, :, :2048] = 1
    assert bool((buffer.tensor[:, :, :2048] == 1).all())
