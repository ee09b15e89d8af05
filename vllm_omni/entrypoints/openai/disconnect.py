# SPDX-License-Identifier: Apache-2.0
"""Cancels the work for a response when its client disconnects."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

T = TypeVar("T")


async def until_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine and cancel it if the client disconnects. The body must have been read.

    Raises:
        ClientDisconnect: The client has disconnected.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, leaving = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait([task, leaving], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        leaving.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
