# SPDX-License-Identifier: Apache-2.0
"""Track which server process owns a file, in directories that several processes share.

Each process holds a lock on a file for as long as the process is running. The operating system
releases the lock when the process ends for any reason.

`filelock` is not used because its purpose is to protect a path for a limited time. In contrast, the
locks in this module show whether the process that created a file is alive.
"""

import contextlib
import fcntl
import multiprocessing.util
import os
import secrets
import stat
import uuid
from pathlib import Path
from typing import IO, Any, BinaryIO, Final

_PREFIX: Final = "vllm_omni-"


def hold_lock(path: Path) -> IO[Any]:
    """Create a file that is locked from the moment other processes can see it.

    The lock is released when the returned file is closed or the process ends.
    """
    hidden = path.with_name(f".{path.name}.new")
    file = hidden.open("wb")
    fcntl.flock(file, fcntl.LOCK_EX)
    hidden.rename(path)
    return file


def open_regular(path: Path) -> BinaryIO:
    """Open a file in a shared directory for reading, without blocking.

    Raises:
        OSError: The file cannot be opened or is not a regular file.
    """
    # Without O_NONBLOCK, opening a FIFO would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    raise OSError(f"{path} is not a regular file")


def is_locked(path: Path) -> bool:
    """Return whether the process that created this file is alive.

    If the file cannot be opened for lack of permission, the process counts as alive.
    """
    try:
        with open_regular(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        return False
    return False


def is_alive(folder: Path, owner: str) -> bool:
    """Return whether the process with this owner name in `folder` is alive."""
    return is_locked(folder / f"{_PREFIX}{owner}.owner")


class StagingDirectory:
    """Directory for staged snapshots. Each file's name identifies the server process that created
    the file.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.owner = folder, secrets.token_hex(8)
        path = folder / f"{_PREFIX}{self.owner}.owner"
        self._lock = hold_lock(path)
        # Unlike an `atexit` handler, this finalizer also runs when API server processes started by
        # vLLM exit.
        self._finalizer = multiprocessing.util.Finalize(
            self, _release, (self._lock, path), exitpriority=10
        )

    def close(self) -> None:
        """Release this process's lock. Idempotent."""
        self._finalizer()

    def new_path(self) -> Path:
        return self.folder / f"{_PREFIX}{self.owner}-{uuid.uuid4().hex}.safetensors"

    def sweep(self) -> set[str]:
        """Remove files that killed servers have left behind.

        Returns:
            Owner names of the killed servers.
        """
        dead = set()
        for path in self.folder.glob(f"{_PREFIX}*.owner"):
            if is_locked(path):
                continue
            owner = path.stem.removeprefix(_PREFIX)
            # Another server that starts at the same time may have removed the file.
            with contextlib.suppress(OSError):
                for left in self.folder.glob(f"{_PREFIX}{owner}-*.safetensors"):
                    left.unlink(missing_ok=True)
                path.unlink(missing_ok=True)
            dead.add(owner)
        return dead


def _release(lock: IO[Any], path: Path) -> None:
    lock.close()
    path.unlink(missing_ok=True)
