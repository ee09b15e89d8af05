# SPDX-License-Identifier: Apache-2.0
"""`SessionMover`: moves sessions from this API server process to other servers.

To move a session, the mover pauses it between two chunks and sends its snapshot to the target
server. The target server restores the session without making it live (`Peer.prepare`). If a step
fails before `Peer.commit`, the session stays on this server. After `Peer.commit`, the target
server's reply determines where the session is. If the result remains unknown, the session ends on
this server as lost, because it may be live on the target server. Its last snapshot is retained.

If both servers share a directory, the snapshot is written to it and restored from it while the
session is still active (`_copy_ahead`). During the pause, the servers write and read only the data
that has changed since the last copy.
"""

import asyncio
import contextlib
import logging
import secrets
import shutil
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp

from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.fleet.peer import MoveResult, Peer
from vllm_omni.entrypoints.fleet.servers import Fleet, FleetServer
from vllm_omni.entrypoints.realtime.sessions.migration import SessionMigration, owner_of_session
from vllm_omni.entrypoints.realtime.sessions.pause import Destination, SessionPause
from vllm_omni.entrypoints.realtime.sessions.session import Session
from vllm_omni.entrypoints.realtime.sessions.session_host import SessionKey
from vllm_omni.entrypoints.realtime.sessions.session_manager import FollowsSession
from vllm_omni.entrypoints.staging_directory import StagingDirectory

logger = logging.getLogger("vllm." + __name__)

_AT_A_TIME: Final = 2
"""Number of sessions whose snapshots are written and sent concurrently while the server drains.
Meanwhile, the other sessions continue, or wait until their clients have read all finished chunks.
"""
_COPIES_AHEAD: Final = 2
"""Number of snapshot versions copied while the session is active. The first copy is slow, so much
of the session changes during it. The second copy takes only slightly longer than the final one.
"""
_MOVE_S: Final = 20.0
"""Time limit in seconds for moving a session while the server drains. One chunk of the session may
run within this time.
"""


@dataclass(frozen=True)
class MovedSession:
    """Result of a finished move."""

    destination: Destination
    """Server and chunk at which the session continues."""
    num_bytes: int
    """Size of the snapshot in bytes."""
    pause_s: float
    """Time in seconds from the start of the pause to the target server's confirmation of the move.
    """
    pause_bytes: int
    """Number of bytes copied during the pause, at most `num_bytes`."""


@dataclass(frozen=True)
class _Shared:
    """A move whose snapshot is in a shared directory."""

    move_id: str
    """Id of the move that the target server has prepared."""
    path: Path
    """Path of the snapshot, which holds the state after an earlier chunk."""


class SessionMover:
    """Moves sessions from one API server process to other servers.

    Args:
        fleet: The fleet's other servers, and the operator's key.
        migration: Saves sessions to snapshots.

    Raises:
        ValueError: The shared directory cannot be used.
    """

    def __init__(self, fleet: Fleet, migration: SessionMigration) -> None:
        self._fleet, self._migration, self._manager = fleet, migration, migration.manager
        self._shared: StagingDirectory | None = None
        if fleet.shared_dir is not None:
            try:
                self._shared = StagingDirectory(Path(fleet.shared_dir))
            except OSError as error:
                raise ValueError(f"shared_dir {fleet.shared_dir}: {error.strerror}") from error
            self._shared.sweep()
        self._copied: set[SessionKey] = set()
        self._client: aiohttp.ClientSession | None = None

    def _peer(self, name: str, server: FleetServer) -> Peer:
        if self._client is None:
            self._client = aiohttp.ClientSession()
        assert self._fleet.key is not None
        return Peer(self._client, name, server, self._fleet.key)

    async def move(
        self,
        session: Session,
        name: str,
        server: FleetServer,
        turn: contextlib.AsyncExitStack | None = None,
    ) -> MovedSession:
        """Move a session before its next chunk.

        Args:
            session: The session.
            name: Name of the target server.
            server: The target server's addresses.
            turn: Exit stack that is closed once the snapshot has been sent.

        Raises:
            EndpointError: `not_movable`, `session_busy` or `move_failed`: the session remains on
                this server. `session_lost`: the session has ended on this server and may be live on
                the target server.
        """
        if not session.started:
            raise EndpointError("not_movable", "the session has no finished chunk yet")
        if not session.is_settled:
            raise EndpointError("session_busy", "the session has just arrived; try again")
        if not all(
            isinstance(one, FollowsSession) and one.follows_moves for one in session.connections
        ):
            raise EndpointError(
                "not_movable",
                "the client has not said that it continues its session on another server",
            )
        # A move that has started continues even if its caller is cancelled.
        return await asyncio.shield(self._move(session, self._peer(name, server), server, turn))

    async def _move(
        self,
        session: Session,
        peer: Peer,
        server: FleetServer,
        turn: contextlib.AsyncExitStack | None,
    ) -> MovedSession:
        moved: list[MovedSession] = []
        shared: _Shared | None = None
        if self._shared is not None and self._fleet.shared_dir == server.shared_dir:
            shared = await self._copy_ahead(session, peer, self._shared.new_path())

        async def work(pause: SessionPause) -> Destination:
            moved.append(await self._hand_over(session, pause, peer, server, shared, turn))
            return moved[0].destination

        try:
            await session.pause(work)
        finally:
            if shared is not None:
                self._manager.spawn(self._end_copy(shared.path))
                if not moved:
                    shared.path.unlink(missing_ok=True)
                    self._manager.spawn(peer.end(shared.move_id))
        return moved[0]

    async def _copy_ahead(self, session: Session, peer: Peer, path: Path) -> _Shared:
        """Copy a session to the target server while the session is active. The copy is not used
        before the commit.

        Raises:
            EndpointError: The session could not be copied, and no copy remains on the target
                server.
        """
        if session.key in self._copied:
            raise EndpointError("session_busy", "the session is being moved")
        shared = _Shared(secrets.token_urlsafe(16), path)
        self._copied.add(session.key)
        try:
            for _ in range(_COPIES_AHEAD):
                await self._migration.copy(session, path, is_playing=True)
                await peer.prepare_shared(shared.move_id, path)
        except BaseException:
            path.unlink(missing_ok=True)
            self._manager.spawn(self._end_copy(path))
            self._manager.spawn(peer.end(shared.move_id))
            raise
        finally:
            self._copied.discard(session.key)
        return shared

    async def _end_copy(self, path: Path) -> None:
        with contextlib.suppress(EndpointError):  # a stopped engine holds no resources
            await self._manager.engine.end_copy(path)

    async def _hand_over(
        self,
        session: Session,
        pause: SessionPause,
        peer: Peer,
        server: FleetServer,
        shared: _Shared | None,
        turn: contextlib.AsyncExitStack | None,
    ) -> MovedSession:
        started_s, engine_id = time.monotonic(), session.engine_id
        if shared is None:
            move_id, path = secrets.token_urlsafe(16), self._migration.staging.new_path()
        else:
            move_id, path = shared.move_id, shared.path
        is_committing = is_live_there = False
        async with contextlib.AsyncExitStack() as stack:
            try:
                if shared is None:
                    header = await self._migration.save(session, path, owner_of_session(session))
                    await peer.prepare(move_id, path)
                    pause_bytes = path.stat().st_size
                else:
                    header, pause_bytes = await self._migration.copy(
                        session, path, is_playing=False
                    )
                    await peer.prepare_shared(move_id, path)
                num_bytes = path.stat().st_size
                if turn is not None:
                    await turn.aclose()
                async with asyncio.timeout(self._manager.limits.send_deadline_s):
                    await pause.wait_until_delivered()
                    await stack.enter_async_context(session.steering)
                if pause.is_cancelled or session.engine_id != engine_id:
                    raise EndpointError("move_failed", "the session has ended in the meantime")
                is_committing = True
                result = await self._commit(session, pause, peer, move_id)
                if result is MoveResult.UNKNOWN:
                    self._lose(session, peer, path, header.chunk_index)
                if result is MoveResult.STAYED:
                    raise EndpointError(
                        "move_failed", f"server {peer.name!r} did not take the session"
                    )
                is_live_there = True
            except TimeoutError:
                raise EndpointError("move_failed", "the client reads too slowly") from None
            finally:
                if not is_committing:
                    self._manager.spawn(peer.end(move_id))
                if not is_live_there:
                    path.unlink(missing_ok=True)
            destination = Destination(peer.name, server.public_url, header.chunk_index)
            session.leave(destination)
        self._manager.spawn(self._settle(session, peer, move_id, path))
        pause_s = time.monotonic() - started_s
        moved = MovedSession(destination, num_bytes, pause_s, pause_bytes)
        logger.info(
            "session_moved session=%s server=%s chunks=%d bytes=%d pause_ms=%.1f pause_bytes=%d",
            session.session_id,
            peer.name,
            header.chunk_index,
            num_bytes,
            pause_s * 1e3,
            pause_bytes,
        )
        return moved

    async def _commit(
        self, session: Session, pause: SessionPause, peer: Peer, move_id: str
    ) -> MoveResult:
        """Commit a move. During the commit, no other server can restore the session's periodic
        snapshot.
        """
        periodic, engine_id = self._migration.periodic_snapshots, session.engine_id
        if periodic is not None:
            periodic.withhold(session)
        result = MoveResult.UNKNOWN
        try:
            state = pause.stream_state() or session.stream_state()
            result = await peer.commit(move_id, state)
        finally:
            if periodic is not None and result is MoveResult.STAYED:
                periodic.release(engine_id)
        return result

    async def _settle(self, session: Session, peer: Peer, move_id: str, path: Path) -> None:
        """Notify the target server that its session is the only copy, and delete the snapshot.

        If the target server has been killed, it may not have written its own snapshot yet, so this
        snapshot is retained.
        """
        if await peer.end_for_certain(move_id) is MoveResult.MOVED:
            path.unlink(missing_ok=True)
        else:
            self._keep(session, peer, path)

    def _lose(self, session: Session, peer: Peer, path: Path, next_chunk: int) -> None:
        """End a session that may be live on the target server, and retain its last snapshot.

        Raises:
            EndpointError: Always raised, with the code `session_lost`.
        """
        self._manager.lose(session)  # also removes its older periodic snapshot
        self._keep(session, peer, path)
        raise EndpointError(
            "session_lost",
            f"the session may continue on the server {peer.name!r}, which does not respond",
            server=peer.name,
            next_chunk_index=next_chunk,
        )

    def _keep(self, session: Session, peer: Peer, path: Path) -> None:
        kept = path.with_suffix(".lost")
        if self._migration.persistent_dir is not None:
            kept = self._migration.persistent_dir.lost_path(session.key)
        shutil.move(path, kept)
        logger.error(
            "session_lost session=%s: server %s does not say that it has the session; %s is its "
            "last snapshot",
            session.session_id,
            peer.name,
            kept,
        )

    # -- draining ----------------------------------------------------------------------------------

    async def move_all(self) -> None:
        """Move as many sessions as possible to servers with free capacity. Failed moves are
        logged.
        """
        sessions = self._manager.sessions()
        free = Counter(dict(await self._free()))
        chosen: dict[str, str] = {}
        limit = asyncio.Semaphore(_AT_A_TIME)

        async def move(session: Session) -> None:
            async with contextlib.AsyncExitStack() as turn:
                await turn.enter_async_context(limit)
                await self._move_anywhere(session, free, chosen, turn)

        if free:
            await asyncio.gather(*map(move, sessions))

    async def _free(self) -> list[tuple[str, int]]:
        peers = [self._peer(name, server) for name, server in self._fleet.others.items()]
        rooms = await asyncio.gather(*(peer.num_free() for peer in peers))
        return [(peer.name, room) for peer, room in zip(peers, rooms, strict=True) if room]

    async def _move_anywhere(
        self,
        session: Session,
        free: Counter[str],
        chosen: dict[str, str],
        turn: contextlib.AsyncExitStack,
    ) -> None:
        """Move a session to the first server that accepts it. A server that has already received
        other sessions of the same client is tried first, followed by the servers with the most free
        capacity.
        """
        tried: set[str] = set()
        while session.started and session.destination is None:
            names = [name for name, room in free.items() if room > 0 and name not in tried]
            if not names:
                return
            preferred = chosen.get(session.client)
            name = preferred if preferred in names else max(names, key=free.__getitem__)
            assert name is not None
            tried.add(name)
            free[name] -= 1
            try:
                async with asyncio.timeout(_MOVE_S):
                    await self.move(session, name, self._fleet.others[name], turn)
                chosen.setdefault(session.client, name)
            except (EndpointError, TimeoutError) as error:
                free[name] += 1
                logger.warning("session %s is not moved: %s", session.session_id, error)
                if isinstance(error, TimeoutError) or error.code == "not_movable":
                    return

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
