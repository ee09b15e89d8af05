# SPDX-License-Identifier: Apache-2.0
"""Encode finished chunks as replies. Each reply is stored as soon as it is encoded."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sized
from typing import Any, Protocol

from vllm_omni.entrypoints.realtime.sessions.run import FinishedChunk, ReplyOptions


class StoreReply(Protocol):
    """Function that stores one of a chunk's replies. It is called on the event loop."""

    def __call__(self, part: int, payload: Sized, is_last: bool) -> None: ...


async def render_replies(
    replies: ReplyOptions,
    chunk: FinishedChunk,
    off_loop: Callable[..., Awaitable[Any]],
    store: StoreReply,
) -> None:
    """Encode a finished chunk, and store its replies.

    The first frames of a chunk can be sent while its last frames are being encoded. If the call is
    cancelled, it still waits for the encoder because the chunk is already part of the session.

    Args:
        replies: Options that determine how the chunk is encoded.
        chunk: Finished chunk to encode.
        off_loop: Function that runs another function on a worker thread.
        store: Function that stores one reply. The last reply is stored after the chunk's trace has
            ended.
    """
    started_ns = time.time_ns()
    loop = asyncio.get_running_loop()

    def encode(store_soon: Callable[[int, Sized], object]) -> tuple[int, Sized | None]:
        """Encode all replies, and store all but the last. Return the index of the last reply and
        the reply itself.
        """
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
