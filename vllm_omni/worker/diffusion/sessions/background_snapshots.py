# SPDX-License-Identifier: Apache-2.0
"""`BackgroundSnapshots`: takes periodic snapshots of the live sessions on one rank with little
delay for their chunks.

A session is copied to host memory between two engine steps, and a thread writes the copy to a file
during the next steps, so only the copy delays the engine. Only one snapshot is written at a time.
The buffer for the copy is as large as the largest session so far. The buffer is retained, because
allocating memory (in particular page-locked memory) takes longer than the copy. This module does
not depend on a model or on sockets.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec
import torch

from vllm_omni.outputs import RequestFailed
from vllm_omni.session_files.snapshot import StagedRank
from vllm_omni.session_files.snapshot_writing import write_bytes
from vllm_omni.worker.diffusion.sessions.snapshots import (
    SessionSnapshots,
    rank_in_world,
    returns_result,
)

_PIECE_BYTES: Final = 8 << 20
"""Number of bytes written per system call. The main thread can run during a system call."""


class BackgroundSnapshots:
    """Periodic snapshots of the sessions on one rank.

    Args:
        snapshots: Object that saves and restores sessions on the same rank.
        device: Device of the sessions.
    """

    def __init__(self, snapshots: SessionSnapshots, device: torch.device) -> None:
        self._snapshots, self._device = snapshots, device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._staged: tuple[str, int] | None = None
        self._writing: Future[float] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    @returns_result
    def stage(self, session_id: str) -> bytes:
        """Copy a session, in its state after the last finished chunk, to host memory.

        Returns:
            A `StagedRank` as JSON.
        """
        if self._writing is not None and not self._writing.done():
            raise RequestFailed(
                "busy", "another periodic snapshot is being written; try again later"
            )
        started_s = time.perf_counter()
        session = self._snapshots.committed(session_id)
        described, tensors = self._snapshots.described(session), session.tensors()
        self._staged, self._writing = None, None
        self._copy(tensors)
        self._staged = session_id, sum(tensor.nbytes for tensor in tensors.values())
        return msgspec.json.encode(StagedRank(described, time.perf_counter() - started_s))

    @returns_result
    def write(self, session_id: str, path: str, starts: Sequence[int]) -> None:
        """Start writing the copy of a session to its offset in the file.

        Args:
            session_id: Id of the staged session.
            path: Path of the snapshot file.
            starts: File offset of each rank's tensors; see `SnapshotPlan.starts`.
        """
        rank = rank_in_world()
        if self._staged != (session_id, starts[rank + 1] - starts[rank]):
            raise RequestFailed(
                "session_busy", "another session was copied in the meantime; try again"
            )
        self._writing = self._thread.submit(self._write, Path(path), starts, rank)

    @returns_result
    def written(self, session_id: str) -> float | None:
        """While the thread is writing, return None. Afterwards, return the CPU time in seconds that
        writing has taken from the denoise steps.
        """
        if self._staged is None or self._staged[0] != session_id or self._writing is None:
            raise RequestFailed(
                "session_busy", "another session was copied in the meantime; try again"
            )
        return self._writing.result() if self._writing.done() else None

    def _copy(self, tensors: Mapping[str, torch.Tensor]) -> None:
        nbytes, is_cuda = (
            sum(tensor.nbytes for tensor in tensors.values()),
            self._device.type == "cuda",
        )
        if len(self._memory) < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=is_cuda)
        position = 0
        for tensor in tensors.values():
            slot = self._memory[position : position + tensor.nbytes]
            position += tensor.nbytes
            if not tensor.nbytes:
                continue
            # If a slot is misaligned for the dtype of its tensor, copy the tensor as bytes.
            if slot.storage_offset() % tensor.element_size():
                slot.copy_(tensor.contiguous().view(-1).view(torch.uint8))
            else:
                slot.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=is_cuda)
        if is_cuda:
            torch.cuda.current_stream(self._device).synchronize()

    def _write(self, path: Path, starts: Sequence[int], rank: int) -> float:
        """Write the copy to the file. This method runs in the thread.

        Returns:
            CPU time in seconds that writing has taken from the denoise steps. 0 unless the device
            is the CPU.
        """
        started_s = time.thread_time()
        own = self._memory.numpy().data[: starts[rank + 1] - starts[rank]]
        write_bytes(path, starts, rank, own, _PIECE_BYTES)
        spent_s = time.thread_time() - started_s
        return spent_s if self._device.type == "cpu" else 0.0
