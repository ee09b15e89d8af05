# SPDX-License-Identifier: Apache-2.0
"""With a world model and two API server processes, `/v1/videos` generates all chunks of a video in
one session, and either process can be polled.
"""

from typing import Any

import numpy as np
import openai
import pytest
from helpers.openai_server import Served, seconds_until
from helpers.waits import seconds, wait_until

from vllm_omni.entrypoints.media.mp4 import decode_mp4

# Starting five processes takes 1 to 4 min.
pytestmark = [pytest.mark.filterwarnings("ignore:The Sora API"), pytest.mark.nightly]


def make(client: openai.OpenAI, **fields: Any) -> Any:
    return client.videos.create(prompt="a field", extra_body={"seed": 1, **fields})


def poll(served: Served, video_id: str) -> Any:
    """Wait until the job has ended. Each request uses a new connection, so that both processes
    receive requests.
    """

    def ended() -> Any:
        with served.connect() as client:
            video = client.videos.retrieve(video_id)
        return None if video.status in ("queued", "in_progress") else video

    return wait_until(ended, 120, every_s=0.05)


def frames_of(served: Served, video_id: str) -> np.ndarray:
    return decode_mp4(served.client.videos.download_content(video_id).content)[0]


def test_a_world_makes_a_video_of_any_length_chunk_by_chunk(world_server: Served) -> None:
    """A video of 25 frames consists of two chunks and part of a third. Frame n of the null world
    has the grey level n.
    """
    video = poll(world_server, make(world_server.client, num_frames=25).id)
    assert (video.status, video.progress, video.num_frames, video.fps) == (
        "completed",
        100,
        25,
        16.0,
    )
    frames = frames_of(world_server, video.id)
    assert len(frames) == 25
    assert np.abs(frames[:, 40, 40, 0].astype(int) - np.arange(25)).max() <= 3
    wait_until(lambda: world_server.ready()[1]["sessions"] == 0)


def test_every_process_has_every_job(world_server: Served) -> None:
    """Every process can access every job: a job can be retrieved, listed, downloaded and deleted
    over new connections, which reach either process.
    """
    video_id = poll(world_server, make(world_server.client, num_frames=9).id).id
    for _ in range(20):
        with world_server.connect() as client:
            assert client.videos.retrieve(video_id).status == "completed"
            assert video_id in [video.id for video in client.videos.list()]
    assert len(frames_of(world_server, video_id)) == 9
    with world_server.connect() as client:
        client.videos.delete(video_id)
    for _ in range(10):
        with world_server.connect() as client, pytest.raises(openai.NotFoundError):
            client.videos.retrieve(video_id)


def test_any_process_ends_a_job(world_server: Served) -> None:
    """Either process can end a job: six 60 s jobs are deleted over new connections, and the engine
    is free shortly after each deletion.
    """
    slow = {"num_frames": 9, "extra_params": {"steps": 300, "step_ms": 200.0}}
    for _ in range(6):
        with world_server.connect() as client:
            video_id = make(client, **slow).id
        wait_until(lambda: world_server.ready()[1]["sessions"] == 1)
        with world_server.connect() as client:
            assert client.videos.delete(video_id).deleted
        assert seconds_until(lambda: world_server.ready()[1]["sessions"] == 0) < seconds(1.5)


def test_a_world_makes_no_images(world_server: Served) -> None:
    """A server with a world model rejects an image request with 400 and lists the supported
    tasks.
    """
    for call in (
        lambda: world_server.client.images.generate(prompt="a"),
        lambda: world_server.client.images.edit(image=("a.png", b"x"), prompt="a"),
    ):
        with pytest.raises(
            openai.BadRequestError, match="it can: world, text_to_video, image_to_video"
        ) as refused:
            call()
        assert refused.value.code == "unsupported_by_model"


def test_metrics_are_summed_over_processes(world_server: Served) -> None:
    """`/metrics` returns the sums over both processes, which vLLM's multiprocess registry
    computes.
    """
    name = 'omni_requests_total{endpoint="videos",status="completed"}'
    before = world_server.metric(name)
    for _ in range(8):
        with world_server.connect() as client:
            poll(world_server, make(client, num_frames=9).id)
    assert world_server.metric(name) == before + 8
    assert world_server.metric("omni_engine_session_slots") == 3
