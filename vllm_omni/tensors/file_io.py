# SPDX-License-Identifier: Apache-2.0
"""Transfers tensor data to and from offsets in a file, with one copy on the host.

Host tensors are transferred directly between their memory and the file, with many tensors per
system call. Strided tensors (frames of a K/V window) are transferred row by row in the same call.
Device tensors pass through two page-locked staging buffers. Each buffer can hold several small
tensors. While one buffer is copied between device and host, several threads write or read the other
buffer, because a single thread is slower than the device. A file contains the elements of a tensor
in logical order, regardless of the tensor's memory layout. Callers define the file format.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import torch

_MAX_VECTORS: Final = 1024  # the kernel's limit for one pwritev or preadv
_STAGING_BYTES: Final = 64 << 20
_THREADS: Final = 8
_LEAST_PART_BYTES: Final = 1 << 20
_NUMPY_KNOWS: Final = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}

TensorAt = tuple[int, torch.Tensor]
"""Offset in a file in bytes, and the tensor whose data is stored there."""
Array = Any  # np.ndarray
"""Contiguous NumPy array that shares memory with a tensor or with a slice of a tensor."""


def write_at(descriptor: int, positions: Iterable[TensorAt], mapping: Array | None = None) -> None:
    """Write the data of each tensor at its offset.

    Args:
        descriptor: Descriptor of the open file.
        positions: Offsets in the file, and the tensors to write there.
        mapping: The file mapped into memory. If given, device tensors are written to the mapping.
            Several threads can then write at the same time, which is not possible with write calls,
            because they lock the file. All blocks of the mapping must be allocated.

    Raises:
        OSError: Writing failed.
    """
    host, device = _sorted_out(positions)
    for start, arrays in _runs(host):
        _write(descriptor, start, arrays)
    if device:
        write = partial(_write, descriptor) if mapping is None else partial(_write_mapped, mapping)
        _write_staged(write, device)


def read_at(descriptor: int, positions: Iterable[TensorAt]) -> None:
    """Fill each tensor with the data at its file offset.

    Raises:
        OSError: Reading failed.
        EOFError: The file is too short.
    """
    host, device = _sorted_out(positions)
    turned: list[tuple[torch.Tensor, torch.Tensor]] = []
    for start, arrays in _runs(host, turned):
        _read(descriptor, start, arrays)
    for target, saved in turned:
        target.copy_(saved)
    if device:
        _read_to_device(descriptor, device)


def _sorted_out(positions: Iterable[TensorAt]) -> tuple[list[TensorAt], list[TensorAt]]:
    """Split the tensors into host tensors and tensors that need a staging buffer. Empty tensors are
    dropped.
    """
    host: list[TensorAt] = []
    staged: list[TensorAt] = []
    for slot in positions:
        if slot[1].numel():
            (staged if _passes_staging(slot[1]) else host).append(slot)
    return host, staged


def _passes_staging(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


# -- host memory -----------------------------------------------------------------------------------


def _runs(
    positions: Iterable[TensorAt], turned: list[tuple[torch.Tensor, torch.Tensor]] | None = None
) -> Iterator[tuple[int, list[Array]]]:
    """Yield (start, arrays) for each range of arrays that are adjacent in the file.

    Args:
        positions: Offsets and tensors, in file order.
        turned: When reading, a list that receives each tensor whose rows are not contiguous,
            together with the contiguous buffer to fill in its place. None when writing; a
            contiguous copy of such a tensor is then written.
    """
    arrays: list[Array] = []
    start = end = 0
    for position, tensor in positions:
        if position != end:
            if arrays:
                yield start, arrays
            arrays, start = [], position
        own = _arrays(tensor)
        if own is None:
            if turned is None:
                stand_in = tensor.contiguous()
            else:
                stand_in = torch.empty(tensor.shape, dtype=tensor.dtype)
                turned.append((tensor, stand_in))
            own = [_numpy(stand_in)]
        arrays += own
        end = position + tensor.nbytes
    if arrays:
        yield start, arrays


def _arrays(tensor: torch.Tensor) -> list[Array] | None:
    """Return the memory of a host tensor in logical order, or None if its rows are not
    contiguous.
    """
    if tensor.is_contiguous():
        return [_numpy(tensor)]
    rows = _rows(tensor)
    return None if rows is None else list(_numpy(rows))


def _rows(tensor: torch.Tensor) -> torch.Tensor | None:
    """Merge the first two dimensions of a tensor. The result is None if the other dimensions are
    not contiguous, or if merging would require a copy.
    """
    if tensor.dim() <= 2 or not tensor[0, 0].is_contiguous():
        return None
    rows = tensor.flatten(0, 1)
    # With uneven strides, `flatten` has made a copy.
    return rows if rows.data_ptr() == tensor.data_ptr() else None


def _numpy(tensor: torch.Tensor) -> Array:
    known = _NUMPY_KNOWS.get(tensor.dtype)
    return (tensor if known is None else tensor.view(known)).numpy()


# -- device memory ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Load:
    """Content of a staging buffer: one contiguous range of the file."""

    position: int
    """Start of the range in the file, in bytes."""
    nbytes: int
    """Length of the range in bytes."""
    parts: list[tuple[int, torch.Tensor]]
    """Pairs of an offset in the buffer and a uint8 view of device memory."""


def _write_staged(
    write: Callable[[int, Sequence[Array]], None], positions: Sequence[TensorAt]
) -> None:
    buffers = _staging(positions)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="snapshot") as threads:
        writing: list[Future[None]] = []
        for number, load in enumerate(_loads(positions, len(buffers[0]))):
            buffer = buffers[number % 2]  # free: at most the other buffer is still being written
            for offset, part in load.parts:
                buffer[offset : offset + len(part)].copy_(part, non_blocking=True)
            _wait_for_device()
            _wait_for(writing)
            writing = _in_parts(threads, write, load, buffer)
        _wait_for(writing)


def _in_parts(
    threads: ThreadPoolExecutor,
    call: Callable[[int, Sequence[Array]], None],
    load: _Load,
    buffer: torch.Tensor,
) -> "list[Future[None]]":
    """Split a staging buffer into parts, and start a call on a thread for each part."""
    each = max(_LEAST_PART_BYTES, -(-load.nbytes // _THREADS))
    return [
        threads.submit(call, load.position + start, [part.numpy()])
        for start, part in zip(
            range(0, load.nbytes, each), buffer[: load.nbytes].split(each), strict=True
        )
    ]


def _wait_for(futures: "Iterable[Future[None]]") -> None:
    for future in futures:
        future.result()


def _read_to_device(descriptor: int, positions: Iterable[TensorAt]) -> None:
    """Read data from the file into tensors in device memory.

    A tensor whose rows are not contiguous is read into a contiguous temporary tensor first. To
    limit memory use, temporary tensors are copied to their targets as soon as their total size
    reaches the maximum size of a staging buffer.
    """
    ready: list[TensorAt] = []
    turned: list[tuple[torch.Tensor, torch.Tensor]] = []
    for position, target in positions:
        if target.is_contiguous() or _rows(target) is not None:
            ready.append((position, target))
            continue
        saved = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        ready.append((position, saved))
        turned.append((target, saved))
        if sum(saved.nbytes for _, saved in turned) >= _STAGING_BYTES:
            _read_turned(descriptor, ready, turned)
            ready, turned = [], []
    _read_turned(descriptor, ready, turned)


def _read_turned(
    descriptor: int,
    positions: Sequence[TensorAt],
    turned: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    if positions:
        _read_staged(descriptor, positions)
    for target, saved in turned:
        target.copy_(saved)


def _read_staged(descriptor: int, positions: Sequence[TensorAt]) -> None:
    buffers = _staging(positions)
    loads = list(_loads(positions, len(buffers[0])))
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="snapshot") as threads:

        def read(number: int) -> "list[Future[None]]":
            read_part = partial(_read, descriptor)
            return _in_parts(threads, read_part, loads[number], buffers[number % 2])

        reading = read(0)
        for number, load in enumerate(loads):
            _wait_for(reading)
            if number + 1 < len(loads):
                reading = read(number + 1)  # safe, because the copies from that buffer have ended
            buffer = buffers[number % 2]
            for offset, part in load.parts:
                part.copy_(buffer[offset : offset + len(part)], non_blocking=True)
            _wait_for_device()


def _staging(positions: Sequence[TensorAt]) -> tuple[torch.Tensor, torch.Tensor]:
    nbytes = min(_STAGING_BYTES, sum(tensor.nbytes for _, tensor in positions))
    pinned = torch.cuda.is_initialized()
    first, second = (torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2))
    return first, second


def _wait_for_device() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


def _loads(positions: Iterable[TensorAt], most: int) -> Iterator[_Load]:
    """Split tensors into loads that fit into a staging buffer, each of at most `most` bytes.

    A tensor whose rows are not contiguous is made contiguous just before it is transferred.
    """
    start = filled = 0
    parts: list[tuple[int, torch.Tensor]] = []
    for position, tensor in positions:
        if parts and position != start + filled:
            yield _Load(start, filled, parts)
            parts = []
        if not parts:
            start, filled = position, 0
        for whole in _byte_views(tensor):
            left = whole
            while len(left):
                part, left = left.tensor_split([most - filled])
                parts.append((filled, part))
                filled += len(part)
                if filled == most:
                    yield _Load(start, filled, parts)
                    start, filled, parts = start + filled, 0, []
    if parts:
        yield _Load(start, filled, parts)


def _byte_views(tensor: torch.Tensor) -> list[torch.Tensor]:
    if not tensor.is_contiguous():
        rows = _rows(tensor)
        if rows is not None:
            return [row.reshape(-1).view(torch.uint8) for row in rows]
        tensor = tensor.contiguous()
    return [tensor.view(-1).view(torch.uint8)]


# -- the file --------------------------------------------------------------------------------------


def _write(descriptor: int, position: int, arrays: Sequence[Array]) -> None:
    _move(os.pwritev, descriptor, position, arrays)


def _write_mapped(mapping: Array, position: int, arrays: Sequence[Array]) -> None:
    for array in arrays:
        np.copyto(mapping[position : position + len(array)], array)
        position += len(array)


def _read(descriptor: int, position: int, arrays: Sequence[Array]) -> None:
    _move(os.preadv, descriptor, position, arrays)


def _move(
    call: Callable[[int, Any, int], int], descriptor: int, position: int, arrays: Sequence[Array]
) -> None:
    for start in range(0, len(arrays), _MAX_VECTORS):
        part = arrays[start : start + _MAX_VECTORS]
        nbytes = sum([array.nbytes for array in part])
        done = call(descriptor, part, position)
        if done != nbytes:
            _finish(call, descriptor, position, part, done)
        position += nbytes


def _finish(
    call: Callable[[int, Any, int], int],
    descriptor: int,
    position: int,
    arrays: Sequence[Array],
    done: int,
) -> None:
    """Transfer the remaining bytes after a system call that transferred only `done` bytes."""
    left = [memoryview(array).cast("B") for array in arrays]
    while True:
        if done == 0:
            raise EOFError("the file is shorter than its header says")
        position += done
        whole = 0
        while whole < len(left) and done >= len(left[whole]):
            done -= len(left[whole])
            whole += 1
        del left[:whole]
        if not left:
            return
        left[0] = left[0][done:]
        done = call(descriptor, left, position)
