# SPDX-License-Identifier: Apache-2.0
"""`run_flow`: concurrent steps of one request, a bounded stream of events to one reader.

A step is a coroutine function that takes `emit`. All steps run at once; `emit` waits while the reader is `max_pending`
events behind, and so does every step behind it. The first step that raises cancels the others and its exception
reaches the reader, after the events emitted before it. A reader that stops early cancels every step and waits until
they have cleaned up.
Why not `asyncio.TaskGroup` alone: it runs and cancels the steps, but has no bounded stream to a
reader who may stop early.
Held by tests/pipeline/test_flow.py.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

Event = TypeVar("Event")
Emit = Callable[[Any], Awaitable[None]]
Step = Callable[[Emit], Awaitable[None]]


class _End:
    """Put behind the last event."""


async def run_flow(steps: list[Step], max_pending: int = 8) -> AsyncGenerator[Any, None]:
    """Yield the steps' items, in order of emission, until all have returned."""
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
                queue.put_nowait(_End)  # a full queue needs no wake-up: the reader sees that the task is done

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
    """The exception that came first; its cancellation caused the others."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
