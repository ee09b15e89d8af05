# SPDX-License-Identifier: Apache-2.0
"""The deadline policy: which requests take their next denoise step together, whom to refuse, when to give up quality.

Pure functions of their arguments: no clock, no vLLM, no state. `StreamBatchScheduler` calls them in an engine,
`benchmarks/scheduler_simulator.py` in virtual time. Every request has a due time: its own deadline; or, without one, a
time by which its next step is due, which keeps it from starving, and from running through while others are late.
Held by tests/core/test_scheduling_policy.py.
"""

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

MAX_UTILISATION = 0.95
"""Share of the engine's time that admitted streams may need, by prediction; the rest absorbs prediction errors."""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request that could take a step now.

    due_s: absolute; requests are ordered by it. has_deadline: `due_s` is the deadline of the whole request; else only a
    target for its next step.
    steps_left: forward passes it still needs, >= 1, a guess before its first one. started: it has had one.
    size: how large its forward is, in any unit that `StepCosts` uses too. order: unique; decides between equals.
    step: steps it has been given so far, those in flight included. level: its chunk's degradation, 0 = full quality; a
    guess before its first step.
    """

    request_id: str
    due_s: float
    has_deadline: bool
    steps_left: int
    started: bool
    size: float
    order: int
    step: int = 0
    level: int = 0


@dataclass(frozen=True, slots=True)
class StepCosts:
    """How long a step takes: `step_s + size_s x sizes + first_s x sizes that begin + last_s x sizes that end`.

    All zero = nothing measured yet. `first_s` is the cost of encoding, `last_s` that of decoding. degraded_last_s:
    `last_s` at each degradation level from 1 on; () = as at full quality.
    """

    step_s: float = 0.0
    size_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    degraded_last_s: tuple[float, ...] = ()

    def last_at(self, level: int) -> float:
        """`last_s` at a degradation level."""
        return self.degraded_last_s[level - 1] if level and self.degraded_last_s else self.last_s

    def of_step(self, request: LiveRequest) -> float:
        """Seconds of the request's next step alone in a batch, without `step_s`."""
        per_size = self.size_s
        if not request.started:
            per_size += self.first_s
        if request.steps_left == 1:
            per_size += self.last_at(request.level)
        return per_size * request.size

    def of_chunk(self, steps: int, size: float, started: bool = False, level: int = 0) -> float:
        """Seconds of a chunk's `steps` steps, each in a batch of its own."""
        per_size = steps * self.size_s + self.last_at(level) + (0.0 if started else self.first_s)
        return max(0.0, steps * self.step_s + per_size * size)


def choose_batch(now_s: float, live: Iterable[LiveRequest], costs: StepCosts, max_requests: int) -> list[LiveRequest]:
    """Return the requests that take a step now: those due first, as many as no deadline is missed for.

    Of the batches made of the first k requests by due time, k <= max_requests, the largest is taken that keeps every
    deadline which can still be kept: its members get their step when the whole batch is done, the others wait for that
    long, and from then on all requests are assumed to be served one by one in order of due time. For requests that are
    late in any case, the batch with the least total waiting time is taken; of equal ones the larger. If most requests
    with a deadline are late by that prediction, the total waiting time alone decides.

    Never empty if `live` is not. O(n log n).
    """
    queue = sorted(live, key=_urgency)
    most = min(max_requests, len(queue))
    if most <= 1 or (costs.size_s <= 0.0 and costs.step_s <= 0.0):
        return queue[:most]
    step_s, size_s, first_s = costs.step_s, costs.size_s, costs.first_s

    # How much later each request could be done than one-by-one service would have it done.
    slack_s: list[float] = []
    work_s = 0.0
    num_deadlines = late_behind = 0
    for request in queue:
        if not request.has_deadline:
            work_s += max(0.0, step_s + costs.of_step(request))
            slack_s.append(math.inf)
            continue
        steps, last_s = request.steps_left, costs.last_at(request.level)
        per_size = steps * size_s + last_s if request.started else steps * size_s + last_s + first_s
        chunk_s = steps * step_s + per_size * request.size
        if chunk_s > 0.0:
            work_s += chunk_s
        slack = request.due_s - now_s - work_s
        slack_s.append(slack)
        num_deadlines += 1
        if slack < 0.0:
            late_behind += 1
    if 2 * late_behind > num_deadlines:
        # Overloaded, or only batches can make it: minimise the total waiting time.
        slack_s = [-1.0 if request.has_deadline else math.inf for request in queue]
        late_behind = num_deadlines

    best, best_wait_s = 1, 0.0
    together_s, alone_s = step_s, 0.0  # the batch's step; the same steps one by one
    slack_inside_s = math.inf
    late_inside, late_alone_s = 0, 0.0
    for index in range(most):
        request = queue[index]
        own_s = costs.of_step(request)
        together_s += own_s
        alone_s += step_s + own_s
        slack = slack_s[index]
        if slack >= 0.0:
            slack_inside_s = min(slack_inside_s, slack + alone_s)
        else:
            late_inside, late_alone_s = late_inside + 1, late_alone_s + alone_s
            late_behind -= 1
        if index == 0:
            best_wait_s = 0.0
            continue
        wait_s = late_inside * together_s - late_alone_s + late_behind * (together_s - alone_s)
        # Those behind it never have to wait longer than one by one: each member after the first saves a `step_s`.
        if slack_inside_s >= together_s and wait_s <= best_wait_s + 1e-9:
            best, best_wait_s = index + 1, wait_s
    return queue[:best]


_urgency: Callable[[LiveRequest], tuple[float, int]] = operator.attrgetter("due_s", "order")


def predicted_end_s(now_s: float, request: LiveRequest, live: Iterable[LiveRequest], costs: StepCosts) -> float:
    """When `request` is done if it and all requests due before it are served one by one."""
    own = _urgency(request)
    ahead = (other for other in live if _urgency(other) <= own)
    return now_s + sum(
        costs.of_chunk(other.steps_left, other.size, other.started, other.level)
        if other.has_deadline
        else costs.step_s + costs.of_step(other)
        for other in ahead
    )


@dataclass(frozen=True, slots=True)
class Demand:
    """A stream that requests a chunk every `period_s`. chunk_s: duration of one chunk alone (0.0 = not known)."""

    period_s: float
    chunk_s: float


def refuses(demands: Sequence[Demand], new: Demand) -> str | None:
    """Why a new stream cannot be held beside `demands`, or None if it can (or if its chunk duration is not known)."""
    if new.chunk_s <= 0.0:
        return None
    own = new.chunk_s / new.period_s
    others = sum(demand.chunk_s / demand.period_s for demand in demands)
    if own + others <= MAX_UTILISATION:
        return None
    return (
        f"a chunk every {new.period_s:.3g} s would take {own:.0%} of the engine's time, {len(demands)} live streams "
        f"take {others:.0%}, and together at most {MAX_UTILISATION:.0%} can be held: ask for fewer frames a second or "
        "try again later"
    )


def choose_level(level: int, costs_s: Sequence[float], due_s: float, start_s: float, period_s: float) -> int:
    """Return the degradation level of a chunk that is about to begin: the best quality that is done in time.

    level: the stream's last one. costs_s: a chunk's duration at each level, 0 = full quality. start_s: predicted start;
    due_s: its deadline. Better quality than last time is taken only if it leaves a tenth of `period_s`, so that a
    stream does not flicker between two levels. If no level is in time, the last (cheapest) is taken.
    """
    for candidate, chunk_s in enumerate(costs_s):
        margin_s = 0.1 * period_s if candidate < level else 0.0
        if start_s + chunk_s + margin_s <= due_s:
            return candidate
    return len(costs_s) - 1
