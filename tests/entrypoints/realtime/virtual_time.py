# SPDX-License-Identifier: Apache-2.0
"""`run_in_virtual_time` runs a coroutine so that its waits take no real time but advance the event
loop's clock exactly.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Selector that advances the event loop's clock to the next timer instead of waiting for it."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "nothing is left that could happen"
            self.now_s += max(0.0, timeout)
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s


def run_in_virtual_time(scenario: Coroutine[Any, Any, T]) -> T:
    """Run a scenario that waits only for timers, and not for threads, sockets or processes."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(scenario)
