# SPDX-License-Identifier: Apache-2.0
"""`Checkpoints`: live sessions are saved every so often, so that a crash loses no more than that.

One session at a time, the one that has waited longest, and only if it has finished a chunk since. After each, the
engine is left alone for so long that checkpoints take no more than `_SHARE` of its time, whatever they cost on this
machine. A checkpoint that cannot be written costs nothing but itself: the one before it stays. A world's checkpoint
goes when the world does; those of a dead engine's worlds stay for the next server.
Held by tests/entrypoints/realtime/test_world_checkpoints.py and test_checkpoints_served.py.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vllm_omni.entrypoints.realtime.errors import DoorError
from vllm_omni.entrypoints.realtime.kept_sessions import KeptSessions
from vllm_omni.entrypoints.realtime.session import Session
from vllm_omni.entrypoints.realtime.session_manager import SessionManager
from vllm_omni.sessions.snapshot import SnapshotHeader

logger = logging.getLogger("vllm." + __name__)

_SHARE: Final = 0.015
"""Of the engine's time, for all checkpoints; chunk time may grow by 2 %."""
_LONGEST_TICK_S: Final = 0.25


@dataclass
class _Saved:
    """How far a session is saved. chunk: its next one in the file, 0 = none. tried_s: when it was last begun."""

    chunk: int
    tried_s: float
    path: Path | None = None


class Checkpoints:
    """period_s: between two checkpoints of a session. `start` from the event loop; ends when draining begins.

    write: saves a session to a new file; returns its header and the seconds that cost the engine.
    """

    def __init__(
        self,
        manager: SessionManager,
        kept: KeptSessions,
        write: Callable[[Session, Path], Awaitable[tuple[SnapshotHeader, float]]],
        period_s: float,
    ) -> None:
        self._manager, self._kept, self._write, self._period_s = manager, kept, write, period_s
        self._saved: dict[str, _Saved] = {}
        self._trouble: str | None = None
        self._is_stretched = False
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._manager.on_world_end.append(self.forget)
        self.task = self._manager.spawn_background(self._run())

    def adopt(self, session: Session, path: Path) -> None:
        """Take over the file that a session was restored from."""
        own = self._kept.checkpoint(session.key)
        path.rename(own)
        self._saved[session.engine_id] = _Saved(session.next_chunk, time.monotonic(), own)

    def forget(self, engine_id: str) -> None:
        """A world has ended: so has its checkpoint, unless it ended with its engine."""
        saved = self._saved.pop(engine_id, None)
        if saved is not None and saved.path is not None and not self._manager.engine.is_dead:
            saved.path.unlink(missing_ok=True)

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
                logger.exception("a checkpoint failed")
            await asyncio.sleep(cost_s / _SHARE)

    def _due(self) -> Session | None:
        """The session whose checkpoint is oldest, of those that have one due."""
        now_s, due = time.monotonic(), []
        for session in self._manager.sessions():
            saved = self._saved.get(session.engine_id)
            if saved is None and session.started:
                due.append((0.0, session))
            elif saved is not None and saved.chunk < session.next_chunk and now_s >= saved.tried_s + self._period_s:
                due.append((saved.tried_s, session))
        return min(due, key=lambda item: item[0], default=(0.0, None))[1]

    async def _save(self, session: Session) -> float:
        """Write one checkpoint; returns the seconds of engine time it took."""
        engine_id, now_s = session.engine_id, time.monotonic()
        saved = self._saved.setdefault(engine_id, _Saved(0, now_s))
        self._note_pace(now_s - saved.tried_s)
        saved.tried_s = now_s
        final = self._kept.checkpoint(session.key)
        partial = self._kept.partial(final)
        try:
            header, cost_s = await self._write(session, partial)
        except (DoorError, OSError) as error:
            self._note_trouble(session, error)
            return 0.0
        if session.engine_id != engine_id or self._manager.drain.is_draining:  # it ended, or is saved for good
            partial.unlink(missing_ok=True)
            return cost_s
        partial.replace(final)
        saved.chunk, saved.path = header.chunk_index, final
        if self._trouble is not None:
            self._trouble = None
            logger.info("checkpoints are written again")
        logger.debug("checkpoint chunks=%d cost_ms=%.1f", header.chunk_index, cost_s * 1e3)
        return cost_s

    def _note_trouble(self, session: Session, error: DoorError | OSError) -> None:
        """Log why a checkpoint could not be written, once until the reason changes."""
        if not session.started or self._manager.engine.is_dead:
            return  # it ended meanwhile
        trouble = error.code if isinstance(error, DoorError) else type(error).__name__
        if trouble != self._trouble:
            self._trouble = trouble
            logger.warning("a checkpoint could not be written; sessions go on, those before it stay: %s", error)

    def _note_pace(self, since_s: float) -> None:
        if since_s > 2 * self._period_s and not self._is_stretched:
            self._is_stretched = True
            logger.warning(
                "checkpoints are %.1f s apart, not omni.checkpoint_s %g: more often would take over %g %% of the "
                "engine's time",
                since_s,
                self._period_s,
                _SHARE * 100,
            )
