# SPDX-License-Identifier: Apache-2.0
"""`WorkerThread`: a worker thread that pauses at defined points until its owner resumes it.

A pipeline's `__call__` cannot be suspended, so it runs on a separate thread. The pipeline's step
callback pauses the thread, and the engine resumes it once per engine step. Exactly one of the two
threads runs at any time, so no locks are needed. The thread is reused for all requests, because
each new thread would also create a new OpenMP thread pool. This module contains no
pipeline-specific code.
"""

import contextlib
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
PausePoint = Callable[[], None]


class WorkCancelled(BaseException):
    """Raised inside cancelled work, at the point where it was paused.

    The class derives from BaseException, so `except Exception` in the work does not catch it.
    """


class WorkerThread(Generic[T]):
    """A thread that runs its work step by step. The owner must call all methods from the same
    thread.

    Args:
        name: Thread name.
        on_thread_start: Function that the new thread calls before any work, for example to select a
            device.
    """

    def __init__(self, name: str, on_thread_start: Callable[[], None] = lambda: None) -> None:
        self._resume, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._work: Callable[[PausePoint], T] | None = None
        self._errand: Callable[[], None] | None = None
        self._result: T | None = None
        self._error: BaseException | None = None
        self._closing = self._cancelling = False
        self._thread = threading.Thread(
            target=self._run, args=(on_thread_start,), name=name, daemon=True
        )
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether work has been started but has not finished."""
        return self._work is not None

    def start_work(self, work: Callable[[PausePoint], T]) -> None:
        """Assign work to the thread. The work does not run until `advance` is called.

        Args:
            work: Function to run. Its only argument is a function that pauses the thread.
        """
        assert self._work is None, "the worker thread is busy"
        self._work = work

    def advance(self) -> tuple[bool, T | None]:
        """Run the work until it pauses or ends. Re-raise any exception that the work raises.

        Returns:
            Whether the work has finished, and its result if it has.
        """
        assert self._work is not None, "the worker thread has no work"
        self._resume.release()
        self._stopped.acquire()
        if self._work is not None:
            return False, None
        result, error = self._result, self._error
        self._result = self._error = None
        if error is None:
            return True, result
        try:
            raise error
        finally:
            # The error's traceback references this frame and, through the work's frames, device
            # memory.
            del error

    def cancel(self) -> None:
        """Cancel the paused work and wait until its stack has been unwound.

        If there is no work, this method does nothing.
        """
        if self._work is None:
            return
        self._cancelling = True
        try:
            with contextlib.suppress(WorkCancelled):
                # The work may pause again while its stack unwinds, so keep cancelling until the
                # work ends.
                while self._work is not None:
                    self.advance()
        finally:
            self._cancelling = False

    def call(self, function: Callable[[], None]) -> None:
        """Run a function on the idle or paused thread. Re-raise any exception that the function
        raises.
        """
        self._errand = function
        self._resume.release()
        self._stopped.acquire()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Cancel any unfinished work and end the thread. Idempotent."""
        if self._closing:
            return
        self.cancel()
        self._closing = True
        self._resume.release()
        self._thread.join()

    def _run(self, on_thread_start: Callable[[], None]) -> None:
        started = False
        while True:
            self._await_resume()
            if self._closing:
                return
            try:
                if not started:
                    on_thread_start()
                    started = True
                if self._cancelling:
                    raise WorkCancelled
                assert self._work is not None
                self._result = self._work(self._pause)
            # Boundary of the thread: `advance` raises the exception in the owner's thread.
            except BaseException as error:
                self._error = error
            self._work = None
            self._stopped.release()

    def _pause(self) -> None:
        self._stopped.release()
        self._await_resume()
        if self._cancelling:
            raise WorkCancelled

    def _await_resume(self) -> None:
        """Wait until the owner resumes the thread. Meanwhile, run functions passed to `call`."""
        self._resume.acquire()
        while self._errand is not None:
            try:
                self._errand()
            except BaseException as error:  # boundary of the thread, as in `_run`
                self._error = error
            self._errand = None
            self._stopped.release()
            self._resume.acquire()
