# SPDX-License-Identifier: Apache-2.0
"""Layout and writing of snapshot files, in the format of `snapshot.py`.

The front end plans and creates the file; every rank then writes its own part. This module does not
depend on a model or on sockets.
"""

import errno
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from vllm_omni.outputs import RequestFailed
from vllm_omni.runtime.storage import STORAGE_FULL, is_disk_full
from vllm_omni.session_files.snapshot import (
    FORMAT_VERSION,
    KEY,
    KIND,
    MAX_OBJECTS,
    MAX_TABLE_BYTES,
    METADATA,
    UNSEEN,
    RankDescription,
    SnapshotHeader,
)
from vllm_omni.tensors.file_io import write_at
from vllm_omni.tensors.saved import DTYPE_BYTES, StoredTensor

_ALIGN: Final = 64
HEAD_BYTES: Final = 64 << 10
"""The head of a file that will be updated is padded to a multiple of this number of bytes, so that
the tensors can remain at their offsets in the next version of the file.
"""


@dataclass(frozen=True)
class SnapshotPlan:
    """Layout of a snapshot file."""

    header: SnapshotHeader
    """Header of the snapshot."""
    head: bytes
    """First bytes of the file: the length of the table, and the table."""
    starts: list[int]
    """File offset of the start of each rank's tensors. The tensors of a rank are adjacent and in
    the order of the rank's description. The last entry is the end of the file.
    """

    @property
    def nbytes(self) -> int:
        return self.starts[-1]


def plan(
    described: Sequence[RankDescription],
    package_version: str,
    owner: Mapping[str, str] | None,
    align: int = _ALIGN,
    *,
    is_complete: bool = True,
) -> SnapshotPlan:
    """Lay out a snapshot file.

    Args:
        described: Descriptions of the ranks' parts, in rank order.
        package_version: Version of this package.
        owner: Owner of the session; see `SnapshotHeader.owner`.
        align: The size of the head is padded to a multiple of this number of bytes.
        is_complete: Whether all tensors belong to the same state of the session; see
            `SnapshotHeader.is_complete`.

    Raises:
        RequestFailed: The ranks are at different chunks (code `session_busy`), or the table would
            exceed its limits (code `snapshot_too_large`).
    """
    first = described[0]
    if any((rank.chunk_index, rank.lora) != (first.chunk_index, first.lora) for rank in described):
        raise RequestFailed("session_busy", "a chunk of this session is being finished; try again")
    header = SnapshotHeader(
        format_version=FORMAT_VERSION,
        package_version=package_version,
        model=first.model,
        chunk_index=first.chunk_index,
        opening=first.opening,
        ranks=[rank.part for rank in described],
        owner=None if owner is None else dict(owner),
        lora=first.lora,
        is_complete=is_complete,
    )
    entries: dict[str, Any] = {
        METADATA: {"format": "pt", "kind": KIND, KEY: msgspec.json.encode(header).decode()}
    }
    ends = [0]
    for number, rank in enumerate(described):
        position = ends[-1]
        for name, (dtype, shape) in rank.tensors.items():
            begin_at, position = position, position + DTYPE_BYTES[dtype] * math.prod(shape)
            entries[f"rank{number}.{name}"] = StoredTensor(dtype, shape, (begin_at, position))
        ends.append(position)
    text = msgspec.json.encode(entries)
    text += b" " * (-(8 + len(text)) % align)  # padded with spaces, as safetensors does
    if len(text) > MAX_TABLE_BYTES or text.count(b"{") > MAX_OBJECTS:
        raise RequestFailed(
            "snapshot_too_large",
            f"a snapshot of {len(entries) - 1} tensors could not be read again",
        )
    start = 8 + len(text)
    return SnapshotPlan(
        header, len(text).to_bytes(8, "little") + text, [start + end for end in ends]
    )


def create_file(path: Path, planned: SnapshotPlan, *, is_update: bool = False) -> None:
    """Create the file with its full size and its header. Only the operating-system user who owns
    the file can read it.

    Because the file is created at its full size, a lack of disk space is detected before any data
    is copied. If the function fails, the file is removed. Unless `is_update` is set, the file must
    not exist yet.

    Raises:
        RequestFailed: The file cannot be created. The code is `storage_full` or `snapshot_storage`.
    """
    created = 0 if is_update else os.O_CREAT | os.O_EXCL
    descriptor = os.open(path, created | os.O_WRONLY, 0o600)
    try:
        disk = os.fstatvfs(descriptor)
        held = os.fstat(descriptor).st_blocks * 512
        if disk.f_bavail * disk.f_frsize < planned.nbytes - held:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.truncate(descriptor, planned.nbytes)
        os.pwrite(descriptor, planned.head, 0)
    except OSError as error:
        path.unlink()
        raise _no_room(planned.nbytes, error) from error
    finally:
        os.close(descriptor)


def write_tensors(
    path: Path, starts: Sequence[int], rank: int, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Copy a rank's tensors from their device to their offsets in the file.

    Args:
        path: Path of the snapshot file.
        starts: Offsets of the ranks in the file; see `SnapshotPlan.starts`.
        rank: Rank of this process.
        tensors: Tensors of the rank, in the order of its description.

    Raises:
        RequestFailed: The total size of the tensors has changed since they were described, or the
            file cannot be written.
    """
    positions = [(position, tensor) for _, position, tensor in placed(starts, rank, tensors)]
    with planned_file(path, starts) as descriptor:
        write_at(descriptor, positions)


def placed(
    starts: Sequence[int], rank: int, tensors: Mapping[str, torch.Tensor]
) -> list[tuple[str, int, torch.Tensor]]:
    """Return the name, the file offset and the data of each of a rank's tensors.

    Raises:
        RequestFailed: The total size of the tensors has changed since they were described.
    """
    position, positions = starts[rank], []
    for name, tensor in tensors.items():
        positions.append((name, position, tensor))
        position += tensor.nbytes
    if position != starts[rank + 1]:
        raise RequestFailed("session_busy", "this session changed in the meantime; try again")
    return positions


def write_bytes(
    path: Path, starts: Sequence[int], rank: int, own: memoryview, part_bytes: int
) -> None:
    """Write a copy of a rank's tensors, and wait until the copy is on disk.

    Args:
        path: Path of the snapshot file.
        starts: Offsets of the ranks in the file; see `SnapshotPlan.starts`.
        rank: Rank of this process.
        own: Data of the rank's tensors. The tensors are adjacent in the file.
        part_bytes: Number of bytes per system call. Other threads can run between two calls.

    Raises:
        RequestFailed: The file cannot be written.
    """
    with planned_file(path, starts) as descriptor:
        done = 0
        while done < len(own):
            done += os.pwrite(descriptor, own[done : done + part_bytes], starts[rank] + done)
        os.fsync(descriptor)


@contextmanager
def planned_file(path: Path, starts: Sequence[int]) -> Iterator[int]:
    """Open, for writing, the file that the front end has created. Errors are converted to
    `RequestFailed`.
    """
    try:
        file = path.open("r+b", buffering=0)
    except OSError:
        file = None
    if file is None or os.fstat(file.fileno()).st_size != starts[-1]:
        raise RequestFailed("snapshot_storage", UNSEEN)
    with file:
        try:
            yield file.fileno()
        except OSError as error:
            raise _no_room(starts[-1], error) from error


def _no_room(nbytes: int, error: OSError) -> RequestFailed:
    code = STORAGE_FULL if is_disk_full(error) else "snapshot_storage"
    return RequestFailed(
        code, f"there is no room for a snapshot of {nbytes} bytes ({error.strerror})"
    )
