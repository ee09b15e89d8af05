# SPDX-License-Identifier: Apache-2.0
"""The deadline policy, tested with decision tables and against its definition on random queues."""

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni.core.sched.policy import (
    MAX_UTILISATION,
    LiveRequest,
    StepCosts,
    StreamDemand,
    choose_batch,
    choose_level,
    predicted_end_s,
    refuses,
)

LINEAR = StepCosts(size_s=0.1)
"""A step takes 0.1 s per request, so batching saves no time."""
SHARED = StepCosts(step_s=0.1, size_s=0.001)
"""A step takes about 0.1 s for any number of requests."""


def live(name: str, deadline_s: float, steps: int = 1, **fields: Any) -> LiveRequest:
    values: dict[str, Any] = {
        "has_deadline": True,
        "started": True,
        "size": 1.0,
        "order": ord(name[0]),
        **fields,
    }
    return LiveRequest(name, deadline_s, steps_left=steps, **values)


def names(batch: list[LiveRequest]) -> str:
    return "".join(request.request_id for request in batch)


@pytest.mark.parametrize(
    ("requests", "costs", "most", "expected"),
    [
        pytest.param([], LINEAR, 4, "", id="no requests"),
        pytest.param(
            [live("a", 9), live("b", 8)],
            LINEAR,
            4,
            "ba",
            id="the earlier deadline first; time for both",
        ),
        pytest.param(
            [live("a", 9), live("b", 9)], LINEAR, 1, "a", id="equal deadlines: the earlier arrival"
        ),
        pytest.param(
            [live("a", 0.1), live("b", 9)], LINEAR, 4, "a", id="a shared step would make a late"
        ),
        pytest.param([live("a", 0.1), live("b", 9)], SHARED, 4, "a", id="by a millisecond"),
        pytest.param(
            [live("a", 0.11), live("b", 9)],
            SHARED,
            4,
            "ab",
            id="a shared step leaves a in time",
        ),
        pytest.param(
            [live("a", 9, 3), live("b", 1.0, 4), live("c", 1.0, 4)],
            LINEAR,
            4,
            "bca",
            id="time for all three",
        ),
        pytest.param(
            [live("a", 9, 3), live("b", 0.4, 4)],
            LINEAR,
            4,
            "b",
            id="all remaining steps count",
        ),
        pytest.param(
            [live(name, 9) for name in "abcdef"], LINEAR, 4, "abcd", id="at most the limit"
        ),
        pytest.param(
            [live("a", -1), live("b", -2)],
            LINEAR,
            4,
            "b",
            id="both late: the earlier deadline alone",
        ),
        pytest.param(
            [live("a", -1), live("b", -2)],
            SHARED,
            4,
            "ba",
            id="both late: together if that is faster",
        ),
        pytest.param(
            [live("a", -1, 2), live("b", 0.35)],
            LINEAR,
            4,
            "a",
            id="a late request delays none in time",
        ),
        pytest.param(
            [live("a", 0.1), live("b", 0.1)],
            StepCosts(),
            4,
            "ab",
            id="costs unknown: the limit",
        ),
        pytest.param(
            [live("a", 10, has_deadline=False), live("b", 0.5)],
            LINEAR,
            4,
            "ba",
            id="without a deadline: shares the step",
        ),
        pytest.param(
            [live("a", -5, has_deadline=False), live("b", 0.1)],
            LINEAR,
            4,
            "ab",
            id="overdue without a deadline: first",
        ),
    ],
)
def test_requests_that_share_the_next_step(
    requests: list[LiveRequest], costs: StepCosts, most: int, expected: str
) -> None:
    assert names(choose_batch(0.0, requests, costs, most)) == expected


@given(st.integers(1, 12), st.integers(1, 4), st.floats(0.5, 5))
def test_a_request_without_a_deadline_does_not_starve(
    num_streams: int, most: int, patience_s: float
) -> None:
    """A request without a deadline does not starve while all streams are late: each step of the
    request runs soon after the step is due.
    """
    costs, now_s, arrivals = StepCosts(size_s=0.1), 0.0, num_streams
    waiting = live("w", patience_s, 3, has_deadline=False, order=-1)
    others = [live("s", 0.2, 2, order=number) for number in range(num_streams)]
    while waiting.steps_left:
        batch = choose_batch(now_s, [waiting, *others], costs, most)
        now_s += costs.step_s + sum(costs.of_step(request) for request in batch)
        if waiting in batch:
            # Requests with an earlier deadline run first. They amount to at most one chunk per
            # stream.
            assert now_s <= waiting.deadline_s + 0.1 * (2 * num_streams + most) + 0.2
            waiting.deadline_s, waiting.steps_left = now_s + patience_s, waiting.steps_left - 1
        for request in batch:
            if request is not waiting:
                request.steps_left -= 1
                if request.steps_left == 0:
                    arrivals += 1
                    request.deadline_s, request.steps_left, request.order = now_s + 0.2, 2, arrivals


@pytest.mark.parametrize(
    ("others", "new", "held"),
    [
        pytest.param([], StreamDemand(0.75, 0.4), True, id="alone, half the time"),
        pytest.param([StreamDemand(0.75, 0.35)], StreamDemand(0.75, 0.35), True, id="two fit"),
        pytest.param(
            [StreamDemand(0.75, 0.4)], StreamDemand(0.75, 0.4), False, id="two do not fit"
        ),
        pytest.param([StreamDemand(3.0, 0.4)], StreamDemand(0.75, 0.4), True, id="with a slow one"),
        pytest.param([], StreamDemand(0.75, 0.8), False, id="not even alone"),
        pytest.param(
            [StreamDemand(0.75, 0.4)], StreamDemand(0.75, 0.0), True, id="nothing known: accepted"
        ),
        pytest.param(
            [StreamDemand(0.75, 0.9)],
            StreamDemand(0.75, 0.0),
            True,
            id="nothing known: accepted with others",
        ),
    ],
)
def test_a_stream_above_capacity_is_refused(
    others: list[StreamDemand], new: StreamDemand, held: bool
) -> None:
    reason = refuses(others, new)
    assert (reason is None) == held
    assert reason is None or f"{MAX_UTILISATION:.0%}" in reason


@pytest.mark.parametrize(
    ("level", "costs_s", "deadline_s", "expected"),
    [
        pytest.param(0, [0.4, 0.2], 1.0, 0, id="in time"),
        pytest.param(0, [0.4, 0.2], 0.3, 1, id="in time only when degraded"),
        pytest.param(0, [0.4, 0.2], 0.1, 1, id="always late: the cheapest level"),
        pytest.param(1, [0.4, 0.2], 0.45, 1, id="better level only with a margin"),
        pytest.param(1, [0.4, 0.2], 0.5, 0, id="with the margin"),
        pytest.param(0, [0.4, 0.3, 0.1], 0.35, 1, id="the smallest degradation first"),
        pytest.param(0, [0.4], 0.1, 0, id="no other level"),
    ],
)
def test_a_chunk_is_degraded_only_to_be_in_time(
    level: int, costs_s: list[float], deadline_s: float, expected: int
) -> None:
    assert choose_level(level, costs_s, deadline_s, start_s=0.0, period_s=1.0) == expected


def chosen_by_definition(
    requests: list[LiveRequest], costs: StepCosts, most: int
) -> list[LiveRequest]:
    """Try every batch size, and return the batch that follows from the definition of
    `choose_batch`.

    The result is exact for binary fractions such as 3/8.
    """
    queue = sorted(requests, key=lambda r: (r.deadline_s, r.order))
    most = min(most, len(queue))
    if costs.step_s <= 0 and costs.size_s <= 0:
        return queue[:most]
    slacks: list[float | None] = []  # None for a request without a deadline
    clock = 0.0
    for r in queue:
        alone = (
            costs.of_chunk(r.steps_left, r.size, r.started, r.level)
            if r.has_deadline
            else one_step(r, costs)
        )
        clock += max(0.0, alone)
        slacks.append(r.deadline_s - clock if r.has_deadline else None)
    timed = [slack for slack in slacks if slack is not None]
    if 2 * sum(slack < 0 for slack in timed) > len(timed):
        slacks = [None if slack is None else -1.0 for slack in slacks]
    best, best_wait = 1, 0.0
    for k in range(1, most + 1):
        together = costs.step_s + sum(costs.of_step(r) for r in queue[:k])
        # Delay of each request's step relative to running the requests one at a time.
        later = [
            together - sum(one_step(r, costs) for r in queue[: min(i, k - 1) + 1])
            for i in range(len(queue))
        ]
        retained = all(
            slack is None or slack < 0 or late <= slack
            for slack, late in zip(slacks, later, strict=True)
        )
        wait = sum(
            late
            for slack, late in zip(slacks, later, strict=True)
            if slack is not None and slack < 0
        )
        if k == 1 or (retained and wait <= best_wait):
            best, best_wait = k, wait if k > 1 else 0.0
    return queue[:best]


def one_step(request: LiveRequest, costs: StepCosts) -> float:
    return costs.step_s + costs.of_step(request)


@pytest.mark.parametrize("tight", [0.5, 1.0, 8.0])
def test_the_batch_equals_its_definition(tight: float) -> None:
    """For one thousand random queues, `choose_batch` returns the batch that follows from its
    definition.

    The time until a deadline is on average `tight` times the work. All sums are exact. The costs of
    starting and ending a chunk may be negative, because they are fitted to measurements.
    """
    rng = random.Random(int(tight * 8))
    sizes = set()
    for _ in range(1000):
        step_s, size_s = rng.choice([(0, 0), (0, 1 / 8), (1, 0), (1, 1 / 8), (1 / 8, 1), (4, 1)])
        first_s, last_s, less_s = (rng.choice([0, 0, 1 / 4, 1, 3, -1 / 2, -4]) for _ in range(3))
        costs = StepCosts(
            step_s, size_s, first_s, last_s, rng.choice([(), (less_s, less_s - 1 / 8)])
        )
        count = rng.randint(1, 7)
        work = max(1, round(tight * count * 2))
        requests = [
            LiveRequest(
                str(number),
                rng.randint(-4, 8 * work) / 8,
                rng.random() < 0.8,
                rng.choice([1, 1, 2, 3]),
                rng.random() < 0.6,
                rng.choice([0.5, 1, 2]),
                order,
                level=rng.choice([0, 0, 1, 2]),
            )
            for number, order in enumerate(rng.sample(range(100), count))
        ]
        most = rng.randint(1, 6)
        expected = chosen_by_definition(requests, costs, most)
        assert choose_batch(0.0, requests, costs, most) == expected, (requests, costs, most)
        later = [dataclasses.replace(r, deadline_s=r.deadline_s + 64) for r in requests]
        assert len(choose_batch(64.0, later, costs, most)) == len(expected), (
            "only the remaining time counts"
        )
        sizes.add(len(expected))
    assert sizes >= {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("costs", "level", "steps_left", "started", "step_s", "chunk_s"),
    [
        (StepCosts(1, 2, 4, 8), 0, 3, True, 2 * 0.5, 3 * 1 + (3 * 2 + 8) * 0.5),
        (StepCosts(1, 2, 4, 8), 0, 3, False, (2 + 4) * 0.5, 3 * 1 + (3 * 2 + 8 + 4) * 0.5),
        (StepCosts(1, 2, 4, 8), 2, 1, True, (2 + 8) * 0.5, 1 + (2 + 8) * 0.5),
        (StepCosts(1, 2, 4, 8, (16, 32)), 0, 1, True, (2 + 8) * 0.5, 1 + (2 + 8) * 0.5),
        (StepCosts(1, 2, 4, 8, (16, 32)), 1, 1, True, (2 + 16) * 0.5, 1 + (2 + 16) * 0.5),
        (StepCosts(1, 2, 4, 8, (16, 32)), 2, 1, False, (2 + 32 + 4) * 0.5, 1 + (2 + 32 + 4) * 0.5),
        (StepCosts(1, 2, 4, -100), 0, 2, True, 2 * 0.5, 0.0),
    ],
)
def test_costs_of_a_request_at_its_level(
    costs: StepCosts, level: int, steps_left: int, started: bool, step_s: float, chunk_s: float
) -> None:
    """The costs of the next step and of the rest of the chunk are correct for a request of size
    0.5.
    """
    request = live("a", 9, steps_left, started=started, size=0.5, level=level)
    assert costs.of_step(request) == step_s
    assert costs.of_chunk(steps_left, 0.5, started, level) == chunk_s
    assert level or costs.of_chunk(steps_left, 0.5, started) == chunk_s, (
        "the default is full quality"
    )


def test_the_end_is_predicted_from_earlier_requests() -> None:
    """When the end of a request is predicted, an earlier request counts until its own end if it has
    a deadline, and for one step otherwise.
    """
    costs = StepCosts(1, 2, 4, 8, (16,))
    requests = [
        live("a", 1, 2, level=1),
        live("b", 2, 3, has_deadline=False, started=False),
        live("c", 2, 1, started=False),
        live("d", 2, 1),
    ]
    alone_s = [2 * 1 + 2 * 2 + 16, 1 + 2 + 4, 1 + 2 + 4 + 8, 1 + 2 + 8]
    for index, request in enumerate(requests):
        assert predicted_end_s(100.0, request, requests[::-1], costs) == 100.0 + sum(
            alone_s[: index + 1]
        )


def test_a_refusal_contains_the_loads() -> None:
    """The error message of a refusal contains the stream's load, the load of the other streams, the
    limit and a remedy.
    """
    assert refuses([StreamDemand(0.5, 0.1), StreamDemand(1.0, 0.25)], StreamDemand(0.75, 0.6)) == (
        "a chunk every 0.75 s would take 80% of the engine's time, 2 live streams take 45%, and at "
        "most 95% "
        "can be used: request a lower frame rate or try again later"
    )
    assert refuses([], StreamDemand(1.0, MAX_UTILISATION)) is None, "exactly the limit"
    assert refuses([StreamDemand(1.0, 0.9)], StreamDemand(1.0, 0.05 + 1e-6)) is not None
