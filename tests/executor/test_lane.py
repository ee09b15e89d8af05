# SPDX-License-Identifier: Apache-2.0
"""`Lane`: work stops at its gates, goes on when told, and can be ended there."""

import threading

import pytest

from vllm_omni.executor.lane import Cancelled, Gate, Lane


def counting(trace: list[object]) -> object:
    def work(gate: Gate) -> str:
        for number in range(3):
            trace.append(number)
            gate()
        return "done"

    return work


def test_work_goes_gate_by_gate() -> None:
    """Nothing runs before the first advance; each advance runs to the next gate; the last returns the result."""
    lane, trace = Lane[str]("t"), []
    lane.start(counting(trace))
    assert trace == [] and lane.busy
    assert [lane.advance() for _ in range(4)] == [(False, None)] * 3 + [(True, "done")]
    assert trace == [0, 1, 2] and not lane.busy
    lane.close()


@pytest.mark.parametrize("advances", [0, 1, 3])
def test_cancel_ends_the_work_where_it_waits(advances: int) -> None:
    """Work that has not begun does not begin; work at a gate unwinds; the lane can be used again."""
    lane, trace = Lane[str]("t"), []
    lane.start(counting(trace))
    for _ in range(advances):
        lane.advance()
    lane.cancel()
    lane.cancel()
    assert trace == list(range(advances)) and not lane.busy
    lane.start(lambda gate: "next")
    assert lane.advance() == (True, "next")
    lane.close()


def test_cancel_is_not_caught_by_except_exception() -> None:
    """A pipeline that survives ordinary errors in its loop is stopped all the same, and its clean-up runs."""
    lane, trace = Lane[None]("t"), []

    def stubborn(gate: Gate) -> None:
        try:
            while True:
                try:
                    gate()
                except Exception:
                    trace.append("survived")
        finally:
            gate()  # a gate on the way out stops it as well
            trace.append("not reached")

    lane.start(stubborn)
    lane.advance()
    lane.cancel()
    assert trace == [] and not lane.busy
    lane.close()


def test_what_the_work_raises_reaches_the_owner() -> None:
    """The error comes out of `advance`, and the lane is free again."""
    lane = Lane[None]("t")

    def failing(gate: Gate) -> None:
        gate()
        raise KeyError("x")

    lane.start(failing)
    lane.advance()
    with pytest.raises(KeyError, match="x"):
        lane.advance()
    assert not lane.busy
    lane.close()


def test_errands_run_on_the_lanes_thread_idle_or_at_a_gate() -> None:
    """A profiler is started on the thread it watches, also in the middle of a request; errors come back."""
    lane, threads = Lane[str]("t"), []
    lane.call(lambda: threads.append(threading.current_thread().name))
    lane.start(counting([]))
    lane.advance()
    lane.call(lambda: threads.append(threading.current_thread().name))
    assert threads == ["t", "t"] and lane.busy

    def failing() -> None:
        raise KeyError("y")

    with pytest.raises(KeyError, match="y"):
        lane.call(failing)
    assert lane.advance() == (False, None)
    lane.close()
    lane.close()


def test_closing_a_busy_lane_ends_its_thread() -> None:
    """close() cancels what runs and joins the thread."""
    lane = Lane[str]("a lane of this test")
    lane.start(counting([]))
    lane.advance()
    assert "a lane of this test" in _names_of_threads()
    lane.close()
    assert "a lane of this test" not in _names_of_threads()


def _names_of_threads() -> set[str]:
    """Others may end at any moment, so they are not counted."""
    return {thread.name for thread in threading.enumerate()}


def test_cancelled_is_no_exception() -> None:
    """`except Exception` inside a pipeline must not swallow it."""
    assert not issubclass(Cancelled, Exception)
