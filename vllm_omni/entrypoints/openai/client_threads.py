# SPDX-License-Identifier: Apache-2.0
"""`ClientThreads`: images and clips of clients are decoded on threads that no client can take from all the others.

Of each client, a key or an address, only some files are decoded at once; further ones wait, and too many are refused.
Clips, which may take seconds, have threads of their own. A client that leaves has its work stopped.
Held by tests/entrypoints/openai/test_client_threads.py.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from fastapi import Request

from vllm_omni.entrypoints.openai.errors import ApiError
from vllm_omni.entrypoints.openai.leaving import until_disconnected
from vllm_omni.entrypoints.realtime.connection import client_of

T = TypeVar("T")

_CLIP_THREADS: Final = 2
_IMAGES_PER_CLIENT: Final = 2
_CLIPS_PER_CLIENT: Final = 1
_WAITING_PER_CLIENT: Final = 16
"""Files of a client that may wait, each as large as a body may be."""


@dataclass
class _Turn:
    """num_users: files of one client that are decoded or wait."""

    semaphore: asyncio.Semaphore
    num_users: int = 0


class ClientThreads:
    """executor: threads of images, which the server also uses for other short work."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._clips = ThreadPoolExecutor(_CLIP_THREADS, thread_name_prefix="omni-clips")
        self._turns: dict[tuple[str, str], _Turn] = {}

    async def image(self, request: Request, function: Callable[..., T], *args: Any) -> T:
        """Call `function` for the client of `request`.

        Raises `ApiError` 429, and `ClientDisconnect` when the client has left.
        """
        return await until_disconnected(
            request, self._run("image", _IMAGES_PER_CLIENT, request, lambda _: function(*args))
        )

    async def clip(self, request: Request, function: Callable[..., T], *args: Any) -> T:
        """Likewise, with a last argument for `function`: whether the client has left, to be called often."""

        def decode(has_left: Callable[[], bool]) -> T:
            return function(*args, has_left)

        return await until_disconnected(request, self._run("clip", _CLIPS_PER_CLIENT, request, decode))

    async def _run(self, kind: str, most: int, request: Request, decode: Callable[[Callable[[], bool]], T]) -> T:
        async with self._turn((client_of(request), kind), most):
            left = threading.Event()
            work = (self._clips if kind == "clip" else self.executor).submit(decode, left.is_set)
            ended = asyncio.wrap_future(work)
            try:
                return await asyncio.shield(ended)
            except asyncio.CancelledError:
                left.set()
                if not work.cancel():  # it has begun: the thread is this client's until it ends
                    await asyncio.wait([ended])
                    ended.exception()  # noted as seen: nobody waits for it
                raise

    @asynccontextmanager
    async def _turn(self, key: tuple[str, str], most: int) -> AsyncIterator[None]:
        turn = self._turns.setdefault(key, _Turn(asyncio.Semaphore(most)))
        if turn.num_users >= most + _WAITING_PER_CLIENT:
            raise ApiError(
                429,
                f"{turn.num_users} files of yours are being read or wait; try again later",
                code="too_many_requests",
                retry_after_s=2,
            )
        turn.num_users += 1
        try:
            async with turn.semaphore:
                yield
        finally:
            turn.num_users -= 1
            if turn.num_users == 0:
                del self._turns[key]
