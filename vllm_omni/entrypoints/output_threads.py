# SPDX-License-Identifier: Apache-2.0
"""At exit the interpreter waits for the threads that receive results.

vLLM's client of an `LLM` receives in a daemon thread, which is told to end when the client is: for an `LLM` that nobody
shut down, when the interpreter exits. That thread still holds the last result. torch gives the interpreter's lock away
while it frees a tensor; where a thread wants it back after the interpreter has begun to end, CPython unwinds its
stack, through C++ that must not be unwound. Then the process aborts ("terminate called without an active exception",
status 134), with everything done and written: 2 of 11 runs of the Lance example did, one after the other on two cores.

Held by tests/entrypoints/test_output_threads.py; the thread's name by tests/seams/test_private_parts.py.
"""

import functools
import threading
import weakref
from typing import Final

OUTPUT_THREAD: Final = "EngineCoreOutputQueueThread"
"""vLLM's name for it (`SyncMPClient`)."""
_LONGEST_S: Final = 10.0


@functools.cache
def wait_for_output_threads_at_exit() -> None:
    """From now on the interpreter's exit waits for these threads, 10 seconds for each at most. Idempotent.

    Call it before an engine is made: finalizers run in reverse order, so this one's turn is after the clients'.
    """
    weakref.finalize(threading.main_thread(), _join)


def _join() -> None:
    for thread in threading.enumerate():
        if thread.name == OUTPUT_THREAD:
            thread.join(_LONGEST_S)
