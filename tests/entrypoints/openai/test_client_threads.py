# SPDX-License-Identifier: Apache-2.0
"""`ClientThreads` chooses which client's file is decoded next, and cancels the work of a client
that disconnects. These tests decode no files.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from helpers.waits import seconds, until
from starlette.requests import ClientDisconnect, Request

from vllm_omni.entrypoints.errors import ApiError
from vllm_omni.entrypoints.openai.client_threads import ClientThreads


class Client:
    """A client at one address. `leaves` is set when the client disconnects."""

    def __init__(self, address: str) -> None:
        self.leaves = asyncio.Event()
        scope = {"type": "http", "headers": [], "client": (address, 1)}
        self.request = Request(scope, self._receive)

    async def _receive(self) -> dict[str, Any]:
        await self.leaves.wait()
        return {"type": "http.disconnect"}


class Work:
    """Simulated decoding of a clip, which lasts until its client disconnects or `done` is set."""

    def __init__(self) -> None:
        self.started, self.done, self.stopped = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )

    def __call__(self, has_left: Callable[[], bool]) -> str:
        self.started.set()
        while not self.done.wait(0.01):
            if has_left():
                self.stopped.set()
                raise RuntimeError("the client has left")
        return "frames"


def run(test: Callable[[ClientThreads], Coroutine[Any, Any, None]]) -> None:
    async def inner() -> None:
        with ThreadPoolExecutor(4) as executor:
            await asyncio.wait_for(test(ClientThreads(executor)), seconds(20))

    asyncio.run(inner())


def test_clips_of_one_client_leave_a_thread_for_another() -> None:
    """Only one clip per client is decoded at a time, so a thread is left for other clients."""

    async def test(threads: ClientThreads) -> None:
        greedy, other = Client("a"), Client("b")
        works = [Work() for _ in range(4)]
        tasks = [asyncio.create_task(threads.clip(greedy.request, work)) for work in works]
        await until(works[0].started.is_set)
        quick = Work()
        quick.done.set()
        assert await threads.clip(other.request, quick) == "frames"
        assert [work.started.is_set() for work in works] == [True, False, False, False]
        for work in works:
            work.done.set()
        assert await asyncio.gather(*tasks) == ["frames"] * 4

    run(test)


def test_a_client_that_leaves_stops_its_work() -> None:
    async def test(threads: ClientThreads) -> None:
        gone, stays = Client("a"), Client("a")
        first, second, third = Work(), Work(), Work()
        running = asyncio.create_task(threads.clip(gone.request, first))
        await until(first.started.is_set)
        waiting = asyncio.create_task(threads.clip(gone.request, second))
        last = asyncio.create_task(threads.clip(stays.request, third))
        gone.leaves.set()
        await until(third.started.is_set)
        third.done.set()
        assert await last == "frames" and first.stopped.is_set() and not second.started.is_set()
        for task in (running, waiting):
            with pytest.raises(ClientDisconnect):
                await task

    run(test)


def test_a_client_with_too_many_files_is_refused() -> None:
    """A client gets 429 once 17 of its clips are being decoded or waiting. Clips of other clients
    are still accepted.
    """

    async def test(threads: ClientThreads) -> None:
        greedy, work = Client("a"), Work()
        tasks = [asyncio.create_task(threads.clip(greedy.request, work)) for _ in range(17)]
        await until(work.started.is_set)
        with pytest.raises(ApiError) as refused:
            await threads.clip(greedy.request, work)
        assert refused.value.status == 429
        work.done.set()
        assert await threads.clip(Client("b").request, work) == "frames"
        await asyncio.gather(*tasks)
        assert await threads.clip(greedy.request, work) == "frames"

    run(test)


def test_images_do_not_wait_for_clips() -> None:
    async def test(threads: ClientThreads) -> None:
        client, clips = Client("a"), [Work(), Work()]
        tasks = [
            asyncio.create_task(threads.clip(Client(name).request, one))
            for name, one in zip("ab", clips, strict=True)
        ]
        await until(lambda: all(one.started.is_set() for one in clips))
        assert await threads.image(client.request, str.upper, "pixels") == "PIXELS"
        for one in clips:
            one.done.set()
        await asyncio.gather(*tasks)

    run(test)
