# SPDX-License-Identifier: Apache-2.0
"""A chunk's way through a live door is bounded in Python calls, which any machine counts alike,
as it does not time.
"""

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
from helpers import fake_engine
from helpers.fake_engine import EndpointServer, FakeEngine
from helpers.live_clients import ExtendedClient
from helpers.waits import seconds

CHUNKS = 40


class LoopEngine(FakeEngine):
    """Remembers the event loop that asks it."""

    loop: asyncio.AbstractEventLoop

    async def encode(self, *args: Any) -> AsyncIterator[Any]:
        self.loop = asyncio.get_running_loop()
        async for response in super().encode(*args):
            yield response


class CallCounter:
    """Python calls of one thread, without those that the stand-in for the engine makes."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._engine_depth = 0

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if code.co_filename in (fake_engine.__file__, __file__):
            self._engine_depth = max(
                0, self._engine_depth + (event == "call") - (event == "return")
            )
        elif event == "call" and not self._engine_depth:
            self.calls[code.co_qualname] += 1

    @contextmanager
    def counting(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        def profile(note: Callable[..., None] | None) -> None:
            done = threading.Event()
            loop.call_soon_threadsafe(lambda: (sys.setprofile(note), done.set()))
            assert done.wait(seconds(10))

        profile(self.note)
        try:
            yield
        finally:
            profile(None)


@pytest.fixture
def engine() -> LoopEngine:
    engine = LoopEngine()
    engine.delay_s = 0.01
    return engine


@pytest.mark.parametrize(
    ("requests", "most"),
    [pytest.param(False, 95, id="without end"), pytest.param(True, 210, id="asked for each")],
)
def test_a_chunk_takes_few_calls(
    endpoint: EndpointServer, engine: LoopEngine, requests: bool, most: int
) -> None:
    """From the engine's answer to the socket; with `credit` also the client's message that asks
    for it.
    """
    counter = CallCounter()
    with ExtendedClient(endpoint.port) as client:

        def next_chunk() -> None:
            if requests:
                client.send({"type": "credit", "chunks": 1})
            client.chunk()

        client.init(extensions=["credit"] if requests else ["receipts"])
        assert client.receive()["type"] == "session"
        for _ in range(10):
            next_chunk()
        with counter.counting(engine.loop):
            for _ in range(CHUNKS):
                next_chunk()
    calls = counter.calls.total() / CHUNKS
    print(f"{calls:.1f} calls a chunk")
    assert abs(counter.calls["_Client.deliver"] - CHUNKS) <= 2
    assert calls < most, counter.calls.most_common(30)
