# SPDX-License-Identifier: Apache-2.0
"""`SuspendedFiles`: stores suspended sessions on disk if they do not fit into host memory.

Each session is stored as a snapshot file. The file has no name in its directory, so the operating
system deletes it when the process ends for any reason. When a session is read, it is verified
against digests that were computed before the session left the device. Files are written and read
between engine steps. This module does not depend on a model.
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from vllm_omni.model_executor.interfaces import SessionState
from vllm_omni.outputs import RequestFailed
from vllm_omni.runtime.storage import STORAGE_FULL, is_disk_full
from vllm_omni.session_files.snapshot_exchange import package_version
from vllm_omni.session_files.snapshot_writing import plan, write_tensors
from vllm_omni.tensors.digests import tensor_digests
from vllm_omni.worker.diffusion.sessions.snapshots import SessionSnapshots
from vllm_omni.worker.diffusion.sessions.store import SessionFile


class SuspendedFiles:
    """Files of suspended sessions. The engine must have only one rank.

    Args:
        folder: Directory to store the files in (`omni.suspend_dir`). The directory is created if
            necessary.
        snapshots: Object that saves and restores sessions on the rank.

    Raises:
        ValueError: No file can be created in the directory.
    """

    def __init__(self, folder: Path, snapshots: SessionSnapshots) -> None:
        self._folder, self._snapshots = folder, snapshots
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._new_file().close()
        except OSError as error:
            raise ValueError(f"omni.suspend_dir {folder}: {error.strerror}") from error

    def _new_file(self) -> IO[bytes]:
        return tempfile.TemporaryFile(buffering=0, dir=self._folder)

    def write(self, session: Any, digests: Mapping[str, str]) -> SessionFile:
        """Write a session to a new file. The session is not changed.

        Args:
            session: Session to write, with its tensors on the host or on the device.
            digests: Digests of the session's tensors, as returned by `tensor_digests`.

        Raises:
            RequestFailed: The file cannot be written, and no file remains. The code is
                `storage_full` or `snapshot_storage`.
        """
        planned = plan([self._snapshots.described(session)], package_version(), None)
        try:
            file = self._new_file()
        except OSError as error:
            raise _failed("written", error) from error
        try:
            os.posix_fallocate(file.fileno(), 0, planned.nbytes)
            os.pwrite(file.fileno(), planned.head, 0)
            write_tensors(_path(file), planned.starts, 0, session.tensors())
        except OSError as error:
            file.close()
            raise _failed("written", error) from error
        except BaseException:
            file.close()
            raise
        return SessionFile(session, file, planned.nbytes, digests)

    @torch.inference_mode()
    def read(self, stored: SessionFile) -> SessionState:
        """Create a session from its file. The file is not changed.

        Raises:
            RequestFailed: The file is damaged or cannot be read. No session remains.
        """
        session: SessionState = self._snapshots.load(
            stored.session_id, _path(stored.file), lambda nbytes: None
        )
        if tensor_digests(session.tensors()) != stored.digests:
            session.close()
            raise RequestFailed(
                "invalid_snapshot",
                f"session {stored.session_id!r} was damaged on disk (omni.suspend_dir): close it "
                "and start a new one",
            )
        session.adapters, session.failure = stored.adapters, stored.failure
        return session


def _path(file: IO[bytes]) -> Path:
    return Path(f"/proc/self/fd/{file.fileno()}")


def _failed(what: str, error: OSError) -> RequestFailed:
    code = STORAGE_FULL if is_disk_full(error) else "snapshot_storage"
    return RequestFailed(code, f"a suspended session cannot be {what} to disk ({error.strerror})")
