# SPDX-License-Identifier: Apache-2.0
"""`ScheduledStreams`: the scheduling state of requests and their streams (sessions).

`ScheduledStreams` tracks the order of requests in each session, their due times and remaining
steps, the steps and sizes of each session's earlier chunks, and the engine time that live streams
need. It converts this state to inputs for `policy.py`. The only decision that it makes itself is
the order of requests in a session.

Requests of a session run in chunk index order, and `ChunkOrder` determines how many of them may be
in flight at once. `reset`, `close` and `fork` wait until no chunk is in flight. Steps in flight
count as finished, because batches reach every pipeline stage in the order in which they were
formed. This module identifies requests and sessions only by id and does not depend on vLLM.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_omni.core.sched.policy import (
    LiveRequest,
    StepCosts,
    StreamDemand,
    choose_level,
    predicted_end_s,
    refuses,
)
from vllm_omni.core.step_protocol import ChunkOrder, ChunkProgress, turn

_REMEMBERED = 4096
_LIVE_PERIODS = 3.0
"""Number of periods without a request after which a stream no longer counts as live. It counts as
live again once its next request arrives.
"""


@dataclass(frozen=True, slots=True)
class RequestFields:
    """Request fields that affect scheduling."""

    session_id: str
    """Id of the request's session."""
    chunk_index: float
    """Chunk index; infinite if the request has none."""
    is_chunk: bool = True
    """Whether the request generates a chunk. False for `reset`, `close` and `fork`."""
    deadline_s: float | None = None
    """Seconds from the request's arrival to its deadline; None if it has no deadline."""
    period_s: float | None = None
    """Seconds between two consecutive chunks of the stream; None if unknown."""
    is_fork: bool = False
    """Whether the request copies its session, which then continues."""

    @classmethod
    def read_extra_kwargs(
        cls, request_id: str, extra_kwargs: dict[str, Any] | None
    ) -> "RequestFields":
        """Read the fields from `PoolingParams.extra_kwargs`.

        A malformed request, which the runner will refuse anyway, is assigned to a session of its
        own. A request without a chunk index runs after all requests in its session that have one.
        Requests without a chunk index run in order of arrival.
        """
        fields = extra_kwargs.get("omni") if extra_kwargs else None
        if not isinstance(fields, dict):
            return cls(request_id, math.inf, is_chunk=False)
        session_id, chunk_index = fields.get("session_id"), fields.get("chunk_index")
        return cls(
            session_id if isinstance(session_id, str) else request_id,
            turn(chunk_index if isinstance(chunk_index, int) else None),
            fields.get("op", "generate") == "generate",
            _seconds(fields.get("deadline_s")),
            _seconds(fields.get("chunk_period_s")),
            fields.get("op") == "fork",
        )


def _seconds(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 < value < math.inf else None


@dataclass(slots=True, eq=False)
class ScheduledStream:
    """Scheduling state of one session."""

    waiting: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Sort keys of the requests with remaining steps, by request id."""
    started: list[str] = field(default_factory=list)
    """Requests in `waiting` that have been in a batch, in the order of their first batch."""
    next: str | None = None
    """First request in `waiting`, by sort key, that has not started."""
    established: bool = False
    """Whether the session has a committed chunk."""
    steps: dict[int, int] = field(default_factory=dict)
    """Last observed number of steps per chunk, by degradation level."""
    size: float | None = None
    """Last observed size of a chunk; None if no chunk has been observed."""
    level: int = 0
    """Degradation level of the session's last chunk."""
    period_s: float | None = None
    """Seconds between two consecutive chunks; None if unknown."""
    last_used_s: float = 0.0
    """Time at which the session's last request ended. The value is not used while requests are
    waiting.
    """


@dataclass(slots=True, eq=False)
class _Entry:
    """A request with remaining steps."""

    fields: RequestFields
    """The request's fields that affect scheduling."""
    stream: ScheduledStream
    """Scheduling state of the request's session."""
    live: LiveRequest
    """The request as an input to `policy.py`."""


class ScheduledStreams:
    """Scheduling state of all requests with remaining steps, and of their streams.

    Args:
        patience_s: Longest time in seconds for which requests without a deadline wait before one of
            them runs a step, even if other requests are late.
        num_levels: Number of quality levels, including full quality.
        chunks_in_flight: Maximum number of chunks in flight per session; see `OmniConfig`.
    """

    def __init__(self, patience_s: float, num_levels: int = 1, chunks_in_flight: int = 1) -> None:
        self.order = ChunkOrder(chunks_in_flight)
        self._patience_s = patience_s
        self._patient: set[str] = set()
        """Ids of requests for chunks without a deadline."""
        self._patient_step_s = 0.0
        """Time at which a request without a deadline last ran a step, or at which such a request
        arrived while no other one was in the scheduler, whichever is later.
        """
        self._num_levels = num_levels
        self._entries: dict[str, _Entry] = {}
        self._streams: OrderedDict[str, ScheduledStream] = OrderedDict()
        self._active: dict[str, ScheduledStream] = {}
        """The streams in `_streams` that have requests with remaining steps."""
        self._num_arrivals = 0
        self._typical = ScheduledStream()
        """Number of steps and size of the most recently observed chunk in any stream. Streams in
        which no chunk has been observed use these values as estimates.
        """

    def __len__(self) -> int:
        """Return the number of requests that can run a step at the same time."""
        if self.order.limit == 1:
            return len(self._active)
        return sum(min(self.order.limit, len(stream.waiting)) for stream in self._active.values())

    # -- events ------------------------------------------------------------------------------------

    def add_request(self, request_id: str, fields: RequestFields, now_s: float) -> None:
        stream = self._streams.get(fields.session_id)
        if stream is None:
            stream = self._streams[fields.session_id] = ScheduledStream()
            self._evict_old()
        self._streams.move_to_end(fields.session_id)
        if fields.period_s is not None:
            stream.period_s = fields.period_s
        order = self._num_arrivals
        self._num_arrivals += 1
        level = stream.level if fields.is_chunk and fields.deadline_s is not None else 0
        steps, size = (
            (self._steps(stream, level), self._size(stream)) if fields.is_chunk else (1, 0.0)
        )
        # Session operations cost nothing, and most of them free memory, so they are due
        # immediately.
        due_at_s = now_s if fields.deadline_s is None else now_s + fields.deadline_s
        live = LiveRequest(
            request_id,
            due_at_s,
            fields.deadline_s is not None,
            steps,
            False,
            size,
            order,
            level=level,
        )
        if fields.is_chunk and fields.deadline_s is None:
            if not self._patient:
                self._patient_step_s = now_s
            self._patient.add(request_id)
        self._entries[request_id] = _Entry(fields, stream, live)
        stream.waiting[request_id] = (fields.chunk_index, order)
        self._active[fields.session_id] = stream
        self._choose_next(stream)

    def advance(self, request_id: str, progress: ChunkProgress | None, now_s: float) -> None:
        """Record that an incomplete request has finished a step.

        Args:
            request_id: Id of the request.
            progress: The request's progress; None if its worker does not report progress.
            now_s: Time at which the step ended.
        """
        entry = self._entries.get(request_id)
        if entry is None:
            return
        live = entry.live
        self._start(request_id, entry)
        if request_id in self._patient:
            self._patient_step_s = now_s
        if progress is None:
            live.steps_left = max(1, live.steps_left - 1)
            return
        live.step = progress.step
        live.steps_left = max(1, progress.num_steps - progress.step)
        live.size = float(max(1, progress.size))
        if entry.fields.is_chunk:
            steps = progress.num_steps
            if entry.fields.chunk_index == 0:
                # Later chunks may have more steps than the first one (`first_chunk_steps`).
                steps = max(steps, self._typical.steps.get(live.level, 0))
            for stream in (entry.stream, self._typical):
                stream.steps[live.level] = steps
                stream.size = live.size

    def finish_request(self, request_id: str, now_s: float) -> None:
        """Remove a request that is complete or was aborted. Idempotent."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        self._patient.discard(request_id)
        session_id, stream = entry.fields.session_id, entry.stream
        stream.last_used_s = now_s
        del stream.waiting[request_id]
        if entry.live.started:
            stream.started.remove(request_id)
        if not stream.waiting:
            del self._active[session_id]
        self._choose_next(stream)
        if not entry.fields.is_chunk and not entry.fields.is_fork and not stream.waiting:
            # The session was reset or closed, so its next request creates a new stream.
            self._streams.pop(session_id, None)

    def committed(self, request_id: str) -> None:
        """Record that the request's chunk was committed.

        This method must be called before `finish_request`.
        """
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.stream.established = True

    def _start(self, request_id: str, entry: _Entry) -> None:
        if not entry.live.started:
            entry.live.started = True
            entry.stream.started.append(request_id)
            self._choose_next(entry.stream)

    def _choose_next(self, stream: ScheduledStream) -> None:
        others = (
            request_id
            for request_id in stream.waiting
            if not self._entries[request_id].live.started
        )
        stream.next = min(others, key=stream.waiting.__getitem__, default=None)

    def _evict_old(self) -> None:
        while len(self._streams) > _REMEMBERED:
            session_id, stream = next(iter(self._streams.items()))
            if stream.waiting:
                return
            del self._streams[session_id]

    # -- queries -----------------------------------------------------------------------------------

    def may_step(self, request_id: str) -> bool:
        """Return whether a request may start or run its next step.

        The result is True for unknown ids.
        """
        entry = self._entries.get(request_id)
        if entry is None:
            return True
        step, ahead = None, [self._entries[other] for other in entry.stream.started]
        if entry.live.started:
            step, ahead = entry.live.step, ahead[: entry.stream.started.index(request_id)]
        elif entry.stream.next != request_id:
            return False
        # Session operations run alone. Chunk 0 also runs alone, because later chunks have nothing
        # to continue until it has been committed.
        alone = any(
            not other.fields.is_chunk or other.fields.chunk_index == 0 for other in (*ahead, entry)
        )
        steps = [other.live.step for other in ahead]
        return self.order.may_move(step, steps, established=entry.stream.established and not alone)

    def runnable(self, busy: Collection[str]) -> list[LiveRequest]:
        """Return the requests that may run a step, except those in `busy`.

        Chunks without a deadline get due times at intervals of `patience_s`. Chunks that have
        started are due first. Within each group, chunks are sorted by order of arrival.
        """
        live = []
        for stream in self._active.values():
            first = stream.started[0] if stream.started else stream.next  # can always run a step
            if first is not None and first not in busy:
                live.append(self._entries[first].live)
            if stream.started and self.order.limit > 1:
                for request_id in [*stream.started[1:], stream.next][: self.order.limit - 1]:
                    if (
                        request_id is not None
                        and request_id not in busy
                        and self.may_step(request_id)
                    ):
                        live.append(self._entries[request_id].live)
        if self._patient:
            patient = [request for request in live if request.request_id in self._patient]
            patient.sort(key=lambda request: (not request.started, request.order))
            for rank, request in enumerate(patient, 1):
                request.deadline_s = self._patient_step_s + rank * self._patience_s
        return live

    def get(self, request_id: str) -> LiveRequest | None:
        entry = self._entries.get(request_id)
        return None if entry is None else entry.live

    def mark_stepped(self, request_id: str) -> None:
        """Record that a request is in a batch. Unknown ids are ignored.

        Later requests in the same session cannot overtake a request that has been in a batch.
        """
        entry = self._entries.get(request_id)
        if entry is not None:
            self._start(request_id, entry)
            entry.live.step += 1

    def _steps(self, stream: ScheduledStream, level: int) -> int:
        """Return the estimated number of steps for a chunk at a degradation level.

        The estimate is the number last observed at this level, or at a better level if this level
        has not been observed. Observations of this stream take precedence over those of other
        streams. If there are no observations, the estimate is 1.
        """
        for known in (stream, self._typical):
            for candidate in range(level, -1, -1):
                if candidate in known.steps:
                    return known.steps[candidate]
        return 1

    def _size(self, stream: ScheduledStream) -> float:
        """Return a chunk's estimated size: the size last observed in its stream, or in any stream
        if its stream has no observations. If there are no observations, the estimate is 1.
        """
        return stream.size or self._typical.size or 1.0

    # -- admission and quality ---------------------------------------------------------------------

    def refusal(self, fields: RequestFields, now_s: float, costs: StepCosts) -> str | None:
        """Check whether the stream that a request would start can be sustained.

        Returns:
            The reason why the new stream cannot be sustained. None if it can be sustained, or if
            the request does not start a new stream with a known period.
        """
        named_later = 0 < fields.chunk_index < math.inf
        if (
            not fields.is_chunk
            or fields.period_s is None
            or named_later
            or fields.session_id in self._streams
        ):
            return None
        return refuses(
            list(self._demands(now_s, costs)),
            self._demand(ScheduledStream(), fields.period_s, costs),
        )

    def _demands(self, now_s: float, costs: StepCosts) -> Iterator[StreamDemand]:
        for stream in self._streams.values():
            period_s = stream.period_s
            if period_s is None:
                continue
            if stream.waiting or now_s - stream.last_used_s <= max(1.0, _LIVE_PERIODS * period_s):
                yield self._demand(stream, period_s, costs)

    def _demand(self, stream: ScheduledStream, period_s: float, costs: StepCosts) -> StreamDemand:
        known = stream.size is not None or self._typical.size is not None
        chunk_s = costs.of_chunk(self._steps(stream, 0), self._size(stream)) if known else 0.0
        return StreamDemand(period_s, chunk_s)

    def decide_level(
        self, request_id: str, now_s: float, live: Sequence[LiveRequest], costs: StepCosts
    ) -> int:
        """Choose the degradation level of a chunk that is about to run its first step, and store it
        in the chunk's request and stream.
        """
        entry = self._entries[request_id]
        stream, request = entry.stream, entry.live
        if self._num_levels == 1 or not entry.fields.is_chunk or not request.has_deadline:
            return 0
        size = self._size(stream)
        levels = [
            costs.of_chunk(self._steps(stream, level), size, level=level)
            for level in range(self._num_levels)
        ]
        own_s = costs.of_chunk(request.steps_left, request.size, level=request.level)
        start_s = predicted_end_s(now_s, request, live, costs) - own_s
        request.level = stream.level = choose_level(
            stream.level,
            levels,
            request.deadline_s,
            start_s,
            stream.period_s or request.deadline_s - now_s,
        )
        request.steps_left = self._steps(stream, request.level)
        return request.level
