# SPDX-License-Identifier: Apache-2.0
"""A server that runs for weeks gives back what is free: garbage in cycles, and holes of the C
library's heap.
"""

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
    """As a task, its exception and the frames of its traceback: only a collection frees it."""

    alive = 0

    def __init__(self) -> None:
        self.own = self
        Cyclic.alive += 1

    def __del__(self) -> None:
        Cyclic.alive -= 1


@pytest.fixture
def thresholds() -> Iterator[None]:
    """Python's own, as a server has them."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()
    gc.collect()


def most_cycles_alive(app: FastAPI, made: int) -> int:
    """Of so many made in a server that has started, each in use for a while, the most that were
    there at once.
    """
    app.state.log_stats = False
    # long enough for the young generations to let them through
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
def test_without_it_they_would() -> None:
    """The day this fails, vLLM or CPython collects by itself: remove `collect_after_freeze`."""
    assert most_cycles_alive(FastAPI(lifespan=lifespan), made=60_000) > 55_000


def test_holes_of_the_heap_go_back_to_the_system() -> None:
    """The holes that other tests left in this process go first: blocks that fill them would take
    no new memory.
    """
    process, trim = psutil.Process(), HeapTrim(interval_s=0)
    trim()
    before = process.memory_info().rss
    blocks = [torch.ones(16 << 10) for _ in range(3000)]  # 64 KiB each, within the heap: 197 MB
    retained = blocks[::50]  # so that its end stays in use
    del blocks
    with_holes = process.memory_info().rss
    trim()
    given_back = with_holes - process.memory_info().rss
    assert with_holes - before > 150e6
    assert given_back > 150e6
    assert len(retained) == 60


def test_not_at_each_session() -> None:
    seconds = itertools.count(0, 4)
    calls: list[int] = []

    def trim(pad: int) -> int:
        calls.append(pad)
        return 1

    heap_trim = HeapTrim(interval_s=30, clock=lambda: float(next(seconds)), trim=trim)
    for _ in range(20):
        heap_trim()
    assert len(calls) == 2  # read at 0, then every 4 s, and again after a trim


def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[Any] = []
    # None has no function at all
    monkeypatch.setattr("vllm_omni.runtime.heap.ctypes.CDLL", requested.append)
    HeapTrim(interval_s=0)()
    assert requested == [None]  # the library that the program itself is linked with, looked at once
