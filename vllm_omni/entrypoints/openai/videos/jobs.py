# SPDX-License-Identifier: Apache-2.0
"""`VideoJobs`: video jobs of this API server process, from acceptance to a terminal state.

A job is accepted immediately. It then waits for one of `max_running_videos` slots and for engine
capacity. A job either completes and leaves its files in the store, or fails with a reason. Jobs
continue when the client disconnects. Cancelling or deleting a job aborts its engine request before
the next denoise step. The workers report a job's progress. Progress never decreases, and it reaches
100 only when the file is complete. This module does not depend on HTTP.

A task queue such as Celery or arq is not used because a job runs in this process's engine and
cannot outlive the process. A broker would add a process without adding durability.
"""

import asyncio
import contextlib
import contextvars
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Executor
from typing import Any, Final, TypeVar

import numpy as np

from vllm_omni.entrypoints.engine.client import OmniEngine
from vllm_omni.entrypoints.errors import DISK_FULL, ApiError
from vllm_omni.entrypoints.openai.engine_requests import VideoPlan, new_engine_id
from vllm_omni.entrypoints.openai.limits import MediaLimits
from vllm_omni.entrypoints.openai.served import ServedModel
from vllm_omni.entrypoints.openai.videos.file import VideoFile
from vllm_omni.entrypoints.openai.videos.store import Ending, JobRecord, MediaStore
from vllm_omni.entrypoints.realtime.connection.connection import ANONYMOUS
from vllm_omni.entrypoints.realtime.connection.session_engine import WORLD_POSES
from vllm_omni.entrypoints.telemetry.metrics import endpoint_metrics, log_event
from vllm_omni.entrypoints.timed_prompts import PromptSchedule
from vllm_omni.inputs import DiffusionParams
from vllm_omni.outputs import RequestFailed
from vllm_omni.runtime.storage import STORAGE_FULL, is_disk_full
from vllm_omni.worlds.start_pose import without_start_pose

logger = logging.getLogger("vllm." + __name__)

ENDPOINT: Final = "videos"
_WATCH_S: Final = 0.1
_PROGRESS_S: Final = 0.4
_END_TIMEOUT_S: Final = 5.0

T = TypeVar("T")


@dataclasses.dataclass(eq=False)
class _Job:
    record: JobRecord
    """Record of the job, which is also written to the store."""
    plan: VideoPlan
    """Video parameters."""
    arrays: dict[str, np.ndarray]
    """Input arrays by name."""
    session_id: str
    """The engine's id for the job's session."""
    num_chunks: int
    """Number of engine requests that the job needs."""
    chunks_done: int = 0
    """Number of engine requests that have finished."""
    ending: Ending | None = None
    """What a client has requested: cancellation or deletion. None: no client has requested either.
    """
    started_s: float | None = None
    """Monotonic time in seconds when the job started. None: the job is still queued."""
    task: asyncio.Task[dict[str, str] | None] | None = None
    """Task that runs the job. The task's result is the job's error, or None if the job succeeded.
    """


class VideoJobs:
    def __init__(
        self,
        engine: OmniEngine,
        served: ServedModel,
        store: MediaStore,
        limits: MediaLimits,
        executor: Executor,
    ) -> None:
        self._engine, self._served, self.store, self._limits = engine, served, store, limits
        self._executor = executor
        self._jobs: dict[str, _Job] = {}
        self._semaphore = asyncio.Semaphore(limits.max_running_videos)
        self._watcher: asyncio.Task[None] | None = None

    @property
    def num_queued(self) -> int:
        return sum(job.record.status == "queued" for job in self._jobs.values())

    @property
    def is_full(self) -> bool:
        return len(self._jobs) >= self._limits.max_running_videos + self._limits.max_queued_videos

    def check_room(self) -> None:
        """Check whether this process can accept another job now.

        Raises:
            ApiError: Status 429 if there are too many jobs.
        """
        if self.is_full:
            endpoint_metrics().request_done(ENDPOINT, "refused", 0.0)
            raise ApiError(
                429,
                f"{len(self._jobs)} video jobs run or wait, the maximum of this server; try again "
                "later",
                code="too_many_jobs",
                retry_after_s=5,
            )

    async def submit(
        self, plan: VideoPlan, arrays: dict[str, np.ndarray], principal: str = ANONYMOUS
    ) -> JobRecord:
        """Accept a client's job, and run it in the background.

        Args:
            plan: Video parameters.
            arrays: Input arrays: `image` for the first frame, or `video` for the clip to edit.
            principal: The client's principal.

        Returns:
            Record of the job.

        Raises:
            ApiError: Status 429 if there are too many jobs.
        """
        self.check_room()
        sampling = plan.sampling
        record = JobRecord(
            id=self.store.new_id(),
            owner=self.store.owner,
            model=sampling.model,
            prompt=sampling.prompt or "",
            size=f"{sampling.width}x{sampling.height}",
            seconds=plan.seconds,
            fps=plan.fps,
            num_frames=plan.num_frames,
            seed=sampling.seed,
            created_s=time.time(),
            principal=principal,
        )
        num_chunks = 1 if self._served.world is None else sum(1 for _ in self._chunks(plan))
        self.store.write(record)  # raises if the disk is full, before the job exists
        job = self._jobs[record.id] = _Job(record, plan, arrays, new_engine_id(), num_chunks)
        job.task = asyncio.create_task(self._run(job))
        job.task.add_done_callback(lambda task: self._ended(job, task))
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch(), context=contextvars.Context())
        self._count()
        await self._off_loop(self.store.prune)
        return record

    async def end(
        self, media_id: str, ending: Ending, principal: str = ANONYMOUS
    ) -> JobRecord | None:
        """Stop a client's job if it is still running.

        Args:
            media_id: Job id.
            ending: How to end the job. `delete` also removes it.
            principal: The client's principal.

        Returns:
            Latest record of the job, or None if the client has no job with this id.
        """
        record = self.store.read_record(media_id, principal)
        if record is None:
            return None
        job = self._jobs.get(media_id)
        if job is not None and job.task is not None:
            job.ending = ending
            job.task.cancel()
            await asyncio.wait([job.task], timeout=_END_TIMEOUT_S)
        elif not record.is_terminal:
            self.store.request_stop(media_id, ending)  # another process owns the job
        elif ending == "delete":
            self.store.delete(media_id)
        return (
            job.record if job is not None else self.store.read_record(media_id, principal) or record
        )

    # -- one job -----------------------------------------------------------------------------------

    async def _run(self, job: _Job) -> dict[str, str] | None:
        """Run a job. Return its error, or None if its files are complete."""
        try:
            async with self._semaphore:
                await self._generate(job)
        except RequestFailed as failure:
            return {"code": failure.code, "message": failure.message}
        except OSError as error:
            if is_disk_full(error):
                logger.warning("video job %s: the disk is full", job.record.id)
                return {"code": STORAGE_FULL, "message": DISK_FULL}
            logger.exception("video job %s could not be written", job.record.id)
            return {
                "code": "storage",
                "message": "the video could not be stored; the server's log has details",
            }
        except Exception:
            logger.exception("video job %s failed", job.record.id)
            return {
                "code": "engine_error",
                "message": "internal error; the server's log has details",
            }
        return None

    def _ended(self, job: _Job, task: "asyncio.Task[dict[str, str] | None]") -> None:
        """Record the outcome of a job when its task has ended.

        This method is a done-callback because a task cancelled before its first step never runs its
        own cleanup.
        """
        if not task.cancelled():
            self._finish(job, task.result())
        elif job.ending is not None:
            self._finish(job, {"code": "cancelled", "message": "the job was cancelled"})
        else:
            self._finish(job, {"code": "server_stopped", "message": "the server has stopped"})

    def _finish(self, job: _Job, error: dict[str, str] | None) -> None:
        """Record the terminal state of a job, or delete the job if a client has requested deletion.
        This method does not raise, because no caller would handle an exception.
        """
        record = job.record
        record.completed_s = time.time()
        record.expires_s = record.completed_s + self._limits.media_ttl_s
        record.error = error
        record.status = "completed" if error is None else "failed"
        record.progress = 100 if error is None else record.progress
        del self._jobs[record.id]
        try:
            ending = job.ending or self.store.stop_requested(record.id)
            if ending == "delete":
                self.store.delete(record.id)
            else:
                self.store.write_when_possible(record)
        except OSError:
            logger.exception("video job %s could not be deleted", record.id)
        status = "completed" if error is None else "cancelled" if job.ending else "failed"
        endpoint_metrics().request_done(ENDPOINT, status, record.completed_s - record.created_s)
        self._count()
        log_event(
            "video_job_ended",
            id=record.id,
            status=status,
            code=error["code"] if error is not None else None,
            frames=record.num_frames,
            size=record.size,
            lasted_s=record.completed_s - record.created_s,
            inference_s=record.inference_time_s,
            file_bytes=record.file_bytes,
        )

    async def _generate(self, job: _Job) -> None:
        """Run a job's engine requests and write its files."""
        log_event(
            "video_job_started", id=job.record.id, waited_s=time.time() - job.record.created_s
        )
        stem = self.store.path(job.record.id, "mp4").with_suffix("")
        job.started_s = time.monotonic()
        file: VideoFile | None = None
        try:
            async with contextlib.aclosing(self._frames(job)) as parts:
                async for frames_THWC, fps in parts:
                    if file is None:
                        file = VideoFile(stem, fps, job.plan.num_frames)
                        job.record.fps = fps
                        job.record.size = f"{frames_THWC.shape[2]}x{frames_THWC.shape[1]}"
                    await self._off_loop(file.write_frames, frames_THWC)
            if file is None:
                raise RequestFailed("engine_error", "the model returned no frames")
            job.record.file_bytes = await self._off_loop(file.finish)
        except BaseException:
            if file is not None:
                file.abandon()
            raise
        job.record.num_frames = file.num_frames
        job.record.seconds = f"{file.num_frames / job.record.fps:g}"
        job.record.inference_time_s = round(time.monotonic() - job.started_s, 3)

    async def _frames(self, job: _Job) -> AsyncGenerator[tuple[np.ndarray, float]]:
        """Yield the video's frames in order, as `(frames_THWC, fps)` pairs."""
        plan, arrays = job.plan, job.arrays
        if self._served.world is None:
            params = plan.sampling.params(job.session_id, num_frames=plan.num_frames, fps=plan.fps)
            meta, results = await self._request(job, params, arrays)
            yield results["frames"][: plan.num_frames], float(meta.get("fps", plan.fps))
            return
        left = plan.num_frames
        try:
            for params in self._chunks(plan, job.session_id):
                meta, results = await self._request(
                    job, params, arrays if params.chunk_index == 0 else {}
                )
                frames_THWC = results["frames"][:left]
                if (poses := meta.get(WORLD_POSES)) is not None:
                    retained = self._served.world.latent_frames(len(frames_THWC))
                    job.record.world_poses = [*(job.record.world_poses or ()), *poses[:retained]]
                left -= len(frames_THWC)
                yield frames_THWC, plan.fps
        finally:
            await self._close_session(job.session_id)

    def _chunks(self, plan: VideoPlan, session_id: str = "-") -> Iterator[DiffusionParams]:
        """Yield the requests for a world model, one per chunk, until the video is long enough."""
        world = self._served.world
        assert world is not None
        left, latent_start = plan.num_frames, 0
        timed = PromptSchedule(plan.prompts, plan.fps)
        for index, size in enumerate(world.chunk_sizes(first=True)):
            if left <= 0:
                return
            prompt = timed.take_prompt(index, plan.num_frames - left)
            left -= size
            count = world.latent_frames(size)
            actions = plan.actions[latent_start : latent_start + count]
            latent_start += count
            first: dict[str, Any] = {}
            if index:
                first = dict.fromkeys(("prompt", "seed", "height", "width"))
            if prompt is not None:
                first["prompt"] = prompt
            yield plan.sampling.params(
                session_id,
                one_shot=False,
                chunk_index=index,
                options=without_start_pose(plan.sampling.options)
                if index
                else plan.sampling.options,
                actions=[*actions, *([] for _ in range(count - len(actions)))]
                if world.actions.has_controls
                else None,
                **first,
            )

    async def _request(
        self, job: _Job, params: DiffusionParams, arrays: dict[str, np.ndarray]
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Run one of a job's engine requests, waiting while the engine has no capacity.

        Raises:
            RequestFailed: The request failed, or the model returned no frames.
        """
        sent_s = time.monotonic()
        meta, results = await self._engine.run_when_room(
            params,
            arrays,
            timeout_s=self._limits.request_timeout_s,
            wait_s=self._limits.queue_timeout_s,
        )
        if "frames" not in results or len(results["frames"]) == 0:
            raise RequestFailed("engine_error", "the model returned no frames")
        endpoint_metrics().stages(ENDPOINT, meta.get("timings_ms", {}), time.monotonic() - sent_s)
        job.chunks_done += 1
        self._set_progress(job, 0, 1)
        return meta, results

    async def _close_session(self, session_id: str) -> None:
        try:
            await asyncio.shield(self._engine.close_session(session_id))
        except RequestFailed as failure:
            logger.warning("the engine did not close a video's session: %s", failure)

    # -- progress ----------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Update the progress of all jobs, and end jobs that a client has cancelled or deleted
        through another process.
        """
        requested_s = 0.0
        while self._jobs:
            for job in list(self._jobs.values()):
                ending = self.store.stop_requested(job.record.id)
                if ending is not None and job.ending is None and job.task is not None:
                    job.ending = ending
                    job.task.cancel()
            if time.monotonic() - requested_s >= _PROGRESS_S and any(
                job.started_s for job in self._jobs.values()
            ):
                with contextlib.suppress(RequestFailed):  # the requests themselves will fail
                    progress = await self._engine.progress()
                    for job in self._jobs.values():
                        if job.session_id in progress:
                            self._set_progress(job, *progress[job.session_id])
                requested_s = time.monotonic()
            await asyncio.sleep(_WATCH_S)

    def _set_progress(self, job: _Job, steps_done: int, num_steps: int) -> None:
        record = job.record
        share = (job.chunks_done + steps_done / max(1, num_steps)) / job.num_chunks
        percent = max(record.progress, min(99, int(100 * share)))
        if record.is_terminal or (percent == record.progress and record.status == "in_progress"):
            return
        record.status, record.progress = "in_progress", percent
        with contextlib.suppress(OSError):  # a full disk is reported when the video is written
            self.store.write(record)
        self._count()

    def _count(self) -> None:
        queued = self.num_queued
        waiting = endpoint_metrics().waiting
        waiting.labels(ENDPOINT, "queued").set(queued)
        waiting.labels(ENDPOINT, "in_progress").set(len(self._jobs) - queued)

    async def _off_loop(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function on the executor's threads.

        If the call is cancelled, it still waits for the thread because a thread cannot be
        interrupted.
        """
        future = asyncio.get_running_loop().run_in_executor(self._executor, function, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise
