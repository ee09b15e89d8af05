# SPDX-License-Identifier: Apache-2.0
"""Waiting functions for tests, with one scale factor for all times.

`OMNI_TEST_PATIENCE=3` multiplies every time by three, for slow machines. A test waits for a
condition with `wait_until` or `until`. A test that measures time, or that checks that nothing
happens, has no condition to wait for, so it uses `pause`. If the code under test itself measures
the time, the test uses `exactly`, which is not scaled. Tests write deadlines and upper bounds as
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
        condition: Function to call every `every_s` seconds.
        within: Time limit in seconds on an idle machine.
        saying: Function that returns the failure message.

    Raises:
        AssertionError: The condition is not true within the time limit.
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
    """Keep this process alive until the test kills it, but for at most a minute."""
    time.sleep(seconds(60))
