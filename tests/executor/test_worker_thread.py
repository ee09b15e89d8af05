# SPDX-License-Identifier: Apache-2.0
"""`WorkerThread`: work stops at its pause points, resumes, and can be cancelled there."""

import threading

import pytest

from vllm_omni.executor.worker_thread import PausePoint, WorkerThread


def counting(trace: list[object]) -> object:
    def work(pause: PausePoint) -> str:
        for number in range(3):
            trace.append(number)
            pause()
        return "done"

    return work


def test_work_advances_from_pause_to_pause() -> None:
    """Each `advance` runs to the next pause point, and the last one returns the result."""
    thread, trace = WorkerThread[str]("t"), []
    thread.start_work(counting(trace))
    assert trace == [] and thread.busy
    assert [thread.advance() for _ in range(4)] == [(False, None)] * 3 + [(True, "done")]
    assert trace == [0, 1, 2] and not thread.busy
    thread.close()


@pytest.mark.parametrize("advances", [0, 1, 3])
def test_cancel_ends_the_work_at_its_pause_point(advances: int) -> None:
    """Work that has not started does not start, and paused work unwinds. The thread can be used
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
    """A pipeline that catches exceptions in its loop is stopped too, and its clean-up runs."""
    thread, trace = WorkerThread[None]("t"), []

    def stubborn(pause: PausePoint) -> None:
        try:
            while True:
                try:
                    pause()
                except Exception:
                    trace.append("survived")
        finally:
            pause()  # a pause point during the clean-up stops it too
            trace.append("not reached")

    thread.start_work(stubborn)
    thread.advance()
    thread.cancel()
    assert trace == [] and not thread.busy
    thread.close()


def test_errors_of_the_work_are_raised_by_advance() -> None:
    """`advance` raises the error, and the thread is free again."""
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


def test_calls_run_on_the_worker_thread() -> None:
    """A profiler starts on the thread that it profiles, also during a request. Errors are
    raised.
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


def test_closing_a_busy_worker_ends_its_thread() -> None:
    """`close` cancels the work and joins the thread."""
    thread = WorkerThread[str]("worker of this test")
    thread.start_work(counting([]))
    thread.advance()
    assert "worker of this test" in _names_of_threads()
    thread.close()
    assert "worker of this test" not in _names_of_threads()


def _names_of_threads() -> set[str]:
    """Return the names instead of the number, because other threads may end."""
    return {thread.name for thread in threading.enumerate()}
