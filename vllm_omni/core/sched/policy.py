# SPDX-License-Identifier: Apache-2.0
"""The deadline policy: selects batches, refuses streams and degrades quality.

All functions in this module are pure: they have no state and use neither a clock nor vLLM.
`StreamBatchScheduler` calls them in an engine; `benchmarks/scheduler_simulator.py` calls them in
virtual time. A request's due time is its deadline. If a request has no deadline, its due time
applies only to its next step, so the request is not starved and does not monopolize the engine
while other requests are late.
"""

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

MAX_UTILISATION = 0.95
"""Maximum predicted share of the engine's time that all admitted streams may use together. The
remaining time absorbs prediction errors.
"""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that is ready to run a step."""

    request_id: str
    """Request id."""
    deadline_s: float
    """Absolute due time in seconds, by which requests are sorted."""
    has_deadline: bool
    """Whether `deadline_s` is the deadline of the whole request. If false, `deadline_s` is a target
    for the request's next step only.
    """
    steps_left: int
    """Number of remaining forward passes, at least 1. Before the first step, this number is an
    estimate.
    """
    started: bool
    """Whether the request has run a step yet."""
    size: float
    """Size of the request's forward pass, in the same unit as the batch sizes in `StepCosts`."""
    order: int
    """Unique number that breaks ties between requests with the same due time."""
    step: int = 0
    """Number of steps scheduled so far, including steps in flight."""
    level: int = 0
    """Degradation level of the request's chunk; 0 is full quality. Before the first step, this
    level is an estimate.
    """


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Costs that predict the duration of a step.

    A step's duration is the sum of four terms: `step_s`, `size_s` times the total size of the
    batch, `first_s` times the total size of the requests in their first step, and `last_s` times
    the total size of the requests in their last step. All costs are zero until a step has been
    measured.
    """

    step_s: float = 0.0
    """Constant part of a step's duration in seconds, independent of the batch."""
    size_s: float = 0.0
    """Seconds per unit of batch size."""
    first_s: float = 0.0
    """Additional seconds per unit of size in a request's first step: the cost of encoding."""
    last_s: float = 0.0
    """Additional seconds per unit of size in a request's last step: the cost of decoding."""
    degraded_last_s: tuple[float, ...] = ()
    """`last_s` at degradation levels 1, 2, and so on. If empty, `last_s` applies to every level."""

    def last_at(self, level: int) -> float:
        """Return `last_s` at the given degradation level."""
        return self.degraded_last_s[level - 1] if level and self.degraded_last_s else self.last_s

    def of_step(self, request: LiveRequest) -> float:
        """Return the number of seconds that a request's next step adds to the duration of a
        batch.
        """
        per_size = self.size_s
        if not request.started:
            per_size += self.first_s
        if request.steps_left == 1:
            per_size += self.last_at(request.level)
        return per_size * request.size

    def of_chunk(self, steps: int, size: float, started: bool = False, level: int = 0) -> float:
        """Return a chunk's duration in seconds if each of its steps runs in a batch of one."""
        per_size = steps * self.size_s + self.last_at(level) + (0.0 if started else self.first_s)
        return max(0.0, steps * self.step_s + per_size * size)


def choose_batch(
    now_s: float, live: Iterable[LiveRequest], costs: StepCosts, max_requests: int
) -> list[LiveRequest]:
    """Choose the requests that run a step now: those with the earliest due times, as many as the
    deadlines allow.

    A candidate batch consists of the first k requests in due-time order, where k <= max_requests.
    The function chooses the largest candidate that meets every deadline that can still be met. The
    prediction assumes that all requests in the batch finish their step together, that all other
    requests wait for the batch, and that all requests are then served one by one in due-time order.

    Requests that would be late even with a batch of one do not limit the batch. If there are such
    late requests, the function considers the candidates that meet the other deadlines, and chooses
    the one with the smallest total waiting time for the late requests. Of several such candidates,
    it chooses the largest. If most requests with a deadline would be late even with a batch of one,
    all deadlines are ignored, and the total waiting time includes every request with a deadline.

    The function runs in O(n log n).

    Args:
        now_s: Time at which the batch starts.
        live: Requests that are ready to run a step.
        costs: Predicted costs of a step.
        max_requests: Maximum number of requests in the batch.

    Returns:
        The requests in the batch. The batch is empty only if `live` is empty.
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
        # Either the engine is overloaded, or only batching can meet the deadlines: minimise the
        # total waiting time.
        slack_s = [-1.0 if request.has_deadline else math.inf for request in queue]
        late_after = num_deadlines

    best, best_wait_s = 1, 0.0
    together_s, alone_s = step_s, 0.0  # duration of the batch, and of its steps if run one by one
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
        # Compared with serving a batch's requests one by one, the batch never delays later
        # requests, because each request after the first saves one `step_s`.
        if slack_inside_s >= together_s and wait_s <= best_wait_s + 1e-9:
            best, best_wait_s = index + 1, wait_s
    return queue[:best]


_urgency: Callable[[LiveRequest], tuple[float, int]] = operator.attrgetter("deadline_s", "order")


def predicted_end_s(
    now_s: float, request: LiveRequest, live: Iterable[LiveRequest], costs: StepCosts
) -> float:
    """Return the predicted time at which a request ends if it and all requests due before it are
    served one by one.
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
    """Engine time required by a stream."""

    period_s: float
    """Seconds between two consecutive chunks of the stream."""
    chunk_s: float
    """Duration in seconds of one chunk that runs by itself; 0 if unknown."""


def refuses(demands: Sequence[StreamDemand], new: StreamDemand) -> str | None:
    """Check whether a new stream can be sustained in addition to the live streams.

    Returns:
        The reason why the new stream cannot be sustained. None if it can be sustained or the
        duration of its chunks is unknown.
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
    """Choose the degradation level of a chunk that is about to start: the best quality that meets
    its deadline.

    A level with better quality than the last chunk's level must meet the deadline with a margin of
    a tenth of `period_s`, so a stream does not alternate between two levels. If no level meets the
    deadline, the last (cheapest) level is chosen.

    Args:
        level: Degradation level of the stream's last chunk.
        costs_s: Duration of the chunk in seconds at each level. Level 0 is full quality.
        deadline_s: Deadline of the chunk, as an absolute time in seconds.
        start_s: Predicted start of the chunk, as an absolute time in seconds.
        period_s: Seconds between two consecutive chunks of the stream.
    """
    for candidate, chunk_s in enumerate(costs_s):
        margin_s = 0.1 * period_s if candidate < level else 0.0
        if start_s + chunk_s + margin_s <= deadline_s:
            return candidate
    return len(costs_s) - 1
