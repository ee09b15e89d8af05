# SPDX-License-Identifier: Apache-2.0
"""`ClientThreads`: decodes images and clips on threads, with a limit per client.

A client is an API key or an address. Only a few files per client are decoded at the same time.
Additional files wait, and if too many files are waiting, requests are refused. Clips are decoded on
separate threads, because decoding a clip can take seconds. If a client disconnects, its work is
cancelled.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from vllm_omni.entrypoints.errors import ApiError
from vllm_omni.entrypoints.realtime.connection.connection import client_of

T = TypeVar("T")

_CLIP_THREADS: Final = 2
_IMAGES_PER_CLIENT: Final = 2
_CLIPS_PER_CLIENT: Final = 1
_WAITING_PER_CLIENT: Final = 16
"""Maximum number of images, and of clips, that can be queued for decoding per client. Each file can
be as large as a request body.
"""


async def until_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine, and cancel it if the client disconnects. The request body must already have
    been read.

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


@dataclass
class _Slot:
    """Limit on concurrent decoding for one client."""

    semaphore: asyncio.Semaphore
    """Semaphore that limits how many files are decoded at the same time."""
    num_users: int = 0
    """Number of files that are being decoded or waiting to be decoded."""


class ClientThreads:
    """Runs decoding functions on threads, with a limit per client.

    Args:
        executor: Threads that decode images. The server also uses them for other short tasks.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._clips = ThreadPoolExecutor(_CLIP_THREADS, thread_name_prefix="omni-clips")
        self._slots: dict[tuple[str, str], _Slot] = {}

    async def image(self, request: Request, function: Callable[..., T], *args: Any) -> T:
        """Run an image decoding function on a thread, within the requesting client's limit.

        Raises:
            ApiError: Status 429 if too many files of this client are waiting.
            ClientDisconnect: The client has disconnected.
        """
        return await until_disconnected(
            request, self._run("image", _IMAGES_PER_CLIENT, request, lambda _: function(*args))
        )

    async def clip(self, request: Request, function: Callable[..., T], *args: Any) -> T:
        """Run a clip decoding function on a thread, within the requesting client's limit.

        The function receives an additional last argument: a callable that returns whether the
        client has disconnected.
        """

        def decode(has_left: Callable[[], bool]) -> T:
            return function(*args, has_left)

        return await until_disconnected(
            request, self._run("clip", _CLIPS_PER_CLIENT, request, decode)
        )

    async def _run(
        self, kind: str, most: int, request: Request, decode: Callable[[Callable[[], bool]], T]
    ) -> T:
        async with self._slot((client_of(request), kind), most):
            left = threading.Event()
            work = (self._clips if kind == "clip" else self.executor).submit(decode, left.is_set)
            ended = asyncio.wrap_future(work)
            try:
                return await asyncio.shield(ended)
            except asyncio.CancelledError:
                left.set()
                # If the function is already running, it counts towards the client's limit until it
                # ends.
                if not work.cancel():
                    await asyncio.wait([ended])
                    ended.exception()  # retrieve the exception, so asyncio does not report it
                raise

    @asynccontextmanager
    async def _slot(self, key: tuple[str, str], most: int) -> AsyncIterator[None]:
        turn = self._slots.setdefault(key, _Slot(asyncio.Semaphore(most)))
        if turn.num_users >= most + _WAITING_PER_CLIENT:
            raise ApiError(
                429,
                f"{turn.num_users} of your files are being decoded or wait; try again later",
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
                del self._slots[key]
