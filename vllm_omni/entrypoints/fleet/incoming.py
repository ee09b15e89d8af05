# SPDX-License-Identifier: Apache-2.0
"""`IncomingSessions`: sessions that are being moved to this server.

A prepared session has been restored in the engine, but clients cannot use it yet. `commit` makes
the session live if the move has neither ended nor timed out. Commit, end and timeout run on one
event loop, so exactly one of them takes effect.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.fleet.peer import RESOLVE_S
from vllm_omni.entrypoints.realtime.sessions.migration import SessionMigration, SessionOwner
from vllm_omni.entrypoints.realtime.sessions.session import Session
from vllm_omni.entrypoints.realtime.sessions.session_host import SessionKey
from vllm_omni.outputs import RequestFailed
from vllm_omni.session_files.snapshot import read_header

logger = logging.getLogger("vllm." + __name__)

_PREPARED_S: Final = 15.0
"""Time in seconds after which a prepared session that has not been committed is discarded."""
_CLAIM_S: Final = 60.0
"""Time in seconds during which new sessions cannot evict a session that has just arrived. The
client needs this time to reconnect and continue its session.
"""
_SETTLE_S: Final = RESOLVE_S + 1.0
_REMEMBERED: Final = 1024
_ENDPOINT: Final = "migration"
_PRINCIPAL: Final = "move:"
"""Prefix of a prepared session's principal. Clients' principals contain no colon."""

State = Literal["receiving", "prepared", "committed", "aborted"]


@dataclass
class _Move:
    state: State = "receiving"
    """State of the move."""
    session: Session | None = None
    """Session restored from the snapshot. None before the session is restored and after the move
    has ended.
    """
    key: SessionKey | None = None
    """The session's key: the principal and the session id."""
    path: Path | None = None
    """Path of the received snapshot."""
    next_chunk: int = 0
    """Index of the session's next chunk in the snapshot."""
    is_complete: bool = True
    """Value of `SnapshotHeader.is_complete` in the received version of the snapshot."""
    timer: asyncio.TimerHandle | None = None
    """Timer that ends the move's current state when its time limit expires."""


class IncomingSessions:
    """Moves of sessions to this API server process.

    Args:
        migration: Restores sessions from snapshots.
    """

    def __init__(self, migration: SessionMigration) -> None:
        self._migration, self._manager = migration, migration.manager
        self._moves: OrderedDict[str, _Move] = OrderedDict()

    def begin(self, move_id: str) -> None:
        """Register a move whose snapshot is being received.

        Raises:
            EndpointError: `session_exists` if the move id is in use.
        """
        if move_id in self._moves:
            raise EndpointError("session_exists", "a move with this id exists")
        self._moves[move_id] = _Move()
        for old_id, move in list(self._moves.items()):
            if len(self._moves) <= _REMEMBERED:
                break
            if move.session is None and move.state in ("committed", "aborted"):
                del self._moves[old_id]

    async def prepare_shared(self, move_id: str, path: Path) -> Session:
        """Restore a session like `prepare`, or update a session that is already prepared.

        Args:
            move_id: Id of the move.
            path: Path of the snapshot, which the source server owns.

        Raises:
            EndpointError: This server has no capacity for the session or cannot restore it, or the
                move was ended.
        """
        if move_id not in self._moves:
            self.begin(move_id)
            try:
                return await self.prepare(move_id, path, is_shared=True)
            except BaseException:
                self._discard(self._known(move_id))
                raise
        move = self._known(move_id)
        if move.state != "prepared" or move.session is None:
            raise EndpointError("unknown_migration", f"the move is {move.state}")
        self._stop_timer(move)
        move.state = "receiving"
        try:
            header = await self._migration.update(move.session, path)
        except BaseException:
            self._discard(move)
            raise
        move.next_chunk, move.is_complete = header.chunk_index, header.is_complete
        return self._set_prepared(move_id, move, move.session)

    async def prepare(self, move_id: str, path: Path, *, is_shared: bool = False) -> Session:
        """Restore a session from its snapshot, but keep it hidden from clients.

        Args:
            move_id: Id of the move.
            path: Path of the snapshot. If `is_shared` is not set, this object takes ownership of
                the file.
            is_shared: Whether the source server owns the snapshot.

        Raises:
            EndpointError: This server has no capacity for the session or cannot restore it.
        """
        move = self._moves[move_id]
        move.path = None if is_shared else path
        try:
            header = await asyncio.to_thread(read_header, path)
            owner = msgspec.convert(header.owner or {}, SessionOwner)
            move.next_chunk, move.is_complete = header.chunk_index, header.is_complete
            move.key = (owner.principal, owner.session_id)
            if self._manager.find(move.key) is not None:
                raise EndpointError("session_exists", "a session with this id is live here")
            hidden = (_PRINCIPAL + move_id, owner.session_id)
            session = await self._migration.restore(hidden, owner.client, path, _ENDPOINT)
        except msgspec.ValidationError as error:
            self._abort(move)
            raise EndpointError("invalid_snapshot", "the snapshot has no owner") from error
        except RequestFailed as error:
            self._abort(move)
            raise EndpointError(error.code, error.message) from error
        except BaseException:
            self._abort(move)
            raise
        session.is_visible = session.is_settled = False
        return self._set_prepared(move_id, move, session)

    def _set_prepared(self, move_id: str, move: _Move, session: Session) -> Session:
        session.protected_until_s = time.monotonic() + _PREPARED_S + _CLAIM_S
        move.session = session
        if move.state != "receiving":  # the move was ended in the meantime
            self._discard(move)
            raise EndpointError("move_failed", "the move was ended")
        move.state = "prepared"
        loop = asyncio.get_running_loop()
        move.timer = loop.call_later(_PREPARED_S, self._expire, move_id, move)
        return session

    def commit(self, move_id: str, stream_state: bytes | None = None) -> Session:
        """Make a prepared session live. After the commit, the session exists only on this server.

        Args:
            move_id: Id of the move.
            stream_state: Controls for the session's live stream. None: the session has no live
                stream.

        Raises:
            EndpointError: The session cannot become live, for example with the code
                `unknown_migration`, `invalid_snapshot` or `session_exists`. It is not live on this
                server.
        """
        move = self._known(move_id)
        if move.state != "prepared" or move.session is None or move.key is None:
            raise EndpointError("unknown_migration", f"the move is {move.state}")
        if not move.is_complete:
            raise EndpointError("invalid_snapshot", "the session's last version has not arrived")
        self._manager.drain.check_new()
        try:
            self._manager.admit_moved(move.session, move.key)
        except EndpointError:
            self._discard(move)
            raise
        session, move.state = move.session, "committed"
        session.stream_state = lambda: stream_state
        session.protected_until_s = time.monotonic() + _CLAIM_S
        self._stop_timer(move)
        move.timer = asyncio.get_running_loop().call_later(_SETTLE_S, self._settle, move)
        logger.info("session_arrived session=%s chunks=%d", session.session_id, session.next_chunk)
        return session

    def end(self, move_id: str) -> State:
        """End a move and return its final state.

        A session that is not live is discarded. If the session is live, it may now be saved and
        moved again, because the source server has received the result.

        Raises:
            EndpointError: `unknown_migration` if this server has no move with this id.
        """
        move = self._known(move_id)
        if move.state == "committed":
            self._settle(move)
        else:
            self._discard(move)
        return move.state

    async def wait_until_settled(self) -> None:
        """Wait until it is certain that every live session exists only on this server."""
        while any(not session.is_settled for session in self._manager.sessions()):
            await asyncio.sleep(0.02)

    def _known(self, move_id: str) -> _Move:
        move = self._moves.get(move_id)
        if move is None:
            raise EndpointError("unknown_migration", "this server knows no such move")
        return move

    def _settle(self, move: _Move) -> None:
        self._stop_timer(move)
        session, path = move.session, move.path
        move.session = move.path = None
        if session is None:
            return
        session.is_settled = True
        if path is None:
            return  # the next periodic snapshot is this server's first snapshot of the session
        periodic = self._migration.periodic_snapshots
        if periodic is not None and session.started:
            # Use the received snapshot until this server has written its own.
            periodic.adopt(session, path, move.next_chunk)
        else:
            path.unlink(missing_ok=True)

    def _expire(self, move_id: str, move: _Move) -> None:
        logger.warning(
            "move %s was not completed: the session is not live here, and it is live on the other "
            "server if that still runs",
            move_id,
        )
        self._discard(move)

    def _discard(self, move: _Move) -> None:
        self._abort(move)
        session, move.session = move.session, None
        if session is not None:
            session.free_engine_state()
            self._manager.remove_if_empty(session)

    def _abort(self, move: _Move) -> None:
        self._stop_timer(move)
        move.state = "aborted"
        if move.path is not None:
            move.path.unlink(missing_ok=True)

    @staticmethod
    def _stop_timer(move: _Move) -> None:
        if move.timer is not None:
            move.timer.cancel()
            move.timer = None
