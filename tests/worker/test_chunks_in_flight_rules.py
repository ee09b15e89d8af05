# SPDX-License-Identifier: Apache-2.0
"""`ChunksInFlight` without a runner: who may begin or go on, and who falls with whom."""

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
    """Requests of sessions that have had `committed` chunks; `begin` gives a request its chunk."""

    def __init__(self, limit: int, committed: int = 5) -> None:
        self.flights = ChunksInFlight(limit)
        self.sessions: dict[str, Any] = {}
        self._committed = committed

    def send(self, name: str, index: int | None = None) -> RequestState:
        """A request without a chunk; its session is its name's first letter."""
        return RequestState(name, DiffusionParams(session_id=name[0], chunk_index=index), {})

    def start(self, name: str, step: int = 0, index: int = 0, after: Any = None) -> RequestState:
        state = self.send(name, index)
        known = SimpleNamespace(session_id=name[0], chunk_index=self._committed)
        session = self.sessions.setdefault(name[0], known)
        state.chunk = SimpleNamespace(session=session, step=step, num_steps=4, name=name)  # type: ignore[assignment]
        state.index = index
        self.flights.add_chunk(state, after)
        return state

    def held(self, *states: RequestState) -> str:
        return " ".join(state.request_id for state in self.flights.waiting(states))


def told(state: RequestState) -> tuple[str, str] | None:
    return None if state.failure is None else (state.failure.code, state.failure.message)


def test_with_one_chunk_at_a_time_nothing_ever_waits() -> None:
    """The scheduler sees to the order then."""
    runs = Sessions(1)
    runs.start("s1")
    assert runs.held(runs.send("s2"), runs.send("s3")) == ""


@pytest.mark.parametrize(
    ("first", "second", "after", "held"),
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
def test_a_chunk_continues_behind_the_one_before_it(
    first: int, second: int, after: int, held: str
) -> None:
    """By `lag_steps` steps, or at will once that one has taken all its steps."""
    runs = Sessions(3)
    runs.flights.order.lag_steps = after
    one, two = runs.start("s1", first), runs.start("s2", second)
    assert runs.held(one, two) == held


def test_a_chunk_starts_behind_the_last_of_its_session() -> None:
    """As far as the limit goes; other sessions do not count."""
    runs = Sessions(3)
    one = runs.start("s1", 2)
    assert runs.held(one, runs.send("s2")) == ""
    two = runs.start("s2", 0)
    assert runs.held(one, two, runs.send("s3")) == "s3", "two is no step ahead"
    two.chunk.step = 1  # type: ignore[union-attr]
    assert runs.held(one, two, runs.send("s3")) == ""
    runs.start("s3", 1).chunk.step = 4  # type: ignore[union-attr]
    assert runs.held(runs.send("s4")) == "s4", "three are at work"
    assert runs.held(runs.send("t1"), runs.send("u1")) == ""


def test_of_those_that_have_not_started_one_of_a_session_may() -> None:
    """The lowest index, wherever it stands in the batch; without one, the first that came,
    behind those with one.
    """
    runs = Sessions(3)
    assert runs.held(runs.send("s2", 2), runs.send("s1", 1), runs.send("s3", 3)) == "s2 s3"
    assert runs.held(runs.send("sx"), runs.send("s1", 1), runs.send("sy")) == "sx sy"
    assert runs.held(runs.send("sx"), runs.send("sy")) == "sy"
    assert (
        runs.held(runs.send("s1", 1), runs.send("t1", 1), runs.send("s0", 0), runs.send("t2", 2))
        == "s1 t2"
    )
    failed, unread = runs.send("s0", 0), RequestState("?", None, {})
    failed.failure = RequestFailed("capacity", "full")
    assert runs.held(failed, unread, runs.send("s1", 1)) == "", (
        "what has failed neither waits nor holds back"
    )


def test_the_first_chunk_of_a_session_is_alone() -> None:
    """Until it is committed there is no session to continue, however far it is."""
    runs = Sessions(3, committed=0)
    one = runs.start("s0", 3)
    assert runs.held(one, runs.send("s1", 1)) == "s1"
    runs.sessions["s"].chunk_index = 1
    assert runs.held(one, runs.send("s1", 1)) == ""


def test_who_follows_whom() -> None:
    runs = Sessions(3)
    flights = runs.flights
    assert flights.ahead("s") == (0, None)
    one, two = runs.start("s1"), runs.start("s2")
    runs.start("t1")
    assert flights.ahead("s") == (2, two.chunk) and flights.ahead("t")[0] == 1
    assert flights.is_next(one.chunk) and not flights.is_next(two.chunk)  # type: ignore[arg-type]
    flights.end(one.chunk)  # type: ignore[arg-type]
    flights.end(one.chunk)  # type: ignore[arg-type]
    assert flights.ahead("s")[0] == 1 and flights.is_next(two.chunk)  # type: ignore[arg-type]
    flights.end(two.chunk)  # type: ignore[arg-type]
    assert flights.ahead("s")[1] is None and not flights.is_next(two.chunk)  # type: ignore[arg-type]
    assert told(one) is None and told(two) is None and set(flights._chunks) == {"t"}


@pytest.mark.parametrize("because", [None, RequestFailed("lost", "the session is gone")])
def test_a_chunk_that_fails_takes_those_behind_it_with_it(because: RequestFailed | None) -> None:
    """Those before it go on; one that had a failure of its own keeps it; the failed one's is its
    own affair.
    """
    runs = Sessions(4)
    one, two, three, four = (runs.start(f"s{index}", index=index) for index in range(1, 5))
    three.failure = own = RequestFailed("non_finite", "NaN")
    for _ in range(2):
        runs.flights.fail(two.chunk, because)  # type: ignore[arg-type]
    expected = PREDECESSOR if because is None else ("lost", "the session is gone")
    assert (told(one), told(two), told(four)) == (None, None, expected) and three.failure is own
    assert runs.flights.ahead("s") == (1, one.chunk)


def test_what_follows_a_failed_chunk_fails_until_it_is_released() -> None:
    """An earlier stage that does not know yet still sends them: they take their steps for
    nothing.
    """
    runs = Sessions(4)
    one = runs.start("s1", index=1)
    two = runs.start("s2", index=2)
    other = runs.start("t2", index=2)
    runs.flights.fail(one.chunk)  # type: ignore[arg-type]
    runs.flights.fail(other.chunk)  # type: ignore[arg-type]
    assert runs.flights.failed("s", 1) is one.chunk and runs.flights.failed("s", 2) is two.chunk
    assert runs.flights.failed("s", 3) is None and runs.flights.failed("u", 1) is None
    late = runs.start("s3", index=3, after=two.chunk)
    assert (
        told(late) == PREDECESSOR
        and runs.flights.failed("s", 3) is late.chunk
        and runs.flights.ahead("s")[0] == 0
    )
    again = runs.start("s1", index=1)
    assert told(again) is None and runs.flights.ahead("s")[0] == 1, (
        "sent again, it follows the session"
    )
    runs.flights.fail(again.chunk)  # type: ignore[arg-type]
    assert runs.flights.failed("s", 1) is again.chunk, "of two, the newer"
    for state in (one, again, two, late):
        runs.flights.release(state.chunk)  # type: ignore[arg-type]
        assert runs.flights.failed("s", state.index) is not state.chunk
    assert set(runs.flights._failed) == {"t"} and runs.flights._chunks == {}


def test_a_chunk_that_is_released_before_its_end_has_failed() -> None:
    """An abort: those behind it fall; after `end` it is only forgotten."""
    runs = Sessions(4)
    one, two, three = (runs.start(f"s{index}", index=index) for index in range(1, 4))
    runs.flights.end(one.chunk)  # type: ignore[arg-type]
    runs.flights.release(one.chunk)  # type: ignore[arg-type]
    assert told(two) is None and runs.flights.ahead("s")[0] == 2
    runs.flights.release(two.chunk)  # type: ignore[arg-type]
    assert told(three) == PREDECESSOR and runs.flights.ahead("s")[0] == 0
    assert runs.flights.failed("s", 2) is None and runs.flights.failed("s", 3) is three.chunk


def test_only_those_behind_a_failed_chunk_fail_with_it() -> None:
    """One that follows a chunk at work is at work, also while failed ones of its session are not
    released yet.
    """
    runs = Sessions(4)
    gone = [runs.start("s1", index=1), runs.start("s2", index=2)]
    runs.flights.fail(gone[0].chunk)  # type: ignore[arg-type]
    again = runs.start("s1", index=1)
    after = runs.start("s2", index=2, after=again.chunk)
    assert told(again) is told(after) is None and runs.flights.ahead("s")[0] == 2
    other = runs.start("t1", index=1)
    assert (
        told(runs.start("t2", index=2, after=other.chunk)) is None
        and runs.flights.ahead("t")[0] == 2
    )
    assert told(runs.start("s3", index=3, after=gone[1].chunk)) == PREDECESSOR
    assert told(runs.start("s2", index=2, after=gone[0].chunk)) == PREDECESSOR
