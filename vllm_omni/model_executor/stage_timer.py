# SPDX-License-Identifier: Apache-2.0
"""`StageTimer`: how long each stage of one chunk took, without stopping the device to find out.

On CUDA a stage is the device time between two events on the current stream; they are read when the chunk is done,
when the device has been waited for anyway. Elsewhere it is host time.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch


class StageTimer:
    """Stages of one chunk; a name used several times (one denoise step after another) adds up and is counted."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._host_ms: list[tuple[str, float]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the work launched inside. Stages may nest; each then counts the inner time too."""
        if self._cuda:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((name, start, end))
        else:
            before = time.perf_counter()
            yield
            self._host_ms.append((name, (time.perf_counter() - before) * 1e3))

    def milliseconds(self) -> dict[str, list[float]]:
        """Milliseconds of every stage so far, in order. On CUDA, waits for all of them, whatever their stream."""
        for _, _, end in self._events:
            end.synchronize()
        return self.milliseconds_so_far()

    def milliseconds_so_far(self) -> dict[str, list[float]]:
        """The same of the stages that have ended on the device too; waits for nothing."""
        ended = [(name, start.elapsed_time(end)) for name, start, end in self._events if end.query()]
        return self._sorted(self._host_ms + ended)

    def add(self, stages: Mapping[str, Sequence[float]]) -> None:
        """Take over the times of another rank."""
        self._host_ms = [(name, value) for name, values in stages.items() for value in values] + self._host_ms

    def _sorted(self, spans: Sequence[tuple[str, float]]) -> dict[str, list[float]]:
        stages: dict[str, list[float]] = {}
        for name, milliseconds in spans:
            stages.setdefault(name, []).append(round(milliseconds, 3))
        return stages
