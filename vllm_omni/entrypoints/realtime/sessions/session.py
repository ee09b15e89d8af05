# SPDX-License-Identifier: Apache-2.0
"""`Session`: the state of one client's session, that is, its requests, its position and its engine
state.

All endpoints share this module, which does not depend on message formats or sockets. An endpoint
submits a `SessionJob` to a `Session`, follows the returned `SessionRun`, and delivers its replies.
`session_manager.py` contains the table of sessions.

Invariants:
- At most one of a session's requests is running, and at most one more request is waiting.
- At most `chunks_in_flight` of a session's chunks are in the engine.
- A restarted session gets a new engine id, so results for the old session never reach it.
- A session stays in the manager's table for exactly as long as it has engine state or a request.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sized
from functools import partial
from typing import Final

import numpy as np

from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.realtime.chunk_source import ChunkControls, ChunkSpan
from vllm_omni.entrypoints.realtime.connection.images import load_named_images
from vllm_omni.entrypoints.realtime.connection.play_clock import PlayClock, PlayDeadline
from vllm_omni.entrypoints.realtime.connection.session_engine import ChunkResult
from vllm_omni.entrypoints.realtime.encoding.session_encoders import SessionEncoders
from vllm_omni.entrypoints.realtime.sessions.pause import (
    Destination,
    PauseSlot,
    SessionPause,
)
from vllm_omni.entrypoints.realtime.sessions.rendering import render_replies
from vllm_omni.entrypoints.realtime.sessions.run import (
    ChunksInFlight,
    DeliveryLog,
    EncodedReply,
    FinishedChunk,
    SessionJob,
    SessionRun,
)
from vllm_omni.entrypoints.realtime.sessions.session_host import SessionHost, SessionKey
from vllm_omni.entrypoints.realtime.spectators.audience import Audience
from vllm_omni.entrypoints.telemetry.metrics import SessionMeter
from vllm_omni.entrypoints.telemetry.tracing import tracing
from vllm_omni.inputs import DiffusionParams
from vllm_omni.runtime import log_context
from vllm_omni.seeds import RANDOM_SEED, chosen_seed
from vllm_omni.worlds.start_pose import START_POSE, without_start_pose

logger = logging.getLogger("vllm." + __name__)

_MAX_WAITING: Final = 2  # one request runs, and one waits


def new_session_id(server_name: str | None = None) -> str:
    """Return a new session id that cannot be guessed. A client that knows the id can continue the
    session.

    Args:
        server_name: Value of `omni.server_name`, which becomes the prefix of the id.
    """
    token = secrets.token_urlsafe(16)
    return token if server_name is None else f"{server_name}.{token}"


class Session:
    """A client's session. This class is not thread-safe; use it from a single event loop."""

    def __init__(
        self, key: SessionKey, manager: "SessionHost[Session]", client: str, endpoint: str
    ) -> None:
        self.key, self.session_id = key, key[1]
        self.meter = SessionMeter(endpoint)
        self.trace = tracing().session(key[1], endpoint)
        self.client = client
        """Client whose `sessions_per_client` limit and quotas apply to the session."""
        self.allowance = manager.quotas.allowance_of(client)
        self.allowance.open_session()
        self._closed = False
        self._manager = manager
        self.engine_id = new_session_id()
        self.started = False
        self.next_chunk = 0
        self.next_frame = 0
        self.height, self.width = manager.info.height, manager.info.width
        self.prompt: str | None = None
        self.seed: int | None = None
        self.in_step = True
        """Whether `next_chunk` is known to match the engine's position. After an abort, the engine
        may be one chunk ahead.
        """
        self.connections: set[object] = set()
        """Open connections that have used this session. The endpoints add and remove them."""
        self.last_used_s = time.monotonic()
        self.pinged_s = self.last_used_s
        """Monotonic time in seconds of the client's last ping."""
        self.delivery_log = DeliveryLog()
        self.encoders = SessionEncoders(manager.implementations)
        """Encoders for the session's frames, which persist across requests."""
        self.audience = Audience(manager)
        """The session's spectators."""
        self._clock = PlayClock()
        self.steering = asyncio.Lock()
        """Lock that is held while an input takes effect and while another server takes over the
        session. The lock ensures that the transferred controls are complete.
        """
        self.stream_state: Callable[[], bytes | None] = lambda: None
        """Until the client's request starts on this server, this function returns the controls of a
        live stream that was moved to this server.
        """
        self.destination: Destination | None = None
        """Server that the session has been moved to. None: the session is on this server."""
        self.is_visible = True
        """Whether clients may use the session. The value is False while the session is being moved
        to this server.
        """
        self.is_settled = True
        """Whether it is certain that no other server holds the session. A session that is not
        settled is neither saved nor moved again, so there are never two copies of it.
        """
        self.protected_until_s = 0.0
        """Monotonic time in seconds until which the session is neither evicted nor closed."""
        self._next_request = asyncio.Lock()
        self._pauses = PauseSlot(self._next_request)
        self._waiting = 0
        self._holds = 0

    @property
    def is_busy(self) -> bool:
        return self._waiting + self._holds > 0

    @property
    def idle_s(self) -> float:
        """Time in seconds since the last request, or 0 while a request is running."""
        return 0.0 if self.is_busy else time.monotonic() - self.last_used_s

    def on_removed(self, reason: str) -> None:
        """End the session's audience, its use of the client's quota, its metrics and its trace
        spans. Idempotent.

        The manager calls this method when it removes the session from its table. The method does
        not free the state in the engine; `free_engine_state` does.
        """
        if self._closed:
            return
        self._closed = True
        self.audience.end()
        self.allowance.close_session()
        self.meter.close(reason)
        self.trace.close(reason)

    @contextlib.contextmanager
    def keep_alive(self) -> Iterator[None]:
        """Protect the session from eviction for the duration of the `with` block, and then remove
        it from the table if it has neither state nor requests.
        """
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            self._manager.remove_if_empty(self)

    # -- pauses ------------------------------------------------------------------------------------

    def pause(
        self, work: Callable[[SessionPause], Awaitable[Destination | None]]
    ) -> "asyncio.Task[Destination | None]":
        """Run work between two of the session's chunks.

        Args:
            work: Coroutine function that runs while none of the session's requests is in the
                engine. It returns the session's new server, or None if the session stays. If `work`
                raises an exception, the session stays.

        Returns:
            A task that returns the result of the work.

        Raises:
            EndpointError: `session_busy` if another pause is pending or running.
        """
        pause = self._pauses.request(work)
        pause.wait_until_delivered = self.delivery_log.wait_until_delivered
        return self._manager.spawn(self._hold(pause))

    async def _hold(self, pause: SessionPause) -> Destination | None:
        with self.keep_alive():
            return await self._pauses.wait(pause)

    async def _pause_run(self, pause: SessionPause, run: SessionRun) -> None:
        """Pause a running request, and run the pause's work.

        Raises:
            EndpointError: `moved` or `session_lost` if the session is no longer on this server.
        """
        pause.stream_state = run.job.source.state
        await self._pauses.run(pause)
        self._check_present()
        error = None if pause.done.cancelled() else pause.done.exception()
        if isinstance(error, EndpointError) and error.code == "session_lost":
            raise EndpointError(error.code, error.message, **error.details)

    def _check_present(self) -> None:
        """Check that the session is still on this server.

        Raises:
            EndpointError: `moved` if the session continues on another server.
        """
        if self.destination is not None:
            raise self.destination.as_error()

    def leave(self, destination: Destination) -> None:
        """Free the session's state after the session has moved to another server.

        Undelivered replies are retained for a client that reconnects to this server.
        """
        self.destination = destination
        self._manager.session_left(self)
        self._manager.engine_session_ended(self.engine_id)
        self._manager.close_engine_session(self.engine_id)
        self.engine_id = new_session_id()
        self.started = False

    # -- requests ----------------------------------------------------------------------------------

    def submit(self, job: SessionJob) -> SessionRun:
        """Start a request and return its run, or return the run of an earlier request that has the
        same id.

        A run that is in progress or has succeeded is returned as is. An interrupted run continues
        where it was interrupted.

        Raises:
            EndpointError: `moved` if the session continues on another server, `request_id_conflict`
                if a different request has the same id, `session_busy` if one request is already
                waiting, or `draining` if the server accepts no new work.
        """
        self.last_used_s = time.monotonic()
        self._check_present()
        run = self.delivery_log.runs.get(job.request_id)
        if run is not None and run.job.digest != job.digest:
            raise EndpointError(
                "request_id_conflict",
                "this request_id belongs to another request; use a new one",
                param="request_id",
            )
        if run is not None and (not run.finished or run.error is None):
            return run
        self._manager.drain.check()
        if self._waiting >= _MAX_WAITING:
            raise EndpointError(
                "session_busy",
                "one request of this session runs and one waits; wait for a response",
            )
        if run is not None and run.completed:
            run.reopen(job)
        else:
            attempt = run.attempt + 1 if run is not None else 1
            run = self.delivery_log.runs[job.request_id] = SessionRun(
                job, attempt=attempt, held=self._manager.held, dropped=self.meter.frames_dropped
            )
            self._trim_delivery_log()
            self.delivery_log.evict_old()
        if self.stream_state() is not None:  # inputs may take effect before the request starts
            self.stream_state = job.source.state
        self._waiting += 1
        run.task = self._manager.spawn(self._produce(run))
        run.task.add_done_callback(lambda task: self._ended(run, task))
        return run

    def cancel(self, runs: Iterable[SessionRun] | None = None) -> None:
        """Cancel runs with a `cancelled` error, and abort their chunks in the engine.

        Args:
            runs: Runs of this session to cancel. Default: all runs.
        """
        for run in list(self.delivery_log.runs.values()) if runs is None else runs:
            if not run.finished and run.task is not None and not run.task.cancelling():
                run.task.cancel()  # a second cancel would interrupt the cleanup

    async def _produce(self, run: SessionRun) -> EndpointError | None:
        log_context.bind(session_id=self.session_id)
        try:
            async with self._next_request:
                await self._generate(run)
        except EndpointError as failure:
            return failure
        except Exception:
            logger.exception("request %s failed", run.job.request_id)
            return EndpointError("engine_error", "internal error; the server's log has details")
        return None

    def _ended(self, run: SessionRun, task: "asyncio.Task[EndpointError | None]") -> None:
        """Record a run's outcome when its task has ended.

        This method is a done-callback because a task cancelled before its first step never runs its
        own cleanup.
        """
        if task.cancelled():
            error: EndpointError | None = EndpointError(
                "cancelled", "the request was cancelled", next_chunk_index=self.next_chunk
            )
        else:
            error = task.result()
        self._waiting -= 1
        self.last_used_s = time.monotonic()
        run.finish(error)
        self._manager.remove_if_empty(self)

    async def _generate(self, run: SessionRun) -> None:
        """Generate a run's chunks, and render their results in order.

        Up to `chunks_in_flight` chunks are in the engine. A live run keeps only as many chunks in
        flight as are needed to keep the engine busy, because controls should be sampled as late as
        possible. The next chunk is requested before the current chunk is rendered and sent.
        """
        limits, info, drain = self._manager.limits, self._manager.info, self._manager.drain
        source, unsent_chunks = run.job.source, run.job.replies.unsent_chunks
        self._check_present()
        self.stream_state = lambda: None  # from now on, the pause provides the controls
        drain.check()  # checked before a restart can discard the session's state
        self.allowance.check_chunk()
        self.meter.request_started()
        start_images, warnings = await self._start(run)
        planned, num_chunks = len(run.sizes), run.num_chunks
        # A live run is charged for each chunk separately.
        self.allowance.charge_chunks(max(0, planned - run.completed))
        in_flight = ChunksInFlight()
        spans = run.spans(info)
        most_in_flight = source.most_in_flight(info, limits)
        unsent_chunks = limits.unsent_chunks if unsent_chunks is None else unsent_chunks

        def fill() -> bool:
            """Request as many chunks as allowed. Return True if a quota prevents a live run's next
            chunk.
            """
            # Until a result has confirmed the engine's position, request only one chunk at a time.
            while (
                len(in_flight) < (most_in_flight if self.in_step else 1)
                and source.ready
                and not drain.is_draining
                and self._pauses.pending is None
            ):
                started = run.completed + len(in_flight)
                if started == num_chunks:
                    break
                if started >= planned and not self.allowance.take_chunk():
                    return True
                span = next(spans)
                controls = source.sample(span)
                run.controls.append(controls)
                in_flight.start(self._request_chunk(run, span, start_images, controls))
            return False

        try:
            while run.completed != num_chunks:
                if not in_flight and self._pauses.pending is not None:
                    await self._pause_run(self._pauses.pending, run)
                if not in_flight and not source.ready:
                    await drain.unless_draining(
                        source.wait_until_ready(), self._pauses.requested.wait()
                    )
                is_held_back = fill()
                if not in_flight and drain.is_draining and self._pauses.pending is None:
                    break
                if not in_flight:
                    if is_held_back:
                        self.allowance.check_chunk()
                    continue  # the quota allows a chunk again, or the client has paused
                async with asyncio.timeout(limits.chunk_timeout_s):
                    await asyncio.wait([in_flight[0]])
                result = in_flight.popleft().result()
                chunk = self._advance(run, result, warnings)
                fill()  # the engine works while this chunk is rendered and sent
                await self._render(run, chunk)
                most_unsent = 0 if self._manager.is_over_budget else unsent_chunks
                if run.num_unsent_chunks > most_unsent:  # otherwise, create no tasks for the wait
                    await drain.unless_draining(
                        run.wait_for_reader(most_unsent), self._pauses.requested.wait()
                    )
        except TimeoutError:
            await self._abort(run, in_flight)
            raise EndpointError(
                "timeout", f"a chunk took longer than {limits.chunk_timeout_s:g} s and was dropped"
            ) from None
        except BaseException as error:
            refused = isinstance(error, EndpointError) and error.code not in (
                "cancelled",
                "engine_error",
            )
            if isinstance(error, EndpointError) and not refused:
                self.in_step = False  # the engine ended the chunk without reporting its position
            if isinstance(error, EndpointError) and self.destination is None:
                self.meter.chunks_aborted(error.code)
            await self._abort(run, in_flight, refused)
            raise
        if drain.is_draining and run.completed != num_chunks:
            # Save immediately, because closing a live connection frees its session.
            await drain.save(self)
            drain.check(next_chunk_index=self.next_chunk)

    async def _start(self, run: SessionRun) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
        """Prepare a run: check the session's position, plan the chunks and load the start images.

        A session that restarts is freed only after these checks. If the engine refuses the restart,
        the session must be started again.

        Returns:
            `(images, warnings)`. `images` contains the start images, which are sent as the
            request's input tensors. If the session does not start with this run, `images` is empty.
            `warnings` contains warnings for the client, for example that an input is ignored.
        """
        job, start, info = run.job, run.job.start, self._manager.info
        if run.completed:
            if self.in_step and self.next_chunk != run.first_chunk + run.completed:
                raise EndpointError(
                    "resync_required",
                    "the session has moved on since this request",
                    next_chunk_index=self.next_chunk,
                )
            return {}, ()
        starts_session = start.restart or not self.started
        in_step, next_chunk = (True, 0) if start.restart else (self.in_step, self.next_chunk)
        if in_step and job.chunk_index not in (None, next_chunk):
            raise EndpointError(
                "out_of_order",
                f"chunk_index {job.chunk_index} arrived, the session's next chunk is {next_chunk}",
                param="chunk_index",
                expected=next_chunk,
            )
        if starts_session:
            if (
                start.load_image is None
                and not start.restart
                and self._manager.was_evicted(self.key)
            ):
                raise EndpointError(
                    "session_evicted", "the session was closed to make room; start it again"
                )
            info.check_image(start.load_image is not None, "image")
            info.check_images(start.images)
        run.first_chunk = next_chunk if job.chunk_index is None else job.chunk_index
        run.sizes = job.source.plan(info, self._manager.limits, starts_session=starts_session)
        warnings = []
        size = (start.height or self.height, start.width or self.width)
        if not starts_session:
            if size != (self.height, self.width):
                raise EndpointError(
                    "unsupported_size",
                    f"{size[1]}x{size[0]} arrived, the session's frames are "
                    f"{self.width}x{self.height}; reset it first",
                    param="extra_body",
                )
            if start.load_image is not None or start.images:
                warnings.append(
                    "image ignored: the session has started; send restart to start again"
                )
            if start.seed not in (None, RANDOM_SEED, self.seed):
                warnings.append("seed ignored: it is fixed when a session starts")
            return {}, tuple(warnings)
        info.check_size(*size)
        limits, images = self._manager.limits, {}
        if start.images:
            images = await self._manager.off_loop(load_named_images, start.images, limits)
        if start.load_image is not None:
            images["image"] = await self._manager.off_loop(start.load_image, *size)
        if self.started:
            self.free_engine_state()
        await self._manager.wait_for_closed_sessions()
        self.height, self.width = size
        self.prompt, self.seed = None, chosen_seed(start.seed)
        untrained = (
            None if info.card is None else info.card.untrained_size(width=size[1], height=size[0])
        )
        return images, () if untrained is None else (untrained,)

    async def _request_chunk(
        self,
        run: SessionRun,
        span: ChunkSpan,
        start_images: dict[str, np.ndarray],
        controls: ChunkControls,
    ) -> ChunkResult:
        """Request one of a run's chunks from the engine. `start_images` contains the input tensors
        for the session's first chunk.

        Raises:
            EndpointError: The engine refused or aborted the chunk.
        """
        job = run.job
        arrays: dict[str, np.ndarray] = {}
        if controls.camera is not None:
            arrays |= {
                "poses": controls.camera.poses_N44,
                "intrinsics": controls.camera.intrinsics_N4,
            }
        is_start = not self.started and span.number == 0
        if is_start:
            arrays |= start_images
        # After an abort, only the engine has the session's current position. In that case, a new
        # request accepts any position, but a resumed request, or a request that names its chunk,
        # requires that chunk's position.
        insists = self.in_step or run.attempt > 1 or job.chunk_index is not None
        due = self._due(run, span) if self._manager.info.by_deadline else None
        params = DiffusionParams(
            session_id=self.engine_id,
            chunk_index=span.chunk_index if insists else None,
            prompt=controls.prompt if is_start or controls.prompt != self.prompt else None,
            seed=self.seed if is_start else None,
            height=self.height if is_start else None,
            width=self.width if is_start else None,
            window_frames=job.start.window_frames if is_start else None,
            sink_frames=job.start.sink_frames if is_start else None,
            actions=None if controls.actions is None else list(controls.actions),
            deadline_s=None if due is None else due.in_s,
            chunk_period_s=None if due is None else due.period_s,
            lora=None if controls.lora is None else list(controls.lora),
            output=job.output,
            trajectory=job.trajectory,
            options=without_start_pose(job.options)
            if span.number and START_POSE in job.options
            else job.options,
        )
        trace = self.trace.chunk(span.chunk_index)
        try:
            result = await self._manager.engine.generate(params, arrays, trace)
        except BaseException as error:
            trace.failed(error)
            if isinstance(error, EndpointError) and (
                error.code == "unknown_session"
                or (error.code == "out_of_order" and not self.in_step)
            ):
                raise self._lost(error) from error
            raise
        trace.finished(result.meta)
        return result

    def _due(self, run: SessionRun, span: ChunkSpan) -> PlayDeadline:
        """Return a chunk's deadline, for engines that schedule by deadline."""
        info = self._manager.info
        return self._clock.schedule_chunk(
            span.num_frames, run.job.replies.fps or info.target_fps or info.fps, time.monotonic()
        )

    def _lost(self, error: EndpointError) -> EndpointError:
        """Return the error to send if the engine does not have the session or has it at a different
        position. If the engine does not have the session, its state on this server is also cleared.
        """
        if error.code == "unknown_session":
            self.free_engine_state(in_engine=False)
            return EndpointError(
                "session_evicted", "the engine has closed this session; send it again with an image"
            )
        return EndpointError(
            "resync_required",
            "a chunk was finished after it was cancelled; send a new request to continue from "
            "there",
        )

    def _advance(
        self, run: SessionRun, result: ChunkResult, warnings: tuple[str, ...]
    ) -> FinishedChunk:
        """Update the session after a chunk has been committed, and return the finished chunk."""
        job, number = run.job, run.completed
        index = int(result.meta.get("chunk_index", self.next_chunk))
        first_frame = int(result.meta.get("first_frame", self.next_frame))
        if number == 0:
            run.first_chunk = index
        controls = run.controls.popleft()
        job.source.note_result(result.meta)
        prompt_applied = controls.prompt is not None and (
            not self.started or controls.prompt != self.prompt
        )
        self.prompt = controls.prompt if prompt_applied else self.prompt
        self.started, self.in_step = True, True
        num_frames = len(result.frames_THWC)
        self.next_chunk, self.next_frame = index + 1, first_frame + num_frames
        timings_ms = result.meta.get("timings_ms", {})
        self.meter.chunk_done(num_frames, self._manager.info.fps, timings_ms, result.wall_ms / 1e3)
        run.completed += 1
        return FinishedChunk(
            session_id=self.session_id,
            request_id=job.request_id,
            sizes=run.sizes or (num_frames,),
            number=number,
            result=result,
            chunk_index=index,
            first_frame=first_frame,
            seed=self.seed,
            prompt_applied=prompt_applied,
            warnings=warnings if number == 0 else (),
            controls=controls,
            encoders=self.encoders,
        )

    async def _render(self, run: SessionRun, chunk: FinishedChunk) -> None:
        """Encode a finished chunk, and store its replies."""
        store = partial(self._keep, run, chunk)
        await render_replies(run.job.replies, chunk, self._manager.off_loop, store)

    def missed_since(self, last_chunk: int | None) -> list[tuple[SessionRun, int]]:
        """Return the replies after `last_chunk` that must be replayed, as
        `DeliveryLog.missed_since` does.

        Raises:
            EndpointError: `resync_required` if some of these replies have been dropped.
        """
        return self.delivery_log.missed_since(last_chunk, self.next_chunk)

    def _trim_delivery_log(self, has_grown: bool = True) -> None:
        if has_grown:
            self.delivery_log.drop_delivered(self._manager.limits.delivery_log_bytes)
        if self._manager.is_over_budget:
            self._manager.trim()

    def _keep(
        self, run: SessionRun, chunk: FinishedChunk, part: int, payload: Sized, is_last: bool
    ) -> None:
        """Store one of a chunk's replies. If it is the last reply, also send the chunk to the
        spectators.
        """
        num_frames = len(chunk.result.frames_THWC) if part == 0 else 0
        trace = chunk.result.trace if is_last else None
        reply = EncodedReply(chunk.chunk_index, part, payload, len(payload), num_frames, trace)
        run.append(reply)
        self.allowance.charge_bytes(reply.num_bytes)
        if not is_last:
            return
        if self.audience:
            fps = run.job.replies.fps or self._manager.info.fps
            self.audience.publish(chunk.stamped_frames(fps), fps, self.encoders)
        self._trim_delivery_log(run.job.replies.keep)

    async def _abort(
        self, run: SessionRun, in_flight: ChunksInFlight, refused: bool = False
    ) -> None:
        """Process a run's finished chunks, cancel its other chunks, and update `in_step`.

        Args:
            run: Run that ends.
            in_flight: The run's chunks in the engine, oldest first.
            refused: Whether the engine refused an earlier chunk, in which case no chunk in
                `in_flight` was committed.
        """
        responded = in_flight.take_finished()
        in_flight.cancel()
        if in_flight:
            self.meter.chunks_aborted("cancelled", len(in_flight))
        for result in responded:
            await self._render(run, self._advance(run, result, ()))
        if in_flight:
            await in_flight.wait_for_end()
            self.in_step = self.in_step and refused
        if not self.started and not refused and self.destination is None:
            self.free_engine_state()  # the first chunk may have been committed

    # -- the engine's state ------------------------------------------------------------------------

    def free_engine_state(self, in_engine: bool = True) -> None:
        """Free the session's state in the engine. The next request must start the session again.

        Args:
            in_engine: Whether the engine may still hold the state.
        """
        self._manager.engine_session_ended(self.engine_id)
        if in_engine:
            with self.trace.current():
                self._manager.close_engine_session(self.engine_id)
        self.engine_id = new_session_id()
        self.started, self.in_step = False, True
        self.next_chunk = self.next_frame = 0
        self.prompt = self.seed = None
        self.encoders.reset()
        self.audience.reset()
        self.delivery_log.evict_finished()

    async def stop(self) -> None:
        """Cancel all requests, but retain the session's state."""
        with self.keep_alive():
            self.cancel()
            async with self._next_request:
                pass

    async def reset(self) -> None:
        """Cancel all requests, and free the session's state.

        If no other request is waiting, the session is removed from the table.
        """
        with self.keep_alive():
            self.cancel()
            async with self._next_request:
                if self.started:
                    self.free_engine_state()

    async def fork(self, new: "Session") -> None:
        """Copy the session's state into `new` between two chunks.

        Raises:
            EndpointError: `missing_image` if the session has no state yet.
        """
        with self.keep_alive(), new.keep_alive():
            async with self._next_request, new._next_request:
                self._check_present()
                if not self.started:
                    raise EndpointError(
                        "missing_image", "the session has not started, so it cannot be branched"
                    )
                try:
                    await self._manager.engine.fork_session(self.engine_id, new.engine_id)
                except BaseException:
                    new.free_engine_state()  # the engine, or some ranks, may have created the copy
                    raise
                new.started, new.in_step = True, self.in_step
                new.next_chunk, new.next_frame = self.next_chunk, self.next_frame
                new.height, new.width = self.height, self.width
                new.prompt, new.seed = self.prompt, self.seed
