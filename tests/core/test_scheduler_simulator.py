# SPDX-License-Identifier: Apache-2.0
"""The scheduler simulator: deadline-first compared with FIFO on the same traces."""

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
def test_every_chunk_of_every_viewer_is_delivered(policy: str) -> None:
    """This includes overload and a job without deadlines."""
    load = Load([*streams(6), Viewer(0.0, 3, None, 50)], COSTS)
    assert [outcome.delivered for outcome in simulate(load, policy)] == [40] * 6 + [3]  # type: ignore[arg-type]


def test_deadlines_keep_streams_in_time_with_jobs() -> None:
    """With two streams and four long jobs, FIFO fills the batch with jobs, and deadline-first keeps
    both streams in time.
    """
    load = Load([*streams(2), *(Viewer(1.0, 2, None, 50) for _ in range(4))], COSTS)
    assert worst_gap(load, "fifo") > 3
    assert worst_gap(load, "deadline") <= 1.5


def test_refusals_keep_served_streams_in_time() -> None:
    outcomes = simulate(Load(streams(6), COSTS, refuse=True), "deadline")
    served = [outcome for outcome in outcomes if not outcome.refused]
    assert 1 <= len(served) < 6
    assert all(outcome.holds() and outcome.misses <= 1 for outcome in served)
