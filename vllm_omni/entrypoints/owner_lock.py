# SPDX-License-Identifier: Apache-2.0
"""Files that belong to one server process, in directories that several share: which live, and files of dead ones.

A process holds a lock on a file of its own while it lives; the system lets go of it however the process ends.
Why not `filelock`: it guards a path for a while; here file and lock together say whether the
process that made the file lives.
Held by tests/entrypoints/test_owner_lock.py.
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
    """Make a file that is locked from the moment it can be seen; the lock goes when it, or the process, is closed."""
    hidden = path.with_name(f".{path.name}.new")
    file = hidden.open("wb")
    fcntl.flock(file, fcntl.LOCK_EX)
    hidden.rename(path)
    return file


def open_regular(path: Path) -> BinaryIO:
    """Open an entry of a shared directory for reading. Raises OSError, also for anything but a file; never waits."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a FIFO would wait for a writer
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    raise OSError(f"{path} is no regular file")


def is_locked(path: Path) -> bool:
    """Whether the process that made this file lives; one that we may not look at counts as alive."""
    try:
        with open_regular(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        return False
    return False


def is_alive(folder: Path, owner: str) -> bool:
    """Whether the process lives whose spool in `folder` has this name."""
    return is_locked(folder / f"{_PREFIX}{owner}.owner")


class Spool:
    """Snapshots on their way through `folder`, named by the server process that made them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.owner = folder, secrets.token_hex(8)
        path = folder / f"{_PREFIX}{self.owner}.owner"
        self._lock = hold_lock(path)
        # Unlike `atexit`, this also runs at the end of the API server processes that vLLM starts.
        self._finalizer = multiprocessing.util.Finalize(self, _let_go, (self._lock, path), exitpriority=10)

    def close(self) -> None:
        """Idempotent."""
        self._finalizer()

    def new_path(self) -> Path:
        return self.folder / f"{_PREFIX}{self.owner}-{uuid.uuid4().hex}.safetensors"

    def sweep(self) -> set[str]:
        """Remove files of killed servers; returns their names, as in `owner`."""
        dead = set()
        for path in self.folder.glob(f"{_PREFIX}*.owner"):
            if is_locked(path):
                continue
            owner = path.stem.removeprefix(_PREFIX)
            with contextlib.suppress(OSError):  # another server that starts now may be faster
                for left in self.folder.glob(f"{_PREFIX}{owner}-*.safetensors"):
                    left.unlink(missing_ok=True)
                path.unlink(missing_ok=True)
            dead.add(owner)
        return dead


def _let_go(lock: IO[Any], path: Path) -> None:
    lock.close()
    path.unlink(missing_ok=True)
