# SPDX-License-Identifier: Apache-2.0
"""`SessionMigration`: writes sessions of this API server process to files and restores them.

If a request is running, the snapshot contains the state after its last finished chunk. A restored
session belongs to the client that restored it. The session can continue at the same chunk on any
endpoint that can continue sessions. Snapshots in transit are stored in `staging`, and snapshots
that outlive the server in `persistent_dir`. Other users of the machine cannot read either
directory.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec

from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.entrypoints.realtime.sessions.periodic_snapshots import PeriodicSnapshots
from vllm_omni.entrypoints.realtime.sessions.persisted_sessions import PersistedSessions, claimed
from vllm_omni.entrypoints.realtime.sessions.session import Session
from vllm_omni.entrypoints.realtime.sessions.session_host import SessionKey
from vllm_omni.entrypoints.realtime.sessions.session_manager import SessionManager
from vllm_omni.entrypoints.realtime.world_camera.protocol import check_prompt
from vllm_omni.entrypoints.staging_directory import StagingDirectory
from vllm_omni.inputs import SessionId
from vllm_omni.outputs import RequestFailed
from vllm_omni.seeds import Seed, check_seed
from vllm_omni.session_files.snapshot import SnapshotHeader, check_table, read_header

logger = logging.getLogger("vllm." + __name__)

T = TypeVar("T")

_ATTEMPTS: Final = 20
_PAUSE_S: Final = 0.05


class SessionOwner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Owner of a session that a draining server has saved."""

    principal: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]{1,32}\Z")]
    """Digest of the client's API key, or `anonymous`."""
    session_id: SessionId
    """The client's id for the session."""
    client: Annotated[str, msgspec.Meta(max_length=256)]
    """Client whose limits and quotas apply to the session."""


class SnapshotScalars(msgspec.Struct, frozen=True):
    """Scalar values that every snapshot of a world model contains. A model may add other values."""

    prompt: str
    """Current prompt."""
    seed: int | None = None
    """The session's seed. None: the seed is unknown."""


class SessionMigration:
    """Saves and restores sessions.

    Args:
        manager: Sessions of this process.
        staging: Staging directory, which the workers can also access.
        persistent_dir: Directory for snapshots that outlive this server. None: sessions are
            discarded at shutdown.
        snapshot_period_s: Seconds between periodic snapshots of a live session. Default: sessions
            are saved only at shutdown.
    """

    def __init__(
        self,
        manager: SessionManager,
        staging: StagingDirectory,
        persistent_dir: Path | None,
        snapshot_period_s: float | None = None,
    ) -> None:
        self.manager, self.staging = manager, staging
        self.persistent_dir: PersistedSessions | None = None
        self.periodic_snapshots: PeriodicSnapshots | None = None
        if persistent_dir is None:
            return
        persistent_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        # A periodic snapshot belongs to its process for as long as the process lives, so the
        # process's lock must be in the directory, where other servers check it.
        self._persistent_staging = (
            staging if snapshot_period_s is None else StagingDirectory(persistent_dir)
        )
        self.persistent_dir = PersistedSessions(persistent_dir, self._persistent_staging.owner)
        manager.drain.save_to = self._persist
        if snapshot_period_s is not None:
            self.periodic_snapshots = PeriodicSnapshots(
                manager, self.persistent_dir, self.save_live, snapshot_period_s
            )
            self.periodic_snapshots.start_saving()

    async def save(
        self, session: Session, path: Path, owner: dict[str, str] | None = None
    ) -> SnapshotHeader:
        """Write a session to a new file.

        Args:
            session: The session.
            path: File to create.
            owner: Session owner to write to the header. Default: the snapshot has no owner.

        Raises:
            EndpointError: The session cannot be saved. The code is, for example, `unknown_session`
                or `session_busy`.
        """
        engine = self.manager.engine
        return await self._repeated(
            session, lambda: engine.save_session(session.engine_id, path, owner)
        )

    async def copy(
        self, session: Session, path: Path, *, is_playing: bool
    ) -> tuple[SnapshotHeader, int]:
        """Write or update the snapshot file of a session that is about to be moved.

        Args:
            session: The session.
            path: Path of the snapshot file.
            is_playing: Whether the session may run chunks during the copy.

        Returns:
            `(header, num_bytes)`: the file header, and the number of bytes written.

        Raises:
            EndpointError: The session cannot be saved. The code is, for example, `unknown_session`
                or `session_busy`.
        """
        engine, owner = self.manager.engine, owner_of_session(session)
        return await self._repeated(
            session,
            lambda: engine.copy_session(session.engine_id, path, owner, is_playing=is_playing),
        )

    async def _repeated(self, session: Session, save: Callable[[], Awaitable[T]]) -> T:
        """Save a session, and retry if one of its chunks has finished in the meantime."""
        with session.keep_alive():
            for attempt in range(_ATTEMPTS):
                if not session.started:
                    raise EndpointError("unknown_session", "the session has no finished chunk yet")
                try:
                    return await save()
                # A chunk finished between the two worker calls that a snapshot requires.
                except EndpointError as error:
                    if error.code != "session_busy" or attempt == _ATTEMPTS - 1:
                        raise
                await asyncio.sleep(_PAUSE_S)
        raise AssertionError("unreachable")

    async def restore(self, key: SessionKey, client: str, path: Path, endpoint: str) -> Session:
        """Restore a session from a snapshot file.

        Args:
            key: The new session's principal and id.
            client: Client whose limits apply to the session.
            path: Snapshot file.
            endpoint: Endpoint name in metrics.

        Raises:
            EndpointError: The session cannot be restored. The code is, for example,
                `session_exists`. A failed restore does not change existing sessions, but an unused
                session may have been closed to make room.
        """
        if self.manager.find(key) is not None:
            raise EndpointError(
                "session_exists",
                "a session with this id is live; choose another",
                param="session_id",
            )
        await self._check(path)
        session = self.manager.open(key, client, endpoint)
        with session.keep_alive():
            await self.manager.wait_for_closed_sessions()
            try:
                header, scalars = await self.manager.engine.restore_session(session.engine_id, path)
            except (RequestFailed, OSError) as error:
                raise _as_endpoint_error(error) from error
            except asyncio.CancelledError:
                session.free_engine_state()  # the workers finish the call that restores it
                raise
            self._note_state(session, header, scalars)
        return session

    async def update(self, session: Session, path: Path) -> SnapshotHeader:
        """Update a restored session from a later version of its snapshot file.

        Raises:
            EndpointError: The session could not be updated, and its state in the engine has been
                freed.
        """
        await self._check(path)
        with session.keep_alive():
            try:
                header, scalars = await self.manager.engine.update_session(session.engine_id, path)
            except (RequestFailed, OSError) as error:
                raise _as_endpoint_error(error) from error
            self._note_state(session, header, scalars)
        return header

    def _note_state(
        self, session: Session, header: SnapshotHeader, scalars: Mapping[str, Any]
    ) -> None:
        """Copy a snapshot's frame size, prompt and seed to the `Session` object.

        If the snapshot is invalid, the session is closed in the engine.

        Raises:
            EndpointError: `invalid_snapshot` if the file is not a snapshot of a world model.
        """
        try:
            world = msgspec.convert(dict(scalars), SnapshotScalars)
            height, width = int(header.opening["height"]), int(header.opening["width"])
        except (KeyError, ValueError, msgspec.ValidationError) as error:
            self.manager.close_engine_session(session.engine_id)
            raise EndpointError(
                "invalid_snapshot", "the snapshot is not of a world model"
            ) from error
        session.started, session.in_step = True, True
        session.next_chunk = header.chunk_index
        session.next_frame = frames_before(self.manager.info, header.chunk_index)
        session.height, session.width = height, width
        session.prompt, session.seed = world.prompt, world.seed
        session.last_used_s = time.monotonic()

    async def _check(self, path: Path) -> None:
        """Check a snapshot file before the workers read it.

        Raises:
            EndpointError: The file is damaged, or its prompt or seed is invalid for every endpoint.
        """
        try:
            header = await asyncio.to_thread(read_header, path)
            await asyncio.to_thread(check_table, path)
        except (RequestFailed, OSError) as error:
            raise _as_endpoint_error(error) from error
        for fields in (header.opening, *(part.scalars for part in header.ranks)):
            prompt, seed = fields.get("prompt"), fields.get("seed")
            if isinstance(prompt, str):
                check_prompt(prompt, self.manager.limits, name="the snapshot's prompt")
            try:
                check_seed(msgspec.convert(seed, Seed | None))
            except ValueError as error:
                raise EndpointError(
                    "invalid_request", f"the snapshot's seed: {error}", param="seed"
                ) from error

    async def take_over(self) -> int:
        """Restore sessions of stopped servers from `persistent_dir`.

        If a session cannot be restored or exceeds the capacity, its snapshot remains in the
        directory, and a message is logged.

        Returns:
            Number of restored sessions.
        """
        if self.persistent_dir is None:
            return 0
        count, room = 0, self.manager.info.max_sessions - len(self.manager)
        left = await asyncio.to_thread(self.persistent_dir.left_by_others)
        if len(left) > room:
            logger.warning(
                "%d sessions of stopped servers are not restored: no capacity", len(left) - room
            )
        for path in left[-room:] if room > 0 else []:
            with claimed(path) as is_mine:
                if not is_mine:
                    continue
                try:
                    header = await asyncio.to_thread(read_header, path)
                    owner = msgspec.convert(header.owner or {}, SessionOwner)
                    key = (owner.principal, owner.session_id)
                    session = await self.restore(key, owner.client, path, "drain")
                except (EndpointError, RequestFailed, OSError, msgspec.ValidationError) as error:
                    logger.warning("%s is not restored: %s", path, error)
                    continue
                count += 1
                try:
                    if self.periodic_snapshots is None:
                        path.unlink()
                    else:
                        self.periodic_snapshots.adopt(session, path, session.next_chunk)
                except OSError as error:
                    logger.warning(
                        "%s is restored, but its file cannot be removed: %s", path, error
                    )
        return count

    def sweep(self) -> None:
        """Remove files that killed servers have left behind: staged snapshots, and incomplete or
        expired persistent snapshots.
        """
        dead = self.staging.sweep()
        if self.persistent_dir is not None:
            self.persistent_dir.sweep(dead | self._persistent_staging.sweep())

    async def save_live(self, session: Session, path: Path) -> tuple[SnapshotHeader, float]:
        """Write a live session to a new file without pausing it.

        Returns:
            `(header, seconds)`: the snapshot header, and the time in seconds that the engine spent
            on the snapshot.

        Raises:
            EndpointError: The engine could not save the session.
            OSError: The file could not be written.
        """
        return await self.manager.engine.save_session_live(
            session.engine_id, path, owner_of_session(session)
        )

    async def _persist(self, session: Session) -> None:
        """Save one session during shutdown."""
        assert self.persistent_dir is not None
        final = self.persistent_dir.final_path(session.key)
        partial = self.persistent_dir.partial_path(final)
        header = await self.save(session, partial, owner_of_session(session))
        partial.replace(final)
        self.persistent_dir.periodic_path(session.key).unlink(missing_ok=True)
        logger.info("session_saved chunks=%d bytes=%d", header.chunk_index, final.stat().st_size)


def owner_of_session(session: Session) -> dict[str, str]:
    """Return a session's owner in the form that snapshot headers use."""
    principal, session_id = session.key
    owner: dict[str, str] = msgspec.to_builtins(SessionOwner(principal, session_id, session.client))
    return owner


def frames_before(info: StreamInfo, chunk_index: int) -> int:
    """Return the number of a session's pixel frames that precede a chunk."""
    return (
        0 if chunk_index == 0 else info.first_chunk_frames + info.chunk_frames * (chunk_index - 1)
    )


def _as_endpoint_error(error: RequestFailed | OSError) -> EndpointError:
    if isinstance(error, RequestFailed):
        return EndpointError(error.code, error.message)
    return EndpointError("snapshot_storage", "the snapshot's file cannot be read")
