# SPDX-License-Identifier: Apache-2.0
"""`StepPacer`: limits how far the host runs ahead of the device, so that aborts take effect
quickly.

On devices other than CUDA GPUs, a step has finished when its launch returns.
"""

import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise

import torch

SLOW_STEP_MS = 50.0
"""Minimum duration in milliseconds for a step to count as slow. The step after a slow step is
launched only shortly before the slow step ends, so that an abort takes effect within one step. Some
passes at the end of a chunk are launched earlier (roles/single.py)."""
SLOW_STAGE_MS = 150.0
"""Minimum duration in milliseconds for a step to count as slow if there are several pipeline
stages. The value is larger than `SLOW_STEP_MS`, because a step takes three times as long to pass
through all processes.
"""
LEAD = 0.2
"""How long before a slow step's expected end the next step is launched, as a fraction of
`SLOW_STEP_MS` or `SLOW_STAGE_MS` (10 ms of 50 ms). An engine step needs about half of this time to
pass through the processes and launch its first kernel. Without a lead, the device would be idle
during that time.
"""
_POLL_S = 0.001
_STEPS = 3
"""Number of earlier steps used to predict a step's duration. The prediction is the minimum of their
durations, because the first and last steps of a chunk take longer.
"""


class StepPacer:
    """Prevents the host from running more than one step ahead of the device. If steps are slow, the
    host runs ahead only by the time that `LEAD` defines.

    The time between two results on the host is therefore not the duration of a step; use `before_s`
    instead.

    Args:
        device: Device of the steps.
        stages: Whether there are several pipeline stages.
    """

    def __init__(self, device: torch.device, *, stages: bool = False) -> None:
        self._cuda = device.type == "cuda"
        self._start_step: tuple[torch.cuda.Event, float] | None = None
        self._spans: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=2)
        self._stages = stages
        self._slow_ms = SLOW_STAGE_MS if stages else SLOW_STEP_MS
        self._ends: deque[torch.cuda.Event] = deque(maxlen=2 + _STEPS)
        self._started_s = 0.0
        """Estimated time when the last step started on the device. The estimate is never earlier
        than the launch of the step.
        """
        self._expected_end_s = 0.0

    def launching(self) -> None:
        """Record that a step is about to be launched. Call this method before launching a step.

        The device time of the step is measured for `before_s`, unless several stages share the
        step.
        """
        if self._cuda and not self._stages:
            start = torch.cuda.Event(enable_timing=True)
            start.record()
            self._start_step = start, time.perf_counter()

    def launched(self, *, moves: bool = True) -> None:
        """Record that a step has been launched. Call this method after launching a step.

        Args:
            moves: Whether the step advances any chunk. If the step only collects results, there is
                nothing to wait for.
        """
        if self._cuda:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            if moves:
                self._ends.append(end)
            if self._start_step is None:
                launch_s = time.perf_counter()
            else:
                start, launch_s = self._start_step
                self._spans.append((start, end))
                self._start_step = None
            if moves:
                self._started_s = max(launch_s, self._expected_end_s)

    @property
    def before_s(self) -> float | None:
        """Device time in seconds of the step before the last one. None if the time is unknown or if
        that step has not finished.
        """
        if len(self._spans) < 2 or not self._spans[0][1].query():
            return None
        start, end = self._spans[0]
        return float(start.elapsed_time(end)) / 1e3

    @property
    def unfinished(self) -> bool:
        """Whether the device is still executing the last step."""
        return bool(self._spans) and not self._spans[-1][1].query()

    def wait(self, may_continue: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the next step may be launched.

        Args:
            may_continue: Function that is polled while waiting for a slow step. The wait ends when
                the function returns True, for example because a result can be delivered. The host
                stays at most one step ahead of the device in any case.

        Returns:
            Whether `may_continue` ended the wait.
        """
        if len(self._ends) < 3:
            return False
        *earlier, before, last = self._ends
        called_s = time.perf_counter()
        idle = before.query()
        before.synchronize()
        # If the device was busy, it starts the last step now, because the first kernel of that step
        # was enqueued before the device was free.
        self._started_s = min(self._started_s, called_s) if idle else time.perf_counter()
        step_ms = min(start.elapsed_time(end) for start, end in pairwise([*earlier, before]))
        self._expected_end_s = self._started_s + step_ms / 1e3
        if step_ms < self._slow_ms:
            return False
        until_s = self._expected_end_s - LEAD * self._slow_ms / 1e3
        while not last.query() and (left_s := until_s - time.perf_counter()) > 0:
            if may_continue():
                return True
            time.sleep(min(left_s, _POLL_S))
        if last.query():  # prevents a late estimate from delaying the estimates of later steps
            self._expected_end_s = min(self._expected_end_s, time.perf_counter())
        return False
