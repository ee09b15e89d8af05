# SPDX-License-Identifier: Apache-2.0
"""Video jobs with an engine that responds instantly: chunks of a world model, waiting for capacity,
cancellation, failures, and limits.
"""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers.instant_engine import InstantEngine, Results
from helpers.waits import pause_task, seconds, until

from vllm_omni.actions import CAMERA_SPACE
from vllm_omni.entrypoints.errors import ApiError
from vllm_omni.entrypoints.media.mp4 import decode_mp4
from vllm_omni.entrypoints.openai.engine_requests import plan_video
from vllm_omni.entrypoints.openai.limits import MediaLimits
from vllm_omni.entrypoints.openai.protocol import VideoRequest, read_request
from vllm_omni.entrypoints.openai.served import ServedModel
from vllm_omni.entrypoints.openai.videos.jobs import VideoJobs
from vllm_omni.entrypoints.openai.videos.routes import as_video
from vllm_omni.entrypoints.openai.videos.store import JobRecord, MediaStore
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.models.capabilities import Capabilities
from vllm_omni.outputs import RequestFailed


def served(world: bool) -> ServedModel:
    info = (
        StreamInfo(
            height=32, width=48, actions=msgspec.structs.replace(CAMERA_SPACE, image="optional")
        )
        if world
        else None
    )
    tasks: Any = (
        ("world", "text_to_video", "image_to_video")
        if world
        else ("text_to_video", "image_to_video")
    )
    return ServedModel(("m",), Capabilities(tasks=tasks, frame_stride=4), 48, 32, 48 * 32, 4, info)


def run(
    tmp_path: Path,
    engine: InstantEngine,
    work: Callable[[VideoJobs], Coroutine[Any, Any, None]],
    world: bool = True,
    **limits: Any,
) -> None:
    async def main() -> None:
        bounds = MediaLimits(media_dir=str(tmp_path), **limits)
        with ThreadPoolExecutor(2) as executor:
            jobs = VideoJobs(engine, served(world), MediaStore(bounds), bounds, executor)
            await asyncio.wait_for(work(jobs), seconds(30))

    asyncio.run(main())


async def submit(
    jobs: VideoJobs, world: bool = True, image: bool = False, **fields: Any
) -> JobRecord:
    request = read_request(VideoRequest, {"prompt": "p", **fields})
    arrays = {"image": np.zeros((32, 48, 3), np.uint8)} if image else {}
    return await jobs.submit(plan_video(request, served(world), image), arrays)


async def end_of(jobs: VideoJobs, job_id: str) -> JobRecord:
    def ended() -> JobRecord | None:
        record = jobs.store.read_record(job_id)
        assert record is not None
        return record if record.is_terminal else None

    record = await until(ended)
    assert record is not None
    return record


def test_a_world_is_requested_chunk_after_chunk_in_one_session(tmp_path: Path) -> None:
    """The chunks of a world model's video are requested one after another in one session. The first
    request contains the prompt, seed, size and image. Every request contains its keys, or idle
    entries once the script has ended. The session is closed at the end.
    """
    engine = InstantEngine()

    async def work(jobs: VideoJobs) -> None:
        keys = [["w"]] * 4
        record = await submit(jobs, image=True, num_frames=25, seed=7, camera_actions=keys)
        record = await end_of(jobs, record.id)
        assert (record.status, record.num_frames, record.progress, record.size) == (
            "completed",
            25,
            100,
            "48x32",
        )
        assert len(decode_mp4(jobs.store.path(record.id, "mp4").read_bytes())[0]) == 25

    run(tmp_path, engine, work)
    (first, with_first), (second, with_second), (third, _) = engine.requests
    assert (first.prompt, first.seed, first.height, with_first) == ("p", 7, 32, ("image",))
    assert (second.prompt, second.seed, second.height, with_second) == (None, None, None, ())
    assert [params.chunk_index for params, _ in engine.requests] == [0, 1, 2]
    assert [params.actions for params in (first, second, third)] == [
        [["w"]] * 3,
        [["w"], [], []],
        [[]] * 3,
    ]
    assert {params.session_id for params, _ in engine.requests} == set(engine.closed)
    assert not first.one_shot


def test_only_the_first_chunk_has_the_start_pose(tmp_path: Path) -> None:
    """Only the first chunk request contains the start pose, whereas every request contains the
    other model options.
    """
    engine = InstantEngine()
    start = {"x_m": 1.0, "z_m": 2.0, "heading_degrees": 90.0}

    async def work(jobs: VideoJobs) -> None:
        record = await submit(
            jobs, num_frames=21, extra_params={"start_pose": start, "camera_scale": 0.1}
        )
        assert (await end_of(jobs, record.id)).status == "completed"

    run(tmp_path, engine, work)
    scale = {"camera_scale": 0.1}
    assert [params.options for params, _ in engine.requests] == [
        {"start_pose": start, **scale},
        scale,
    ]


def test_a_video_of_a_known_pose_reports_the_world_poses(tmp_path: Path) -> None:
    """A video job reports one world pose per latent frame, or none if the camera's pose in the
    world is unknown.
    """

    class PosedEngine(InstantEngine):
        async def run_request(self, params: DiffusionParams, arrays: Any) -> Results:
            meta, results = await super().run_request(params, arrays)
            if params.op == "generate":
                meta["world_poses"] = [
                    [float(params.chunk_index), float(row), 0.0, 0.0] for row in range(3)
                ]
            return meta, results

    async def work(jobs: VideoJobs) -> None:
        record = await end_of(jobs, (await submit(jobs, num_frames=17)).id)
        poses = as_video(record).world_poses
        assert poses is not None
        assert [pose[:2] for pose in poses] == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1]]

    async def unposed(jobs: VideoJobs) -> None:
        assert (
            as_video(await end_of(jobs, (await submit(jobs, num_frames=9)).id)).world_poses is None
        )

    run(tmp_path, PosedEngine(), work)
    run(tmp_path, InstantEngine(), unposed)


def test_a_timed_prompt_acts_from_its_chunk(tmp_path: Path) -> None:
    """A timed prompt takes effect at the first chunk that starts at or after its time. At 16 frames
    per second, the third chunk starts at 1.31 s.
    """
    engine = InstantEngine()

    async def work(jobs: VideoJobs) -> None:
        record = await submit(jobs, num_frames=45, prompts=[{"prompt": "snow", "seconds": 1}])
        assert (await end_of(jobs, record.id)).status == "completed"

    run(tmp_path, engine, work)
    assert [params.prompt for params, _ in engine.requests] == ["p", None, "snow", None]


def test_a_single_video_is_one_request(tmp_path: Path) -> None:
    """A video from a model without sessions is requested with a single one-shot request that
    contains all fields.
    """
    engine = InstantEngine()

    async def work(jobs: VideoJobs) -> None:
        record = await submit(jobs, world=False, image=True, num_frames=17, fps=8)
        assert (await end_of(jobs, record.id)).seconds == "2.125"

    run(tmp_path, engine, work, world=False)
    ((params, arrays),) = engine.requests
    assert (params.one_shot, params.num_frames, params.fps, params.prompt) == (True, 17, 8.0, "p")
    assert arrays == ("image",) and engine.closed == []


def test_a_job_waits_for_a_full_engine(tmp_path: Path) -> None:
    """A job waits while the engine is full: it runs after the engine has refused it twice with
    `capacity`.
    """
    engine = InstantEngine()
    engine.failures = [RequestFailed("capacity", "full"), RequestFailed("capacity", "full")]

    async def work(jobs: VideoJobs) -> None:
        record = await submit(jobs, num_frames=9)
        assert (await end_of(jobs, record.id)).status == "completed"

    run(tmp_path, engine, work)
    assert len(engine.requests) == 3


def test_a_job_that_finds_no_room_in_time_fails(tmp_path: Path) -> None:
    """A job that does not get capacity in time fails with the `capacity` code."""
    engine = InstantEngine()
    engine.failures = [RequestFailed("capacity", "full")] * 100

    async def work(jobs: VideoJobs) -> None:
        record = await end_of(jobs, (await submit(jobs, num_frames=9)).id)
        assert record.error == {"code": "capacity", "message": "full"}

    run(tmp_path, engine, work, queue_timeout_s=0.3)


def test_a_failure_in_a_later_chunk_closes_the_session_and_leaves_no_file(tmp_path: Path) -> None:
    """After a failure in a later chunk, the job reports the model's error, its session is closed,
    and no file is left.
    """
    engine = InstantEngine()
    failing = [None, RequestFailed("non_finite", "NaN")]
    response = engine.run_request

    async def sometimes(params: DiffusionParams, arrays: Any) -> Results:
        if params.op == "generate" and (failure := failing.pop(0)) is not None:
            raise failure
        return await response(params, arrays)

    engine.run_request = sometimes  # type: ignore[method-assign]

    async def work(jobs: VideoJobs) -> None:
        record = await end_of(jobs, (await submit(jobs, num_frames=21)).id)
        assert (record.status, record.error) == ("failed", {"code": "non_finite", "message": "NaN"})
        assert not jobs.store.path(record.id, "mp4").exists()

    run(tmp_path, engine, work)
    assert len(engine.closed) == 1


@pytest.mark.parametrize("from_elsewhere", [False, True])
@pytest.mark.parametrize("ending", ["cancel", "delete"])
def test_ending_a_job_cancels_its_request(
    tmp_path: Path, ending: Any, from_elsewhere: bool
) -> None:
    """Ending a job cancels its engine request: immediately if the job runs in this process, and
    through the store if it runs in another process.
    """
    engine = InstantEngine()

    async def work(jobs: VideoJobs) -> None:
        engine.release = asyncio.Event()
        record = await submit(jobs, num_frames=9)
        await until(lambda: engine.requests)
        if from_elsewhere:
            jobs.store.request_stop(record.id, ending)
        else:
            await jobs.end(record.id, ending)
        await until(lambda: engine.closed)
        assert engine.cancelled == 1
        if ending == "delete":
            assert jobs.store.read_record(record.id) is None
        else:
            ended = await end_of(jobs, record.id)
            assert ended.error is not None and ended.error["code"] == "cancelled"

    run(tmp_path, engine, work)


def test_a_waiting_job_that_is_deleted_never_reaches_the_engine(tmp_path: Path) -> None:
    """A waiting job that is deleted never reaches the engine, even if it is deleted right after it
    has been accepted.
    """
    engine = InstantEngine()

    async def work(jobs: VideoJobs) -> None:
        engine.release = asyncio.Event()
        running = await submit(jobs, num_frames=9, prompt="running")
        waiting = await submit(jobs, num_frames=9, prompt="waiting")
        await jobs.end(waiting.id, "delete")
        engine.release.set()
        await end_of(jobs, running.id)

    run(tmp_path, engine, work, max_running_videos=1)
    assert {params.prompt for params, _ in engine.requests} == {"running"}


def test_jobs_are_bounded(tmp_path: Path) -> None:
    """At most `max_running_videos` jobs run and `max_queued_videos` jobs wait. Additional jobs get
    429 until a job has ended.
    """
    engine = InstantEngine()

    async def work(jobs: VideoJobs) -> None:
        engine.release = asyncio.Event()
        records = [await submit(jobs, num_frames=9) for _ in range(3)]
        with pytest.raises(ApiError) as refused:
            await submit(jobs, num_frames=9)
        assert refused.value.status == 429 and refused.value.retry_after_s
        await until(lambda: len(engine.requests) == 2)
        await pause_task(0.05)
        assert len(engine.requests) == 2
        engine.release.set()
        for record in records:
            await end_of(jobs, record.id)
        await submit(jobs, num_frames=9)

    run(tmp_path, engine, work, max_running_videos=2, max_queued_videos=1)


def test_progress_never_falls_and_ends_at_100_with_the_file(tmp_path: Path) -> None:
    """Progress counts the denoise steps that the workers report, for two chunks of ten steps each.
    Progress never decreases and is 100 once the file exists.
    """
    engine = InstantEngine()

    async def work(jobs: VideoJobs) -> None:
        engine.release = asyncio.Event()
        record = await submit(jobs, num_frames=21)
        seen = []
        for steps in ((3, 10), (1, 10), (10, 10)):
            engine.steps = steps
            await pause_task(0.6)
            stored = jobs.store.read_record(record.id)
            assert stored is not None
            seen.append((stored.status, stored.progress))
        assert seen == [("in_progress", 15), ("in_progress", 15), ("in_progress", 50)]
        engine.release.set()
        assert (await end_of(jobs, record.id)).progress == 100

    run(tmp_path, engine, work)
