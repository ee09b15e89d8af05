# SPDX-License-Identifier: Apache-2.0
"""`run_flow`: runs the steps of a request concurrently and puts their events into a bounded queue.

A step is a coroutine function with one argument, `emit`. All steps run concurrently. `emit` waits
while `max_pending` events have not been read, so a slow reader delays the steps. The first step
that raises an exception cancels the others, and the reader receives the exception after all earlier
events. A reader that stops early cancels every step and waits until the steps have cleaned up.
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
    """Run the steps concurrently and yield their events in order of emission.

    Args:
        steps: Coroutine functions, each with the argument `emit`.
        max_pending: Maximum number of events that have been emitted but not yet read.
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
    """Return the first exception, which caused the cancellation of the other steps."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
