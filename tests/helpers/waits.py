# SPDX-License-Identifier: Apache-2.0
"""Functions for waiting in tests, with a common scale for all times.

`OMNI_TEST_PATIENCE=3` multiplies every time by three, for slow machines. A test waits for a
condition with `wait_until` or `until`. A test that verifies that nothing happens, or that measures
time, has no condition to wait for and uses `pause`. If the code under test measures a time itself,
the test uses `exactly`, which is not scaled. Deadlines and upper bounds are written as
`seconds(...)`. tests/test_suite_layout.py verifies that tests contain no bare sleeps.
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
    """Wait until `condition` returns a true value, and return that value.

    Args:
        condition: Called every `every_s` seconds.
        within: Time limit in seconds on an idle machine.
        saying: Returns the failure message.

    Raises:
        AssertionError: The time limit has passed.
    """
    deadline_s = time.monotonic() + seconds(within)
    while not (seen := condition()):
        assert time.monotonic() < deadline_s, f"{saying()} (within {seconds(within):g} s)"
        time.sleep(every_s)
    return seen


async def until(condition: Callable[[], Seen], within: float = 10.0) -> Seen:
    """Wait like `wait_until`, without blocking the event loop."""
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
    """Keep a process alive until the test kills it. After a minute it exits by itself."""
    time.sleep(seconds(60))
