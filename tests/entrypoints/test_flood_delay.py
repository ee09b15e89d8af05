# SPDX-License-Identifier: Apache-2.0
"""The next WebSocket of an address is delayed after a flood, and other addresses are not
affected.
"""

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from vllm_omni.entrypoints.limits import flood_delay
from vllm_omni.entrypoints.limits.flood_delay import MEMORY_S, FloodDelay

CLIENT, NEIGHBOUR = "10.0.0.1", "10.0.0.2"


class Clock:
    """`now_s` in seconds, and `slept`, the delays so far."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.slept = 100.0, list[float]()
        monkeypatch.setattr(flood_delay.asyncio, "sleep", self._sleep)

    def __call__(self) -> float:
        return self.now_s

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Server:
    """An application with the middleware. `_code` and `_by_application` say how its next WebSocket
    ends.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._delay = FloodDelay(self._app, clock)
        self._code, self._by_application = 1000, False

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._by_application:
            await send({"type": "websocket.close", "code": self._code})
        else:
            assert (await receive())["code"] == self._code

    def connect(
        self,
        address: str | None,
        code: int = 1000,
        *,
        by_application: bool = False,
        kind: str = "websocket",
    ) -> float:
        """Return the delay before the application gets the connection."""
        self._code, self._by_application = code, by_application
        before = sum(self._clock.slept)

        async def receive() -> Message:
            return {"type": "websocket.disconnect", "code": code}

        async def send(message: Message) -> None:
            assert message["code"] == code

        scope: dict[str, Any] = {
            "type": kind,
            "client": None if address is None else (address, 1234),
        }
        asyncio.run(self._delay(scope, receive, send))
        return sum(self._clock.slept) - before


@pytest.mark.parametrize("by_application", [False, True])
def test_the_next_socket_of_a_flooding_address_waits(clock: Clock, by_application: bool) -> None:
    server = Server(clock)
    assert server.connect(CLIENT, 1008, by_application=by_application) == 0
    assert server.connect(NEIGHBOUR) == 0
    assert server.connect(CLIENT) == flood_delay.DELAY_S
    assert server.connect(CLIENT, kind="http") == 0
    clock.now_s += MEMORY_S
    assert server.connect(CLIENT) == 0


def test_simultaneous_sockets_open_one_after_the_other(clock: Clock) -> None:
    """Eight sockets at once would have eight times the effect. The delay is bounded."""
    server = Server(clock)
    server.connect(CLIENT, 1008)
    waits_s = [server.connect(CLIENT) for _ in range(40)]
    assert waits_s[:3] == [flood_delay.DELAY_S + number * flood_delay.GAP_S for number in range(3)]
    assert max(waits_s) == flood_delay.MOST_DELAY_S


@pytest.mark.parametrize("code", [1000, 1001, 1011, 4008])
def test_other_close_codes_cause_no_delay(clock: Clock, code: int) -> None:
    server = Server(clock)
    for by_application in (False, True):
        server.connect(CLIENT, code, by_application=by_application)
        assert server.connect(CLIENT) == 0


def test_sockets_without_an_address_share_the_delay(clock: Clock) -> None:
    """A server on a Unix socket gets no address from its proxy."""
    server = Server(clock)
    server.connect(None, 1008)
    assert server.connect(None) == flood_delay.DELAY_S


def test_the_number_of_stored_addresses_is_bounded(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest is evicted, so an attack from many addresses takes no memory."""
    monkeypatch.setattr(flood_delay, "_MOST_ADDRESSES", 3)
    server = Server(clock)
    for number in (0, 1, 0, 2, 3):
        server.connect(f"10.0.0.{number}", 1008)
    assert [server.connect(f"10.0.0.{number}") > 0 for number in range(4)] == [
        True,
        False,
        True,
        True,
    ]
