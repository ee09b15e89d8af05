# SPDX-License-Identifier: Apache-2.0
"""`KeptSessions`: the directory in which sessions outlive the server process that served them.

Two kinds of file lie there: `<digest>.session.safetensors`, left by a server that was told to stop, and
`<digest>.<owner>.session.safetensors`, a checkpoint that belongs to the process `owner` while that lives. The digest is
of the session's key. A file appears whole, under its name, or not at all. Knows no sessions and no engine.
Held by tests/entrypoints/realtime/test_world_checkpoints.py and test_drain_served.py.
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

from vllm_omni.entrypoints.owner_lock import is_alive, open_regular
from vllm_omni.entrypoints.realtime.session_host import SessionKey

logger = logging.getLogger("vllm." + __name__)

SUFFIX: Final = ".session.safetensors"
_PARTIAL: Final = ".partial"
_ABANDONED_S: Final = 600.0
"""The age of an unfinished file whose server, on another machine, must be dead."""
_LIFETIME_S: Final = 86_400.0
"""The age at which a dead server's checkpoint that nobody could take over is removed."""


class KeptSessions:
    """owner: this process, as `Spool.owner` names it; with checkpoints, that of a spool in this same folder."""

    def __init__(self, folder: Path, owner: str) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder, self._owner = folder, owner

    def drained(self, key: SessionKey) -> Path:
        """Where a session of a server that is stopping lies."""
        return self.folder / f"{_digest(key)}{SUFFIX}"

    def checkpoint(self, key: SessionKey) -> Path:
        """Where this process keeps a session that lives."""
        return self.folder / f"{_digest(key)}.{self._owner}{SUFFIX}"

    def partial(self, final: Path) -> Path:
        """Where `final` is written before it gets its name."""
        return final.with_name(f"{final.name.removesuffix(SUFFIX)}.{self._owner}{_PARTIAL}")

    def left_by_others(self) -> list[Path]:
        """Files of processes that have ended, the oldest first; of several of one session, the newest."""
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
            except FileNotFoundError:  # another server that starts now may be faster
                continue
            except OSError as error:
                logger.warning("%s is not taken over: %s", path, error)
        return [path for _, path in sorted(newest.values())]

    def sweep(self, dead: set[str]) -> None:
        """Remove unfinished files of the processes `dead`, and checkpoints that have waited in vain for a server."""
        now_s = time.time()
        for partial in self.folder.glob(f"*{_PARTIAL}"):
            with contextlib.suppress(OSError):  # another server that starts now may be faster
                if partial.name.split(".")[-2] in dead or now_s - partial.stat().st_mtime > _ABANDONED_S:
                    partial.unlink(missing_ok=True)
        for path in self.folder.glob(f"*.*{SUFFIX}"):
            owner = path.name.removesuffix(SUFFIX).partition(".")[2]
            with contextlib.suppress(OSError):
                if not is_alive(self.folder, owner) and now_s - path.stat().st_mtime > _LIFETIME_S:
                    path.unlink()
                    logger.warning("%s is removed: for a day no server could take it over", path)


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[bool]:
    """Hold a kept file against other API server processes; whoever dies meanwhile leaves it to the next server.

    Yields False for a file that is held, gone or cannot be opened.
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
        yield path.exists()  # another process may have taken it over and removed it


def _digest(key: SessionKey) -> str:
    principal, session_id = key
    return hashlib.blake2b(f"{principal}/{session_id}".encode(), digest_size=16).hexdigest()
