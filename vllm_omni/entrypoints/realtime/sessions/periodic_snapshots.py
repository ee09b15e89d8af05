# SPDX-License-Identifier: Apache-2.0
"""`PeriodicSnapshots`: saves live sessions periodically to limit what a crash loses.

Sessions are saved one at a time. Of the sessions that have finished a chunk since their last
snapshot, the session with the oldest snapshot is saved first. After a snapshot, the next one is
delayed until snapshots take at most `_SHARE` of the engine's time, so the interval adapts to the
machine. If a snapshot cannot be written, the previous one is retained. When a session ends, its
snapshot is removed. If the engine dies, the snapshots are retained for the next server.
"""

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.realtime.sessions.persisted_sessions import (
    SUFFIX,
    WITHHELD_SUFFIX,
    PersistedSessions,
)
from vllm_omni.entrypoints.realtime.sessions.session import Session
from vllm_omni.entrypoints.realtime.sessions.session_manager import SessionManager
from vllm_omni.session_files.snapshot import SnapshotHeader

logger = logging.getLogger("vllm." + __name__)

_SHARE: Final = 0.015
"""Maximum fraction of the engine's time that all periodic snapshots may take. The limit ensures
that chunk times grow by at most 2 %.
"""
_LONGEST_TICK_S: Final = 0.25


@dataclass
class _Saved:
    """State of a session's last periodic snapshot."""

    chunk: int
    """Index of the session's next chunk according to the snapshot, or 0 if there is no snapshot."""
    tried_s: float
    """Monotonic time in seconds when the last attempt to save the session was made."""
    path: Path | None = None
    """Path of the snapshot. None: the session has not been saved yet."""


class PeriodicSnapshots:
    """Saves the sessions of one API server process periodically, until draining starts.

    Args:
        manager: Sessions of this process.
        persistent_dir: Directory for the snapshots.
        write: Function that saves a session to a new file, and returns the header and the time in
            seconds that the engine spent on the snapshot.
        period_s: Seconds between two snapshots of the same session.
    """

    def __init__(
        self,
        manager: SessionManager,
        persistent_dir: PersistedSessions,
        write: Callable[[Session, Path], Awaitable[tuple[SnapshotHeader, float]]],
        period_s: float,
    ) -> None:
        self._manager, self._persistent_dir, self._write, self._period_s = (
            manager,
            persistent_dir,
            write,
            period_s,
        )
        self._saved: dict[str, _Saved] = {}
        self._withheld: set[str] = set()
        self._trouble: str | None = None
        self._is_stretched = False
        self.task: asyncio.Task[None] | None = None

    def start_saving(self) -> None:
        self._manager.on_engine_session_end.append(self.discard_snapshot)
        self.task = self._manager.spawn_background(self._run())

    def adopt(self, session: Session, path: Path, next_chunk: int) -> None:
        """Use the file that a session was restored from as the session's first periodic snapshot.

        Args:
            session: The session.
            path: Path of the file, which is moved into the snapshot directory.
            next_chunk: Index of the session's next chunk according to the file.
        """
        own = self._persistent_dir.periodic_path(session.key)
        try:
            path.rename(own)
        except OSError:  # the file is on another file system
            partial = self._persistent_dir.partial_path(own)
            shutil.copyfile(path, partial)
            partial.rename(own)
            path.unlink()
        self._saved[session.engine_id] = _Saved(next_chunk, time.monotonic(), own)

    def discard_snapshot(self, engine_id: str) -> None:
        """If the engine is alive, remove the snapshot of a session that has ended."""
        self._withheld.discard(engine_id)
        saved = self._saved.pop(engine_id, None)
        if saved is not None and saved.path is not None and not self._manager.engine.is_dead:
            saved.path.unlink(missing_ok=True)

    def withhold(self, session: Session) -> None:
        """Hide a session's snapshot from other servers, and stop writing new snapshots of the
        session.

        If another server restored the snapshot of a session that is being moved, there would be two
        copies of the session.
        """
        self._withheld.add(session.engine_id)
        self._rename(session.engine_id, WITHHELD_SUFFIX)

    def release(self, engine_id: str) -> None:
        """Undo `withhold` if the session was not moved after all."""
        self._withheld.discard(engine_id)
        self._rename(engine_id, SUFFIX)

    def _rename(self, engine_id: str, suffix: str) -> None:
        saved = self._saved.get(engine_id)
        if saved is None or saved.path is None:
            return
        stem = saved.path.name.removesuffix(SUFFIX).removesuffix(WITHHELD_SUFFIX)
        with contextlib.suppress(FileNotFoundError):
            saved.path = saved.path.rename(saved.path.with_name(stem + suffix))

    async def _run(self) -> None:
        while not self._manager.drain.is_draining:
            session = self._due()
            if session is None:
                await asyncio.sleep(min(_LONGEST_TICK_S, self._period_s / 4))
                continue
            cost_s = 0.0
            try:
                cost_s = await self._save(session)
            except Exception:
                logger.exception("a periodic snapshot failed")
            await asyncio.sleep(cost_s / _SHARE)

    def _due(self) -> Session | None:
        """Return the session to save next, or None if no session needs a snapshot now. Sessions
        that have never been saved come first, followed by the session whose last attempt is oldest.
        """
        now_s, due = time.monotonic(), []
        for session in self._manager.sessions():
            saved = self._saved.get(session.engine_id)
            if session.engine_id in self._withheld or not session.is_settled:
                continue
            if saved is None and session.started:
                due.append((0.0, session))
            elif (
                saved is not None
                and saved.chunk < session.next_chunk
                and now_s >= saved.tried_s + self._period_s
            ):
                due.append((saved.tried_s, session))
        return min(due, key=lambda item: item[0], default=(0.0, None))[1]

    async def _save(self, session: Session) -> float:
        """Write one snapshot of a session.

        Returns:
            Time in seconds that the engine spent on the snapshot.
        """
        engine_id, now_s = session.engine_id, time.monotonic()
        saved = self._saved.setdefault(engine_id, _Saved(0, now_s))
        self._note_cost(now_s - saved.tried_s)
        saved.tried_s = now_s
        final = self._persistent_dir.periodic_path(session.key)
        partial = self._persistent_dir.partial_path(final)
        try:
            header, cost_s = await self._write(session, partial)
        except (EndpointError, OSError) as error:
            self._note_trouble(session, error)
            return 0.0
        # Discard the snapshot if the session has ended or is being moved, or if draining will save
        # the session.
        if (
            session.engine_id != engine_id
            or engine_id in self._withheld
            or self._manager.drain.is_draining
        ):
            partial.unlink(missing_ok=True)
            return cost_s
        partial.replace(final)
        saved.chunk, saved.path = header.chunk_index, final
        if self._trouble is not None:
            self._trouble = None
            logger.info("periodic snapshots are written again")
        logger.debug("periodic_snapshot chunks=%d cost_ms=%.1f", header.chunk_index, cost_s * 1e3)
        return cost_s

    def _note_trouble(self, session: Session, error: EndpointError | OSError) -> None:
        """Log the reason why a snapshot could not be written. A repeated reason is logged only
        once.
        """
        if not session.started or self._manager.engine.is_dead:
            return  # the session has ended
        trouble = error.code if isinstance(error, EndpointError) else type(error).__name__
        if trouble != self._trouble:
            self._trouble = trouble
            logger.warning(
                "a periodic snapshot could not be written; sessions and earlier snapshots are not "
                "affected: %s",
                error,
            )

    def _note_cost(self, since_s: float) -> None:
        if since_s > 2 * self._period_s and not self._is_stretched:
            self._is_stretched = True
            logger.warning(
                "periodic snapshots are %.1f s apart instead of omni.snapshot_period_s %g, because "
                "they would take more than %g %% of the engine's time",
                since_s,
                self._period_s,
                _SHARE * 100,
            )
