# SPDX-License-Identifier: Apache-2.0
"""`Lane`: one thread whose work stops at gates, until its owner lets it continue.

A pipeline's `__call__` cannot be left in the middle, so it runs on a thread of its own; its step callback passes a gate
and the engine lets it through once per engine step. Exactly one of the two threads runs at any time, so neither needs
locks. The thread lives as long as the lane (a thread per request would make a new OpenMP team per request). It knows
no pipelines. Held by tests/executor/test_lane.py.
"""

import contextlib
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
Gate = Callable[[], None]


class Cancelled(BaseException):
    """Raised at the gate where the work waits when it is cancelled; unwinds through `except Exception`."""


class Lane(Generic[T]):
    """All methods are called by one and the same thread, the owner's.

    on_thread_start: runs first on the lane's thread (to choose a device, say).
    """

    def __init__(self, name: str, on_thread_start: Callable[[], None] = lambda: None) -> None:
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._work: Callable[[Gate], T] | None = None
        self._errand: Callable[[], None] | None = None
        self._result: T | None = None
        self._error: BaseException | None = None
        self._closing = self._cancelling = False
        self._thread = threading.Thread(target=self._run, args=(on_thread_start,), name=name, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether work has been started that is not finished."""
        return self._work is not None

    def start(self, work: Callable[[Gate], T]) -> None:
        """Give the lane work; nothing of it runs before `advance`. `work` is called with its gate."""
        assert self._work is None, "the lane is busy"
        self._work = work

    def advance(self) -> tuple[bool, T | None]:
        """Let the work run to its next gate or its end: `(finished, result)`; raises the work's exception."""
        assert self._work is not None, "the lane has no work"
        self._go.release()
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
            del error  # its traceback holds this frame and, through the work's frames, device memory

    def cancel(self) -> None:
        """End the work where it waits; returns when its thread has left it. Without work, does nothing."""
        if self._work is None:
            return
        self._cancelling = True
        try:
            with contextlib.suppress(Cancelled):
                while self._work is not None:  # work that passes further gates while it unwinds is stopped at each
                    self.advance()
        finally:
            self._cancelling = False

    def call(self, function: Callable[[], None]) -> None:
        """Run a function on the lane's thread, whether it is idle or waits at a gate; raises its exception."""
        self._errand = function
        self._go.release()
        self._stopped.acquire()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Cancel the work and end the thread; idempotent."""
        if self._closing:
            return
        self.cancel()
        self._closing = True
        self._go.release()
        self._thread.join()

    def _run(self, on_thread_start: Callable[[], None]) -> None:
        started = False
        while True:
            self._await_turn()
            if self._closing:
                return
            try:
                if not started:
                    on_thread_start()
                    started = True
                if self._cancelling:
                    raise Cancelled
                assert self._work is not None
                self._result = self._work(self._gate)
            except BaseException as error:  # boundary of the thread: `advance` raises it in the owner's
                self._error = error
            self._work = None
            self._stopped.release()

    def _gate(self) -> None:
        self._stopped.release()
        self._await_turn()
        if self._cancelling:
            raise Cancelled

    def _await_turn(self) -> None:
        """Wait for the owner; run the errands it sends meanwhile."""
        self._go.acquire()
        while self._errand is not None:
            try:
                self._errand()
            except BaseException as error:  # boundary, as in `_run`
                self._error = error
            self._errand = None
            self._stopped.release()
            self._go.acquire()
