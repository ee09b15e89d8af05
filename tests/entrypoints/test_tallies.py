# SPDX-License-Identifier: Apache-2.0
"""Counters and histograms of the front end are scraped as `prometheus_client`'s own are, also with
several processes.
"""

import os
import re
from pathlib import Path

import pytest
from helpers.rank_processes import run_ranks
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest, values

from vllm_omni.entrypoints.telemetry.frontend_metrics import (
    Counts,
    Distributions,
    FrontendCounter,
    FrontendHistogram,
)

BOUNDS = (0.005, 0.5, 1.0, 60.0)
LABELS = ("endpoint", "stage")
AMOUNTS = (0.0, 0.005, 0.0050001, 0.4, 1.0, 59.9, 61.0)


def scraped(registry: CollectorRegistry) -> str:
    """The page without creation times."""
    return re.sub(r"(_created\{.*\}) .*", r"\1", generate_latest(registry).decode())


def test_a_frontend_metric_is_scraped_as_the_librarys_own() -> None:
    """Names, types, texts, labels, inclusive bounds and sums are equal, also before the first
    observation.
    """
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counters: list[Counts] = [
        FrontendCounter("chunks", "Chunks.", LABELS, ours),
        Counter("chunks", "Chunks.", LABELS, registry=theirs),
    ]
    histograms: list[Distributions] = [
        FrontendHistogram("seconds", "Seconds.", LABELS, BOUNDS, ours),
        Histogram("seconds", "Seconds.", LABELS, buckets=BOUNDS, registry=theirs),
    ]
    assert scraped(ours) == scraped(theirs)
    for counted, timed in zip(counters, histograms, strict=True):
        counted.labels("an endpoint", "x").inc()
        counted.labels("an endpoint", "x").inc(2.5)
        counted.labels("another", "x")
        for amount in AMOUNTS:
            timed.labels("an endpoint", "encode").observe(amount)
        timed.labels("an endpoint", "decode")
    assert scraped(ours) == scraped(theirs)
    assert 'chunks_total{endpoint="an endpoint",stage="x"} 3.5' in scraped(ours)


def test_a_metric_name_is_unique() -> None:
    registry = CollectorRegistry(auto_describe=True)  # as the registry of the process
    FrontendCounter("chunks", "Chunks.", LABELS, registry)
    with pytest.raises(ValueError, match="chunks"):
        Counter("chunks", "Chunks.", registry=registry)


COUNTS = (2, 3)


def _as_a_server_process(folder: str) -> None:
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
    # as when `prometheus_client` is first imported with this variable
    values.ValueClass = values.get_value_class()


def _count(rank: int, folder: str) -> None:
    from vllm_omni.entrypoints.telemetry.metrics import SessionMeter

    _as_a_server_process(folder)
    meter = SessionMeter("e")
    for _ in range(COUNTS[rank]):
        meter.chunk_done(4, 16.0, {"decode": [200.0]}, 0.3)


def _scrape(rank: int, folder: str, response: str) -> None:
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    _as_a_server_process(folder)
    Path(response).write_bytes(generate_latest(get_prometheus_registry()))


def test_the_chunks_of_all_server_processes_are_scraped(tmp_path: Path) -> None:
    folder, page = tmp_path / "multiprocess", tmp_path / "page.txt"
    folder.mkdir()
    run_ranks(_count, (str(folder),), len(COUNTS))
    run_ranks(_scrape, (str(folder), str(page)), 1)
    response = page.read_text()
    assert 'omni_rt_chunks_total{endpoint="e"} 5.0' in response
    assert 'omni_rt_frames_total{endpoint="e"} 20.0' in response
    assert 'omni_rt_chunk_seconds_bucket{endpoint="e",le="0.25",stage="decode"} 5.0' in response
    assert 'omni_rt_inter_chunk_gap_seconds_count{endpoint="e"} 3.0' in response
