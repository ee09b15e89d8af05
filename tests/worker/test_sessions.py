# SPDX-License-Identifier: Apache-2.0
"""`SessionStore`: limits on the number and size of sessions, eviction of idle sessions, and session
operations.
"""

from typing import Any

import pytest
import torch

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import SessionState
from vllm_omni.outputs import RequestFailed
from vllm_omni.worker.diffusion.sessions.store import SessionStore, Suspension


class Session(SessionState):
    def __init__(self, session_id: str, nbytes: int = 10) -> None:
        super().__init__(session_id)
        self._nbytes = nbytes
        self.closed = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def scalars(self) -> dict[str, Any]:
        return {}

    def fork(self, session_id: str) -> "Session":
        return Session(session_id, self._nbytes)

    def to(self, device: torch.device | str) -> None: ...

    def close(self) -> None:
        self.closed += 1


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> SessionStore:
    return SessionStore(max_sessions=3, idle_s=60.0, max_bytes=25, clock=clock)


def test_a_session_above_the_limit_evicts_no_other(store: SessionStore, clock: Clock) -> None:
    """A session that is larger than the limit is refused, and no idle session is closed to make
    room for it.
    """
    store.add_session(Session("a"))
    clock.now = 1000
    with pytest.raises(RequestFailed, match="capacity"):
        store.make_room(26)
    assert "a" in store


def test_the_least_recently_used_idle_session_is_evicted(store: SessionStore, clock: Clock) -> None:
    """The least recently used idle session is evicted. In this test, session `a` is older but was
    used again, so session `b` is evicted.
    """
    a, b = Session("a"), Session("b")
    store.add_session(a)
    store.add_session(b)
    clock.now = 50
    store.get("a")
    clock.now = 100
    store.make_room(10)
    assert "a" in store and "b" not in store and b.closed == 1


def test_a_session_with_a_chunk_in_flight_is_never_evicted(
    store: SessionStore, clock: Clock
) -> None:
    """A session with a chunk in flight is pinned. It is not evicted before its last chunk ends,
    however long ago it was last used.
    """
    store.add_session(Session("a"))
    store.add_session(Session("b"))
    store.pin("a"), store.pin("a"), store.pin("b")
    clock.now = 1000
    with pytest.raises(RequestFailed, match="capacity"):
        store.make_room(10)
    store.unpin("a")
    with pytest.raises(RequestFailed, match="capacity"):
        store.make_room(10)
    assert store.is_pinned("a")
    store.unpin("a")
    assert not store.is_pinned("a")
    store.make_room(10)
    assert "a" not in store and "b" in store


def failure_of(call: Any, *args: Any) -> tuple[str, str]:
    with pytest.raises(RequestFailed) as failed:
        call(*args)
    return failed.value.code, failed.value.message


def test_refusals_name_the_limit_and_the_remedy(store: SessionStore) -> None:
    """A refusal names the unknown session or the exceeded limit and, if there is one, the
    remedy.
    """
    assert failure_of(store.get, "x") == (
        "unknown_session",
        "session 'x' is not live here: start it with an image and a prompt",
    )
    too_large = ("capacity", "a session needs 26 bytes, all sessions may hold 25")
    assert failure_of(store.make_room, 26) == too_large
    store.add_session(Session("a", 20))
    assert failure_of(store.make_room, 6) == (
        "capacity",
        "1 of 3 sessions hold 20 bytes and none has been idle for 60 s: close one or try "
        "again later",
    )


def test_the_limits_are_inclusive(store: SessionStore, clock: Clock) -> None:
    """Limits are inclusive: sessions may use exactly the maximum number of bytes, and a session
    whose idle time equals the limit may be closed.
    """
    store.make_room(25)
    store.add_session(Session("a", 15))
    store.make_room(10)
    store.add_session(Session("b", 10))
    clock.now = 59.9
    assert failure_of(store.make_room, 1)[0] == "capacity"
    clock.now = 60.0
    store.make_room(1)
    assert "a" not in store and "b" in store, "only the required sessions are closed"


def test_the_number_of_sessions_is_limited_without_a_limit_on_bytes(clock: Clock) -> None:
    store = SessionStore(2, 60.0, clock=clock)
    for name in "ab":
        store.make_room(10**15)
        store.add_session(Session(name, 10**15))
    assert failure_of(store.make_room, 1)[0] == "capacity"
    clock.now = 60.0
    store.make_room(1)
    assert len(store) == 1 and store.stats()["max_bytes"] is None


def test_eviction_skips_pinned_sessions(store: SessionStore, clock: Clock) -> None:
    """Eviction skips pinned sessions and evicts as many idle sessions as required."""
    for name in "abc":
        store.add_session(Session(name, 8))
    store.pin("a")
    clock.now = 60.0
    store.make_room(17)
    assert [name in store for name in "abc"] == [True, False, False]
    assert not store.is_pinned("b") and store.is_pinned("a")


def operation(op: str, session_id: str = "a", fork_to: str | None = None) -> DiffusionParams:
    return DiffusionParams(session_id=session_id, op=op, fork_to=fork_to)  # type: ignore[arg-type]


@pytest.mark.parametrize("op", ["close", "reset"])
def test_close_and_reset_report_whether_the_session_existed(store: SessionStore, op: str) -> None:
    """`close` and `reset` report whether the session existed. The first chunk after a reset starts
    a new session with the same id.
    """
    session = Session("a")
    store.add_session(session)
    assert store.operate(operation(op)) == {"op": op, "session_id": "a", "existed": True}
    assert store.operate(operation(op)) == {"op": op, "session_id": "a", "existed": False}
    assert session.closed == 1 and "a" not in store
    store.add_session(Session("a"))


def test_a_fork_is_a_separate_session(store: SessionStore, clock: Clock) -> None:
    """A fork continues after the same chunk as its source, inherits its source's failure, and
    counts towards the byte limit.

    The fork operation marks both the source and the fork as recently used.
    """
    source = Session("a")
    source.chunk_index, source.failure = 7, RequestFailed("non_finite", "NaN")
    store.add_session(source)
    clock.now = 30.0
    assert store.operate(operation("fork", fork_to="b")) == {
        "op": "fork",
        "session_id": "b",
        "chunk_index": 7,
    }
    assert store.get("b").failure is source.failure and store.nbytes == 20
    clock.now = 89.0
    assert failure_of(store.make_room, 10)[0] == "capacity", "the source was used for the fork"


@pytest.mark.parametrize("fork_to", ["a", "b", None])
def test_a_fork_requires_a_new_name(store: SessionStore, fork_to: str | None) -> None:
    store.add_session(Session("a", 1)), store.add_session(Session("b", 1))
    text = f"fork_to must name a new session, got {fork_to!r}"
    assert failure_of(store.operate, operation("fork", fork_to=fork_to)) == (
        "invalid_request",
        text,
    )
    assert failure_of(store.operate, operation("fork", "x", "c"))[0] == "unknown_session"
    assert len(store) == 2


def test_a_fork_that_does_not_fit_is_refused(store: SessionStore) -> None:
    store.add_session(Session("a", 13))
    assert failure_of(store.operate, operation("fork", fork_to="b"))[0] == "capacity"
    assert "b" not in store


def test_all_sessions_are_moved_closed_and_listed(store: SessionStore) -> None:
    moved: list[tuple[str, Any]] = []
    sessions = [Session(name, 5) for name in ("c", "a", "b")]
    for index, session in enumerate(sessions):
        session.chunk_index = index
        session.to = lambda device, name=session.session_id: moved.append((name, device))  # type: ignore[misc,assignment]
        store.add_session(session)
    assert store.stats() == {
        "sessions": 3,
        "max_sessions": 3,
        "bytes": 15,
        "max_bytes": 25,
        "suspended": 0,
        "suspended_bytes": 0,
        "on_disk": 0,
        "disk_bytes": 0,
        "can_suspend": False,
        "chunks": {"a": 1, "b": 2, "c": 0},
    }
    store.to("cpu")
    assert sorted(moved) == [("a", "cpu"), ("b", "cpu"), ("c", "cpu")]
    store.close_all()
    assert (
        len(store) == 0
        and [session.closed for session in sessions] == [1, 1, 1]
        and store._last_used == {}
    )


def test_pooled_memory_is_trimmed_for_live_sessions(store: SessionStore) -> None:
    """Pooled memory counts as free. If a session is added, the pool is trimmed to the remaining
    bytes.
    """
    limits: list[int] = []
    store.trim_pool = limits.append
    store.make_room(20)
    store.add_session(Session("a"))
    store.add_session(Session("b"))
    assert limits == [15, 5]
    store.close("a")
    assert limits == [15, 5], "its memory may stay pooled"
    store.to("cpu")
    assert limits[-1] == 0, "sleep mode frees the pool"


@pytest.fixture
def moves(store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return the list of moves, each as (session, device). The store may suspend up to 25 bytes of
    sessions that have been idle for 5 s.
    """
    store.max_sessions, store.suspension = 8, Suspension(5.0, 25, torch.device("cuda"))
    moves: list[tuple[str, str]] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(
        Session, "to", lambda self, device: moves.append((self.session_id, str(device)))
    )
    return moves


def test_an_idle_session_makes_room_in_host_memory(
    store: SessionStore, clock: Clock, moves: list[tuple[str, str]]
) -> None:
    """The least recently used idle session moves to host memory. When its next chunk runs, the
    session returns to the device, and another idle session moves to the host instead.
    """
    for name in ("a", "b"):
        store.make_room(10)
        store.add_session(Session(name))
    with pytest.raises(RequestFailed, match="capacity"):
        store.make_room(10)  # neither session has been idle for 5 s
    clock.now = 5
    assert store.stats()["can_suspend"]
    store.make_room(10)
    store.add_session(Session("c"))
    assert moves == [("a", "cpu")]
    assert (store.nbytes, store.suspended_nbytes, len(store)) == (20, 10, 3)
    clock.now = 20
    store.resume("a")
    assert moves == [("a", "cpu"), ("b", "cpu"), ("a", "cuda")]
    store.resume("a")  # `a` is on the device already
    assert len(moves) == 3
    store.close("b")
    assert store.suspended_nbytes == 0


def test_host_memory_is_bounded_and_a_session_with_a_chunk_in_flight_is_not_moved(
    store: SessionStore, clock: Clock, moves: list[tuple[str, str]]
) -> None:
    """Two of the four idle sessions fit in host memory. A new session is then refused, and no
    session is closed to make room for it.

    A session with a chunk in flight is not moved.
    """
    for number, name in enumerate("abcd"):
        clock.now = 10 * number
        store.make_room(10)
        store.add_session(Session(name))
    assert [name for name, _ in moves] == ["a", "b"]
    clock.now = 45
    with pytest.raises(RequestFailed, match="capacity"):
        store.make_room(10)
    assert len(store) == 4
    store.pin("c")
    store.pin("d")
    with pytest.raises(RequestFailed, match="capacity"):
        store.resume("a")
    assert store.suspended_nbytes == 20
    # After `idle_s`, sessions are closed as usual, but only if that frees device memory.
    store.unpin("c")
    clock.now = 1000
    store.make_room(10)
    assert "c" not in store
    assert {"a", "b", "d"} <= set(store.stats()["chunks"])


def test_sleep_leaves_suspended_sessions_on_the_host(
    store: SessionStore, clock: Clock, moves: list[tuple[str, str]]
) -> None:
    for number, name in enumerate("abc"):
        clock.now = 10 * number
        store.make_room(10)
        store.add_session(Session(name))
    moves.clear()
    store.to("cuda")
    assert [name for name, _ in moves] == ["b", "c"]
