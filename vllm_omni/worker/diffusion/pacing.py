# SPDX-License-Identifier: Apache-2.0
"""`StepPacer`: keeps the host from running ahead of the device, so that an abort still finds a step to stop.

Elsewhere than on CUDA the device has ended a step when its launch returns. Held by tests/worker/test_overlap.py.
"""

import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise

import torch

SLOW_STEP_MS = 50.0
"""From here on the next step is launched only when the last is about to end, so that an abort takes effect within one
step."""
SLOW_STAGE_MS = 150.0
"""The same with pipeline stages, where a step's way through all processes takes three times as long."""
LEAD = 0.2
"""How long before a slow step's expected end the next one may be launched, of the times above: 10 ms of 50. An engine
step's way through the processes and to the first kernel takes about half of that, in which the device would idle."""
_POLL_S = 0.001
_STEPS = 3
"""A step is expected to take as long as the shortest of so many before it: a chunk's first and last one take longer."""


class StepPacer:
    """Keeps the host at most one step ahead of the device, and where steps are long by no more than `LEAD` tells.

    So the time between two answers of the host is not that of a step: `before_s` is.
    """

    def __init__(self, device: torch.device, *, stages: bool = False) -> None:
        self._cuda = device.type == "cuda"
        self._begin: tuple[torch.cuda.Event, float] | None = None
        self._spans: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=2)
        self._stages = stages
        self._slow_ms = SLOW_STAGE_MS if stages else SLOW_STEP_MS
        self._ends: deque[torch.cuda.Event] = deque(maxlen=2 + _STEPS)
        self._began_s = 0.0
        """When the device began the last step, as far as the host knows; not before the host began to launch it."""
        self._expected_end_s = 0.0

    def launching(self) -> None:
        """Call before launching a step. Its device time is measured, for `before_s`, unless stages share the step."""
        if self._cuda and not self._stages:
            begin = torch.cuda.Event(enable_timing=True)
            begin.record()
            self._begin = begin, time.perf_counter()

    def launched(self, *, moves: bool = True) -> None:
        """Call after launching a step. moves: False = it only fetches results, so there is nothing to wait for."""
        if self._cuda:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            if moves:
                self._ends.append(end)
            if self._begin is None:
                launch_s = time.perf_counter()
            else:
                begin, launch_s = self._begin
                self._spans.append((begin, end))
                self._begin = None
            if moves:
                self._began_s = max(launch_s, self._expected_end_s)

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

    def wait(self, is_result_ready: Callable[[], bool] = lambda: False) -> bool:
        """Call before launching a step, or earlier; a result that is ready for delivery, which it returns, ends it."""
        if len(self._ends) < 3:
            return False
        *earlier, before, last = self._ends
        called_s = time.perf_counter()
        idle = before.query()
        before.synchronize()
        # The device began the last step with its first kernel, which a host that launches ahead brings before its turn.
        self._began_s = min(self._began_s, called_s) if idle else time.perf_counter()
        step_ms = min(begin.elapsed_time(end) for begin, end in pairwise([*earlier, before]))
        self._expected_end_s = self._began_s + step_ms / 1e3
        if step_ms < self._slow_ms:
            return False
        until_s = self._expected_end_s - LEAD * self._slow_ms / 1e3
        while not last.query() and (left_s := until_s - time.perf_counter()) > 0:
            if is_result_ready():
                return True
            time.sleep(min(left_s, _POLL_S))
        if last.query():  # else the next step, too, would be expected to end late, and the one behind it
            self._expected_end_s = min(self._expected_end_s, time.perf_counter())
        return False
