# SPDX-License-Identifier: Apache-2.0
"""Simulates a scheduler in virtual time: replays arrival traces against a policy, with specified
actual step times.

The simulated engine runs one batch at a time, like an engine with `StreamBatchScheduler`. The
deadline policy gets its inputs (costs, remaining steps) from `StepCostModel` and
`ScheduledStreams`, as in the real scheduler. `fifo` is the scheduler without deadlines: it serves
sessions in order of arrival and runs each chunk to completion. The simulation is deterministic for
a given seed.
"""

import heapq
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from vllm_omni.core.sched.cost_model import StepCostModel
from vllm_omni.core.sched.policy import LiveRequest, StepCosts, choose_batch
from vllm_omni.core.sched.streams import RequestFields, ScheduledStreams
from vllm_omni.core.step_protocol import ChunkProgress

Policy = Literal["fifo", "deadline"]
_LEAD_CHUNKS = 2
"""A viewer requests its next chunk when at most this number of chunks are in the engine or waiting
to be played.
"""


@dataclass(frozen=True)
class Viewer:
    """One stream that plays a chunk every `period_s` seconds and requests its first chunk at
    `start_s`.

    If `period_s` is None, the stream is a job without a viewer. Such a job generates chunks as fast
    as possible and has no deadlines.
    """

    start_s: float
    num_chunks: int
    period_s: float | None
    steps: int = 5
    size: float = 1.0


@dataclass(frozen=True)
class Load:
    """A trace of viewers, and the properties of the simulated machine.

    `jitter` is the relative standard deviation of a step's time. `hiccups_per_s` is the mean number
    of steps that take `hiccup_s` longer, per second of busy time. `most` is
    `max_requests_per_step`. If `refuse` is True, streams that cannot be sustained are refused.
    """

    viewers: Sequence[Viewer]
    costs: StepCosts
    most: int = 4
    jitter: float = 0.03
    hiccups_per_s: float = 0.0
    hiccup_s: float = 0.0
    refuse: bool = False
    patience_s: float = 0.5
    seed: int = 0


@dataclass
class Outcome:
    """Deliveries to one viewer. `gaps_s` contains the times between consecutive chunks, and
    `misses` is the number of chunks that arrived after their deadlines.
    """

    viewer: Viewer
    refused: bool = False
    first_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    misses: int = 0
    delivered: int = 0
    last_s: float = 0.0
    deadline_s: float = 0.0
    requested: int = 0

    def holds(self, chunks: float = 1.5) -> bool:
        """Return whether the 99th percentile of the gaps is at most `chunks` periods."""
        period_s = self.viewer.period_s
        return (
            not self.refused
            and period_s is not None
            and quantile(self.gaps_s, 0.99) <= chunks * period_s
        )


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return the nearest-rank quantile, or 0.0 if there are no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else 0.0


def _units(size: float) -> int:
    """Convert a size to the unit that the runner reports: a whole number of latent elements."""
    return round(1000 * size)


def simulate(load: Load, policy: Policy) -> list[Outcome]:
    """Run the trace to its end, and return the outcome of each viewer, in order."""
    return _Simulation(load, policy).run()


class _Simulation:
    def __init__(self, load: Load, policy: Policy) -> None:
        self.load, self.policy = load, policy
        self.rng = random.Random(load.seed)
        self.model = StepCostModel()
        self.streams = ScheduledStreams(load.patience_s)
        self.outcomes = [Outcome(viewer) for viewer in load.viewers]
        self.steps_done: dict[str, int] = {}
        self.running: dict[str, None] = {}
        self.order = itertools.count()
        self.events: list[tuple[float, int, int]] = []
        """Requests for a viewer's next chunk, as (time, tie-break, viewer)."""
        for number, viewer in enumerate(load.viewers):
            heapq.heappush(self.events, (viewer.start_s, next(self.order), number))

    def run(self) -> list[Outcome]:
        now_s = 0.0
        while self.events or len(self.streams):
            while self.events and self.events[0][0] <= now_s:
                requested_s, _, number = heapq.heappop(self.events)
                self._send(number, requested_s, now_s)
            if not len(self.streams):
                if self.events:
                    now_s = max(now_s, self.events[0][0])
                continue
            now_s = self._step(now_s)
        return self.outcomes

    def _send(self, number: int, requested_s: float, now_s: float) -> None:
        outcome, viewer = self.outcomes[number], self.load.viewers[number]
        deadline_s = None
        if viewer.period_s is not None:
            outcome.deadline_s = max(outcome.deadline_s, requested_s) + viewer.period_s
            deadline_s = max(1e-3, outcome.deadline_s - now_s)
        fields = RequestFields(str(number), outcome.requested, True, deadline_s, viewer.period_s)
        if self.load.refuse and self.policy == "deadline":
            outcome.refused = self.streams.refusal(fields, now_s, self.model.costs) is not None
            if outcome.refused:
                return
        self.streams.add_request(f"{number}-{outcome.requested}", fields, now_s)
        outcome.requested += 1

    def _step(self, now_s: float) -> float:
        batch = self._batch(now_s)
        sizes = [self._viewer(request).size for request in batch]
        first = [size for request, size in zip(batch, sizes, strict=True) if not request.started]
        costs = self.load.costs
        ending = [
            request
            for request in batch
            if self._steps_done(request) + 1 == self._viewer(request).steps
        ]
        last = [self._viewer(request).size for request in ending]
        duration_s = (
            costs.step_s
            + costs.size_s * sum(sizes)
            + costs.first_s * sum(first)
            + costs.last_s * sum(last)
        )
        duration_s *= max(0.5, self.rng.gauss(1.0, self.load.jitter))
        if self.rng.random() < self.load.hiccups_per_s * duration_s:
            duration_s += self.load.hiccup_s
        end_s = now_s + duration_s
        for request in batch:
            viewer, done = self._viewer(request), self._steps_done(request) + 1
            self.steps_done[request.request_id] = done
            self.streams.advance(
                request.request_id, ChunkProgress(done, viewer.steps, _units(viewer.size)), end_s
            )
            if done == viewer.steps:
                self._deliver(request, end_s)
        if self.policy == "deadline":
            self.model.observe(
                _units(sum(sizes)), _units(sum(first)), _units(sum(last)), duration_s
            )
        return end_s

    def _batch(self, now_s: float) -> list[LiveRequest]:
        live = self.streams.runnable(())
        if self.policy == "deadline":
            batch = choose_batch(now_s, live, self.model.costs, self.load.most)
        else:  # running chunks first, by start time, then waiting chunks, by arrival time
            started = {name: rank for rank, name in enumerate(self.running)}
            live.sort(
                key=lambda request: (started.get(request.request_id, len(started)), request.order)
            )
            batch = live[: self.load.most]
            self.running.update(dict.fromkeys(request.request_id for request in batch))
        return batch

    def _deliver(self, request: LiveRequest, end_s: float) -> None:
        number = int(request.request_id.split("-")[0])
        outcome, viewer = self.outcomes[number], self.load.viewers[number]
        self.streams.finish_request(request.request_id, end_s)
        self.running.pop(request.request_id, None)
        shown_s = end_s
        if viewer.period_s is not None:
            outcome.misses += end_s > request.deadline_s + 1e-9
            if outcome.first_s is None:
                outcome.first_s = end_s - viewer.start_s
            else:
                # An early chunk is played as soon as its predecessor has finished playing.
                shown_s = max(end_s, outcome.last_s + viewer.period_s)
                outcome.gaps_s.append(shown_s - outcome.last_s)
        outcome.last_s = shown_s
        outcome.delivered += 1
        if outcome.requested < viewer.num_chunks:
            # Like the endpoints, a viewer keeps one chunk in the engine, and one ready while
            # another plays.
            wait_s = (
                0.0 if viewer.period_s is None else shown_s - (_LEAD_CHUNKS - 1) * viewer.period_s
            )
            heapq.heappush(self.events, (max(end_s, wait_s), next(self.order), number))

    def _viewer(self, request: LiveRequest) -> Viewer:
        return self.load.viewers[int(request.request_id.split("-")[0])]

    def _steps_done(self, request: LiveRequest) -> int:
        return self.steps_done.get(request.request_id, 0)
