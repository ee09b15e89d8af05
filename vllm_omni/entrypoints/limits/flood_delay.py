# SPDX-License-Identifier: Apache-2.0
"""`FloodDelay`: ASGI middleware that delays new WebSockets of an address after a flood.

A connection's budgets end a flood within milliseconds, but each new connection has a full budget,
and a handshake and a burst cost about 8 ms. Eight sockets that reconnected at once used a quarter
of a core. With a reverse proxy, the address is the forwarded one that uvicorn trusts
(`FORWARDED_ALLOW_IPS`).

Why not a reverse proxy's limit_conn or limit_req: it counts connections and cannot detect that a
connection was closed because of a flood.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from websockets.frames import CloseCode

DELAY_S: Final = 1.0
"""Delay in seconds of a new WebSocket of such an address."""
GAP_S: Final = 0.125
"""Minimum time in seconds between two of them, because sockets that were closed together reconnect
together."""
MOST_DELAY_S: Final = 4.0
"""Maximum delay in seconds, regardless of the number of waiting sockets."""
MEMORY_S: Final = 3.0
"""Seconds after its last closed socket for which an address is delayed."""
_MOST_ADDRESSES: Final = 4096


@dataclass
class _Address:
    """State of one address."""

    closed_s: float
    """Monotonic time of the last WebSocket that was closed as a flood, in seconds."""
    opens_s: float = 0.0
    """Monotonic time at which the last waiting WebSocket opens, in seconds."""


class FloodDelay:
    """Records WebSockets that end with 1008, whether the server or the application closed them."""

    def __init__(self, app: ASGIApp, clock: Callable[[], float] = time.monotonic) -> None:
        self._app, self._clock = app, clock
        self._addresses: OrderedDict[str, _Address] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return
        address = (scope.get("client") or ("local",))[0]
        if (wait_s := self._wait_s(address)) > 0:
            await asyncio.sleep(wait_s)

        async def watched_receive() -> Message:
            return self._watched(address, "websocket.disconnect", await receive())

        async def watched_send(message: Message) -> None:
            await send(self._watched(address, "websocket.close", message))

        await self._app(scope, watched_receive, watched_send)

    def _wait_s(self, address: str) -> float:
        now_s, known = self._clock(), self._addresses.get(address)
        if known is None or now_s - known.closed_s >= MEMORY_S:
            return 0.0
        known.opens_s = min(max(now_s + DELAY_S, known.opens_s + GAP_S), now_s + MOST_DELAY_S)
        return known.opens_s - now_s

    def _watched(self, address: str, end: str, message: Message) -> Message:
        if message["type"] == end and message.get("code") == CloseCode.POLICY_VIOLATION:
            now_s = self._clock()
            self._addresses.setdefault(address, _Address(now_s)).closed_s = now_s
            self._addresses.move_to_end(address)
            if len(self._addresses) > _MOST_ADDRESSES:
                self._addresses.popitem(last=False)
        return message
