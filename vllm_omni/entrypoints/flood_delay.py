# SPDX-License-Identifier: Apache-2.0
"""`FloodDelay`: ASGI middleware by which an address waits for a WebSocket when one of its own was closed as a flood.

A connection's budgets end a flood within milliseconds, but each new connection has them anew, and a handshake and a
burst cost some 8 ms: eight sockets that came again at once took a quarter of a core. Behind a reverse proxy the address
is the one that the proxy forwards and uvicorn trusts (`FORWARDED_ALLOW_IPS`). Knows no route.
Why not a reverse proxy's limit_conn or limit_req: it counts connections, and cannot tell those
that were closed as a flood.
Held by tests/entrypoints/test_flood_delay.py and tests/entrypoints/realtime/test_floods_served.py.
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
"""How much later than asked for a WebSocket of such an address is opened."""
GAP_S: Final = 0.125
"""Between two of them at least: sockets that were closed together come again together."""
MOST_DELAY_S: Final = 4.0
"""However many of them wait."""
MEMORY_S: Final = 3.0
"""For how long after its last closed socket an address waits."""
_MOST_ADDRESSES: Final = 4096


@dataclass
class _Address:
    """closed_s: when a WebSocket of it was last closed as a flood. opens_s: when the newest that waits is opened."""

    closed_s: float
    opens_s: float = 0.0


class FloodDelay:
    """Notes each WebSocket that ends with 1008, whoever of server and application closes it."""

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
