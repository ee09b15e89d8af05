# SPDX-License-Identifier: Apache-2.0
"""Tensors with any layout, dtype and device can be written to and read from given positions in a
file.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from vllm_omni.tensors import file_io
from vllm_omni.tensors.file_io import read_at, write_at

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
DEVICES = ["cpu", "cpu, staged", pytest.param("cuda", marks=[pytest.mark.cuda, NO_CUDA])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the tensors' device. With `staged`, tensors in host memory are copied through a
    staging buffer, as tensors in device memory are.
    """
    name, _, staged = request.param.partition(", ")
    if staged:
        monkeypatch.setattr(file_io, "_passes_staging", lambda tensor: True)
    return name


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    number = os.open(tmp_path / "bytes", os.O_RDWR | os.O_CREAT)
    yield number
    os.close(number)


def layouts(device: str) -> dict[str, torch.Tensor]:
    """Return tensors with every layout that sessions contain, filled with different values."""
    values = torch.arange(4 * 2 * 12 * 3 * 5, dtype=torch.float32, device=device).view(
        4, 2, 12, 3, 5
    )
    return {
        "contiguous": values.bfloat16(),
        "frames of a window": values[:, :, 3:7],
        "channels last": values[:, :, :, :, 0].contiguous(memory_format=torch.channels_last),
        "no rows": values.transpose(1, 4),
        "transposed": values[0, 0, :, :, 0].t(),
        "scalar": torch.tensor(7.5, dtype=torch.float64, device=device),
        "flags": torch.tensor([True, False, True], device=device),
        "empty": torch.empty(0, 3, device=device),
        "bytes": torch.arange(251, dtype=torch.uint8, device=device),
    }


@pytest.mark.parametrize("gap", [0, 64])
def test_every_layout_comes_back(descriptor: int, device: str, gap: int) -> None:
    """A tensor with any layout is written in logical order and read back.

    The tensors' file positions are tested both with and without gaps between them, and tensors are
    read into memory with the same layout.
    """
    tensors, positions, position = layouts(device), {}, 10
    for name, tensor in tensors.items():
        positions[name] = position
        position += tensor.nbytes + gap
    write_at(descriptor, [(positions[name], tensor) for name, tensor in tensors.items()])
    for name, tensor in tensors.items():
        stored = os.pread(descriptor, tensor.nbytes, positions[name])
        assert stored == tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), (
            name
        )
        target = torch.zeros_like(tensor)
        read_at(descriptor, [(positions[name], target)])
        assert torch.equal(target, tensor), name


def test_rows_of_a_larger_tensor_are_filled_in_place(descriptor: int, device: str) -> None:
    """Frames are read directly into their slots in a window tensor, and the other slots do not
    change.
    """
    frames = torch.arange(4 * 2 * 3 * 5, dtype=torch.int32, device=device).view(4, 2, 3, 5)
    write_at(descriptor, [(0, frames)])
    window = torch.full((4, 2, 9, 5), -1, dtype=torch.int32, device=device)
    read_at(descriptor, [(0, window[:, :, 2:5])])
    assert torch.equal(window[:, :, 2:5], frames)
    assert bool((window[:, :, :2] == -1).all() and (window[:, :, 5:] == -1).all())


def test_more_parts_and_bytes_than_one_call_takes(
    descriptor: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transfer can have more segments than one system call accepts, and more bytes than the
    staging buffer holds.
    """
    monkeypatch.setattr(file_io, "_STAGING_BYTES", 100)
    rows = torch.arange(1500 * 2 * 4 * 2, dtype=torch.int16, device=device).view(1500, 2, 4, 2)[
        :, :, 1:3
    ]
    write_at(descriptor, [(0, rows[:2]), (rows[:2].nbytes, rows[2:])])
    target = torch.zeros(1500, 2, 4, 2, dtype=torch.int16, device=device)[:, :, 1:3]
    read_at(descriptor, [(0, target)])
    assert torch.equal(target, rows)


def test_calls_that_move_less_than_requested_are_repeated(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a system call transfers fewer bytes than requested, it is repeated for the remaining
    bytes, because the kernel may stop at any byte.
    """
    write, read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, arrays, at: write(fd, [arrays[0][:7]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, arrays, at: read(fd, [arrays[0][:5]], at))
    rows = torch.arange(3 * 2 * 4 * 2).view(3, 2, 4, 2)[:, :, 1:3]
    write_at(descriptor, [(3, rows)])
    target = torch.zeros_like(rows)
    read_at(descriptor, [(3, target)])
    assert torch.equal(target, rows)


def test_a_file_that_ends_too_early_is_an_error(descriptor: int) -> None:
    """Reading from a file that ends too early raises an error, so a tensor is never silently left
    half-filled.
    """
    write_at(descriptor, [(0, torch.arange(4))])
    with pytest.raises(EOFError):
        read_at(descriptor, [(8, torch.zeros(4, dtype=torch.int64))])


def test_tensors_in_any_order_and_in_small_parts_are_staged_in_any_number_of_loads(
    descriptor: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors can be staged in any order and in any number of loads, with staging buffers of one
    byte or more.

    In this test, some loads end in the middle of a tensor, and transposed tensors are read in
    between.
    """
    tensors = list(layouts(device).values())
    ends = [sum(tensor.nbytes for tensor in tensors[:number]) for number in range(len(tensors))]
    for nbytes in (1, 7, 64, 1000, 1 << 20):
        monkeypatch.setattr(file_io, "_STAGING_BYTES", nbytes)
        os.truncate(descriptor, 0)
        positions = list(zip(ends, tensors, strict=True))
        write_at(descriptor, positions[::-1] if nbytes == 64 else positions)
        targets = [torch.zeros_like(tensor) for tensor in tensors]
        read_at(descriptor, zip(ends, targets, strict=True))
        assert all(
            torch.equal(target, tensor) for target, tensor in zip(targets, tensors, strict=True)
        )


def test_an_error_in_a_transfer_of_device_memory_is_raised(
    descriptor: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error during a device memory transfer is raised, even if it occurs in the last of several
    writes or because a file is too short.
    """
    monkeypatch.setattr(file_io, "_STAGING_BYTES", 64)
    values = torch.arange(100, dtype=torch.int64, device=device)
    write_at(descriptor, [(0, values)])
    with pytest.raises(EOFError):
        read_at(descriptor, [(8, torch.zeros_like(values))])
    write = os.pwritev

    def full(number: int, arrays: list[np.ndarray], position: int) -> int:
        if position + sum(array.nbytes for array in arrays) >= values.nbytes:
            raise OSError(28, "no space")
        return write(number, arrays, position)

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="no space"):
        write_at(descriptor, [(0, values[:90]), (720, values[90:])])
