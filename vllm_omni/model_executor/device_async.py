# SPDX-License-Identifier: Apache-2.0
"""Asynchronous device work: copies, single values and durations.

`to_device` copies a tensor asynchronously. `PendingScalar` is a value that the device computes.
`StageTimer` measures how long each stage of a chunk takes. On devices other than CUDA, all calls
are synchronous.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to `device`.

    On CUDA, the copy goes through page-locked memory and is enqueued after the kernels launched so
    far.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class PendingScalar:
    """A value that the device computes while the host continues.

    Args:
        number: Tensor on the device, with one element.
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
        """Whether the device has computed the value. If so, `wait` returns immediately."""
        return self._arrived is None or bool(self._arrived.query())

    def wait(self) -> int:
        """Wait for the device and return the value."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return int(self._number)


class StageTimer:
    """Measures the durations of a chunk's stages. For example, each denoise step is a stage."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._host_ms: list[tuple[str, float]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Context manager that times the work launched within it. An outer stage includes its inner
        stages.
        """
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
        """Return the durations in milliseconds of all stages so far, grouped by stage name, in
        order.

        On CUDA, this call waits until all stages have finished, regardless of their CUDA stream.
        """
        for _, _, end in self._events:
            end.synchronize()
        return self.milliseconds_so_far()

    def milliseconds_so_far(self) -> dict[str, list[float]]:
        """Return the durations of the stages that the device has finished, without waiting for
        unfinished stages.
        """
        ended = [
            (name, start.elapsed_time(end)) for name, start, end in self._events if end.query()
        ]
        stages: dict[str, list[float]] = {}
        for name, milliseconds in self._host_ms + ended:
            stages.setdefault(name, []).append(round(milliseconds, 3))
        return stages

    def add_times(self, stages: Mapping[str, Sequence[float]]) -> None:
        """Add another rank's stage durations, in milliseconds."""
        self._host_ms = [
            (name, value) for name, values in stages.items() for value in values
        ] + self._host_ms
