# SPDX-License-Identifier: Apache-2.0
"""The deadline policy: selects batches, refuses streams and degrades quality.

These are pure functions: they have no state and use neither a clock nor vLLM.
`StreamBatchScheduler` calls them in an engine; `benchmarks/scheduler_simulator.py` calls them in
virtual time. The due time of a request is its deadline. A request without a deadline gets a due
time for its next step, so that it is not starved and does not monopolize the engine while others
are late.
"""

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

MAX_UTILISATION = 0.95
"""Maximum predicted share of the engine's time for admitted streams. The rest absorbs prediction
errors."""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that is ready to run a step."""

    request_id: str
    """Id of the request."""
    deadline_s: float
    """Due time in seconds, absolute. Requests are sorted by this time."""
    has_deadline: bool
    """Whether `deadline_s` is the deadline of the whole request. If false, it is a target for the
    next step.
    """
    steps_left: int
    """Remaining forward passes, at least 1. A guess before the first step."""
    started: bool
    """Whether the request has run a step."""
    size: float
    """Size of the request's forward pass, in the unit of `StepCosts`."""
    order: int
    """Unique number that breaks ties."""
    step: int = 0
    """Steps scheduled so far, including those in flight."""
    level: int = 0
    """Degradation level of its chunk; 0 is full quality. A guess before the first step."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs that predict the duration of a step.

    The duration is `step_s`, plus `size_s` times the total size of the batch, plus `first_s` times
    the total size of requests in their first step, plus `last_s` times that of requests in their
    last step. If all costs are zero, nothing has been measured.
    """

    step_s: float = 0.0
    """Seconds of a step, independent of its batch."""
    size_s: float = 0.0
    """Seconds per unit of size."""
    first_s: float = 0.0
    """Additional seconds per unit of size in a request's first step: the cost of encoding."""
    last_s: float = 0.0
    """Additional seconds per unit of size in a request's last step: the cost of decoding."""
    degraded_last_s: tuple[float, ...] = ()
    """`last_s` at each degradation level from 1 on. Empty means as at full quality."""

    def last_at(self, level: int) -> float:
        """Return `last_s` at a degradation level."""
        return self.degraded_last_s[level - 1] if level and self.degraded_last_s else self.last_s

    def of_step(self, request: LiveRequest) -> float:
        """Return the seconds that a request's next step adds to the duration of a batch."""
        per_size = self.size_s
        if not request.started:
            per_size += self.first_s
        if request.steps_left == 1:
            per_size += self.last_at(request.level)
        return per_size * request.size

    def of_chunk(self, steps: int, size: float, started: bool = False, level: int = 0) -> float:
        """Return the duration in seconds of a chunk whose steps each run alone in a batch."""
        per_size = steps * self.size_s + self.last_at(level) + (0.0 if started else self.first_s)
        return max(0.0, steps * self.step_s + per_size * size)


def choose_batch(
    now_s: float, live: Iterable[LiveRequest], costs: StepCosts, max_requests: int
) -> list[LiveRequest]:
    """Return the requests that run a step now: those with the earliest due times, up to the number
    that deadlines allow.

    Candidates are the batches of the first k requests by due time, k <= max_requests. The largest
    batch is chosen that meets every deadline that can still be met. The prediction assumes that all
    requests of the batch finish their step together, that all others wait for the batch, and that
    all requests are then served one by one in order of due time. Requests that are late even with a
    batch of one do not limit the batch. If there are any, the batch with the smallest sum of their
    waiting times is chosen among the batches that meet the other deadlines. Ties are resolved in
    favour of the larger batch. If most requests with a deadline are late even with a batch of one,
    all deadlines are ignored, and the sum covers all requests with a deadline.

    Runs in O(n log n).

    Args:
        now_s: When the batch starts.
        live: Requests that are ready to run a step.
        costs: Predicted costs.
        max_requests: Maximum size of the batch.

    Returns:
        The batch. Empty only if `live` is.
    """
    queue = sorted(live, key=_urgency)
    most = min(max_requests, len(queue))
    if most <= 1 or (costs.size_s <= 0.0 and costs.step_s <= 0.0):
        return queue[:most]
    step_s, size_s, first_s = costs.step_s, costs.size_s, costs.first_s

    # Slack of each request if the queue were served one request at a time.
    slack_s: list[float] = []
    work_s = 0.0
    num_deadlines = late_after = 0
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
        slack = request.deadline_s - now_s - work_s
        slack_s.append(slack)
        num_deadlines += 1
        if slack < 0.0:
            late_after += 1
    if 2 * late_after > num_deadlines:
        # Overload, or only batching can keep the deadlines: minimise the total waiting time.
        slack_s = [-1.0 if request.has_deadline else math.inf for request in queue]
        late_after = num_deadlines

    best, best_wait_s = 1, 0.0
    together_s, alone_s = step_s, 0.0  # duration of the batch, and of the same steps one by one
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
            late_after -= 1
        if index == 0:
            best_wait_s = 0.0
            continue
        wait_s = late_inside * together_s - late_alone_s + late_after * (together_s - alone_s)
        # Later requests never wait longer than one by one: each member after the first saves a
        # `step_s`.
        if slack_inside_s >= together_s and wait_s <= best_wait_s + 1e-9:
            best, best_wait_s = index + 1, wait_s
    return queue[:best]


_urgency: Callable[[LiveRequest], tuple[float, int]] = operator.attrgetter("deadline_s", "order")


def predicted_end_s(
    now_s: float, request: LiveRequest, live: Iterable[LiveRequest], costs: StepCosts
) -> float:
    """Return the predicted end of a request if it and all requests due earlier are served one by
    one.
    """
    own = _urgency(request)
    ahead = (other for other in live if _urgency(other) <= own)
    return now_s + sum(
        costs.of_chunk(other.steps_left, other.size, other.started, other.level)
        if other.has_deadline
        else costs.step_s + costs.of_step(other)
        for other in ahead
    )


@dataclass(frozen=True, slots=True)
class StreamDemand:
    """Engine time that a stream needs."""

    period_s: float
    """Seconds between two chunks."""
    chunk_s: float
    """Duration of one chunk alone in seconds; 0 if unknown."""


def refuses(demands: Sequence[StreamDemand], new: StreamDemand) -> str | None:
    """Return the reason why a new stream cannot be sustained next to the live streams.

    Returns:
        The reason; None if it can be sustained or if the duration of its chunk is unknown.
    """
    if new.chunk_s <= 0.0:
        return None
    own = new.chunk_s / new.period_s
    others = sum(demand.chunk_s / demand.period_s for demand in demands)
    if own + others <= MAX_UTILISATION:
        return None
    return (
        f"a chunk every {new.period_s:.3g} s would take {own:.0%} of the engine's time, "
        f"{len(demands)} live streams "
        f"take {others:.0%}, and at most {MAX_UTILISATION:.0%} can be used: request a lower frame "
        "rate or "
        "try again later"
    )


def choose_level(
    level: int, costs_s: Sequence[float], deadline_s: float, start_s: float, period_s: float
) -> int:
    """Return the degradation level of a chunk that is about to start: the best quality that meets
    its deadline.

    Returning to a better quality requires a margin of a tenth of `period_s`, so that a stream does
    not flicker between two levels. If no level meets the deadline, the last (cheapest) one is
    chosen.

    Args:
        level: Level of the stream's last chunk.
        costs_s: Duration of the chunk at each level; 0 is full quality.
        deadline_s: Deadline of the chunk.
        start_s: Predicted start of the chunk.
        period_s: Seconds between two chunks of the stream.
    """
    for candidate, chunk_s in enumerate(costs_s):
        margin_s = 0.1 * period_s if candidate < level else 0.0
        if start_s + chunk_s + margin_s <= deadline_s:
            return candidate
    return len(costs_s) - 1
