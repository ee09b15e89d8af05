# SPDX-License-Identifier: Apache-2.0
"""`StepPacer`: keeps the host from running ahead of the device, so that an abort still finds a step to stop.

Elsewhere than on CUDA the device has ended a step when its launch returns. Held by tests/worker/test_overlap.py.
"""

import time
from collections import deque

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


class StepPacer:
    """Keeps the host at most one step ahead of the device, and where steps are long by no more than `LEAD` tells.

    So the time between two answers of the host is not that of a step: `before_s` is.
    """

    def __init__(self, device: torch.device, *, stages: bool = False) -> None:
        self._cuda = device.type == "cuda"
        self._begin: torch.cuda.Event | None = None
        self._spans: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=2)
        self._slow_ms = SLOW_STAGE_MS if stages else SLOW_STEP_MS
        self._ends: deque[torch.cuda.Event] = deque(maxlen=3)
        self._launch_s = 0.0
        """When the host began to launch the last step, or launched it, if nobody said that it began."""
        self._expected_end_s = 0.0

    def launching(self) -> None:
        """Call before launching a step whose device time `before_s` shall tell."""
        if self._cuda:
            self._begin = torch.cuda.Event(enable_timing=True)
            self._begin.record()
            self._launch_s = time.perf_counter()

    def launched(self) -> None:
        """Call after launching a step."""
        if self._cuda:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._ends.append(end)
            if self._begin is None:
                self._launch_s = time.perf_counter()
            else:
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
        if len(self._ends) < 3:
            return
        earlier, before, last = self._ends
        idle = before.query()
        before.synchronize()
        step_ms = earlier.elapsed_time(before)
        # The device began the last step with its first kernel, which a host that launches ahead brings before its turn.
        began_s = max(self._launch_s, self._expected_end_s) if idle else time.perf_counter()
        self._expected_end_s = began_s + step_ms / 1e3
        if not hurry and step_ms >= self._slow_ms:
            until_s = self._expected_end_s - LEAD * self._slow_ms / 1e3
            while not last.query() and (left_s := until_s - time.perf_counter()) > 0:
                time.sleep(min(left_s, _POLL_S))
