# SPDX-License-Identifier: Apache-2.0
"""`SessionStore`: creates, evicts and frees the sessions of one rank, and tracks their memory.

The first chunk of a session creates it. It outlives requests and is freed in one place (`close`).
Admission is by bytes: the size of a session is known before it is created, and constant afterwards
unless its K/V window grows (`omni.kv_growth`).
A session that was idle for a while may be *suspended*: its state moves to host memory, which has a
limit of its own, and back before its next chunk (`omni.suspend_idle_s`).
Memory of closed sessions that a model retains (`trim_pool`) counts as free and yields to live
sessions. This module depends neither on the scheduler nor on model maths.
"""

import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import SessionState
from vllm_omni.outputs import RequestFailed
from vllm_omni.runtime.heap import HeapTrim

logger = logging.getLogger("vllm." + __name__)


@dataclass(frozen=True)
class Suspension:
    """When sessions may be suspended."""

    idle_s: float
    """Seconds without a request after which a session may be suspended."""
    max_bytes: int
    """Maximum size of all suspended sessions together in bytes."""
    device: torch.device
    """Device on which sessions run. On a CPU, a suspended session stays where it is."""


class SessionStore:
    """Live sessions of one rank, least recently used first.

    Args:
        max_sessions: Maximum number of live sessions.
        idle_s: Seconds without a request after which a session may be evicted.
        max_bytes: Maximum memory of all sessions on the device together; None is unlimited.
        clock: Time in seconds. With several ranks it must be equal on all of them, because eviction
            must not differ between ranks.
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
        """`PoolsMemory.trim_pool` of the model: limits the memory it retains of closed sessions."""
        self._clock = clock
        self._sessions: OrderedDict[str, SessionState] = OrderedDict()
        self._last_used: dict[str, float] = {}
        self._pins: dict[str, int] = {}
        self.suspension: Suspension | None = None
        """When sessions may be suspended. None: never."""
        self._suspended: set[str] = set()
        self._trim_heap = HeapTrim()

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._sessions

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def nbytes(self) -> int:
        """Size of the sessions on the device in bytes."""
        return sum(
            session.nbytes
            for session_id, session in self._sessions.items()
            if session_id not in self._suspended
        )

    @property
    def suspended_nbytes(self) -> int:
        """Size of the suspended sessions in host memory in bytes."""
        return sum(self._sessions[session_id].nbytes for session_id in self._suspended)

    def get(self, session_id: str) -> SessionState:
        """Return a live session and mark it as used.

        Raises:
            RequestFailed: `unknown_session`: the session is not live.
        """
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
            RequestFailed: `capacity`: it does not fit. It stays suspended.
        """
        if session_id not in self._suspended:
            return
        self.get(session_id)  # its use now protects it from eviction
        session = self._sessions[session_id]
        self.pin(session_id)
        try:
            # it may change places with another session, so that both are on the host for a moment
            self._make_room(session.nbytes, sessions=0, leaving_host=session.nbytes)
        finally:
            self.unpin(session_id)
        self._move(session_id, is_suspended=False)

    def _suspend_idle(self, fits: Callable[[], bool], leaving_host: int) -> None:
        """Suspend idle sessions, least recently used first, until `fits` or none is left."""
        for session_id in list(self._sessions):
            if fits():
                return
            if self._may_suspend(session_id, leaving_host):
                self._move(session_id, is_suspended=True)

    def _may_suspend(self, session_id: str, leaving_host: int = 0) -> bool:
        if (
            self.suspension is None
            or session_id in self._suspended
            or self._pins.get(session_id)
            or self._clock() - self._last_used[session_id] < self.suspension.idle_s
        ):
            return False
        after = self.suspended_nbytes + self._sessions[session_id].nbytes
        return after - leaving_host <= self.suspension.max_bytes

    def _move(self, session_id: str, *, is_suspended: bool) -> None:
        assert self.suspension is not None
        started_s, session = time.perf_counter(), self._sessions[session_id]
        if self.suspension.device.type != "cpu":
            # a decode on another stream may still use the session
            torch.cuda.synchronize(self.suspension.device)
            session.to("cpu" if is_suspended else self.suspension.device)
        (self._suspended.add if is_suspended else self._suspended.discard)(session_id)
        logger.debug(
            "%s bytes=%d took_ms=%.1f",
            "session_suspended" if is_suspended else "session_resumed",
            session.nbytes,
            (time.perf_counter() - started_s) * 1e3,
        )

    def make_room(self, nbytes: int) -> None:
        """Make room for one more session, suspending or closing idle sessions if needed.

        Args:
            nbytes: Size of the session.

        Raises:
            RequestFailed: `capacity`: the session does not fit.
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
            if session_id in self._suspended and len(self) + sessions <= self.max_sessions:
                continue  # it holds no memory of the device
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
        """Allocate the memory of a session's next chunk if possible.

        Idle sessions are closed if needed.

        Returns:
            `SessionState.held_frames`.
        """
        session = self.get(session_id)  # its use now protects it from eviction
        with contextlib.suppress(RequestFailed, torch.OutOfMemoryError):
            if missing := session.missing_nbytes():
                self._make_room(missing, sessions=0)
            session.grow()
        return session.held_frames

    def add_session(self, session: SessionState) -> None:
        """Take ownership of a new session, whose id must be unused."""
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
            RequestFailed: The session to fork is not live, or its copy is not possible.
        """
        if params.op == "fork":
            if params.fork_to is None or params.fork_to in self:
                raise RequestFailed(
                    "invalid_request", f"fork_to must name a new session, got {params.fork_to!r}"
                )
            source = self.get(params.session_id)
            self.resume(params.session_id)
            self.pin(params.session_id)
            try:
                self.make_room(source.nbytes)
            finally:
                self.unpin(params.session_id)
            copy = source.fork(params.fork_to)
            copy.failure, copy.adapters = source.failure, source.adapters
            self.add_session(copy)
            return {"op": "fork", "session_id": params.fork_to, "chunk_index": source.chunk_index}
        # `reset`: the next chunk creates a new session of this id
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
        """Whether a chunk of this session is in flight."""
        return session_id in self._pins

    def close(self, session_id: str) -> bool:
        """Free a session. Idempotent.

        Returns:
            Whether the session was live.
        """
        session = self._sessions.pop(session_id, None)
        self._last_used.pop(session_id, None)
        self._suspended.discard(session_id)
        if session is not None:
            session.close()
            self._trim_heap()
        return session is not None

    def close_all(self) -> None:
        for session_id in list(self._sessions):
            self.close(session_id)

    def to(self, device: torch.device | str) -> None:
        """Move the sessions that are not suspended."""
        for session_id, session in self._sessions.items():
            if session_id not in self._suspended:
                session.to(device)
        self.trim_pool(0)

    def stats(self) -> dict[str, Any]:
        """Return statistics as JSON types, because they are sent over RPC."""
        return {
            "sessions": len(self),
            "max_sessions": self.max_sessions,
            "bytes": self.nbytes,
            "max_bytes": self.max_bytes,
            "suspended": len(self._suspended),
            "suspended_bytes": self.suspended_nbytes,
            "can_suspend": any(map(self._may_suspend, self._sessions)),
            "chunks": {name: session.chunk_index for name, session in self._sessions.items()},
        }
