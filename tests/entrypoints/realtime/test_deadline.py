# SPDX-License-Identifier: Apache-2.0
"""`Deadline`: a time limit that is entered for each chunk and reuses its timer."""

import asyncio

import pytest
from virtual_time import run_in_virtual_time

from vllm_omni.entrypoints.realtime.connection.deadline import Deadline


def test_a_block_that_takes_too_long_is_ended() -> None:
    """The block ends with TimeoutError after `on_expiry` was called, and the deadline can be used
    again.
    """

    async def scenario() -> None:
        reported: list[float] = []
        loop = asyncio.get_running_loop()
        deadline = Deadline(3.0, lambda: reported.append(loop.time()))
        for started_s in (0.0, 3.0):
            with pytest.raises(TimeoutError), deadline:
                await asyncio.sleep(10)
            assert deadline.expired
            assert loop.time() == reported[-1] == started_s + 3.0
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]

    run_in_virtual_time(scenario())


def test_each_block_has_the_whole_time() -> None:
    """The timer of an earlier block does not shorten a later one."""

    async def scenario() -> None:
        deadline = Deadline(3.0)
        for _ in range(7):
            with deadline:
                await asyncio.sleep(2.0)
            await asyncio.sleep(0.5)
        assert not deadline.expired
        started_s = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError), deadline:
            await asyncio.sleep(10)
        assert asyncio.get_running_loop().time() == started_s + 3.0

    run_in_virtual_time(scenario())


def test_a_cancellation_is_not_taken_for_a_timeout() -> None:
    """The task is cancelled even if its time is up at the same moment."""

    async def scenario() -> None:
        deadline = Deadline(3.0)

        async def work() -> None:
            with deadline:
                await asyncio.sleep(10)

        for wait_s in (1.0, 3.0):
            task = asyncio.ensure_future(work())
            await asyncio.sleep(wait_s)
            task.cancel()
            with pytest.raises((asyncio.CancelledError, TimeoutError)):
                await task
            assert task.cancelled() or wait_s == 3.0

    run_in_virtual_time(scenario())


def test_a_block_can_be_expired() -> None:
    """`expire` may be called twice, or between two blocks."""

    async def scenario() -> None:
        deadline = Deadline(3.0)
        loop = asyncio.get_running_loop()
        for delay_s in (1.0, 1.0, 1.5):
            loop.call_later(delay_s, deadline.expire)
        with pytest.raises(TimeoutError), deadline:
            await asyncio.sleep(10)
        assert loop.time() == 1.0
        await asyncio.sleep(1.0)
        with deadline:
            await asyncio.sleep(2.0)
        assert not deadline.expired
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]

    run_in_virtual_time(scenario())


def test_a_closed_deadline_has_no_timer() -> None:
    """The event loop holds no handle of a closed deadline."""

    async def scenario() -> None:
        deadline = Deadline(3.0)
        with deadline:
            await asyncio.sleep(0.1)
        deadline.close()
        loop = asyncio.get_running_loop()
        assert all(handle.cancelled() for handle in loop._scheduled)  # type: ignore[attr-defined]

    run_in_virtual_time(scenario())
