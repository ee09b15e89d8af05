# SPDX-License-Identifier: Apache-2.0
"""Counters and histograms that change with every chunk, as plain numbers without locks.

`prometheus_client`'s classes cost a lock and several calls per observation. They are still used
with several API server processes, because only they write the files that the scraped process reads.
Both variants have the same names, labels and samples. Only the event loop's thread may observe.
"""

import os
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString


class Count(Protocol):
    def inc(self, amount: float = 1) -> None: ...


class Distribution(Protocol):
    def observe(self, amount: float) -> None: ...


class Counts(Protocol):
    def labels(self, *values: str) -> Count: ...


class Distributions(Protocol):
    def labels(self, *values: str) -> Distribution: ...


def counter(name: str, text: str, labels: Sequence[str]) -> Counts:
    return (
        Counter(name, text, labels)
        if _has_several_processes()
        else FrontendCounter(name, text, labels)
    )


def histogram(
    name: str, text: str, labels: Sequence[str], bounds: Sequence[float]
) -> Distributions:
    """Create a histogram.

    Args:
        name: Name of the metric.
        text: Its description.
        labels: Names of its labels.
        bounds: Upper bounds of the buckets, without infinity.
    """
    if _has_several_processes():
        return Histogram(name, text, labels, buckets=bounds)
    return FrontendHistogram(name, text, labels, bounds)


def _has_several_processes() -> bool:
    return "PROMETHEUS_MULTIPROC_DIR" in os.environ  # the same check as in vLLM


class _Sum:
    def __init__(self) -> None:
        self.total, self.created_s = 0.0, time.time()

    def inc(self, amount: float = 1) -> None:
        self.total += amount


class _Buckets:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts, self.sum, self.created_s = [0] * (len(bounds) + 1), 0.0, time.time()

    def observe(self, amount: float) -> None:
        self.counts[bisect_left(self._bounds, amount)] += 1
        self.sum += amount


class FrontendCounter:
    """A `Counter` without locks."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry = REGISTRY
    ) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._children: dict[tuple[str, ...], _Sum] = {}
        registry.register(self)

    def labels(self, *values: str) -> Count:
        return self._children.setdefault(values, _Sum())

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, child in list(self._children.items()):
            family.add_metric(values, child.total, child.created_s)
        yield family


class FrontendHistogram:
    """A `Histogram` without locks."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        bounds: Sequence[float],
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self._name, self._text, self._labels, self._bounds = name, text, labels, bounds
        self._names = [floatToGoString(bound) for bound in (*bounds, float("inf"))]
        self._children: dict[tuple[str, ...], _Buckets] = {}
        registry.register(self)

    def labels(self, *values: str) -> Distribution:
        return self._children.setdefault(values, _Buckets(self._bounds))

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, child in list(self._children.items()):
            family.add_metric(
                values, list(zip(self._names, accumulate(child.counts), strict=True)), child.sum
            )
            family.add_sample(
                f"{self._name}_created",
                dict(zip(self._labels, values, strict=True)),
                child.created_s,
            )
        yield family
