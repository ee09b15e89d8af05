# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics for all endpoints, and structured log lines for sessions and jobs.

The metrics are exported through vLLM's own `/metrics` endpoint. The endpoint serves
`prometheus_client`'s default registry or, if there are several API server processes, the files in
`PROMETHEUS_MULTIPROC_DIR`. An endpoint creates a `SessionMeter` for each session. Requests without
a session use `endpoint_metrics()`. Each label has few possible values, and labels never identify
clients.

A log line consists of an event and `key=value` pairs. Two lines are written for each session, two
for each video job and one for each image call. Log lines never contain prompts, keys or addresses.

vLLM's stat loggers (`vllm.stat_logger_plugins`) are not used because they receive engine statistics
about tokens and iterations, but not about sessions or about data that clients receive.
"""

import functools
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from prometheus_client import Counter, Gauge, Histogram

logger = logging.getLogger("vllm." + __name__)

_SECONDS: Final = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    1.5,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)
_LONG_SECONDS: Final = (
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
    1800.0,
)
STAGES: Final = {"encode": "encode", "steps": "denoise", "decode": "decode"}
"""Metric label for each stage in `timings_ms`."""
LATE_TOLERANCE_S: Final = 0.02
"""Delay in seconds above which a chunk counts as late, measured from the end of the previous
chunk's playback.
"""


def log_event(event: str, **fields: object) -> None:
    """Log one structured line: `event key=value ...`.

    Floats are written with three decimal places. Pairs with the value None are omitted.
    """
    shown = (
        f"{name}={value:.3f}" if isinstance(value, float) else f"{name}={value}"
        for name, value in fields.items()
        if value is not None
    )
    logger.info("%s %s", event, " ".join(shown))


class EndpointMetrics:
    """All metrics of one API server process.

    Use `endpoint_metrics()` to get the instance, because a registry accepts each metric name only
    once.
    """

    def __init__(self) -> None:
        endpoint = ("endpoint",)
        self.sessions = Gauge(
            "omni_rt_sessions", "Live sessions.", endpoint, multiprocess_mode="livesum"
        )
        self.opened = Counter("omni_rt_sessions_opened", "Sessions started.", endpoint)
        self.closed = Counter(
            "omni_rt_sessions_closed", "Sessions ended, by reason.", (*endpoint, "reason")
        )
        self.rejected = Counter(
            "omni_rt_sessions_rejected", "Sessions refused, by reason.", (*endpoint, "reason")
        )
        self.chunks = Counter("omni_rt_chunks", "Chunks generated.", endpoint)
        self.frames = Counter("omni_rt_frames", "Frames generated.", endpoint)
        self.aborted = Counter(
            "omni_rt_chunks_aborted", "Chunks dropped in the engine.", (*endpoint, "reason")
        )
        self.dropped = Counter(
            "omni_rt_frames_dropped", "Frames generated but not delivered.", endpoint
        )
        self.late = Counter(
            "omni_rt_deadline_misses",
            "Chunks that arrived after the previous chunk had been played.",
            endpoint,
        )
        self.first_frame = Histogram(
            "omni_rt_time_to_first_frame_seconds",
            "From a request to its first chunk.",
            endpoint,
            buckets=_SECONDS,
        )
        self.gap = Histogram(
            "omni_rt_inter_chunk_gap_seconds",
            "Between chunks of one request.",
            endpoint,
            buckets=_SECONDS,
        )
        self.stage = Histogram(
            "omni_rt_chunk_seconds",
            "Time of a chunk by stage.",
            (*endpoint, "stage"),
            buckets=_SECONDS,
        )
        # Cached because `labels` takes a lock, and each chunk uses several labels.
        self._stage = functools.cache(self.stage.labels)
        self.duration = Histogram(
            "omni_rt_session_duration_seconds",
            "Length of sessions.",
            endpoint,
            buckets=_LONG_SECONDS,
        )
        self.requests = Counter(
            "omni_requests", "Image calls and video jobs, by outcome.", (*endpoint, "status")
        )
        self.request_seconds = Histogram(
            "omni_request_seconds",
            "Time of image calls and video jobs.",
            endpoint,
            buckets=_LONG_SECONDS,
        )
        self.waiting = Gauge(
            "omni_requests_waiting",
            "Image calls and video jobs not yet finished.",
            (*endpoint, "state"),
            multiprocess_mode="livesum",
        )
        # Every process gets the same statistics from the engine, so the latest value is correct.
        self.held_bytes = Gauge(
            "omni_held_bytes",
            "Bytes in use, by kind.",
            ("kind",),
            multiprocess_mode="livemostrecent",
        )
        self.reply_bytes = Gauge(
            "omni_rt_held_reply_bytes",
            "Replies retained for readers and for resume.",
            multiprocess_mode="livesum",
        )
        self.engine_sessions = Gauge(
            "omni_engine_sessions", "Sessions in the engine.", multiprocess_mode="livemostrecent"
        )
        self.engine_slots = Gauge(
            "omni_engine_session_slots",
            "Maximum number of sessions in the engine.",
            multiprocess_mode="livemostrecent",
        )

    def session_refused(self, endpoint: str, reason: str) -> None:
        self.rejected.labels(endpoint, reason).inc()

    def request_done(self, endpoint: str, status: str, seconds: float) -> None:
        """Record an image call or a video job that has ended.

        Args:
            endpoint: Endpoint name.
            status: `completed`, `failed`, `cancelled` or `refused`.
            seconds: Duration of the call or job in seconds.
        """
        self.requests.labels(endpoint, status).inc()
        self.request_seconds.labels(endpoint).observe(seconds)

    def engine_state(self, stats: Mapping[str, Any]) -> None:
        """Set the engine gauges from the workers' `session_stats`."""
        self.engine_sessions.set(stats["sessions"])
        self.engine_slots.set(stats["max_sessions"])
        self.held_bytes.labels("sessions").set(stats["bytes"])
        self.held_bytes.labels("suspended_sessions").set(stats["suspended_bytes"])
        self.held_bytes.labels("sessions_on_disk").set(stats["disk_bytes"])
        if stats.get("max_bytes") is not None:
            self.held_bytes.labels("sessions_limit").set(stats["max_bytes"])

    def endpoint_bytes(self, media_files: int, replies: int) -> None:
        """Set the endpoint gauges.

        Args:
            media_files: Total size in bytes of all processes' media files.
            replies: Total size in bytes of the replies that this process retains.
        """
        self.held_bytes.labels("media_files").set(media_files)
        self.reply_bytes.set(replies)

    def stages(
        self, endpoint: str, timings_ms: Mapping[str, Sequence[float]], wall_s: float
    ) -> None:
        """Observe the duration of each stage of a chunk or an image. The rest of `wall_s` is
        observed as the `queue` stage.
        """
        sum_s = 0.0
        for name, times in timings_ms.items():
            spent_s = sum(times) / 1e3
            sum_s += spent_s
            if name in STAGES:
                self._stage(endpoint, STAGES[name]).observe(spent_s)
        busy_s = sum(timings_ms["total"]) / 1e3 if "total" in timings_ms else sum_s
        self._stage(endpoint, "queue").observe(max(0.0, wall_s - busy_s))


@functools.cache
def endpoint_metrics() -> EndpointMetrics:
    """Return this process's metrics."""
    return EndpointMetrics()


class SessionMeter:
    """Records one session's metrics."""

    def __init__(self, endpoint: str) -> None:
        self._metrics = endpoint_metrics()
        self._endpoint = endpoint
        self._opened_s = time.monotonic()
        self._request_s: float | None = None
        self._last_chunk_s: float | None = None
        self._deadline_s = 0.0
        self._closed = False
        self.num_chunks = self.num_frames = self.num_aborted = self.num_dropped = self.num_late = 0
        self._first_frame_s: float | None = None
        self._worst_gap_s = 0.0
        self._metrics.opened.labels(endpoint).inc()
        self._metrics.sessions.labels(endpoint).inc()
        self._chunks, self._frames = (
            self._metrics.chunks.labels(endpoint),
            self._metrics.frames.labels(endpoint),
        )
        self._gap = self._metrics.gap.labels(endpoint)
        log_event("session_opened", endpoint=endpoint)

    def request_started(self) -> None:
        """Record the start of a request. The time since the previous request counts neither as a
        gap nor as a delay.
        """
        self._request_s, self._last_chunk_s = time.monotonic(), None

    def chunk_done(
        self, num_frames: int, fps: float, timings_ms: Mapping[str, Sequence[float]], wall_s: float
    ) -> None:
        """Record a chunk that the engine has finished.

        Args:
            num_frames: Number of pixel frames in the chunk.
            fps: Playback rate in frames per second.
            timings_ms: Times of the engine's stages in milliseconds.
            wall_s: Time in seconds from submission to result.
        """
        now, endpoint = time.monotonic(), self._endpoint
        self.num_chunks += 1
        self.num_frames += num_frames
        self._chunks.inc()
        self._frames.inc(num_frames)
        self._metrics.stages(endpoint, timings_ms, wall_s)
        if self._last_chunk_s is None:
            first_s = now - (self._opened_s if self._request_s is None else self._request_s)
            self._first_frame_s = first_s if self._first_frame_s is None else self._first_frame_s
            self._metrics.first_frame.labels(endpoint).observe(first_s)
            self._deadline_s = now
        else:
            gap_s = now - self._last_chunk_s
            self._worst_gap_s = max(self._worst_gap_s, gap_s)
            self._gap.observe(gap_s)
            if now > self._deadline_s + LATE_TOLERANCE_S:
                self.num_late += 1
                self._metrics.late.labels(endpoint).inc()
        self._last_chunk_s = now
        self._deadline_s = max(self._deadline_s, now) + num_frames / fps

    def chunks_aborted(self, reason: str, count: int = 1) -> None:
        self.num_aborted += count
        self._metrics.aborted.labels(self._endpoint, reason).inc(count)

    def frames_dropped(self, count: int) -> None:
        """Count frames that were not delivered because the client disconnected or read too
        slowly.
        """
        self.num_dropped += count
        self._metrics.dropped.labels(self._endpoint).inc(count)

    def close(self, reason: str) -> None:
        """Record that the session has ended. Idempotent."""
        if self._closed:
            return
        self._closed = True
        lasted_s = time.monotonic() - self._opened_s
        self._metrics.sessions.labels(self._endpoint).dec()
        self._metrics.closed.labels(self._endpoint, reason).inc()
        self._metrics.duration.labels(self._endpoint).observe(lasted_s)
        log_event(
            "session_closed",
            endpoint=self._endpoint,
            reason=reason,
            lasted_s=lasted_s,
            chunks=self.num_chunks,
            frames=self.num_frames,
            aborted=self.num_aborted,
            dropped=self.num_dropped,
            late=self.num_late,
            first_frame_s=self._first_frame_s,
            worst_gap_s=self._worst_gap_s,
        )
