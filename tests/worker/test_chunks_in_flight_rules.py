# SPDX-License-Identifier: Apache-2.0
"""Tests of `ChunksInFlight` without a runner: when a chunk starts or waits, and when it fails
because its predecessor failed.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.requests import RequestState
from vllm_omni.outputs import RequestFailed
from vllm_omni.worker.diffusion.sessions.in_flight import ChunksInFlight

PREDECESSOR = (
    "predecessor_failed",
    "an earlier chunk failed or was aborted while both were in flight; the session is as it was "
    "before that "
    "chunk: send both again",
)


class Sessions:
    """The requests of sessions that each have `committed` committed chunks. `start` assigns chunks
    to requests.
    """

    def __init__(self, limit: int, committed: int = 5) -> None:
        self.flights = ChunksInFlight(limit)
        self.sessions: dict[str, Any] = {}
        self._committed = committed

    def send(self, name: str, index: int | None = None) -> RequestState:
        """Return a request that has no chunk yet. The first letter of the request's name is the
        name of its session.
        """
        return RequestState(name, DiffusionParams(session_id=name[0], chunk_index=index), {})

    def start(self, name: str, step: int = 0, index: int = 0, after: Any = None) -> RequestState:
        state = self.send(name, index)
        known = SimpleNamespace(session_id=name[0], chunk_index=self._committed)
        session = self.sessions.setdefault(name[0], known)
        state.chunk = SimpleNamespace(session=session, step=step, num_steps=4, name=name)  # type: ignore[assignment]
        state.index = index
        self.flights.add_chunk(state, after)
        return state

    def waiting(self, *states: RequestState) -> str:
        return " ".join(state.request_id for state in self.flights.waiting(states))


def failure_of(state: RequestState) -> tuple[str, str] | None:
    return None if state.failure is None else (state.failure.code, state.failure.message)


@pytest.mark.parametrize(
    ("first", "second", "after", "waiting"),
    [
        (0, 0, 1, "s2"),
        (1, 0, 1, ""),
        (1, 1, 1, "s2"),
        (2, 1, 1, ""),
        (1, 0, 2, "s2"),
        (2, 0, 2, ""),
        (3, 2, 2, "s2"),
        (4, 3, 2, ""),
        (4, 4, 2, ""),
    ],
)
def test_a_chunk_runs_lag_steps_after_its_predecessor(
    first: int, second: int, after: int, waiting: str
) -> None:
    """A chunk stays `lag_steps` steps behind its predecessor until the predecessor has run all of
    its steps.
    """
    runs = Sessions(3)
    runs.flights.order.lag_steps = after
    one, two = runs.start("s1", first), runs.start("s2", second)
    assert runs.waiting(one, two) == waiting


def test_a_chunk_starts_after_the_last_chunk_of_its_session() -> None:
    """A chunk starts after its session's latest chunk, up to the limit on chunks in flight. Chunks
    of other sessions do not count towards the limit.
    """
    runs = Sessions(3)
    one = runs.start("s1", 2)
    assert runs.waiting(one, runs.send("s2")) == ""
    two = runs.start("s2", 0)
    assert runs.waiting(one, two, runs.send("s3")) == "s3", "chunk 2 has not taken a step"
    two.chunk.step = 1  # type: ignore[union-attr]
    assert runs.waiting(one, two, runs.send("s3")) == ""
    runs.start("s3", 1).chunk.step = 4  # type: ignore[union-attr]
    assert runs.waiting(runs.send("s4")) == "s4", "three chunks are in flight"
    assert runs.waiting(runs.send("t1"), runs.send("u1")) == ""


def test_one_chunk_of_a_session_starts_per_step() -> None:
    """In each step, only the chunk with the lowest index starts in each session, whatever its
    position in the batch.

    Requests without an index follow in order of arrival.
    """
    runs = Sessions(3)
    assert runs.waiting(runs.send("s2", 2), runs.send("s1", 1), runs.send("s3", 3)) == "s2 s3"
    assert runs.waiting(runs.send("sx"), runs.send("s1", 1), runs.send("sy")) == "sx sy"
    assert runs.waiting(runs.send("sx"), runs.send("sy")) == "sy"
    assert (
        runs.waiting(runs.send("s1", 1), runs.send("t1", 1), runs.send("s0", 0), runs.send("t2", 2))
        == "s1 t2"
    )
    failed, unread = runs.send("s0", 0), RequestState("?", None, {})
    failed.failure = RequestFailed("capacity", "full")
    assert runs.waiting(failed, unread, runs.send("s1", 1)) == "", (
        "a failed request neither waits nor delays others"
    )


def test_the_first_chunk_of_a_session_runs_alone() -> None:
    """A session's first chunk runs by itself, because the session does not exist for later chunks
    until the first chunk is committed.
    """
    runs = Sessions(3, committed=0)
    one = runs.start("s0", 3)
    assert runs.waiting(one, runs.send("s1", 1)) == "s1"
    runs.sessions["s"].chunk_index = 1
    assert runs.waiting(one, runs.send("s1", 1)) == ""


@pytest.mark.parametrize("because", [None, RequestFailed("lost", "the session is gone")])
def test_a_failed_chunk_fails_its_successors(because: RequestFailed | None) -> None:
    """When a chunk fails, its successors fail too, but earlier chunks continue. A successor that
    has already failed keeps its own error.
    """
    runs = Sessions(4)
    one, two, three, four = (runs.start(f"s{index}", index=index) for index in range(1, 5))
    three.failure = own = RequestFailed("non_finite", "NaN")
    for _ in range(2):
        runs.flights.fail(two.chunk, because)  # type: ignore[arg-type]
    expected = PREDECESSOR if because is None else ("lost", "the session is gone")
    assert (failure_of(one), failure_of(two), failure_of(four)) == (
        None,
        None,
        expected,
    ) and three.failure is own
    assert runs.flights.ahead("s") == (1, one.chunk)
