# SPDX-License-Identifier: Apache-2.0
"""Waiting in tests, in one unit: `OMNI_TEST_PATIENCE=3` gives everything three times as long, for
slow machines.

A test waits for a condition (`wait_until`, `until`) as long as it takes, `within` at most. Where
nothing can be seen, because the test is that nothing happens, or because time itself is its
subject, it pauses: `pause` at least so long; `exactly` as the clocks of the code under test count,
whatever the patience (the rate of a slow reader, a moment between two timers). Deadlines and upper
bounds are `seconds(...)`. Held by tests/test_suite_layout.py.
"""

import asyncio
import os
import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE = float(os.environ.get("OMNI_TEST_PATIENCE", "1"))
_LOOK_S = 0.005

Seen = TypeVar("Seen")


def seconds(on_a_quiet_machine: float) -> float:
    return on_a_quiet_machine * PATIENCE


def wait_until(
    condition: Callable[[], Seen],
    within: float = 10.0,
    saying: Callable[[], str] = lambda: "the condition did not come true",
    every_s: float = _LOOK_S,
) -> Seen:
    """What `condition` returns once it is true.

    Fails, with what `saying` returns, when it is not in time.
    """
    deadline_s = time.monotonic() + seconds(within)
    while not (seen := condition()):
        assert time.monotonic() < deadline_s, f"{saying()} (within {seconds(within):g} s)"
        time.sleep(every_s)
    return seen


async def until(condition: Callable[[], Seen], within: float = 10.0) -> Seen:
    """`wait_until` in an event loop."""
    deadline_s = time.monotonic() + seconds(within)
    while not (seen := condition()):
        assert time.monotonic() < deadline_s, (
            f"the condition did not come true (within {seconds(within):g} s)"
        )
        await asyncio.sleep(_LOOK_S)
    return seen


def pause(at_least_s: float) -> None:
    time.sleep(seconds(at_least_s))


async def pause_task(at_least_s: float) -> None:
    await asyncio.sleep(seconds(at_least_s))


def exactly(duration_s: float) -> None:
    time.sleep(duration_s)


async def exactly_in_task(duration_s: float) -> None:
    await asyncio.sleep(duration_s)


def stay_until_killed() -> None:
    """Of a process that a test ends; if it does not, the process ends by itself."""
    time.sleep(seconds(60))
