# SPDX-License-Identifier: Apache-2.0
"""Functions that time kernels on one GPU. This module requires only torch."""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
BF16 = torch.bfloat16
CALLS = 4
"""Number of calls in one CUDA graph."""
_WARM = 2


@dataclass
class Results:
    """Results by part and candidate. Candidates that would start after `seconds` are left out."""

    seconds: float
    rows: dict[str, dict[str, Any]]
    failed: dict[str, str]
    started: float

    def attempt(self, part: str, name: str, run: Callable[[], dict[str, Any]]) -> None:
        """Run a candidate. If the candidate fails, record the error in `failed`, so that other
        candidates still run.
        """
        spent = time.monotonic() - self.started
        if spent > self.seconds:
            self.failed[f"{part}/{name}"] = f"left out after {spent:.0f} s"
            return
        try:
            row = run()
        except Exception as error:
            self.failed[f"{part}/{name}"] = " ".join(repr(error).split())[:300]
            if CUDA:
                torch.cuda.synchronize()
            return
        self.rows.setdefault(part, {})[name] = row
        print(f"{spent:6.1f}s {part:34s} {name:38s} {row}", file=sys.stderr, flush=True)


def milliseconds(run: Callable[[], Any], repeats: int = 7) -> float:
    """Return the median device time of one call, in milliseconds, after two warm-up calls."""
    for _ in range(_WARM):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return round(statistics.median(times), 5)


def timed(run: Callable[[], Any], *, flop: float = 0.0, nbytes: float = 0.0) -> dict[str, Any]:
    """Return the median milliseconds per call in a CUDA graph of several calls, and the call's
    rate. On a CPU, the call runs once without being timed.
    """
    run()
    if not CUDA:
        return {}
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    ms = milliseconds(graph.replay, repeats=6) / CALLS
    row: dict[str, Any] = {"ms": round(ms, 4)}
    if flop:
        row["tflop_per_s"] = round(flop / ms / 1e9)
    if nbytes:
        row["gb_per_s"] = round(nbytes / ms / 1e6)
    return row


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return |found - exact| / |exact|, rounded to four significant digits."""
    return float(f"{((found.double() - exact.double()).norm() / exact.double().norm()).item():.3e}")
