# SPDX-License-Identifier: Apache-2.0
"""The Python calls that a live endpoint makes per chunk are bounded, because their number does not
depend on the machine as time does.
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
    """Stores the event loop that calls it."""

    loop: asyncio.AbstractEventLoop

    async def encode(self, *args: Any) -> AsyncIterator[Any]:
        self.loop = asyncio.get_running_loop()
        async for response in super().encode(*args):
            yield response


class CallCounter:
    """Counts Python calls of one thread, without those of the fake engine."""

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
    [pytest.param(False, 95, id="endless"), pytest.param(True, 210, id="credit")],
)
def test_a_chunk_takes_few_calls(
    endpoint: EndpointServer, engine: LoopEngine, requests: bool, most: int
) -> None:
    """Counts from the engine's result to the socket, and with `credit` also the client's message
    that requests the chunk.
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
    print(f"{calls:.1f} calls per chunk")
    assert abs(counter.calls["_Client.deliver"] - CHUNKS) <= 2
    assert calls < most, counter.calls.most_common(30)
