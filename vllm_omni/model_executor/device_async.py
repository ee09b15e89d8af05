# SPDX-License-Identifier: Apache-2.0
"""Device work that the host does not wait for: copies, single values and times.

`to_device` copies without a wait, `Arriving` is a value that the device still computes,
`StageTimer` measures the stages of one chunk. On other devices than CUDA everything is there when a
call returns.
Tests: tests/model_executor/test_noise.py.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a CPU tensor's copy on `device`; on CUDA queued behind the running kernels, through
    page-locked memory.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Arriving:
    """A number that the device computes while the host goes on; elsewhere than on CUDA it is there
    at once.

    number: of one element.
    """

    def __init__(self, number: torch.Tensor) -> None:
        self._number, self._arrived = number, None
        if number.is_cuda:
            self._number = torch.empty((), dtype=number.dtype, pin_memory=True).copy_(
                number, non_blocking=True
            )
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @property
    def known(self) -> bool:
        """Whether `wait` would return at once."""
        return self._arrived is None or bool(self._arrived.query())

    def wait(self) -> int:
        """The number, as soon as the device has it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return int(self._number)


class StageTimer:
    """Stages of one chunk; a name used several times (one denoise step after another) adds up
    and is counted.
    """

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
        """Milliseconds of every stage so far, in order.

        On CUDA, waits for all of them, whatever their stream.
        """
        for _, _, end in self._events:
            end.synchronize()
        return self.milliseconds_so_far()

    def milliseconds_so_far(self) -> dict[str, list[float]]:
        """The same of the stages that have ended on the device too; waits for nothing."""
        ended = [
            (name, start.elapsed_time(end)) for name, start, end in self._events if end.query()
        ]
        stages: dict[str, list[float]] = {}
        for name, milliseconds in self._host_ms + ended:
            stages.setdefault(name, []).append(round(milliseconds, 3))
        return stages

    def add_times(self, stages: Mapping[str, Sequence[float]]) -> None:
        """Take over the times of another rank."""
        self._host_ms = [
            (name, value) for name, values in stages.items() for value in values
        ] + self._host_ms
