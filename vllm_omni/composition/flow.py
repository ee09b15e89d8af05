# SPDX-License-Identifier: Apache-2.0
"""`run_flow`: runs a request's steps concurrently and puts their events into a bounded queue.

A step is a coroutine function with one argument, `emit`. While `max_pending` events are unread,
`emit` waits, so a slow reader delays the steps. If a step raises an exception, the other steps are
cancelled, and the reader receives the exception after all earlier events. If the reader stops
early, every step is cancelled, and the generator waits until the steps have cleaned up.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

Event = TypeVar("Event")
Emit = Callable[[Any], Awaitable[None]]
Step = Callable[[Emit], Awaitable[None]]


class _End:
    """Marks the end of the queue."""


async def run_flow(steps: list[Step], max_pending: int = 8) -> AsyncGenerator[Any, None]:
    """Run the steps concurrently and yield their events in the order in which they were emitted.

    Args:
        steps: Coroutine functions, each with one argument, `emit`.
        max_pending: Maximum number of events emitted but not yet read.
    """
    queue: asyncio.Queue[Any] = asyncio.Queue(maxsize=max_pending)

    async def supervise() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for step in steps:
                    group.create_task(_call(step, queue.put))
        except BaseExceptionGroup as raised:
            raise _first(raised) from raised
        finally:
            with contextlib.suppress(asyncio.QueueFull):
                # A full queue needs no end marker, because the reader also checks whether the task
                # is done.
                queue.put_nowait(_End)

    task = asyncio.create_task(supervise())
    try:
        while not (task.done() and queue.empty()):
            event = await queue.get()
            if event is not _End:
                yield event
        await task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


async def _call(step: Step, emit: Emit) -> None:
    await step(emit)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first exception, which caused the other steps to be cancelled."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
