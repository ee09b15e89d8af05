# SPDX-License-Identifier: Apache-2.0
"""`StepPacer`: keeps the host from running ahead of the device, so that an abort still finds a step to stop.

Elsewhere than on CUDA the device has ended a step when its launch returns. Held by tests/worker/test_overlap.py.
"""

from collections import deque

import torch

SLOW_STEP_MS = 50.0
"""From here on the next step is launched only after the last has ended: about 1 % of the device's time for an abort
that takes effect within one step."""
SLOW_STAGE_MS = 150.0
"""The same with pipeline stages, where a step's way through all processes takes three times as long."""


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
