# SPDX-License-Identifier: Apache-2.0
"""`SessionStore`: creates, evicts and frees the sessions on one rank, and tracks their memory.

A session is created by its first chunk, a fork or a restore. A session outlives its requests and
ends in only one place (`close`), which frees it. Other code frees a session object only if the
object is not in the store. Such an object has just been written to disk (`_write`), or could not be
restored (`SuspendedFiles.read`, `SessionSnapshots.load`). Sessions are admitted by their size in
bytes: the size of a session is known before it is created, and constant afterwards unless its K/V
window grows (`omni.kv_growth`).

A session that has been idle for some time may be *suspended* (`omni.suspend_idle_s`): its state
moves to host memory, which has a separate limit, and moves back before the session's next chunk.
When host memory reaches its limit, the sessions that have been idle longest are moved to files
(`omni.suspend_dir`). A model may retain the memory of closed sessions. The retained memory counts
as free and is released when live sessions need it (`trim_pool`). This module does not depend on the
scheduler or on model maths.
"""

import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any, Protocol

import torch

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import SessionState
from vllm_omni.outputs import RequestFailed
from vllm_omni.runtime.heap import HeapTrim
from vllm_omni.tensors.digests import tensor_digests

logger = logging.getLogger("vllm." + __name__)


@dataclass(frozen=True)
class Suspension:
    """Conditions under which sessions may be suspended."""

    idle_s: float
    """Time in seconds without a request after which a session may be suspended."""
    max_bytes: int
    """Maximum total size in bytes of all suspended sessions in host memory."""
    device: torch.device
    """Device that sessions run on. On a CPU, a suspended session is not moved."""


class SessionFile:
    """A suspended session on disk. The object replaces the session in the store.

    Args:
        session: Session that was written. The caller frees the session's memory.
        file: File that contains the session.
        num_bytes: Size of the file in bytes.
        digests: Digests of the session's tensors, keyed by name.
    """

    def __init__(
        self,
        session: SessionState,
        file: IO[bytes],
        num_bytes: int,
        digests: Mapping[str, str],
    ) -> None:
        self.digests = digests
        self.session_id, self.nbytes = session.session_id, session.nbytes
        self.chunk_index, self.failure = session.chunk_index, session.failure
        self.adapters, self.file, self.num_bytes = session.adapters, file, num_bytes

    def close(self) -> None:
        """Close the file. Closing the file deletes it. Idempotent."""
        self.file.close()


class SessionFiles(Protocol):
    """Interface of the object that writes suspended sessions to disk and reads them back."""

    def write(self, session: Any, digests: Mapping[str, str]) -> SessionFile: ...

    def read(self, stored: SessionFile) -> SessionState: ...


class SessionStore:
    """Live sessions on one rank, least recently used first.

    Args:
        max_sessions: Maximum number of live sessions.
        idle_s: Time in seconds without a request after which a session may be evicted.
        max_bytes: Maximum total memory in bytes of all sessions on the device, or None for no
            limit.
        clock: Function that returns the time in seconds. With several ranks, the function must
            return the same value on all ranks, because all ranks must evict the same sessions.
    """

    def __init__(
        self,
        max_sessions: int,
        idle_s: float,
        max_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_sessions = max_sessions
        self.idle_s = idle_s
        self.max_bytes = max_bytes
        self.trim_pool: Callable[[int], None] = lambda nbytes: None
        """The model's `PoolsMemory.trim_pool`, which limits how much memory of closed sessions the
        model retains.
        """
        self._clock = clock
        self._sessions: OrderedDict[str, SessionState | SessionFile] = OrderedDict()
        self._last_used: dict[str, float] = {}
        self._pins: dict[str, int] = {}
        self.suspension: Suspension | None = None
        """Conditions under which sessions may be suspended, or None if sessions are never
        suspended."""
        self.files: SessionFiles | None = None
        """Object that writes suspended sessions to disk and reads them back, or None if suspended
        sessions remain in host memory."""
        self._suspended: set[str] = set()
        """Ids of the suspended sessions in host memory."""
        self._digests: dict[str, dict[str, str]] = {}
        """Tensor digests of the suspended sessions in host memory. These sessions may be moved to
        disk.
        """
        self._trim_heap = HeapTrim()

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._sessions

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def nbytes(self) -> int:
        """Total size in bytes of the sessions on the device."""
        return sum(
            session.nbytes
            for session_id, session in self._sessions.items()
            if not self._is_suspended(session_id)
        )

    @property
    def suspended_nbytes(self) -> int:
        """Total size in bytes of the suspended sessions in host memory."""
        return sum(self._sessions[session_id].nbytes for session_id in self._suspended)

    def _files(self) -> list[SessionFile]:
        return [session for session in self._sessions.values() if isinstance(session, SessionFile)]

    def get(self, session_id: str) -> SessionState:
        """Return a live session and mark it as used. A session on disk is moved to the device.

        Raises:
            RequestFailed: The session is not live (code `unknown_session`), or it is on disk and
                cannot be resumed (see `resume`).
        """
        if isinstance(self._use(session_id), SessionFile):
            self.resume(session_id)
        session = self._sessions[session_id]
        assert not isinstance(session, SessionFile)
        return session

    def _use(self, session_id: str) -> SessionState | SessionFile:
        session = self._sessions.get(session_id)
        if session is None:
            raise RequestFailed(
                "unknown_session",
                f"session {session_id!r} is not live here: start it with an image and a prompt",
            )
        self._sessions.move_to_end(session_id)
        self._last_used[session_id] = self._clock()
        return session

    def resume(self, session_id: str) -> None:
        """Move a session back to the device if it is suspended.

        Raises:
            RequestFailed: There is not enough memory for the session (code `capacity`), or its file
                is damaged or cannot be read (code `invalid_snapshot` or `snapshot_storage`). The
                session stays suspended.
        """
        session = self._sessions.get(session_id)
        if session is None or not self._is_suspended(session_id):
            return
        self._use(session_id)  # protects it from eviction
        on_host = session.nbytes if session_id in self._suspended else 0
        self.pin(session_id)
        try:
            # The session may have to replace another session on the device. Both sessions are then
            # in host memory for a short time.
            self._make_room(session.nbytes, sessions=0, leaving_host=on_host)
        finally:
            self.unpin(session_id)
        if isinstance(session, SessionFile):
            self._read(session)
        else:
            self._move(session_id, is_suspended=False)

    def _is_suspended(self, session_id: str) -> bool:
        """Return whether a live session occupies no device memory."""
        is_file = isinstance(self._sessions[session_id], SessionFile)
        return is_file or session_id in self._suspended

    def _read(self, stored: SessionFile) -> None:
        assert self.files is not None
        started_s = time.perf_counter()
        self._sessions[stored.session_id] = self.files.read(stored)
        stored.close()
        _log("session_read", stored.nbytes, started_s)

    def _write(self, session_id: str, digests: Mapping[str, str]) -> None:
        """Move a session to disk.

        Raises:
            RequestFailed: The session cannot be written and stays where it is.
        """
        assert self.files is not None
        started_s, session = time.perf_counter(), self._sessions[session_id]
        assert not isinstance(session, SessionFile)
        self._sessions[session_id] = self.files.write(session, digests)
        self._suspended.discard(session_id)
        self._digests.pop(session_id, None)
        session.close()
        _log("session_written", session.nbytes, started_s)

    def _suspend_idle(self, fits: Callable[[], bool], leaving_host: int) -> None:
        """Suspend idle sessions, least recently used first, until `fits` returns True or no session
        can be suspended.
        """
        for session_id in list(self._sessions):
            if fits():
                return
            if self._may_suspend(session_id, leaving_host):
                try:
                    self._suspend(session_id, leaving_host)
                except RequestFailed as failure:  # the disk is full
                    logger.warning("sessions cannot be suspended any more: %s", failure)
                    return

    def _suspend(self, session_id: str, leaving_host: int) -> None:
        """Move a session to host memory. If necessary, first move other sessions from host memory
        to disk.

        Raises:
            RequestFailed: A session cannot be written to disk and stays where it is.
        """
        assert self.suspension is not None
        session = self._sessions[session_id]
        assert not isinstance(session, SessionFile)
        digests: dict[str, str] = {}
        if self.files is not None:  # digests are computed on the device, where this is fast
            digests = tensor_digests(session.tensors())
            if session.nbytes > self.suspension.max_bytes:
                self._write(session_id, digests)
                return
            for other in [name for name in self._sessions if name in self._suspended]:
                after = self.suspended_nbytes + session.nbytes - leaving_host
                if after <= self.suspension.max_bytes:
                    break
                if not self._pins.get(other):
                    self._write(other, self._digests[other])
        self._move(session_id, is_suspended=True)
        self._digests[session_id] = digests

    def _may_suspend(self, session_id: str, leaving_host: int = 0) -> bool:
        if (
            self.suspension is None
            or self._is_suspended(session_id)
            or self._pins.get(session_id)
            or self._clock() - self._last_used[session_id] < self.suspension.idle_s
        ):
            return False
        if self.files is not None:
            return True
        after = self.suspended_nbytes + self._sessions[session_id].nbytes
        return after - leaving_host <= self.suspension.max_bytes

    def _move(self, session_id: str, *, is_suspended: bool) -> None:
        assert self.suspension is not None
        started_s, session = time.perf_counter(), self._sessions[session_id]
        assert not isinstance(session, SessionFile)
        if self.suspension.device.type != "cpu":
            # A decode on another CUDA stream may still be using the session.
            torch.cuda.synchronize(self.suspension.device)
            session.to("cpu" if is_suspended else self.suspension.device)
        (self._suspended.add if is_suspended else self._suspended.discard)(session_id)
        what = "session_suspended" if is_suspended else "session_resumed"
        _log(what, session.nbytes, started_s)

    def make_room(self, nbytes: int) -> None:
        """Make room for one more session. Idle sessions are suspended or closed if necessary.

        Args:
            nbytes: Size of the session in bytes.

        Raises:
            RequestFailed: The session does not fit (code `capacity`).
        """
        if self.max_bytes is not None and nbytes > self.max_bytes:
            raise RequestFailed(
                "capacity",
                f"a session needs {nbytes} bytes, all sessions may hold {self.max_bytes}",
            )
        self._make_room(nbytes, sessions=1)

    def _make_room(self, nbytes: int, *, sessions: int, leaving_host: int = 0) -> None:
        if self._fits(nbytes, sessions=sessions):
            return
        if len(self) + sessions <= self.max_sessions:
            self._suspend_idle(lambda: self._fits(nbytes, sessions=sessions), leaving_host)
            if self._fits(nbytes, sessions=sessions):
                return
        now = self._clock()
        for session_id in list(self._sessions):  # least recently used first
            if self._is_suspended(session_id) and len(self) + sessions <= self.max_sessions:
                continue  # closing it would free no memory on the device
            if not self._pins.get(session_id) and now - self._last_used[session_id] >= self.idle_s:
                self.close(session_id)
                if self._fits(nbytes, sessions=sessions):
                    return
        raise RequestFailed(
            "capacity",
            f"{len(self)} of {self.max_sessions} sessions hold {self.nbytes} bytes and none has "
            "been idle for "
            f"{self.idle_s:g} s: close one or try again later",
        )

    def _fits(self, nbytes: int, *, sessions: int = 1) -> bool:
        if len(self) + sessions > self.max_sessions:
            return False
        return self.max_bytes is None or self.nbytes + nbytes <= self.max_bytes

    def grow_session(self, session_id: str) -> int:
        """Allocate the memory for a session's next chunk if possible.

        Idle sessions are closed if necessary.

        Returns:
            Number of frames that the session then has memory for (`SessionState.held_frames`).
        """
        session = self.get(session_id)  # marks the session as used, which prevents its eviction
        with contextlib.suppress(RequestFailed, torch.OutOfMemoryError):
            if missing := session.missing_nbytes():
                self._make_room(missing, sessions=0)
            session.grow()
        return session.held_frames

    def add_session(self, session: SessionState) -> None:
        """Take ownership of a new session. The id of the session must not be in use."""
        assert session.session_id not in self._sessions
        self._sessions[session.session_id] = session
        self._last_used[session.session_id] = self._clock()
        if self.max_bytes is not None:
            self.trim_pool(max(0, self.max_bytes - self.nbytes))

    def operate(self, params: DiffusionParams) -> dict[str, Any]:
        """Run the session operation `params.op` (close, reset or fork).

        Returns:
            Metadata of the result.

        Raises:
            RequestFailed: The session to fork is not live, or it cannot be copied.
        """
        if params.op == "fork":
            if params.fork_to is None or params.fork_to in self:
                raise RequestFailed(
                    "invalid_request", f"fork_to must name a new session, got {params.fork_to!r}"
                )
            self.resume(params.session_id)
            source = self.get(params.session_id)
            self.pin(params.session_id)
            try:
                self.make_room(source.nbytes)
            finally:
                self.unpin(params.session_id)
            copy = source.fork(params.fork_to)
            copy.failure, copy.adapters = source.failure, source.adapters
            self.add_session(copy)
            return {"op": "fork", "session_id": params.fork_to, "chunk_index": source.chunk_index}
        # After `reset`, the next chunk creates a new session with the same id.
        existed = self.close(params.session_id)
        return {"op": params.op, "session_id": params.session_id, "existed": existed}

    def pin(self, session_id: str) -> None:
        """Protect a session from eviction while one of its chunks is in flight."""
        self._pins[session_id] = self._pins.get(session_id, 0) + 1

    def unpin(self, session_id: str) -> None:
        self._pins[session_id] -= 1
        if not self._pins[session_id]:
            del self._pins[session_id]

    def is_pinned(self, session_id: str) -> bool:
        """Return whether a chunk of a session is in flight."""
        return session_id in self._pins

    def close(self, session_id: str) -> bool:
        """Free a session. Idempotent.

        Returns:
            Whether the session was live.
        """
        session = self._sessions.pop(session_id, None)
        self._last_used.pop(session_id, None)
        self._suspended.discard(session_id)
        self._digests.pop(session_id, None)
        if session is not None:
            session.close()
            self._trim_heap()
        return session is not None

    def close_all(self) -> None:
        for session_id in list(self._sessions):
            self.close(session_id)

    def to(self, device: torch.device | str) -> None:
        """Move all sessions that are not suspended to `device`."""
        for session_id, session in self._sessions.items():
            if session_id not in self._suspended and not isinstance(session, SessionFile):
                session.to(device)
        self.trim_pool(0)

    def stats(self) -> dict[str, Any]:
        """Return session statistics as JSON types, which can be sent over RPC."""
        return {
            "sessions": len(self),
            "max_sessions": self.max_sessions,
            "bytes": self.nbytes,
            "max_bytes": self.max_bytes,
            "suspended": len(self._suspended),
            "suspended_bytes": self.suspended_nbytes,
            "on_disk": len(files := self._files()),
            "disk_bytes": sum(stored.num_bytes for stored in files),
            "can_suspend": any(map(self._may_suspend, self._sessions)),
            "chunks": {name: session.chunk_index for name, session in self._sessions.items()},
        }


def _log(what: str, num_bytes: int, started_s: float) -> None:
    took_ms = (time.perf_counter() - started_s) * 1e3
    logger.debug("%s bytes=%d took_ms=%.1f", what, num_bytes, took_ms)
