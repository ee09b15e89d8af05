# SPDX-License-Identifier: Apache-2.0
"""`WorkerThread`: work stops at its gates, goes on when told, and can be ended there."""

import threading

import pytest

from vllm_omni.executor.worker_thread import Cancelled, PausePoint, WorkerThread


def counting(trace: list[object]) -> object:
    def work(pause: PausePoint) -> str:
        for number in range(3):
            trace.append(number)
            pause()
        return "done"

    return work


def test_work_goes_gate_by_gate() -> None:
    """Nothing runs before the first advance; each advance runs to the next gate; the last
    returns the result.
    """
    thread, trace = WorkerThread[str]("t"), []
    thread.start_work(counting(trace))
    assert trace == [] and thread.busy
    assert [thread.advance() for _ in range(4)] == [(False, None)] * 3 + [(True, "done")]
    assert trace == [0, 1, 2] and not thread.busy
    thread.close()


@pytest.mark.parametrize("advances", [0, 1, 3])
def test_cancel_ends_the_work_where_it_waits(advances: int) -> None:
    """Work that has not begun does not begin; work at a gate unwinds; the lane can be used
    again.
    """
    thread, trace = WorkerThread[str]("t"), []
    thread.start_work(counting(trace))
    for _ in range(advances):
        thread.advance()
    thread.cancel()
    thread.cancel()
    assert trace == list(range(advances)) and not thread.busy
    thread.start_work(lambda pause: "next")
    assert thread.advance() == (True, "next")
    thread.close()


def test_cancel_is_not_caught_by_except_exception() -> None:
    """A pipeline that survives ordinary errors in its loop is stopped all the same, and its
    clean-up runs.
    """
    thread, trace = WorkerThread[None]("t"), []

    def stubborn(pause: PausePoint) -> None:
        try:
            while True:
                try:
                    pause()
                except Exception:
                    trace.append("survived")
        finally:
            pause()  # a gate on the way out stops it as well
            trace.append("not reached")

    thread.start_work(stubborn)
    thread.advance()
    thread.cancel()
    assert trace == [] and not thread.busy
    thread.close()


def test_what_the_work_raises_reaches_the_owner() -> None:
    """The error comes out of `advance`, and the lane is free again."""
    thread = WorkerThread[None]("t")

    def failing(pause: PausePoint) -> None:
        pause()
        raise KeyError("x")

    thread.start_work(failing)
    thread.advance()
    with pytest.raises(KeyError, match="x"):
        thread.advance()
    assert not thread.busy
    thread.close()


def test_errands_run_on_the_lanes_thread_idle_or_at_a_gate() -> None:
    """A profiler is started on the thread it watches, also in the middle of a request; errors
    come back.
    """
    thread, threads = WorkerThread[str]("t"), []
    thread.call(lambda: threads.append(threading.current_thread().name))
    thread.start_work(counting([]))
    thread.advance()
    thread.call(lambda: threads.append(threading.current_thread().name))
    assert threads == ["t", "t"] and thread.busy

    def failing() -> None:
        raise KeyError("y")

    with pytest.raises(KeyError, match="y"):
        thread.call(failing)
    assert thread.advance() == (False, None)
    thread.close()
    thread.close()


def test_closing_a_busy_thread_ends_its_thread() -> None:
    """close() cancels what runs and joins the thread."""
    thread = WorkerThread[str]("a lane of this test")
    thread.start_work(counting([]))
    thread.advance()
    assert "a lane of this test" in _names_of_threads()
    thread.close()
    assert "a lane of this test" not in _names_of_threads()


def _names_of_threads() -> set[str]:
    """Others may end at any moment, so they are not counted."""
    return {thread.name for thread in threading.enumerate()}


def test_cancelled_is_no_exception() -> None:
    """`except Exception` inside a pipeline must not swallow it."""
    assert not issubclass(Cancelled, Exception)
