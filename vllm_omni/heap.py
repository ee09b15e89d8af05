# SPDX-License-Identifier: Apache-2.0
"""Memory of processes that run for weeks: free memory goes back to the system. Held by tests/test_heap.py.

Two things keep a server growing though nothing leaks. CPython runs a full collection only when the objects that wait
for one are a quarter of those that outlived the last (long_lived_pending in CPython's gcmodule.c). vLLM freezes the
heap of a started server right after a full collection, so that quarter is one of 770,000 objects that are out of reach
since: cycles (tasks, their exceptions and frames; uvicorn's connections) pile up for hours. And glibc's `malloc` gives
back only the end of its heap: tensors of many sizes leave holes that stay resident.
"""

import ctypes
import gc
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI


def collect_after_freeze(app: FastAPI) -> None:
    """Run full collections of a started server, whose heap vLLM has frozen, over the objects made since.

    They are cheap then (1 ms for 4,000 objects), so they come after 23,000 new objects and no longer after 85,000.
    """
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(starting: FastAPI) -> AsyncIterator[Any]:
        async with inner(starting) as state:
            gc.collect()
            young, middle, _ = gc.get_threshold()
            gc.set_threshold(young, middle, 2)
            yield state

    app.router.lifespan_context = lifespan


def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's, else None: other C libraries have no such function, or give memory back by themselves."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


class HeapTrim:
    """Returns the C library's free memory to the system, at most once in `interval_s` (5 ms for 60 MB of holes)."""

    def __init__(
        self,
        interval_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        trim: Callable[[int], int] | None = None,
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._trim = trim or _malloc_trim()
        self._next_s = clock() + interval_s

    def __call__(self) -> None:
        if self._trim is not None and self._clock() >= self._next_s:
            self._trim(0)
            self._next_s = self._clock() + self._interval_s
