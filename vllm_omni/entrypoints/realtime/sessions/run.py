# SPDX-License-Identifier: Apache-2.0
"""A request's inputs (`SessionJob`), replies (`SessionRun`) and chunks in the engine
(`ChunksInFlight`), and a session's recent requests (`DeliveryLog`).

A run can outlive the connection that requested it. A run's replies are numbered, and the session
retains them. A client that reconnects can therefore receive replies again or follow a run in
progress. A job's `ChunkSource` determines which chunks are generated. This module does not depend
on message formats or sockets.
"""

import asyncio
import dataclasses
import time
from collections import OrderedDict, deque
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sized,
)
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count, islice
from typing import Any, Final

import msgspec
import numpy as np

from vllm_omni.entrypoints.errors import EndpointError, WebSocketCloseCode
from vllm_omni.entrypoints.realtime.chunk_source import (
    ChunkControls,
    ChunkSource,
    ChunkSpan,
    PlannedChunks,
)
from vllm_omni.entrypoints.realtime.connection.delivery_window import DeliveryWindow
from vllm_omni.entrypoints.realtime.connection.session_engine import ChunkResult
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.entrypoints.realtime.encoding.frames import StampedFrames, stamped_frames
from vllm_omni.entrypoints.realtime.encoding.session_encoders import SessionEncoders
from vllm_omni.entrypoints.telemetry.tracing import ChunkTrace
from vllm_omni.inputs import Output

_REMEMBERED_RUNS: Final = 64

Deliver = Callable[[Any], Awaitable[None]]
"""Function that sends one reply's payload to the client."""


class FinishedChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A finished chunk, with the metadata that its replies require."""

    session_id: str
    """Session id that clients use."""
    request_id: str
    """Request id."""
    sizes: tuple[int, ...]
    """Number of pixel frames in each chunk of the request. For a live request, the tuple contains
    only the size of this chunk.
    """
    number: int
    """Index of this chunk within the request, starting at 0."""
    result: ChunkResult
    """Frames and metadata from the engine."""
    chunk_index: int
    """Index of this chunk within the session, starting at 0."""
    first_frame: int
    """Index of the chunk's first pixel frame within the session."""
    seed: int | None
    """The session's seed. None: the seed is unknown."""
    prompt_applied: bool
    """Whether a new prompt took effect with this chunk."""
    warnings: tuple[str, ...]
    """Warnings for the client. Only the first chunk of a request can have warnings."""
    controls: ChunkControls
    """Controls used to generate the chunk."""
    encoders: SessionEncoders
    """The session's encoders."""

    def stamped_frames(self, fps: float) -> StampedFrames:
        """Return the chunk's frames with their stamps.

        Args:
            fps: Playback rate in frames per second.
        """
        return stamped_frames(
            self.result.frames_THWC,
            chunk_index=self.chunk_index,
            first_frame=self.first_frame,
            fps=fps,
            input_id=self.controls.input_id,
        )


@dataclass(frozen=True, kw_only=True)
class SessionStart:
    """Parameters for starting a session, used if the request's session has not started yet."""

    load_image: Callable[[int, int], np.ndarray] | None = None
    """Function that returns the start image, uint8 `[H, W, 3]`, for a given `(height, width)`. It
    is called on a worker thread. None: the session has no start image.
    """
    images: Mapping[str, Any] = field(default_factory=dict)
    """Named images (`ActionSpace.images`). Each image is a file, a `data:` URL or an array."""
    seed: int | None = None
    """Noise seed. The value -1 selects a random seed. Default: the model's default seed."""
    height: int | None = None
    """Frame height in pixels. Default: the server's height."""
    width: int | None = None
    """Frame width in pixels. Default: the server's width."""
    window_frames: int | None = None
    """Attention window in latent frames. Default: the server's attention window."""
    sink_frames: int | None = None
    """Number of sink frames in the attention window. Default: the server's number."""
    restart: bool = False
    """Whether to discard the session's existing state and restart the session. Default: False."""


@dataclass(frozen=True, kw_only=True)
class ReplyOptions:
    """Options that determine how finished chunks become replies."""

    render: Callable[[FinishedChunk], Iterable[Sized]]
    """Function that encodes a chunk as replies. A reply's `len` is its size in bytes. If `inline`
    is not set, the function is called on a worker thread. A reply may be sent before the next reply
    is encoded.
    """
    inline: bool = False
    """Whether to call `render` on the event loop, for renderers that take less time than a thread
    switch. Default: False.
    """
    keep: bool = True
    """Whether to retain delivered replies, so that a reconnecting client can receive them again.
    Default: True.
    """
    unsent_chunks: int | None = None
    """Maximum number of finished chunks that may wait for the client.

    Default: `EndpointLimits.unsent_chunks`.
    """
    fps: float | None = None
    """The client's playback rate in frames per second. Default: the server's target."""


@dataclass(frozen=True, kw_only=True)
class SessionJob:
    """One request's validated inputs."""

    request_id: str
    """Request id, which is unique within the session."""
    source: ChunkSource
    """Source of the request's chunks and their controls."""
    replies: ReplyOptions
    """Options that determine how finished chunks become replies."""
    start: SessionStart = SessionStart()
    """Parameters used if the request starts the session."""
    digest: bytes = b""
    """Digest of the request's content, which distinguishes a repeated request from a different
    request that has the same id.
    """
    chunk_index: int | None = None
    """Index that the session's next chunk must have. Default: any index is accepted."""
    options: dict[str, Any] = field(default_factory=dict)
    """Model options, which apply to every chunk."""
    output: Output = "rgb"
    """Kind of output to generate. All of a session's requests must use the same kind. Default:
    `rgb` frames.
    """
    trajectory: bool = False
    """Whether results include the latents of each denoise step. Default: False."""


class EncodedReply(msgspec.Struct, frozen=True):
    """An encoded message that belongs to a chunk."""

    chunk_index: int
    """Index of the chunk within the session."""
    part: int
    """Index of the message within its chunk, starting at 0."""
    payload: Any
    """The encoded message."""
    num_bytes: int
    """Size of the message in bytes."""
    num_frames: int = 0
    """Number of pixel frames in the whole chunk if this is the chunk's first message, otherwise 0.
    """
    trace: ChunkTrace | None = None
    """The chunk's trace, which is set only for the chunk's last message. The `transport` span ends
    when that message has been delivered.
    """


@dataclass(eq=False)
class _Follower:
    owner: object
    """Connection that receives the replies."""


class ChunksInFlight(deque[asyncio.Task[ChunkResult]]):
    """A run's chunks in the engine, oldest first."""

    def start(self, chunk: Coroutine[Any, Any, ChunkResult]) -> None:
        self.append(asyncio.get_running_loop().create_task(chunk))

    def take_finished(self) -> list[ChunkResult]:
        """Remove and return the results of all leading chunks that succeeded, up to the first chunk
        that is running or has failed.
        """
        finished = []
        while self and self[0].done() and not self[0].cancelled() and self[0].exception() is None:
            finished.append(self.popleft().result())
        return finished

    def cancel(self) -> None:
        for task in self:
            task.cancel()

    async def wait_for_end(self) -> None:
        await asyncio.wait(self)
        for task in self:  # retrieve every exception so that asyncio does not report it
            if not task.cancelled():
                task.exception()


@dataclass
class HeldBytes:
    """Counter for the total size of the replies that several runs retain."""

    total: int = 0
    """Total size of the replies in bytes."""


@dataclass(eq=False)
class SessionRun:
    """One request's execution: its plan, its replies and its outcome."""

    job: SessionJob
    """Inputs of the request."""
    sizes: tuple[int, ...] = ()
    """Number of pixel frames in each chunk. The value is set before the first chunk starts. The
    tuple is empty for a live run.
    """
    first_chunk: int = 0
    """Index of the run's first chunk within the session."""
    attempt: int = 1
    """Number of attempts, including the current one. An interrupted run may be repeated."""
    completed: int = 0
    """Number of finished chunks."""
    replies: deque[EncodedReply] = field(default_factory=deque)
    """Retained replies, oldest first."""
    num_replies: int = 0
    """Number of replies so far, including dropped replies."""
    first_retained: int = 0
    """Index of the oldest retained reply."""
    delivered: int = 0
    """Number of replies that the current follower has received."""
    finished: bool = False
    """Whether the run has ended."""
    error: EndpointError | None = None
    """Error that the run failed with. None: the run has not failed."""
    task: "asyncio.Task[EndpointError | None] | None" = None
    """Task that generates the chunks."""
    started_s: float = field(default_factory=time.monotonic)
    """Monotonic time in seconds when the last attempt started."""
    controls: deque[ChunkControls] = field(default_factory=deque)
    """Controls of the chunks in flight."""
    retained_bytes: int = 0
    """Size of the retained replies in bytes."""
    held: HeldBytes = field(default_factory=HeldBytes)
    """Counter that several runs share. Its total includes `retained_bytes`."""
    dropped: Callable[[int], None] = lambda num_frames: None
    """Function that is called with the number of frames dropped before delivery."""
    _follower: "_Follower | None" = None
    """Connection that currently receives the replies. None: no connection receives them."""
    _waiting: list[asyncio.Future[None]] = field(default_factory=list)
    """Futures of tasks that are waiting for the next reply, the next delivery or the end of the
    run.
    """

    @property
    def has_follower(self) -> bool:
        return self._follower is not None

    def is_followed_by(self, owner: object) -> bool:
        """Return whether the given connection currently receives the replies."""
        return self._follower is not None and self._follower.owner is owner

    @property
    def num_chunks(self) -> int | None:
        """Number of chunks in the run. None: the run continues until it is cancelled."""
        return len(self.sizes) or self.job.source.num_chunks

    def spans(self, info: StreamInfo) -> Iterator[ChunkSpan]:
        """Yield the chunks to request, starting with the first incomplete chunk."""
        latent_frames = cache(info.latent_frames)  # chunks have only two sizes
        frame = sum(self.sizes[: self.completed])
        latent = sum(map(latent_frames, self.sizes[: self.completed]))
        first_size, later_size = info.first_chunk_frames, info.chunk_frames
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

    def append(self, reply: EncodedReply) -> None:
        self.replies.append(reply)
        self.num_replies += 1
        self._grow(reply.num_bytes)
        if self._waiting:
            self._notify()

    def _grow(self, num_bytes: int) -> None:
        self.retained_bytes += num_bytes
        self.held.total += num_bytes

    def finish(self, error: EndpointError | None = None) -> None:
        """Mark the run as ended, and drop its inputs. If the client repeats the request, it sends
        the inputs again.
        """
        self.finished, self.error = True, error
        self.controls.clear()
        self.job = dataclasses.replace(self.job, source=PlannedChunks(), start=SessionStart())
        self._notify()

    def discard(self) -> None:
        """Drop all replies because no client can request them any more."""
        undelivered = islice(self.replies, max(0, self.delivered - self.first_retained), None)
        self.dropped(sum(reply.num_frames for reply in undelivered))
        self.first_retained = self.num_replies
        self.replies.clear()
        self._grow(-self.retained_bytes)

    def reopen(self, job: SessionJob) -> None:
        """Continue an interrupted run with the repeated request's job.

        Finished chunks and their replies are retained.
        """
        self.job, self.finished, self.error, self.attempt = job, False, None, self.attempt + 1
        self.started_s = time.monotonic()

    def follow(
        self, deliver: Deliver, owner: object, window: DeliveryWindow, start: int = 0
    ) -> Coroutine[Any, Any, bool]:
        """Deliver replies to a connection until the run ends. An earlier follower is superseded
        immediately.

        Args:
            deliver: Function that sends one reply.
            owner: Connection that receives the replies.
            window: Delivery window, which detects a client that reads too slowly.
            start: Index of the first reply to deliver.

        Returns:
            False if a later call for the same owner superseded this call, otherwise True.

        Raises:
            EndpointError: The error that the run failed with, `superseded` if another owner follows
                the run, `resync_required` if replies have been dropped, or `slow_reader` if the
                client reads too slowly.
        """
        me = self._follower = _Follower(owner)
        self.delivered = start
        self._notify()
        return self._follow(me, deliver, window, start)

    async def _follow(
        self, me: "_Follower", deliver: Deliver, window: DeliveryWindow, position: int
    ) -> bool:
        started_ns = time.time_ns()
        try:
            while True:
                if self._follower is not me:
                    if self._follower is not None and self._follower.owner is me.owner:
                        return False
                    raise EndpointError(
                        "superseded",
                        "another connection took this session over",
                        close=WebSocketCloseCode.SUPERSEDED,
                    )
                if position < self.first_retained:
                    raise EndpointError(
                        "resync_required", "earlier replies of this request have been dropped"
                    )
                if position < self.num_replies:
                    reply = self.replies[position - self.first_retained]
                    if reply.part == 0:
                        started_ns = time.time_ns()
                    await window.deliver(
                        deliver(reply.payload), reply.num_frames, partial(self._has_later, reply)
                    )
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
                    await self._notify_waiters()
            if self.error is not None:
                raise self.error
            return True
        finally:
            if self._follower is me:
                self._follower = None
                self._notify()

    def _has_later(self, reply: EncodedReply) -> bool:
        return bool(self.replies) and self.replies[-1].chunk_index != reply.chunk_index

    async def wait_for_reader(self, unsent_chunks: int) -> None:
        """Wait until at most `unsent_chunks` finished chunks are waiting for delivery."""
        while self.num_unsent_chunks > unsent_chunks:
            await self._notify_waiters()

    async def wait_for_follower(self) -> None:
        """Wait until the connection that receives the replies has received all of them or has been
        closed.
        """
        while self.has_follower and self.num_unsent_chunks:
            await self._notify_waiters()

    @property
    def num_unsent_chunks(self) -> int:
        """Number of finished chunks that are waiting for delivery."""
        unsent = self.num_replies - max(self.delivered, self.first_retained)
        if unsent <= 1:
            return unsent
        return len({reply.chunk_index for reply in islice(reversed(self.replies), unsent)})

    def drop_oldest(self) -> int:
        """Drop the oldest reply if it has been delivered or the run has ended.

        Returns:
            Number of bytes freed, or 0 if no reply can be dropped.
        """
        if not self.replies or (not self.finished and self.first_retained >= self.delivered):
            return 0
        oldest = self.replies.popleft()
        if self.first_retained >= self.delivered:
            self.dropped(oldest.num_frames)
        self.first_retained += 1
        self._grow(-oldest.num_bytes)
        return oldest.num_bytes

    def _notify_waiters(self) -> asyncio.Future[None]:
        """Return a future that completes at the next reply, at the next delivery or when the run
        ends.
        """
        changed = asyncio.get_running_loop().create_future()
        self._waiting.append(changed)
        return changed

    def _notify(self) -> None:
        for changed in self._waiting:
            if not changed.done():  # unless cancelled
                changed.set_result(None)
        self._waiting.clear()


class DeliveryLog:
    """A session's recent requests and their replies, for replay and resume.

    The number of requests and their total size in bytes are bounded.
    """

    def __init__(self) -> None:
        self.runs: OrderedDict[str, SessionRun] = OrderedDict()
        """Runs by request id, oldest first."""

    def missed_since(self, last_chunk: int | None, next_chunk: int) -> list[tuple[SessionRun, int]]:
        """Return the replies that must be replayed after a client reconnects.

        Args:
            last_chunk: Index of the last chunk that the client has received. None: the client has
                received no chunk.
            next_chunk: Index of the session's next chunk.

        Returns:
            List of `(run, index)`, where `index` is the index of the run's first reply to deliver.

        Raises:
            EndpointError: `resync_required` if some of these replies have been dropped.
        """
        wanted = 0 if last_chunk is None else last_chunk + 1
        missed: list[tuple[SessionRun, int]] = []
        for run in self.runs.values():
            skipped = sum(reply.chunk_index < wanted for reply in run.replies)
            retained = list(run.replies)[skipped:]
            if retained and retained[0].chunk_index == wanted and retained[0].part == 0:
                missed.append((run, run.first_retained + skipped))
                wanted = retained[-1].chunk_index + 1
            elif not run.finished:
                missed.append((run, run.num_replies))
        if wanted < next_chunk:
            raise EndpointError(
                "resync_required",
                "some replies have been dropped; continue from here",
                next_chunk_index=next_chunk,
            )
        return missed

    async def wait_until_delivered(self) -> None:
        """Wait until every connected client has received all replies of all finished chunks."""
        for run in list(self.runs.values()):
            await run.wait_for_follower()

    def drop_delivered(self, keep_bytes: int) -> None:
        """Drop delivered replies, oldest first, until at most `keep_bytes` bytes remain."""
        total = 0
        # This runs after every chunk, so a generator expression would cost too much.
        for run in self.runs.values():
            total += run.retained_bytes
        for run in self.runs.values():
            while total > keep_bytes and (freed := run.drop_oldest()):
                total -= freed

    def evict_old(self) -> None:
        """Remove the oldest finished requests if there are too many."""
        num_old = len(self.runs) - _REMEMBERED_RUNS
        if num_old <= 0:
            return
        for request_id, run in list(self.runs.items())[:num_old]:
            if run.finished and not run.has_follower:
                self._evict(request_id, run)

    def evict_finished(self) -> None:
        for request_id, run in list(self.runs.items()):
            if run.finished:
                self._evict(request_id, run)

    def discard(self) -> None:
        """Drop all replies because the session has ended."""
        for run in self.runs.values():
            run.discard()

    def _evict(self, request_id: str, run: SessionRun) -> None:
        run.discard()
        del self.runs[request_id]
