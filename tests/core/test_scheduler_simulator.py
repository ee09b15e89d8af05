# SPDX-License-Identifier: Apache-2.0
"""The simulator: deadline-first against FIFO on the same traces."""

import pytest

from benchmarks.scheduler_simulator import Load, Viewer, quantile, simulate
from vllm_omni.core.sched.policy import StepCosts

COSTS = StepCosts(step_s=0.0003, size_s=0.0474, first_s=0.012, last_s=0.006)


def streams(count: int, chunks: int = 40) -> list[Viewer]:
    return [Viewer(0.2 * number, chunks, 0.75) for number in range(count)]


def worst_gap(load: Load, policy: str) -> float:
    outcomes = simulate(load, policy)  # type: ignore[arg-type]
    return max(quantile(outcome.gaps_s, 0.99) / 0.75 for outcome in outcomes if outcome.gaps_s)


@pytest.mark.parametrize("policy", ["fifo", "deadline"])
def test_every_chunk_of_every_viewer_comes(policy: str) -> None:
    """Also in overload, and also those of a job without deadlines."""
    load = Load([*streams(6), Viewer(0.0, 3, None, 50)], COSTS)
    assert [outcome.delivered for outcome in simulate(load, policy)] == [40] * 6 + [3]  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["fifo", "deadline"])
def test_a_trace_gives_the_same_again(policy: str) -> None:
    load = Load(streams(3), COSTS, hiccups_per_s=0.2, hiccup_s=0.2, seed=5)
    assert [o.gaps_s for o in simulate(load, policy)] == [o.gaps_s for o in simulate(load, policy)]  # type: ignore[arg-type]


def test_streams_play_smoothly_alongside_jobs_that_have_no_deadline() -> None:
    """Two streams and four long jobs: FIFO lets the jobs take every place, deadline-first holds
    both streams.
    """
    load = Load([*streams(2), *(Viewer(1.0, 2, None, 50) for _ in range(4))], COSTS)
    assert worst_gap(load, "fifo") > 3
    assert worst_gap(load, "deadline") <= 1.5


def test_refusing_keeps_the_streams_that_are_served_in_time() -> None:
    outcomes = simulate(Load(streams(6), COSTS, refuse=True), "deadline")
    served = [outcome for outcome in outcomes if not outcome.refused]
    assert 1 <= len(served) < 6
    assert all(outcome.holds() and outcome.misses <= 1 for outcome in served)
