# SPDX-License-Identifier: Apache-2.0
"""A long-running server frees cyclic garbage and returns unused heap memory to the system."""

import gc
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.entrypoints.launchers.utils.server_utils import lifespan

from vllm_omni.runtime.heap import HeapTrim, collect_after_freeze

IN_USE = 10_000


class Cyclic:
    """An object in a reference cycle, which only the garbage collector frees.

    For example, a failed task and its traceback form a reference cycle.
    """

    alive = 0

    def __init__(self) -> None:
        self.own = self
        Cyclic.alive += 1

    def __del__(self) -> None:
        Cyclic.alive -= 1


@pytest.fixture
def thresholds() -> Iterator[None]:
    """Use Python's default garbage-collection thresholds, as a server does."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()
    gc.collect()


def most_cycles_alive(app: FastAPI, made: int) -> int:
    """Create cyclic objects in a started server, and return the largest number of objects alive at
    the same time.

    Each cyclic object is in use for a while.
    """
    app.state.log_stats = False
    # The deque is long enough for objects to reach the garbage collector's oldest generation.
    in_use: deque[Cyclic] = deque(maxlen=IN_USE)
    with TestClient(app):
        most = 0
        for _ in range(made):
            in_use.append(Cyclic())
            most = max(most, Cyclic.alive)
    return most


@pytest.mark.usefixtures("thresholds")
def test_cycles_do_not_pile_up_in_a_server_that_vllm_froze() -> None:
    app = FastAPI(lifespan=lifespan)
    collect_after_freeze(app)
    assert most_cycles_alive(app, made=60_000) < IN_USE + 30_000


@pytest.mark.usefixtures("thresholds")
def test_cycles_pile_up_with_vllms_own_lifespan_handler() -> None:
    """With only vLLM's own lifespan handler, cyclic objects are not freed.

    If this test fails, vLLM or CPython has changed: remove `collect_after_freeze`.
    """
    assert most_cycles_alive(FastAPI(lifespan=lifespan), made=60_000) > 55_000


def test_holes_of_the_heap_go_back_to_the_system() -> None:
    """Unused memory in the middle of the heap is returned to the operating system.

    The test first trims free heap memory left by earlier tests, because otherwise its blocks would
    reuse that memory and take no new memory.
    """
    process, trim = psutil.Process(), HeapTrim(interval_s=0)
    trim()
    before = process.memory_info().rss
    blocks = [
        torch.ones(16 << 10) for _ in range(3000)
    ]  # 197 MB in total; malloc allocates blocks of 64 KiB on the heap
    retained = blocks[::50]  # these blocks keep the end of the heap in use
    del blocks
    with_holes = process.memory_info().rss
    trim()
    given_back = with_holes - process.memory_info().rss
    assert with_holes - before > 150e6
    assert given_back > 150e6
    assert len(retained) == 60


def test_the_heap_is_trimmed_at_most_once_per_interval() -> None:
    seconds = itertools.count(0, 4)
    calls: list[int] = []

    def trim(pad: int) -> int:
        calls.append(pad)
        return 1

    heap_trim = HeapTrim(interval_s=30, clock=lambda: float(next(seconds)), trim=trim)
    for _ in range(20):
        heap_trim()
    assert len(calls) == 2  # the clock is read at 0, every 4 s, and after each trim


def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[Any] = []
    # `append` returns None, which has no attribute `malloc_trim`.
    monkeypatch.setattr("vllm_omni.runtime.heap.ctypes.CDLL", requested.append)
    HeapTrim(interval_s=0)()
    assert requested == [None]  # the process's own C library is opened only once
