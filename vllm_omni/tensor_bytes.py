# SPDX-License-Identifier: Apache-2.0
"""Bytes of tensors to and from places in a file, each byte copied once on the host.

Host tensors go straight between where they lie and the file, many in one call of the kernel; strided ones (frames of a
K/V window) row by row in the same call. Device tensors pass through two page-locked buffers, small ones together: while
one buffer is on its way between device and host, the other is between host and file. A file holds a tensor's elements
in logical order, whatever its layout in memory. Knows no format: callers say where.
Held by tests/test_tensor_bytes.py.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import torch

_MAX_VECTORS: Final = 1024  # the kernel's limit of one pwritev or preadv
_STAGING_BYTES: Final = 64 << 20
_NUMPY_KNOWS: Final = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}

Place = tuple[int, torch.Tensor]
"""A position in a file, and the tensor whose bytes belong there."""
Array = Any
"""A contiguous numpy array that shares memory with a tensor, or a part of one's bytes."""


def write_at(descriptor: int, places: Iterable[Place]) -> None:
    """Write each tensor's bytes at its position. Raises OSError."""
    host, device = _sorted_out(places)
    for start, arrays in _runs(host):
        _write(descriptor, start, arrays)
    if device:
        _write_staged(descriptor, device)


def read_at(descriptor: int, places: Iterable[Place]) -> None:
    """Fill each tensor with the bytes at its position. Raises OSError, and EOFError if the file ends before."""
    host, device = _sorted_out(places)
    turned: list[tuple[torch.Tensor, torch.Tensor]] = []
    for start, arrays in _runs(host, turned):
        _read(descriptor, start, arrays)
    for target, saved in turned:
        target.copy_(saved)
    if device:
        _read_to_device(descriptor, device)


def _sorted_out(places: Iterable[Place]) -> tuple[list[Place], list[Place]]:
    """Host tensors and those that pass through staging buffers; empty ones nowhere."""
    host: list[Place] = []
    staged: list[Place] = []
    for place in places:
        if place[1].numel():
            (staged if _passes_staging(place[1]) else host).append(place)
    return host, staged


def _passes_staging(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


# -- host memory -----------------------------------------------------------------------------------------------------


def _runs(
    places: Iterable[Place], turned: list[tuple[torch.Tensor, torch.Tensor]] | None = None
) -> Iterator[tuple[int, list[Array]]]:
    """Yield (start, arrays that follow each other in the file). turned: where a tensor that lies in small pieces is
    noted with the contiguous one that stands in for it (to be filled); None = the stand-in is a copy.
    """
    arrays: list[Array] = []
    start = end = 0
    for position, tensor in places:
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
    """The memory of a host tensor in logical order, None if it lies in smaller pieces than rows."""
    if tensor.is_contiguous():
        return [_numpy(tensor)]
    rows = _rows(tensor)
    return None if rows is None else list(_numpy(rows))


def _rows(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor with its first two dimensions made one, if everything behind them is contiguous."""
    if tensor.dim() <= 2 or not tensor[0, 0].is_contiguous():
        return None
    rows = tensor.flatten(0, 1)
    return rows if rows.data_ptr() == tensor.data_ptr() else None  # else they do not follow each other evenly: a copy


def _numpy(tensor: torch.Tensor) -> Array:
    known = _NUMPY_KNOWS.get(tensor.dtype)
    return (tensor if known is None else tensor.view(known)).numpy()


# -- device memory ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Load:
    """One staging buffer's content: bytes that follow each other in the file."""

    position: int
    nbytes: int
    pieces: list[tuple[int, torch.Tensor]]
    """Where in the buffer, and uint8 views of device memory."""


def _write_staged(descriptor: int, places: Sequence[Place]) -> None:
    buffers = _staging(places)
    with ThreadPoolExecutor(1, thread_name_prefix="snapshot") as file:
        writing: Future[None] | None = None
        for number, load in enumerate(_loads(places, len(buffers[0]))):
            buffer = buffers[number % 2]  # its last write has ended: only the other buffer's may be going on
            for offset, piece in load.pieces:
                buffer[offset : offset + len(piece)].copy_(piece, non_blocking=True)
            _wait_for_device()
            if writing is not None:
                writing.result()
            writing = file.submit(_write, descriptor, load.position, [buffer[: load.nbytes].numpy()])
        if writing is not None:
            writing.result()


def _read_to_device(descriptor: int, places: Iterable[Place]) -> None:
    """Tensors in small pieces are read into a contiguous one beside them, a staging buffer's worth at a time."""
    ready: list[Place] = []
    turned: list[tuple[torch.Tensor, torch.Tensor]] = []
    for position, target in places:
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


def _read_turned(descriptor: int, places: Sequence[Place], turned: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if places:
        _read_staged(descriptor, places)
    for target, saved in turned:
        target.copy_(saved)


def _read_staged(descriptor: int, places: Sequence[Place]) -> None:
    buffers = _staging(places)
    loads = list(_loads(places, len(buffers[0])))
    with ThreadPoolExecutor(1, thread_name_prefix="snapshot") as file:

        def read(number: int) -> "Future[None]":
            load = loads[number]
            return file.submit(_read, descriptor, load.position, [buffers[number % 2][: load.nbytes].numpy()])

        reading = read(0)
        for number, load in enumerate(loads):
            reading.result()
            if number + 1 < len(loads):
                reading = read(number + 1)  # into the buffer whose copies ended below
            buffer = buffers[number % 2]
            for offset, piece in load.pieces:
                piece.copy_(buffer[offset : offset + len(piece)], non_blocking=True)
            _wait_for_device()


def _staging(places: Sequence[Place]) -> tuple[torch.Tensor, torch.Tensor]:
    nbytes = min(_STAGING_BYTES, sum(tensor.nbytes for _, tensor in places))
    pinned = torch.cuda.is_initialized()
    first, second = (torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2))
    return first, second


def _wait_for_device() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()


def _loads(places: Iterable[Place], most: int) -> Iterator[_Load]:
    """Cut tensors into loads of at most `most` bytes; a tensor in small pieces is made contiguous when it is due."""
    start = filled = 0
    pieces: list[tuple[int, torch.Tensor]] = []
    for position, tensor in places:
        if pieces and position != start + filled:
            yield _Load(start, filled, pieces)
            pieces = []
        if not pieces:
            start, filled = position, 0
        for whole in _byte_views(tensor):
            left = whole
            while len(left):
                part, left = left.tensor_split([most - filled])
                pieces.append((filled, part))
                filled += len(part)
                if filled == most:
                    yield _Load(start, filled, pieces)
                    start, filled, pieces = start + filled, 0, []
    if pieces:
        yield _Load(start, filled, pieces)


def _byte_views(tensor: torch.Tensor) -> list[torch.Tensor]:
    if not tensor.is_contiguous():
        rows = _rows(tensor)
        if rows is not None:
            return [row.reshape(-1).view(torch.uint8) for row in rows]
        tensor = tensor.contiguous()
    return [tensor.view(-1).view(torch.uint8)]


# -- the file --------------------------------------------------------------------------------------------------------


def _write(descriptor: int, position: int, arrays: Sequence[Array]) -> None:
    _move(os.pwritev, descriptor, position, arrays)


def _read(descriptor: int, position: int, arrays: Sequence[Array]) -> None:
    _move(os.preadv, descriptor, position, arrays)


def _move(call: Callable[[int, Any, int], int], descriptor: int, position: int, arrays: Sequence[Array]) -> None:
    for begin in range(0, len(arrays), _MAX_VECTORS):
        part = arrays[begin : begin + _MAX_VECTORS]
        nbytes = sum([array.nbytes for array in part])
        done = call(descriptor, part, position)
        if done != nbytes:
            _finish(call, descriptor, position, part, done)
        position += nbytes


def _finish(
    call: Callable[[int, Any, int], int], descriptor: int, position: int, arrays: Sequence[Array], done: int
) -> None:
    """Go on with a call that moved `done` bytes only."""
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
