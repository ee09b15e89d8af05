# SPDX-License-Identifier: Apache-2.0
"""The session store: bytes and counts are bounded, idle sessions make room, sessions at work never do."""

from typing import Any

import pytest
import torch

from vllm_omni.model_executor.interfaces import SessionState
from vllm_omni.outputs import RequestFailed
from vllm_omni.worker.sessions import SessionStore


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


def test_bytes_are_bounded_before_the_count(store: SessionStore) -> None:
    """Two sessions of 10 bytes fit into 25, a third does not, though three sessions are allowed."""
    store.add(Session("a"))
    store.make_room(10)
    store.add(Session("b"))
    with pytest.raises(RequestFailed, match="capacity"):
        store.make_room(10)
    assert store.nbytes == 20


def test_a_session_larger_than_everything_is_refused_without_evicting(store: SessionStore, clock: Clock) -> None:
    """No idle session is closed for one that could never fit."""
    store.add(Session("a"))
    clock.now = 1000
    with pytest.raises(RequestFailed, match="capacity"):
        store.make_room(26)
    assert "a" in store


def test_the_least_recently_used_idle_session_makes_room(store: SessionStore, clock: Clock) -> None:
    """`a` is older but was used again; `b` goes."""
    a, b = Session("a"), Session("b")
    store.add(a)
    store.add(b)
    clock.now = 50
    store.get("a")
    clock.now = 100
    store.make_room(10)
    assert "a" in store and "b" not in store and b.closed == 1


def test_a_session_with_a_chunk_in_flight_is_never_evicted(store: SessionStore, clock: Clock) -> None:
    """Pinned sessions stay however idle they look, until the last chunk lets go."""
    store.add(Session("a"))
    store.add(Session("b"))
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


def test_closing_is_idempotent(store: SessionStore) -> None:
    """The session's own close runs once; the second call says there was nothing."""
    session = Session("a")
    store.add(session)
    assert store.close("a") and not store.close("a") and session.closed == 1


def test_an_unknown_session_is_named(store: SessionStore) -> None:
    """The error says which id and what to do."""
    with pytest.raises(RequestFailed, match=r"unknown_session.*'x'"):
        store.get("x")
