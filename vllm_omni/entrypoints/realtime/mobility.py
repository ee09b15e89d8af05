# SPDX-License-Identifier: Apache-2.0
"""`SessionMobility`: sessions of this API server process that are written to files and made of files.

A session saved while a request runs is saved as its last finished chunk left it. A restored one belongs to whoever
restored it and goes on at every door that continues sessions, at the same chunk. Files in transit lie in `spool`, files
of a drained server in `kept`, named by a digest of their owner; neither is readable by others. Knows no HTTP. Held by
tests/entrypoints/realtime/test_session_api.py and test_drain_served.py.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec

from vllm_omni.entrypoints.owner_lock import Spool
from vllm_omni.entrypoints.realtime.errors import DoorError
from vllm_omni.entrypoints.realtime.facts import WorldFacts
from vllm_omni.entrypoints.realtime.session import Session, SessionKey
from vllm_omni.entrypoints.realtime.session_manager import SessionManager
from vllm_omni.inputs import Seed, SessionId
from vllm_omni.outputs import RequestFailed
from vllm_omni.snapshot import SnapshotHeader, check_table, read_header

logger = logging.getLogger("vllm." + __name__)

SUFFIX: Final = ".session.safetensors"
_PARTIAL: Final = ".partial"
_ABANDONED_S: Final = 600.0
"""The age of an unfinished file whose server, on another machine, must be dead."""
_ATTEMPTS: Final = 20
_PAUSE_S: Final = 0.05


class Owner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose a drained server's session was. principal: a digest of its API key, or `anonymous`."""

    principal: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]{1,32}$")]
    session_id: SessionId
    client: Annotated[str, msgspec.Meta(max_length=256)]


class WorldScalars(msgspec.Struct, frozen=True):
    """What every world's session says of itself; the rest is its model's own."""

    prompt: str
    seed: int | None = None


class SessionMobility:
    """spool: in a directory that the workers see as well. kept: where a drained server leaves its sessions, or None."""

    def __init__(self, manager: SessionManager, spool: Spool, kept: Path | None) -> None:
        self.manager, self.spool, self.kept = manager, spool, kept
        if kept is not None:
            kept.mkdir(parents=True, exist_ok=True, mode=0o700)
            manager.drain.save_to = self._keep

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
        """Refuse what no door would take, before the workers read the file. Raises `DoorError`."""
        try:
            header = await asyncio.to_thread(read_header, path)
            await asyncio.to_thread(check_table, path)
        except (RequestFailed, OSError) as error:
            raise _as_door_error(error) from error
        most = self.manager.limits.max_prompt_chars
        for fields in (header.opening, *(part.scalars for part in header.ranks)):
            prompt, seed = fields.get("prompt"), fields.get("seed")
            if isinstance(prompt, str) and len(prompt) > most:
                raise DoorError(
                    "prompt_too_long",
                    f"the snapshot's prompt has {len(prompt)} characters; at most {most} are allowed",
                    param="prompt",
                )
            try:
                msgspec.convert(seed, Seed | None)
            except msgspec.ValidationError as error:
                raise DoorError("invalid_request", f"the snapshot's seed: {error}", param="seed") from error

    async def take_over(self) -> int:
        """Restore what a drained server left in `kept`; returns how many. What does not fit stays, and is logged."""
        if self.kept is None:
            return 0
        count = 0
        for path in sorted(self.kept.glob(f"*{SUFFIX}")):
            with _claimed(path) as is_mine:
                if not is_mine:
                    continue
                try:
                    header = await asyncio.to_thread(read_header, path)
                    owner = msgspec.convert(header.owner or {}, Owner)
                    key = (owner.principal, owner.session_id)
                    await self.restore(key, owner.client, path, "drain")
                except (DoorError, RequestFailed, msgspec.ValidationError) as error:
                    logger.warning("%s is not taken over: %s", path, error)
                    continue
                path.unlink()
                count += 1
        return count

    def sweep(self) -> None:
        """Remove what servers have left that were killed while a snapshot was on its way, or was being kept."""
        dead = self.spool.sweep()
        for partial in [] if self.kept is None else self.kept.glob(f"*{_PARTIAL}"):
            with contextlib.suppress(OSError):  # another server that starts now may be faster
                age_s = time.time() - partial.stat().st_mtime
                if partial.name.split(".")[-2] in dead or age_s > _ABANDONED_S:
                    partial.unlink(missing_ok=True)

    async def _keep(self, session: Session) -> None:
        """Save one session of a server that is stopping."""
        assert self.kept is not None
        principal, session_id = session.key
        digest = hashlib.blake2b(f"{principal}/{session_id}".encode(), digest_size=16).hexdigest()
        partial = self.kept / f"{digest}.{self.spool.owner}{_PARTIAL}"
        owner = Owner(principal, session_id, session.client)
        header = await self.save(session, partial, msgspec.to_builtins(owner))
        partial.replace(self.kept / f"{digest}{SUFFIX}")
        logger.info(
            "session_saved chunks=%d bytes=%d", header.chunk_index, (self.kept / f"{digest}{SUFFIX}").stat().st_size
        )


@contextlib.contextmanager
def _claimed(path: Path) -> Iterator[bool]:
    """Hold a kept file against other API server processes; whoever dies meanwhile leaves it to the next server."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        yield False
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield path.exists()  # another process may have taken it over and removed it


def frames_before(facts: WorldFacts, chunk_index: int) -> int:
    """Pixel frames of the chunks before `chunk_index`."""
    return 0 if chunk_index == 0 else facts.first_chunk_frames + facts.chunk_frames * (chunk_index - 1)


def _as_door_error(error: RequestFailed | OSError) -> DoorError:
    if isinstance(error, RequestFailed):
        return DoorError(error.code, error.message)
    return DoorError("snapshot_storage", "the snapshot's file cannot be read")
