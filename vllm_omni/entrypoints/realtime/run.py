# SPDX-License-Identifier: Apache-2.0
"""`Job` and `Run`: one request: its checked inputs, and its replies so far.

A run outlives the connection that asked for it: its replies are numbered and kept (within the session's journal), so a
client that comes back can have them again, or take over while it still runs. A job's `ChunkSource` says which chunks
it makes. Knows no message format and no sockets.
Held by tests/entrypoints/realtime/{test_session,test_generate_door,test_live_faults}.py.
"""

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count, islice
from typing import Any

import msgspec
import numpy as np

from vllm_omni.entrypoints.realtime.chunk_source import ChunkSource, ChunkSpan, Controls, PlannedChunks
from vllm_omni.entrypoints.realtime.engine import ChunkResult
from vllm_omni.entrypoints.realtime.errors import Close, DoorError
from vllm_omni.entrypoints.realtime.facts import WorldFacts
from vllm_omni.entrypoints.realtime.pace import ReaderPace
from vllm_omni.entrypoints.tracing import ChunkTrace

Deliver = Callable[[Any], Awaitable[None]]
"""Hands one reply's payload to the client."""


class FinishedChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk with all metadata that a door's replies carry.

    sizes: pixel frames of each chunk of the request (of a live one: of this chunk alone); number: chunks before it.
    chunk_index, first_frame: its place in the session.
    """

    session_id: str
    request_id: str
    sizes: tuple[int, ...]
    number: int
    result: ChunkResult
    chunk_index: int
    first_frame: int
    seed: int | None
    prompt_applied: bool
    warnings: tuple[str, ...]
    controls: Controls


@dataclass(frozen=True, kw_only=True)
class WorldStart:
    """How the request's world begins, if it does not yet exist.

    load_image: `(height, width)` -> uint8 `[H, W, 3]`; called off the event loop. height, width: pixels, None = as the
    session or the server has them. seed: -1 = the session draws one. restart: an existing world is given up for this
    one.
    """

    load_image: Callable[[int, int], np.ndarray] | None = None
    seed: int | None = None
    height: int | None = None
    width: int | None = None
    restart: bool = False


@dataclass(frozen=True, kw_only=True)
class ReplyOptions:
    """How finished chunks become replies.

    render: turns a chunk into encoded replies, each with a length in bytes; called off the event loop, unless `inline`
    says that it takes less time than a change of threads. keep: whether delivered replies stay in the session's
    journal. unsent_chunks: finished chunks that may wait for the reader; None = as the limits say. fps: the rate the
    client plays at; None = the server's target.
    """

    render: Callable[[FinishedChunk], Sequence[Sized]]
    inline: bool = False
    keep: bool = True
    unsent_chunks: int | None = None
    fps: float | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """The checked inputs of one request.

    digest: names the content, so that a repeated `request_id` is known to be a repetition. chunk_index: the chunk that
    must be the session's next; None = any. options: of the model, for every chunk.
    """

    request_id: str
    source: ChunkSource
    replies: ReplyOptions
    start: WorldStart = WorldStart()
    digest: bytes = b""
    chunk_index: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


class Reply(msgspec.Struct, frozen=True):
    """One encoded message, `num_bytes` long; `part` counts the messages of its chunk.

    num_frames: of the whole chunk with its first part, 0 with the others. trace: spans of the chunk, set with its last
    part only; the delivery of that part ends the `transport` span.
    """

    chunk_index: int
    part: int
    payload: Any
    num_bytes: int
    num_frames: int = 0
    trace: ChunkTrace | None = None


@dataclass(eq=False)
class _Follower:
    owner: object


@dataclass
class HeldBytes:
    """Size of the replies of several runs that are kept for a reader or in a journal."""

    total: int = 0


@dataclass(eq=False)
class Run:
    """One request's plan, replies and end.

    sizes: pixel frames of its chunks, set when its turn comes (empty for a live run). controls: of the chunks that the
    engine has. completed: chunks done. num_replies: so far. first_kept: replies before this number have been dropped.
    delivered: replies the current follower has. held: where `kept_bytes` counts as well. dropped: called with the
    number of frames that are dropped undelivered.
    """

    job: Job
    sizes: tuple[int, ...] = ()
    first_chunk: int = 0
    attempt: int = 1
    completed: int = 0
    replies: deque[Reply] = field(default_factory=deque)
    num_replies: int = 0
    first_kept: int = 0
    delivered: int = 0
    finished: bool = False
    error: DoorError | None = None
    task: "asyncio.Task[DoorError | None] | None" = None
    started_s: float = field(default_factory=time.monotonic)
    controls: deque[Controls] = field(default_factory=deque)
    kept_bytes: int = 0
    held: HeldBytes = field(default_factory=HeldBytes)
    dropped: Callable[[int], None] = lambda num_frames: None
    _follower: "_Follower | None" = None
    _waiting: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def has_follower(self) -> bool:
        return self._follower is not None

    @property
    def num_chunks(self) -> int | None:
        """Chunks until its end; None = until it is cancelled."""
        return len(self.sizes) or self.job.source.num_chunks

    def spans(self, facts: WorldFacts) -> Iterator[ChunkSpan]:
        """Of the chunks from the first incomplete one on; after the last of a plan there is none to ask for."""
        latent_frames = cache(facts.latent_frames)  # chunks have two sizes
        frame = sum(self.sizes[: self.completed])
        latent = sum(map(latent_frames, self.sizes[: self.completed]))
        first_size, later_size = facts.first_chunk_frames, facts.chunk_frames
        for number in count(self.completed):
            index = self.first_chunk + number
            size = self.sizes[number] if self.sizes else later_size if index else first_size
            span = ChunkSpan(
                chunk_index=index,
                number=number,
                first_frame=frame,
                num_frames=size,
                first_latent=latent,
                num_latents=latent_frames(size),
            )
            frame, latent = frame + size, latent + span.num_latents
            yield span

    def append(self, reply: Reply) -> None:
        self.replies.append(reply)
        self.num_replies += 1
        self._grow(reply.num_bytes)
        if self._waiting:
            self._notify()

    def _grow(self, num_bytes: int) -> None:
        self.kept_bytes += num_bytes
        self.held.total += num_bytes

    def finish(self, error: DoorError | None = None) -> None:
        """Mark the end and drop the inputs: a repeated request sends them again."""
        self.finished, self.error = True, error
        self.controls.clear()
        self.job = dataclasses.replace(self.job, source=PlannedChunks(), start=WorldStart())
        self._notify()

    def discard(self) -> None:
        """Drop every reply: no client can ask for them any more."""
        undelivered = islice(self.replies, max(0, self.delivered - self.first_kept), None)
        self.dropped(sum(reply.num_frames for reply in undelivered))
        self.first_kept = self.num_replies
        self.replies.clear()
        self._grow(-self.kept_bytes)

    def reopen(self, job: Job) -> None:
        """Continue a cut run with the repeated request's job; finished chunks and their replies stay."""
        self.job, self.finished, self.error, self.attempt = job, False, None, self.attempt + 1
        self.started_s = time.monotonic()

    def follow(self, deliver: Deliver, owner: object, pace: ReaderPace, start: int = 0) -> Coroutine[Any, Any, bool]:
        """Deliver every reply from number `start` on until the run ends; an earlier follower is superseded at once.

        owner: the connection. Returns False if a later call of the same owner took over, else True.
        Raises the run's own `DoorError` if it failed, `superseded` if another owner took over, `resync_required` if
        replies it needs are gone, `slow_reader` if `pace` says so.
        """
        me = self._follower = _Follower(owner)
        self.delivered = start
        self._notify()
        return self._follow(me, deliver, pace, start)

    async def _follow(self, me: "_Follower", deliver: Deliver, pace: ReaderPace, position: int) -> bool:
        started_ns = time.time_ns()
        try:
            while True:
                if self._follower is not me:
                    if self._follower is not None and self._follower.owner is me.owner:
                        return False
                    raise DoorError("superseded", "another connection took this session over", close=Close.SUPERSEDED)
                if position < self.first_kept:
                    raise DoorError("resync_required", "earlier replies of this request are no longer kept")
                if position < self.num_replies:
                    reply = self.replies[position - self.first_kept]
                    if reply.part == 0:
                        started_ns = time.time_ns()
                    await pace.hand_over(deliver(reply.payload), reply.num_frames, partial(self._has_later, reply))
                    position += 1
                    if reply.trace is not None:
                        reply.trace.sent(started_ns)
                    if self._follower is me:
                        self.delivered = position
                        if not self.job.replies.keep:
                            self.drop_oldest()
                        if self._waiting:
                            self._notify()
                elif self.finished:
                    break
                else:
                    await self._change()
            if self.error is not None:
                raise self.error
            return True
        finally:
            if self._follower is me:
                self._follower = None

    def _has_later(self, reply: Reply) -> bool:
        return bool(self.replies) and self.replies[-1].chunk_index != reply.chunk_index

    async def wait_for_reader(self, unsent_chunks: int) -> None:
        """Return when at most `unsent_chunks` chunks wait for delivery."""
        while self._num_unsent_chunks() > unsent_chunks:
            await self._change()

    def _num_unsent_chunks(self) -> int:
        unsent = self.num_replies - max(self.delivered, self.first_kept)
        if unsent <= 1:
            return unsent
        return len({reply.chunk_index for reply in islice(reversed(self.replies), unsent)})

    def drop_oldest(self) -> int:
        """Forget the oldest reply if it was delivered; returns the bytes freed (0: nothing to forget)."""
        if not self.replies or (not self.finished and self.first_kept >= self.delivered):
            return 0
        oldest = self.replies.popleft()
        if self.first_kept >= self.delivered:
            self.dropped(oldest.num_frames)
        self.first_kept += 1
        self._grow(-oldest.num_bytes)
        return oldest.num_bytes

    def _change(self) -> asyncio.Future[None]:
        """The next change of what is here, or is delivered."""
        changed = asyncio.get_running_loop().create_future()
        self._waiting.append(changed)
        return changed

    def _notify(self) -> None:
        for changed in self._waiting:
            if not changed.done():  # cancelled
                changed.set_result(None)
        self._waiting.clear()
