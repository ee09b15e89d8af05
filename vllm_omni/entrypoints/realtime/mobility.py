# SPDX-License-Identifier: Apache-2.0
"""`SessionMobility`: saves sessions of this API server process to files and restores them.

A session saved while a request runs is saved in the state after its last finished chunk. A restored one belongs to the
client that restored it and goes on at every door that continues sessions, at the same chunk. Files in transit lie in
`spool`, those that outlive their server in `kept`; neither is readable by others. Knows no HTTP. Held by
tests/entrypoints/realtime/test_session_api.py and test_drain_served.py.
"""

import asyncio
import logging
import time
from pathlib import Path
from typing import Annotated, Final

import msgspec

from vllm_omni.entrypoints.owner_lock import Spool
from vllm_omni.entrypoints.realtime.checkpoints import Checkpoints
from vllm_omni.entrypoints.realtime.errors import DoorError
from vllm_omni.entrypoints.realtime.facts import WorldFacts
from vllm_omni.entrypoints.realtime.kept_sessions import KeptSessions, claimed
from vllm_omni.entrypoints.realtime.protocol import check_prompt
from vllm_omni.entrypoints.realtime.session import Session
from vllm_omni.entrypoints.realtime.session_host import SessionKey
from vllm_omni.entrypoints.realtime.session_manager import SessionManager
from vllm_omni.inputs import SessionId
from vllm_omni.outputs import RequestFailed
from vllm_omni.seeds import Seed, check_seed
from vllm_omni.sessions.snapshot import SnapshotHeader, check_table, read_header

logger = logging.getLogger("vllm." + __name__)

_ATTEMPTS: Final = 20
_PAUSE_S: Final = 0.05


class Owner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Owner of a drained server's session. principal: a digest of its API key, or `anonymous`."""

    principal: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]{1,32}\Z")]
    session_id: SessionId
    client: Annotated[str, msgspec.Meta(max_length=256)]


class WorldScalars(msgspec.Struct, frozen=True):
    """Scalars in every world session's snapshot; the other scalars are the model's own."""

    prompt: str
    seed: int | None = None


class SessionMobility:
    """spool: in a directory that the workers see as well. kept: where sessions outlive this server, or None.

    checkpoint_s: seconds between checkpoints of a live session; None = saved only when the server drains.
    """

    def __init__(
        self, manager: SessionManager, spool: Spool, kept: Path | None, checkpoint_s: float | None = None
    ) -> None:
        self.manager, self.spool = manager, spool
        self.kept: KeptSessions | None = None
        self.checkpoints: Checkpoints | None = None
        if kept is None:
            return
        kept.mkdir(parents=True, exist_ok=True, mode=0o700)
        # A checkpoint belongs to its process while that lives: other servers of the directory see its lock in `kept`.
        self._kept_spool = spool if checkpoint_s is None else Spool(kept)
        self.kept = KeptSessions(kept, self._kept_spool.owner)
        manager.drain.save_to = self._keep
        if checkpoint_s is not None:
            self.checkpoints = Checkpoints(manager, self.kept, self.checkpoint, checkpoint_s)
            self.checkpoints.start()

    async def save(self, session: Session, path: Path, owner: dict[str, str] | None = None) -> SnapshotHeader:
        """Write a session to the new file `path`. Raises `DoorError` `unknown_session`, `session_busy`, ..."""
        with session.hold():
            for attempt in range(_ATTEMPTS):
                if not session.started:
                    raise DoorError("unknown_session", "the session has no finished chunk yet")
                try:
                    return await self.manager.engine.save(session.engine_id, path, owner)
                except DoorError as error:  # a chunk was finished between the two calls that a snapshot takes
                    if error.code != "session_busy" or attempt == _ATTEMPTS - 1:
                        raise
                await asyncio.sleep(_PAUSE_S)
        raise AssertionError("unreachable")

    async def restore(self, key: SessionKey, client: str, path: Path, endpoint: str) -> Session:
        """Make a session of a file. Raises `DoorError`, `session_exists` among others; then nothing is changed."""
        if self.manager.find(key) is not None:
            raise DoorError("session_exists", "a session with this id is live; choose another", param="session_id")
        await self._check(path)
        session = self.manager.open(key, client, endpoint)
        with session.hold():
            await self.manager.worlds_closed()
            try:
                header, scalars = await self.manager.engine.restore(session.engine_id, path)
            except (RequestFailed, OSError) as error:
                raise _as_door_error(error) from error
            try:
                said = msgspec.convert(scalars, WorldScalars)
                height, width = int(header.opening["height"]), int(header.opening["width"])
            except (KeyError, ValueError, msgspec.ValidationError) as error:
                self.manager.close_world(session.engine_id)
                raise DoorError("invalid_snapshot", "the snapshot is not of a world") from error
            session.started, session.in_step = True, True
            session.next_chunk = header.chunk_index
            session.next_frame = frames_before(self.manager.facts, header.chunk_index)
            session.height, session.width = height, width
            session.prompt, session.seed = said.prompt, said.seed
            session.last_used_s = time.monotonic()
        return session

    async def _check(self, path: Path) -> None:
        """Refuse a damaged file, or a prompt or seed no door would take, before workers read it. Raises `DoorError`."""
        try:
            header = await asyncio.to_thread(read_header, path)
            await asyncio.to_thread(check_table, path)
        except (RequestFailed, OSError) as error:
            raise _as_door_error(error) from error
        for fields in (header.opening, *(part.scalars for part in header.ranks)):
            prompt, seed = fields.get("prompt"), fields.get("seed")
            if isinstance(prompt, str):
                check_prompt(prompt, self.manager.limits, name="the snapshot's prompt")
            try:
                check_seed(msgspec.convert(seed, Seed | None))
            except ValueError as error:
                raise DoorError("invalid_request", f"the snapshot's seed: {error}", param="seed") from error

    async def take_over(self) -> int:
        """Restore ended servers' sessions from `kept`; returns how many. Failed and surplus ones stay, logged."""
        if self.kept is None:
            return 0
        count, room = 0, self.manager.facts.max_sessions - len(self.manager)
        left = await asyncio.to_thread(self.kept.left_by_others)
        if len(left) > room:
            logger.warning("%d sessions of ended servers are not taken over: there is no room", len(left) - room)
        for path in left[-room:] if room > 0 else []:
            with claimed(path) as is_mine:
                if not is_mine:
                    continue
                try:
                    header = await asyncio.to_thread(read_header, path)
                    owner = msgspec.convert(header.owner or {}, Owner)
                    key = (owner.principal, owner.session_id)
                    session = await self.restore(key, owner.client, path, "drain")
                except (DoorError, RequestFailed, OSError, msgspec.ValidationError) as error:
                    logger.warning("%s is not taken over: %s", path, error)
                    continue
                count += 1
                try:
                    if self.checkpoints is None:
                        path.unlink()
                    else:
                        self.checkpoints.adopt(session, path)
                except OSError as error:
                    logger.warning("%s is taken over, but cannot be removed: %s", path, error)
        return count

    def sweep(self) -> None:
        """Remove files of killed servers: snapshots in transit, and snapshots that were being written to `kept`."""
        dead = self.spool.sweep()
        if self.kept is not None:
            self.kept.sweep(dead | self._kept_spool.sweep())

    async def checkpoint(self, session: Session, path: Path) -> tuple[SnapshotHeader, float]:
        """Write a session to the new file `path` while it goes on, unheld: `(header, seconds of engine time)`.

        Raises `DoorError` and OSError.
        """
        return await self.manager.engine.checkpoint(session.engine_id, path, _owner(session))

    async def _keep(self, session: Session) -> None:
        """Save one session of a server that is stopping."""
        assert self.kept is not None
        final = self.kept.drained(session.key)
        partial = self.kept.partial(final)
        header = await self.save(session, partial, _owner(session))
        partial.replace(final)
        self.kept.checkpoint(session.key).unlink(missing_ok=True)
        logger.info("session_saved chunks=%d bytes=%d", header.chunk_index, final.stat().st_size)


def _owner(session: Session) -> dict[str, str]:
    principal, session_id = session.key
    owner: dict[str, str] = msgspec.to_builtins(Owner(principal, session_id, session.client))
    return owner


def frames_before(facts: WorldFacts, chunk_index: int) -> int:
    """Pixel frames of the chunks before `chunk_index`."""
    return 0 if chunk_index == 0 else facts.first_chunk_frames + facts.chunk_frames * (chunk_index - 1)


def _as_door_error(error: RequestFailed | OSError) -> DoorError:
    if isinstance(error, RequestFailed):
        return DoorError(error.code, error.message)
    return DoorError("snapshot_storage", "the snapshot's file cannot be read")
