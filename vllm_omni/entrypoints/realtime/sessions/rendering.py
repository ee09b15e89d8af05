# SPDX-License-Identifier: Apache-2.0
"""Encodes a finished chunk as replies. Each reply is stored as soon as it is encoded."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sized
from typing import Any, Protocol

from vllm_omni.entrypoints.realtime.sessions.run import FinishedChunk, ReplyOptions


class StoreReply(Protocol):
    """Stores one reply of a chunk. Called on the event loop."""

    def __call__(self, part: int, payload: Sized, is_last: bool) -> None: ...


async def render_replies(
    replies: ReplyOptions,
    chunk: FinishedChunk,
    off_loop: Callable[..., Awaitable[Any]],
    store: StoreReply,
) -> None:
    """Encode a chunk and store its replies.

    The first frames are sent while the last ones are encoded. Cancellation waits for the encoder,
    because the chunk is part of the session.

    Args:
        replies: How the chunk becomes replies.
        chunk: The chunk.
        off_loop: Runs a function on a thread.
        store: Stores one reply. The last reply is stored after the trace of the chunk has ended.
    """
    started_ns = time.time_ns()
    loop = asyncio.get_running_loop()

    def encode(store_soon: Callable[[int, Sized], object]) -> tuple[int, Sized | None]:
        """Return the last reply and its index, after all others have been stored."""
        number, last = 0, None
        for payload in replies.render(chunk):
            if last is not None:
                store_soon(number, last)
                number += 1
            last = payload
        return number, last

    def finish(number: int, last: Sized | None) -> None:
        chunk.result.trace.rendered(started_ns)
        if last is not None:
            store(number, last, True)

    if replies.inline:
        finish(*encode(lambda part, payload: store(part, payload, False)))
        return
    rendering = asyncio.ensure_future(
        off_loop(
            encode,
            lambda part, payload: loop.call_soon_threadsafe(store, part, payload, False),
        )
    )
    try:
        await asyncio.shield(rendering)
    finally:
        finish(*await rendering)
