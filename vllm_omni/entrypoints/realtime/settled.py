# SPDX-License-Identifier: Apache-2.0
"""`settled`: wait for a task without being its owner. Held by tests/entrypoints/realtime/test_settled.py."""

import asyncio
from functools import partial
from typing import Any


async def settled(task: asyncio.Task[Any]) -> None:
    """Return when `task` has ended, however; cancelling the wait leaves the task running.

    As `asyncio.wait` of one task, in a third of the time: this happens for every chunk.
    """
    if not task.done():
        ended = asyncio.get_running_loop().create_future()
        task.add_done_callback(partial(_wake, ended))
        await ended


def _wake(ended: asyncio.Future[None], task: asyncio.Task[Any]) -> None:
    if not ended.done():  # the wait was cancelled
        ended.set_result(None)
