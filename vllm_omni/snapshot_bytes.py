# SPDX-License-Identifier: Apache-2.0
"""Bytes of tensors to and from places in a file, each byte copied once on the host.

Host tensors go straight between where they lie and the file, many in one call of the kernel; strided ones (frames of a
K/V window) row by row in the same call. Device tensors pass through one page-locked buffer, small ones together. A file
holds a tensor's elements in logical order, whatever its layout in memory. Knows no format: callers say where.
Held by tests/worker/test_snapshot_bytes.py.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch

_MAX_VECTORS: Final = 1024  # the kernel's limit of one pwritev or preadv
_STAGING_BYTES: Final = 64 << 20

Array = Any
"""A one-dimensional uint8 numpy array that shares memory with a tensor."""


def write_at(descriptor: int, places: Iterable[tuple[int, torch.Tensor]]) -> None:
    """Write each tensor's bytes at its position. Raises OSError."""
    host, device = _HostRun(descriptor), _DeviceRun(descriptor)
    for position, tensor in places:
        if not tensor.numel():
            continue
        run: _HostRun | _DeviceRun = device if tensor.is_cuda else host
        run.add(position, tensor)
    host.flush()
    device.flush()


def read_at(descriptor: int, position: int, target: torch.Tensor) -> None:
    """Fill `target` with the bytes at `position`. Raises OSError, and EOFError if the file ends before."""
    if not target.numel():
        return
    if target.is_cuda:
        _read_to_device(descriptor, position, target)
    elif _rows_are_contiguous(target):
        _read(descriptor, position, _host_arrays(target))
    else:
        _read_and_copy(descriptor, position, target)


class _HostRun:
    """Host bytes that follow each other in the file, not yet written."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._arrays: list[Array] = []
        self._start = self._end = 0

    def add(self, position: int, tensor: torch.Tensor) -> None:
        if position != self._end or len(self._arrays) >= _MAX_VECTORS:
            self.flush()
        if not self._arrays:
            self._start = position
        self._arrays += _host_arrays(tensor if _rows_are_contiguous(tensor) else tensor.contiguous())
        self._end = position + tensor.nbytes

    def flush(self) -> None:
        _write(self._descriptor, self._start, self._arrays)
        self._arrays = []


class _DeviceRun:
    """Device bytes that follow each other in the file, on their way through page-locked memory."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._staging: torch.Tensor | None = None
        self._start = self._filled = 0

    def add(self, position: int, tensor: torch.Tensor) -> None:
        if self._staging is None:
            self._staging = torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        if position != self._start + self._filled:
            self.flush()
            self._start = position
        for piece in _device_pieces(tensor if _rows_are_contiguous(tensor) else tensor.contiguous()):
            while piece.numel():
                part, piece = piece.tensor_split([len(self._staging) - self._filled])
                self._staging[self._filled : self._filled + len(part)].copy_(part, non_blocking=True)
                self._filled += len(part)
                if self._filled == len(self._staging):
                    self.flush()

    def flush(self) -> None:
        if self._staging is not None and self._filled:
            torch.cuda.current_stream().synchronize()
            _write(self._descriptor, self._start, [self._staging[: self._filled].numpy()])
        self._start += self._filled
        self._filled = 0


def _read_to_device(descriptor: int, position: int, target: torch.Tensor) -> None:
    if not _rows_are_contiguous(target):
        _read_and_copy(descriptor, position, target)
        return
    staging = torch.empty(min(_STAGING_BYTES, target.nbytes), dtype=torch.uint8, pin_memory=True)
    for piece in _device_pieces(target):
        for part in piece.split(len(staging)):
            _read(descriptor, position, [staging[: len(part)].numpy()])
            part.copy_(staging[: len(part)])
            position += len(part)


def _read_and_copy(descriptor: int, position: int, target: torch.Tensor) -> None:
    saved = torch.empty(target.shape, dtype=target.dtype)
    _read(descriptor, position, _host_arrays(saved))
    target.copy_(saved)


def _rows_are_contiguous(tensor: torch.Tensor) -> bool:
    """Whether a tensor is contiguous, or at least everything behind its first two dimensions."""
    return tensor.is_contiguous() or (tensor.dim() > 2 and tensor[0, 0].is_contiguous())


def _host_arrays(tensor: torch.Tensor) -> list[Array]:
    if tensor.is_contiguous():
        return [tensor.view(-1).view(torch.uint8).numpy()]
    planes = tensor.view(torch.uint8).numpy()
    return [row.reshape(-1) for plane in planes for row in plane]


def _device_pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.is_contiguous():
        return [tensor.view(-1).view(torch.uint8)]
    return [row.view(-1).view(torch.uint8) for plane in tensor for row in plane]


def _write(descriptor: int, position: int, arrays: Sequence[Array]) -> None:
    left = list(arrays)
    while left:
        position += (written := os.pwritev(descriptor, left[:_MAX_VECTORS], position))
        _advance(left, written)


def _read(descriptor: int, position: int, arrays: Sequence[Array]) -> None:
    left = list(arrays)
    while left:
        position += (got := os.preadv(descriptor, left[:_MAX_VECTORS], position))
        if got == 0:
            raise EOFError("the file is shorter than its header says")
        _advance(left, got)


def _advance(left: list[Array], nbytes: int) -> None:
    """Take `nbytes` that are done off the front of `left`."""
    whole = 0
    while whole < len(left) and nbytes >= len(left[whole]):
        nbytes -= len(left[whole])
        whole += 1
    del left[:whole]
    if nbytes:
        left[0] = left[0][nbytes:]
