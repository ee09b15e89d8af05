# SPDX-License-Identifier: Apache-2.0
"""`WorkerThread` pauses work at pause points, where the work can be resumed or cancelled."""

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
    """Each `advance` call runs the work to its next pause point, and the last call returns the
    result.
    """
    thread, trace = WorkerThread[str]("t"), []
    thread.start_work(counting(trace))
    assert trace == [] and thread.busy
    assert [thread.advance() for _ in range(4)] == [(False, None)] * 3 + [(True, "done")]
    assert trace == [0, 1, 2] and not thread.busy
    thread.close()


@pytest.mark.parametrize("advances", [0, 1, 3])
def test_cancel_ends_the_work_at_its_pause_point(advances: int) -> None:
    """If work is cancelled, it either never starts or unwinds from its current pause point. The
    thread can then be reused.
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
    """Cancelling also stops a pipeline that catches exceptions in its loop, and the pipeline's
    cleanup code runs.
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
            pause()  # A pause point during the cleanup stops it too.
            trace.append("not reached")

    thread.start_work(stubborn)
    thread.advance()
    thread.cancel()
    assert trace == [] and not thread.busy
    thread.close()


def test_errors_of_the_work_are_raised_by_advance() -> None:
    """`advance` re-raises any exception that the work raised, and the thread can be reused."""
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
    """`call` runs a function on the worker thread, even during a request, for example to start a
    profiler on that thread. If the function fails, `call` raises its exception in the caller.
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
    """`close` cancels a busy thread's work and joins the thread."""
    thread = WorkerThread[str]("worker of this test")
    thread.start_work(counting([]))
    thread.advance()
    assert "worker of this test" in _names_of_threads()
    thread.close()
    assert "worker of this test" not in _names_of_threads()


def _names_of_threads() -> set[str]:
    """Return the names of the running threads. Counting them would not suffice, because other
    threads may end in the meantime.
    """
    return {thread.name for thread in threading.enumerate()}
