# SPDX-License-Identifier: Apache-2.0
"""Baseline for realtime_load.py: the minimum cost of sending the same messages with uvicorn.

The process runs an ASGI application without a framework. Over each connection, the application
repeats the recorded messages of one chunk as often as the model would generate chunks, and stamps
each chunk's due time into its pixels. Messages from clients are read and discarded. `GET /state`
responds as soon as the server is listening.
"""

import asyncio
import gc
import json
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvicorn
from realtime_clients import STAMP

from vllm_omni.entrypoints.websocket import WebSocketOptions

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class BareServer:
    """ASGI application that sends `messages`, the messages of one chunk in order, every `period_s`
    seconds. The last `pixel_bytes` bytes of the longest message are the chunk's pixels.
    """

    def __init__(self, messages: list[bytes], pixel_bytes: int, period_s: float) -> None:
        self._messages = messages
        self._pixels = max(messages, key=len)
        self._stamp_at = len(self._pixels) - pixel_bytes
        self._period_s = period_s

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
            await receive()  # a session starts with its client's first message
            sending = asyncio.create_task(self._send(send))
            while (await receive())["type"] != "websocket.disconnect":
                pass
            sending.cancel()

    async def _send(self, send: Send) -> None:
        deadline_s, number = time.monotonic() + self._period_s, 0
        while True:
            await asyncio.sleep(deadline_s - time.monotonic())
            pixels = bytearray(self._pixels)
            STAMP.pack_into(pixels, self._stamp_at, deadline_s, number)
            for message in self._messages:
                await send(
                    {
                        "type": "websocket.send",
                        "bytes": bytes(pixels) if message is self._pixels else message,
                    }
                )
            deadline_s, number = deadline_s + self._period_s, number + 1


def main() -> None:
    """Run `bare_server.py OPTIONS`, where OPTIONS is a JSON object: print the port, and serve until
    the process is killed.
    """
    options = json.loads(sys.argv[1])
    messages = [
        bytes.fromhex(message) for message in json.loads(Path(options["messages"]).read_text())
    ]
    chunk_frames = options["chunk_frames"]
    pixel_bytes = chunk_frames * options["width"] * options["height"] * 3
    app = BareServer(messages, pixel_bytes, chunk_frames / options["fps"])
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]  # uvicorn's types require a specific dict for each message
        log_level="warning",
        access_log=False,
        loop=options["loop"],
        lifespan="off",
    )
    WebSocketOptions().apply(config)
    gc.collect()
    gc.freeze()
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        print(listener.getsockname()[1], flush=True)
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
