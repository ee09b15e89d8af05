# SPDX-License-Identifier: Apache-2.0
"""Steps of one request that run concurrently: event order, limits, failures and disconnects."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from helpers.waits import pause_task, seconds

from vllm_omni.composition.flow import Emit, run_flow


async def read_all(flow: AsyncIterator[Any]) -> list[Any]:
    return [event async for event in flow]


async def read_until(flow: AsyncIterator[Any], message: str) -> list[Any]:
    """Read events slowly until the flow raises `ValueError(message)`; return the events read before
    the exception.
    """
    seen: list[Any] = []

    async def read() -> None:
        async for event in flow:
            await pause_task(0.01)
            seen.append(event)

    with pytest.raises(ValueError, match=message):
        await read()
    return seen


def test_events_arrive_in_order_and_steps_run_concurrently() -> None:
    """Two steps that exchange data both finish, which shows that they run concurrently. Each step's
    events arrive in the order in which the step emits them.
    """

    async def scenario() -> list[Any]:
        ready: asyncio.Queue[int] = asyncio.Queue(maxsize=1)

        async def first(emit: Emit) -> None:
            for number in range(20):
                await ready.put(number)
                await emit(("made", number))

        async def second(emit: Emit) -> None:
            for _ in range(20):
                await emit(("taken", await ready.get()))

        return await read_all(run_flow([first, second], max_pending=2))

    events = asyncio.run(asyncio.wait_for(scenario(), seconds(10)))
    for kind in ("made", "taken"):
        assert [number for name, number in events if name == kind] == list(range(20))


def test_a_slow_reader_blocks_the_steps() -> None:
    """Steps block once the reader has `max_pending` unread events."""

    async def scenario() -> None:
        emitted = 0

        async def eager(emit: Emit) -> None:
            nonlocal emitted
            for number in range(50):
                await emit(number)
                emitted += 1

        read = 0
        async for _ in run_flow([eager], max_pending=3):
            read += 1
            await asyncio.sleep(0)
            assert emitted <= read + 3 + 1
        assert read == 50

    asyncio.run(asyncio.wait_for(scenario(), seconds(10)))


def test_a_failed_step_ends_the_flow_after_its_events() -> None:
    """When one step fails, the other step is cancelled and runs its cleanup code, and the reader
    receives the exception of the step that failed first.
    """
    cleaned: list[str] = []

    async def scenario() -> list[Any]:
        async def fails(emit: Emit) -> None:
            await emit("before")
            await pause_task(0.01)
            raise ValueError("the first")

        async def waits(emit: Emit) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cleaned.append("waits")

        return await read_until(run_flow([waits, fails]), "the first")

    assert asyncio.run(asyncio.wait_for(scenario(), seconds(10))) == ["before"]
    assert cleaned == ["waits"]


def test_a_step_that_fails_while_the_queue_is_full() -> None:
    """When a step fails while the queue is full, the reader receives all emitted events before the
    exception.
    """

    async def scenario() -> list[Any]:
        async def fails(emit: Emit) -> None:
            await emit(1)
            raise ValueError("full")

        return await read_until(run_flow([fails], max_pending=1), "full")

    assert asyncio.run(asyncio.wait_for(scenario(), seconds(10))) == [1]


def test_closing_the_flow_cancels_every_step() -> None:
    cleaned: list[str] = []

    async def scenario() -> None:
        async def endless(emit: Emit) -> None:
            try:
                while True:
                    await emit("more")
            finally:
                await pause_task(0.01)
                cleaned.append("endless")

        flow = run_flow([endless], max_pending=1)
        assert await anext(flow) == "more"
        await flow.aclose()  # type: ignore[attr-defined]
        assert cleaned == ["endless"]

    asyncio.run(asyncio.wait_for(scenario(), seconds(10)))
