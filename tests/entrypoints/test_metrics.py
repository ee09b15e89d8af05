# SPDX-License-Identifier: Apache-2.0
"""Tests of `SessionMeter`: counters, times and log lines."""

import logging
import uuid
from collections.abc import Callable

import pytest
from prometheus_client import REGISTRY

from vllm_omni.entrypoints.telemetry import metrics
from vllm_omni.entrypoints.telemetry.metrics import SessionMeter, endpoint_metrics


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(metrics.time, "monotonic", clock)
    return clock


@pytest.fixture
def endpoint() -> str:
    """Return an endpoint label that no other test uses. All tests in a process share one metrics
    registry.
    """
    return f"door-{uuid.uuid4().hex}"


@pytest.fixture
def value(endpoint: str) -> Callable[..., float]:
    return lambda name, **labels: (
        REGISTRY.get_sample_value(name, {"endpoint": endpoint, **labels}) or 0.0
    )


def test_a_session_is_counted_from_its_start_to_its_end(
    clock: Clock, endpoint: str, value: Callable[..., float]
) -> None:
    """A session is counted in the gauge, in the counters by reason, and in the duration histogram.
    Closing the session a second time has no effect.
    """
    meter = SessionMeter(endpoint)
    assert value("omni_rt_sessions") == value("omni_rt_sessions_opened_total") == 1
    clock.now_s += 12
    meter.close("idle")
    meter.close("closed")
    assert value("omni_rt_sessions") == 0
    assert value("omni_rt_sessions_closed_total", reason="idle") == 1
    assert value("omni_rt_sessions_closed_total", reason="closed") == 0
    assert value("omni_rt_session_duration_seconds_sum") == 12


def test_chunks_are_timed_from_their_request_and_from_each_other(
    clock: Clock, endpoint: str, value: Callable[..., float]
) -> None:
    """A request's first chunk is timed from the request, and later chunks from the preceding chunk.
    Idle time between two requests counts neither as a gap nor as a delay.
    """
    meter = SessionMeter(endpoint)
    clock.now_s += 100  # idle before the request
    for _ in range(2):
        meter.request_started()
        clock.now_s += 2
        meter.chunk_done(9, 16.0, {}, 2.0)
        clock.now_s += 0.5
        meter.chunk_done(12, 16.0, {}, 0.5)
        clock.now_s += 60
    assert value("omni_rt_time_to_first_frame_seconds_count") == 2
    assert value("omni_rt_time_to_first_frame_seconds_sum") == 4
    assert value("omni_rt_inter_chunk_gap_seconds_count") == 2
    assert value("omni_rt_inter_chunk_gap_seconds_sum") == 1
    assert value("omni_rt_chunks_total") == 4 and value("omni_rt_frames_total") == 42


def test_a_chunk_is_late_after_all_sent_frames_were_played(
    clock: Clock, endpoint: str, value: Callable[..., float]
) -> None:
    """A chunk is late only if all previously sent frames have been played by the time it arrives.
    At 16 fps, 16 frames last one second. Any lead built up by earlier chunks is used up first.
    """
    meter = SessionMeter(endpoint)
    meter.request_started()
    for gap_s, late in ((5.0, 0), (0.2, 0), (1.7, 0), (0.5, 0), (2.0, 1), (1.0, 1), (1.1, 2)):
        clock.now_s += gap_s
        meter.chunk_done(16, 16.0, {}, 0.1)
        assert (meter.num_late, value("omni_rt_deadline_misses_total")) == (late, late), gap_s


def test_stages_come_from_the_workers_timings(endpoint: str, value: Callable[..., float]) -> None:
    """Stage times come from the workers' timings. The rest of a chunk's time is recorded as
    queueing time.
    """
    endpoint_metrics().stages(
        endpoint,
        {"encode": [10.0], "steps": [100.0, 100.0], "decode": [40.0], "total": [260.0]},
        0.3,
    )
    seconds = {
        stage: value("omni_rt_chunk_seconds_sum", stage=stage)
        for stage in ("encode", "denoise", "decode", "queue")
    }
    assert seconds == pytest.approx({"encode": 0.01, "denoise": 0.2, "decode": 0.04, "queue": 0.04})


def test_a_session_logs_two_lines(endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each session logs two lines, and the second, logged when the session closes, lists its counts
    as `key=value` pairs.
    """
    with caplog.at_level(logging.INFO, logger=metrics.logger.name):
        metrics.logger.addHandler(caplog.handler)
        meter = SessionMeter(endpoint)
        meter.request_started()
        for _ in range(50):
            meter.chunk_done(12, 16.0, {}, 0.1)
        meter.chunks_aborted("cancelled", 2)
        meter.frames_dropped(7)
        meter.close("closed")
        metrics.logger.removeHandler(caplog.handler)
    lines = list(dict.fromkeys(record.getMessage() for record in caplog.records))
    assert len(lines) == 2
    fields = dict(pair.split("=") for pair in lines[1].split()[1:])
    assert lines[1].startswith("session_closed ")
    assert (fields["chunks"], fields["frames"], fields["aborted"], fields["dropped"]) == (
        "50",
        "600",
        "2",
        "7",
    )
