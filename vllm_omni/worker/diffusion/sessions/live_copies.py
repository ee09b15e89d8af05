# SPDX-License-Identifier: Apache-2.0
"""`LiveCopies`: snapshot files of sessions that are about to be moved. The files are updated while
the sessions are active.

A thread writes the first version of a file directly from the session's memory, on a separate CUDA
stream, while the engine runs its steps. The K/V of finished chunks do not change, and chunks in
flight write only to slots that no later chunk reads. The only inconsistent data in the file is
therefore data that the next version does not contain. For a later version, only tensors whose
digest or location has changed are written. New tensors are stored at the offsets of tensors that
have left the window, so all other tensors remain at their offsets in the file.

The last version is written while the session is paused, so the file is then a complete snapshot.
The server that the session moves to uses the digests of this version to check the session in device
memory. This module does not depend on a model or on sockets.
"""

import logging
import mmap
import os
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch

from vllm_omni.outputs import RequestFailed
from vllm_omni.session_files.snapshot_writing import placed, planned_file
from vllm_omni.tensors.digests import tensor_digests
from vllm_omni.tensors.file_io import TensorAt, write_at
from vllm_omni.worker.diffusion.sessions.snapshots import (
    SessionSnapshots,
    rank_in_world,
    returns_result,
)

logger = logging.getLogger("vllm." + __name__)

_MOST_COPIES: Final = 4
"""Maximum number of snapshot files tracked at the same time. The number is limited, because each
file is mapped into memory."""

Place = tuple[str, str]
"""Name and digest of a tensor."""


@dataclass
class _Copy:
    """This rank's part of one snapshot file."""

    session_id: str = ""
    """Id of the session in the version being written."""
    chunk_index: int = 0
    """Index of the session's next chunk in the version being written."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Tensors of the version being written, in file order; empty once writing has started."""
    digests: dict[str, str] = field(default_factory=dict)
    """Digests of the tensors in the version being written, keyed by name."""
    places: dict[int, Place] = field(default_factory=dict)
    """Names and digests of the tensors in the file, keyed by offset."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Sizes in bytes of the tensors in the file, keyed by offset."""
    allocated: int = 0
    """File offset where the allocated memory or disk space ends."""
    mapping: Any = None
    """The file mapped into memory, or None if the file is not mapped yet."""
    writing: "Future[int] | None" = None
    """Number of bytes written, as a future that is done when writing has finished."""


class LiveCopies:
    """Snapshot files of one rank's sessions that are about to be moved.

    Args:
        snapshots: Object that saves and restores sessions on the same rank.
        device: Device of the sessions.
    """

    def __init__(self, snapshots: SessionSnapshots, device: torch.device) -> None:
        self._snapshots, self._device = snapshots, device
        self._copies: OrderedDict[str, _Copy] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="live-copy")
        self._stream: Any = None

    @returns_result
    def describe(self, session_id: str, path: str) -> bytes:
        """Describe a session for the next version of a file, including digests.

        Returns:
            A `RankDescription` as JSON, with the tensors in file order.
        """
        session = self._snapshots.committed(session_id)
        tensors = session.tensors()
        copy = self._copies.setdefault(path, _Copy())
        self._copies.move_to_end(path)
        while len(self._copies) > _MOST_COPIES:
            self._copies.popitem(last=False)
        if copy.writing is not None and not copy.writing.done():
            raise RequestFailed("session_busy", "the file is still being written; try again")
        copy.session_id, copy.chunk_index = session_id, session.chunk_index
        copy.digests = tensor_digests(tensors)
        copy.tensors = _in_places(copy, tensors)
        return msgspec.json.encode(
            self._snapshots.described(session, copy.tensors, digests=copy.digests)
        )

    @returns_result
    def write(
        self, session_id: str, path: str, chunk_index: int, starts: Sequence[int], is_playing: bool
    ) -> None:
        """Write the data that has changed since the last version of the file.

        Args:
            session_id: Id of the described session.
            path: Path of the snapshot file.
            chunk_index: Index of the session's next chunk in the description.
            starts: File offset of each rank's tensors; see `SnapshotPlan.starts`.
            is_playing: Whether to write in the thread while the engine continues. `written` returns
                the result when writing has finished.
        """
        copy = self._copies.get(path)
        if copy is None or (copy.session_id, copy.chunk_index) != (session_id, chunk_index):
            raise RequestFailed("session_busy", "another session was described; try again")
        session = self._snapshots.committed(session_id)
        if not is_playing and session.chunk_index != chunk_index:
            raise RequestFailed(
                "session_busy", "a chunk of this session finished in the meantime; try again"
            )
        rank = rank_in_world()
        positions = placed(starts, rank, copy.tensors)
        changed: list[TensorAt] = [
            (position, tensor)
            for name, position, tensor in positions
            if copy.places.get(position) != (name, copy.digests[name])
        ]
        # If this version cannot be written, the content of the file is unknown, so clear
        # `copy.places` until writing has finished.
        copy.tensors, copy.places = {}, {}
        places = {position: (name, copy.digests[name]) for name, position, _ in positions}
        copy.sizes = {position: tensor.nbytes for _, position, tensor in positions}
        # A growing window may be unmapped while the engine continues, so do not write it in the
        # thread.
        if is_playing and not session.growing_nbytes:
            copy.writing = self._thread.submit(
                self._write, Path(path), starts, copy, changed, places
            )
        else:
            done: Future[int] = Future()
            done.set_result(self._write(Path(path), starts, copy, changed, places, is_ahead=False))
            copy.writing = done

    @returns_result
    def written(self, path: str) -> int | None:
        """While the thread is writing, return None. Afterwards, return the number of bytes written.

        Raises:
            RequestFailed: The file cannot be written.
        """
        copy = self._copies.get(path)
        if copy is None or copy.writing is None:
            raise RequestFailed("session_busy", "the file is not known any more; try again")
        return copy.writing.result() if copy.writing.done() else None

    @returns_result
    def end(self, path: str) -> None:
        """Release the memory used for a file. Idempotent.

        If the thread is still writing the file, the memory is released when the thread has
        finished.
        """
        self._copies.pop(path, None)

    def _write(
        self,
        path: Path,
        starts: Sequence[int],
        copy: _Copy,
        changed: Sequence[TensorAt],
        places: Mapping[int, Place],
        *,
        is_ahead: bool = True,
    ) -> int:
        """Write the tensors in `changed`, and record `places` as the new content of the file.

        If `is_ahead` is set, this method runs in the thread.

        Returns:
            Number of bytes written.
        """
        rank, started_s = rank_in_world(), time.perf_counter()
        num_bytes = sum(tensor.nbytes for _, tensor in changed)
        with planned_file(path, starts) as descriptor, torch.inference_mode():
            begin, end = max(starts[rank], copy.allocated), starts[rank + 1]
            if begin < end:  # writing to a mapping without disk space would kill the process
                os.posix_fallocate(descriptor, begin, end - begin)
                copy.mapping = None
            copy.allocated = end
            if copy.mapping is None:
                copy.mapping = np.frombuffer(mmap.mmap(descriptor, starts[-1]), dtype=np.uint8)
            with self._own_stream(is_ahead):
                write_at(descriptor, changed, copy.mapping)
        copy.places = dict(places)
        took_ms = (time.perf_counter() - started_s) * 1e3
        logger.info(
            "session_copied ahead=%s bytes=%d of=%d took_ms=%.1f",
            is_ahead,
            num_bytes,
            end - starts[rank],
            took_ms,
        )
        return num_bytes

    def _own_stream(self, is_ahead: bool) -> Any:
        """Return a context manager that prevents copies from waiting for the engine's kernels."""
        if not is_ahead or self._device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        return torch.cuda.stream(self._stream)


def _in_places(copy: _Copy, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Order tensors for the next version of a file.

    Tensors that are already in the file keep their offsets. New tensors fill gaps of the same size.
    """
    left = dict(tensors)
    stay = {
        name: left.pop(name)
        for name, digest in copy.places.values()
        if name in left and copy.digests[name] == digest
    }
    ordered: dict[str, torch.Tensor] = {}
    for position, (name, _) in sorted(copy.places.items()):
        size = copy.sizes[position]
        if name not in stay:
            name = next((name for name, tensor in left.items() if tensor.nbytes == size), "")
        if name:
            ordered[name] = stay[name] if name in stay else left.pop(name)
    return {**ordered, **left}
