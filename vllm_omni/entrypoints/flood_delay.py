# SPDX-License-Identifier: Apache-2.0
"""`FloodDelay`: ASGI middleware by which an address waits for a WebSocket when one of its own was closed as a flood.

A connection's budgets end a flood within milliseconds, but each new connection has them anew, and a handshake and a
burst cost some 8 ms: eight sockets that came again at once took a quarter of a core. Behind a reverse proxy the address
is the one that the proxy forwards and uvicorn trusts (`FORWARDED_ALLOW_IPS`). Knows no route.
Held by tests/entrypoints/test_flood_delay.py and tests/entrypoints/realtime/test_floods_served.py.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from websockets.frames import CloseCode

DELAY_S: Final = 1.0
"""How much later than asked for a WebSocket of such an address is opened."""
GAP_S: Final = 0.125
"""Between two of them at least: sockets that were closed together come again together."""
MOST_DELAY_S: Final = 4.0
"""However many of them wait."""
MEMORY_S: Final = 3.0
"""For how long after its last closed socket an address waits."""
_MOST_ADDRESSES: Final = 4096


class FloodDelay:
    """Notes each WebSocket that ends with 1008, whoever of server and application closes it."""

    def __init__(self, app: ASGIApp, clock: Callable[[], float] = time.monotonic) -> None:
        self._app, self._clock = app, clock
        self._closed_s: OrderedDict[str, float] = OrderedDict()
        self._opens_s: dict[str, float] = {}
        """When the newest of an address's waiting WebSockets opens."""

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
        now_s = self._clock()
        if now_s - self._closed_s.get(address, -MEMORY_S) >= MEMORY_S:
            return 0.0
        opens_s = max(now_s + DELAY_S, self._opens_s.get(address, 0.0) + GAP_S)
        self._opens_s[address] = min(opens_s, now_s + MOST_DELAY_S)
        return self._opens_s[address] - now_s

    def _watched(self, address: str, end: str, message: Message) -> Message:
        if message["type"] == end and message.get("code") == CloseCode.POLICY_VIOLATION:
            self._closed_s[address] = self._clock()
            self._closed_s.move_to_end(address)
            if len(self._closed_s) > _MOST_ADDRESSES:
                oldest, _ = self._closed_s.popitem(last=False)
                self._opens_s.pop(oldest, None)
        return message
