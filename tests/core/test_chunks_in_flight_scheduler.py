# SPDX-License-Identifier: Apache-2.0
"""`StreamBatchScheduler` with several chunks of each session in flight
(`omni.chunks_in_flight`).
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from scheduler_harness import Harness
from vllm.v1.request import RequestStatus

STEPS = 3


@pytest.fixture(params=["fifo", "deadline"])
def new_harness(request: pytest.FixtureRequest, null_world: Path) -> Callable[..., Harness]:
    """Return a harness factory for one of the two scheduling policies. When requests have no
    deadlines, both policies behave the same.
    """
    return partial(Harness, null_world, scheduling=request.param)


class Worker:
    """A mocked worker on which every chunk takes `steps` steps."""

    def __init__(self, harness: Harness, steps: int = STEPS) -> None:
        self.harness, self.steps = harness, steps
        self.done: dict[str, int] = {}
        self.lag_steps = 1

    def response(self, output: Any) -> list[str]:
        names = list(output.num_scheduled_tokens)
        for name in names:
            self.done[name] = self.done.get(name, 0) + 1
        ended = [name for name in names if self.done[name] == self.steps]
        progress = {name: (self.done[name], self.steps, 1) for name in names if name not in ended}
        self.harness.response(
            output, done=ended, progress=progress, committed=ended, lag_steps=self.lag_steps
        )
        return ended

    def step(self) -> list[str]:
        names, output = self.harness.schedule()
        self.response(output)
        return sorted(names)


def test_chunks_follow_one_step_apart(new_harness: Callable[..., Harness]) -> None:
    """The first chunk of a session runs by itself. Later chunks run one step apart, up to the limit
    on chunks in flight.
    """
    harness = new_harness(chunks_in_flight=2)
    for chunk in range(4):
        harness.add(f"s{chunk}", "s", chunk)
    worker = Worker(harness)
    batches = [worker.step() for _ in range(9)]
    assert batches == [["s0"]] * 3 + [
        ["s1"],
        ["s1", "s2"],
        ["s1", "s2"],
        ["s2", "s3"],
        ["s3"],
        ["s3"],
    ]
    assert not harness.scheduler.has_unfinished_requests()


def test_a_chunk_closer_than_the_lag_waits(new_harness: Callable[..., Harness]) -> None:
    """A running chunk waits while it is fewer steps behind its predecessor than the lag that the
    worker reports.
    """
    harness = new_harness(chunks_in_flight=2)
    worker = Worker(harness, steps=5)
    for chunk in range(3):
        harness.add(f"s{chunk}", "s", chunk)
    batches = [worker.step() for _ in range(7)]
    assert batches[5:] == [["s1"], ["s1", "s2"]]
    worker.lag_steps = 2
    assert [worker.step() for _ in range(3)] == [["s1", "s2"], ["s1"], ["s1", "s2"]]


@pytest.mark.parametrize("max_requests_per_step", [1, 2])
def test_a_small_batch_starves_no_session(
    new_harness: Callable[..., Harness], max_requests_per_step: int
) -> None:
    """When two sessions each have three chunks in flight, more than fit in a batch, every chunk
    still finishes.
    """
    harness = new_harness(max_requests_per_step=max_requests_per_step, chunks_in_flight=3)
    worker = Worker(harness)
    for chunk in range(5):
        for session in "st":
            harness.add(f"{session}{chunk}", session, chunk)
    for _ in range(2 * 5 * STEPS + 1):
        for name in (names := worker.step()):
            before = f"{name[0]}{int(name[1:]) - 1}"
            ahead = worker.done.get(before, STEPS) - (before in names)
            assert ahead >= worker.done[name] or ahead == STEPS
    assert not harness.scheduler.has_unfinished_requests()


def test_successors_of_an_aborted_chunk_end(new_harness: Callable[..., Harness]) -> None:
    """When a chunk is aborted, its successors end with errors from the runner. If the client sends
    the chunk again, it starts immediately.
    """
    harness = new_harness(chunks_in_flight=3)
    worker = Worker(harness)
    for chunk in range(4):
        harness.add(f"s{chunk}", "s", chunk)
    for _ in range(STEPS + 2):
        worker.step()
    harness.scheduler.finish_requests("s1", RequestStatus.FINISHED_ABORTED)
    names, output = harness.schedule()
    assert "s2" in names
    harness.response(output, done=names)
    harness.add("again", "s", 1)
    assert "again" in harness.step(done=["s3", "again"])
    harness.step(done=["s3", "again"])
    assert not harness.scheduler.has_unfinished_requests() and not len(harness.scheduler._streams)
