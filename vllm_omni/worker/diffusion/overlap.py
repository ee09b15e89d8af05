# SPDX-License-Identifier: Apache-2.0
"""What overlaps with what on the device: decoding a finished chunk with the next steps, the host with the device.

`ResultStream` decodes on a CUDA stream of its own, `PendingResult` is a result on its way to the host, `FiniteCheck`
the verdict on a chunk, `StepPacer` keeps the host from running ahead of the device, so that an abort still finds
something to stop. Elsewhere than on CUDA everything has happened when a call returns.
Held by tests/worker/test_overlap.py.
"""

import contextlib
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from vllm_omni.model_executor.interfaces import DiffusionRequest, SupportsStepExecution
from vllm_omni.outputs import RequestFailed, empty_result, pack

SLOW_STEP_MS = 50.0
"""From here on the next step is launched only after the last has ended: about 1 % of the device's time for an abort
that takes effect within one step."""
SLOW_STAGE_MS = 150.0
"""The same with pipeline stages, where a step's way through all processes takes three times as long."""


class PendingResult:
    """One finished chunk's result; the device may still be decoding it or copying it to the host.

    tensors: on the host, to be read after `done`. The request must keep what the decode reads until then.
    """

    def __init__(
        self,
        request: DiffusionRequest,
        meta: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        done: "torch.cuda.Event | None",
        started_s: float,
    ) -> None:
        self._request = request
        self._meta = {"session_id": request.session.session_id, "chunk_index": request.session.chunk_index, **meta}
        if request.degradations:
            self._meta["degradations"] = list(request.degradations)
        self._tensors = tensors
        self._done = done
        self._started_s = started_s

    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self._done is None or bool(self._done.query())

    def wait(self) -> None:
        """Return when the device no longer reads anything of the request."""
        if self._done is not None:
            self._done.synchronize()

    def envelope(self) -> torch.Tensor:
        """Wait, then pack the result, with the device time of the stages that have ended (a clean pass may run on)."""
        self.wait()
        stages = self._request.timer.milliseconds_so_far()
        elapsed_ms = (time.perf_counter() - self._started_s) * 1e3
        return pack({**self._meta, "timings_ms": {**stages, "total": [round(elapsed_ms, 3)]}}, self._tensors)


class FiniteCheck:
    """Whether a tensor is finite, found out on the device while the host and the device go on."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._done: torch.cuda.Event | None = None
        finite = torch.isfinite(tensor).all()
        if tensor.is_cuda:
            self._finite = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(finite, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()
        else:
            self._finite = finite

    @property
    def known(self) -> bool:
        """Whether `require` would answer at once."""
        return self._done is None or bool(self._done.query())

    def require(self, what: str) -> None:
        """Wait for the answer; raises `RequestFailed("non_finite", ...)` if the tensor holds NaN or Inf."""
        if self._done is not None:
            self._done.synchronize()
        if not bool(self._finite):
            raise RequestFailed(
                "non_finite", f"{what} contains NaN or Inf; the session is unchanged, send the chunk again"
            )


class ResultStream:
    """Where results are decoded and copied to the host.

    overlap: on CUDA, use a stream of its own. beside_steps: with priority over the denoise steps there: somebody waits
    for the frames. (Where there are none, the next latents come in beside it.)
    """

    def __init__(self, device: torch.device, overlap: bool, *, beside_steps: bool = True) -> None:
        self._cuda = device.type == "cuda"
        priority = -1 if beside_steps else 0
        self._stream = torch.cuda.Stream(device, priority=priority) if self._cuda and overlap else None

    def decode(self, model: SupportsStepExecution, request: DiffusionRequest, started_s: float) -> PendingResult:
        """Launch `post_decode` and the copy of what it returns; call it before the session moves on."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            with request.timer.stage("decode"):
                meta, tensors = model.post_decode(request)
            host = {name: _to_host(tensor) for name, tensor in tensors.items()}
            done = torch.cuda.Event() if self._cuda else None
            if done is not None:
                done.record()
        return PendingResult(request, meta, host, done, started_s)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start copying a CUDA tensor into page-locked memory; a host tensor is returned as it is."""
    if not tensor.is_cuda:
        return tensor
    return empty_result(tensor.shape, tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class StepPacer:
    """Keeps the host at most one step ahead of the device, and not ahead at all where steps are long.

    So the time between two answers of the host is not that of a step: `before_s` is.
    """

    def __init__(self, device: torch.device, *, stages: bool = False) -> None:
        self._cuda = device.type == "cuda"
        self._begin: torch.cuda.Event | None = None
        self._spans: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=2)
        self._slow_ms = SLOW_STAGE_MS if stages else SLOW_STEP_MS
        self._ends: deque[torch.cuda.Event] = deque(maxlen=3)

    def launching(self) -> None:
        """Call before launching a step whose device time `before_s` shall tell."""
        if self._cuda:
            self._begin = torch.cuda.Event(enable_timing=True)
            self._begin.record()

    def launched(self) -> None:
        """Call after launching a step."""
        if self._cuda:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._ends.append(end)
            if self._begin is not None:
                self._spans.append((self._begin, end))
                self._begin = None

    @property
    def before_s(self) -> float | None:
        """Device time of the step before the last one launched; None = there was none, or the device is still at it."""
        if len(self._spans) < 2 or not self._spans[0][1].query():
            return None
        begin, end = self._spans[0]
        return float(begin.elapsed_time(end)) / 1e3

    @property
    def unfinished(self) -> bool:
        """Whether the device is still at the last step launched."""
        return bool(self._spans) and not self._spans[-1][1].query()

    def wait(self, *, hurry: bool) -> None:
        """Call before launching a step, or earlier. hurry: a result is ready for delivery, so wait less."""
        if len(self._ends) == 3:
            earlier, before, last = self._ends
            before.synchronize()
            if not hurry and earlier.elapsed_time(before) >= self._slow_ms:
                last.synchronize()
