# SPDX-License-Identifier: Apache-2.0
"""Make the interpreter wait at exit for the threads that receive results.

The engine client of vLLM's `LLM` receives results in a daemon thread. If the `LLM` was not shut
down, that thread runs until the interpreter exits, and it still references the last result. torch
releases the GIL while it frees a tensor. If a thread requests the GIL again after the interpreter
has started to exit, CPython unwinds the thread's stack through C++ code that must not be unwound.
The process then aborts ("terminate called without an active exception", status 134) after all work
is done. Without this module, 2 of 11 runs of the Lance example on two cores aborted in this way.

tests/seams/test_private_parts.py checks the thread's name.
"""

import functools
import threading
import weakref
from typing import Final

OUTPUT_THREAD: Final = "EngineCoreOutputQueueThread"
"""Name that vLLM's `SyncMPClient` gives to the thread that receives results."""
_LONGEST_S: Final = 10.0


@functools.cache
def wait_for_output_threads_at_exit() -> None:
    """Make the interpreter wait at exit for threads named `OUTPUT_THREAD`, for up to 10 seconds
    each. Idempotent.

    Call this function before creating an engine. Finalizers run in reverse order of registration,
    so this finalizer then runs after those of the engine clients.
    """
    weakref.finalize(threading.main_thread(), _join)


def _join() -> None:
    for thread in threading.enumerate():
        if thread.name == OUTPUT_THREAD:
            thread.join(_LONGEST_S)
