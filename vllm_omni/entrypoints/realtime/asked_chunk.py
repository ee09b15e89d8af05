# SPDX-License-Identifier: Apache-2.0
"""`AskedChunk`: a chunk that the engine has been asked for, until it answers. Held by
tests/entrypoints/realtime/test_asked_chunk.py.
"""

import asyncio
from collections.abc import Awaitable, Callable

from vllm_omni.entrypoints.realtime.engine import ChunkResult


class AskedChunk:
    """`task` runs the request from now on. One task may wait for it, and is cancelled without it.

    The request itself wakes whoever waits as it ends: a done-callback of the task would run, and wake, a turn of the
    event loop later, and this happens for every chunk.
    """

    def __init__(self, request: Callable[[], Awaitable[ChunkResult]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] | None = None
        self.task = self._loop.create_task(self._run(request))

    async def _run(self, request: Callable[[], Awaitable[ChunkResult]]) -> ChunkResult:
        try:
            return await request()
        finally:
            if self._ended is not None and not self._ended.done():
                self._ended.set_result(None)

    async def settled(self) -> None:
        """Return when the request has ended, however; a cancellation leaves it running."""
        if not self.task.done():
            self._ended = self._loop.create_future()
            await self._ended
