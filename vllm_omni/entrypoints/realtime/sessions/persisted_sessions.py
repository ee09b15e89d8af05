# SPDX-License-Identifier: Apache-2.0
"""`PersistedSessions`: manages the directory for snapshots that outlive their server process.

The directory contains three kinds of files. `<digest>.session.safetensors` is a session that a
server saved at shutdown. `<digest>.<owner>.session.safetensors` is a periodic snapshot that belongs
to the process `owner` while that process is alive. `<digest>.<owner>.withheld` is the last snapshot
of a session that was being moved to another server. A withheld snapshot is never restored
automatically because the session may be live on the other server. If that other server was killed,
an operator may restore the snapshot. The digest is computed from the session's key. Files are
renamed into place, so they are always complete. This module does not depend on sessions or the
engine.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from vllm_omni.entrypoints.realtime.sessions.session_host import SessionKey
from vllm_omni.entrypoints.staging_directory import is_alive, open_regular

logger = logging.getLogger("vllm." + __name__)

SUFFIX: Final = ".session.safetensors"
WITHHELD_SUFFIX: Final = ".withheld"
_PARTIAL: Final = ".partial"
_ABANDONED_S: Final = 600.0
"""Age in seconds above which an incomplete file from another machine is considered abandoned."""
_LIFETIME_S: Final = 86_400.0
"""Age in seconds above which a periodic snapshot that no server could restore is removed."""


class PersistedSessions:
    """Manages the snapshots in one directory.

    Args:
        folder: Path of the directory. If the directory does not exist, it is created.
        owner: Name of this process (`StagingDirectory.owner`). For periodic snapshots, it must be
            the name that the process uses in the staging directory.
    """

    def __init__(self, folder: Path, owner: str) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder, self._owner = folder, owner

    def final_path(self, key: SessionKey) -> Path:
        """Return the path for a session saved at shutdown."""
        return self.folder / f"{_digest(key)}{SUFFIX}"

    def periodic_path(self, key: SessionKey) -> Path:
        """Return the path for this process's periodic snapshot of a session."""
        return self.folder / f"{_digest(key)}.{self._owner}{SUFFIX}"

    def partial_path(self, final: Path) -> Path:
        """Return the path that a file is written to before it is renamed to `final`."""
        return final.with_name(f"{final.name.removesuffix(SUFFIX)}.{self._owner}{_PARTIAL}")

    def lost_path(self, key: SessionKey) -> Path:
        """Return the path for the last snapshot of a session that may be live on another server."""
        return self.folder / f"{_digest(key)}.{self._owner}{WITHHELD_SUFFIX}"

    def left_by_others(self) -> list[Path]:
        """Return the snapshots of processes that have ended, oldest first.

        If a session has several snapshots, only the newest is returned, and the others are removed.
        """
        newest: dict[str, tuple[float, Path]] = {}
        for path in self.folder.glob(f"*{SUFFIX}"):
            digest, _, owner = path.name.removesuffix(SUFFIX).partition(".")
            if owner and is_alive(self.folder, owner):
                continue
            try:
                with open_regular(path) as file:
                    found = os.fstat(file.fileno()).st_mtime, path
                older = min(found, newest.get(digest, found))
                newest[digest] = max(found, newest.get(digest, found))
                if older != newest[digest]:
                    older[1].unlink()
            # Another server that starts at the same time may have restored the snapshot.
            except FileNotFoundError:
                continue
            except OSError as error:
                logger.warning("%s is not restored: %s", path, error)
        return [path for _, path in sorted(newest.values())]

    def sweep(self, dead: set[str]) -> None:
        """Remove expired snapshots, and incomplete files that are abandoned or belong to one of the
        dead processes named in `dead`.
        """
        now_s = time.time()
        for partial in self.folder.glob(f"*{_PARTIAL}"):
            # Another server that starts at the same time may have removed the file.
            with contextlib.suppress(OSError):
                if (
                    partial.name.split(".")[-2] in dead
                    or now_s - partial.stat().st_mtime > _ABANDONED_S
                ):
                    partial.unlink(missing_ok=True)
        for path in self.folder.glob(f"*.*{WITHHELD_SUFFIX}"):
            owner = path.name.removesuffix(WITHHELD_SUFFIX).partition(".")[2]
            with contextlib.suppress(OSError):
                if is_alive(self.folder, owner):
                    continue
                if now_s - path.stat().st_mtime > _LIFETIME_S:
                    path.unlink()
                    continue
                logger.warning(
                    "session_lost: %s is the last snapshot of a session that was moving when its "
                    "server ended; if it is live on no server, restore it with PUT /v1/sessions",
                    path,
                )
        for path in self.folder.glob(f"*.*{SUFFIX}"):
            owner = path.name.removesuffix(SUFFIX).partition(".")[2]
            with contextlib.suppress(OSError):
                if not is_alive(self.folder, owner) and now_s - path.stat().st_mtime > _LIFETIME_S:
                    path.unlink()
                    logger.warning(
                        "%s is removed, because no server could restore it for a day", path
                    )


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Lock a snapshot for the duration of the `with` block so that no other API server process
    restores it.

    If this process dies, the lock is released, and the next server may restore the snapshot.

    Yields:
        True if this process holds the lock. False if the file is already locked, is missing or
        cannot be opened.
    """
    try:
        file = open_regular(path)
    except OSError:
        yield False
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield path.exists()  # another process may have restored and removed it


def _digest(key: SessionKey) -> str:
    principal, session_id = key
    return hashlib.blake2b(f"{principal}/{session_id}".encode(), digest_size=16).hexdigest()
