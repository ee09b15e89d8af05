# SPDX-License-Identifier: Apache-2.0
"""`/v1/videos` of a world behind two API server processes: chunk after chunk in one session,
polled from either.
"""

from typing import Any

import numpy as np
import openai
import pytest
from helpers.openai_server import Served, seconds_until
from helpers.waits import pause, seconds, wait_until

from vllm_omni.entrypoints.media.mp4 import decode_mp4

# five processes: 1 to 4 min
pytestmark = [pytest.mark.filterwarnings("ignore:The Sora API"), pytest.mark.nightly]


def make(client: openai.OpenAI, **fields: Any) -> Any:
    return client.videos.create(prompt="a field", extra_body={"seed": 1, **fields})


def poll(served: Served, video_id: str) -> Any:
    """Until it is over, with a new connection each time: both processes are asked."""

    def ended() -> Any:
        with served.connect() as client:
            video = client.videos.retrieve(video_id)
        return None if video.status in ("queued", "in_progress") else video

    return wait_until(ended, 120, every_s=0.05)


def frames_of(served: Served, video_id: str) -> np.ndarray:
    return decode_mp4(served.client.videos.download_content(video_id).content)[0]


def test_a_world_makes_a_video_of_any_length_chunk_by_chunk(world_server: Served) -> None:
    """25 frames are two chunks and a part of a third; frame n of the null world has grey level
    n.
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


def test_every_process_knows_every_job(world_server: Served) -> None:
    """Created over one connection, seen, listed, downloaded and deleted over twenty others."""
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
    """Six jobs of 60 s each, ended over new connections: the engine is free in a second, whoever
    owns them.
    """
    slow = {"num_frames": 9, "extra_params": {"steps": 300, "step_ms": 200.0}}
    for _ in range(6):
        with world_server.connect() as client:
            video_id = make(client, **slow).id
        wait_until(lambda: world_server.ready()[1]["sessions"] == 1)
        with world_server.connect() as client:
            assert client.videos.delete(video_id).deleted
        assert seconds_until(lambda: world_server.ready()[1]["sessions"] == 0) < seconds(1.5)


def test_progress_counts_chunks_and_steps(world_server: Served) -> None:
    """Of four chunks with five steps each."""
    video = make(world_server.client, num_frames=45, extra_params={"step_ms": 60.0})
    seen = set()
    while video.status in ("queued", "in_progress"):
        pause(0.05)
        with world_server.connect() as client:
            video = client.videos.retrieve(video.id)
        seen.add(video.progress)
    assert video.status == "completed"
    assert sorted(seen)[-1] == 100 and len(seen) >= 4


def test_the_camera_can_be_steered(world_server: Served) -> None:
    """`camera_actions`: held keys per latent frame, as JSON in a form or as a list in JSON."""
    body = {"prompt": "a", "num_frames": 9, "camera_actions": [["w"], ["w", "l"]]}
    in_json = world_server.client.post("/videos", body=body, cast_to=dict)["id"]
    in_form = make(world_server.client, num_frames=9, camera_actions='[["w"], ["w", "l"]]').id
    for video_id in (in_json, in_form):
        assert poll(world_server, video_id).status == "completed"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"negative_prompt": "dogs"}, "negative_prompt"),
        ({"num_inference_steps": 9}, "num_inference_steps"),
        ({"guidance_scale": 3.0}, "guidance_scale"),
    ],
)
def test_what_a_world_cannot_do_is_refused(
    world_server: Served, fields: dict[str, Any], param: str
) -> None:
    """Steps and guidance are fixed in a distilled model."""
    with pytest.raises(openai.BadRequestError) as refused:
        make(world_server.client, **fields)
    assert (refused.value.code, refused.value.param) == ("unsupported_by_model", param)


def test_a_world_makes_no_images(world_server: Served) -> None:
    """400 that says what it can do."""
    for call in (
        lambda: world_server.client.images.generate(prompt="a"),
        lambda: world_server.client.images.edit(image=("a.png", b"x"), prompt="a"),
    ):
        with pytest.raises(
            openai.BadRequestError, match="it can: world, text_to_video, image_to_video"
        ) as refused:
            call()
        assert refused.value.code == "unsupported_by_model"


def test_full_means_not_ready_and_a_video_waits_for_room(world_server: Served) -> None:
    """Two videos run, a third waits; ended, the third runs.

    Readiness follows the engine's sessions.
    """
    slow = {"num_frames": 9, "extra_params": {"steps": 300, "step_ms": 100.0}}
    assert world_server.ready()[1]["status"] == "ready"
    videos = [make(world_server.client, **slow).id for _ in range(3)]
    wait_until(lambda: world_server.ready()[1]["sessions"] >= 2)
    for video_id in videos:
        with world_server.connect() as client:
            client.videos.delete(video_id)
    wait_until(lambda: world_server.ready()[1]["sessions"] == 0)


def test_metrics_are_summed_over_processes(world_server: Served) -> None:
    """Stock vLLM's multiprocess registry: jobs of both processes in one number."""
    name = 'omni_requests_total{endpoint="videos",status="completed"}'
    before = world_server.metric(name)
    for _ in range(8):
        with world_server.connect() as client:
            poll(world_server, make(client, num_frames=9).id)
    assert world_server.metric(name) == before + 8
    assert world_server.metric("omni_engine_session_slots") == 3


def test_a_realtime_session_is_counted_and_timed(world_server: Served) -> None:
    """Through the camera door: sessions, chunks, frames, time to first frame, gaps; gauges end
    at zero.
    """
    import msgpack
    from websockets.sync.client import connect

    opened = world_server.metric('omni_rt_sessions_opened_total{endpoint="realtime/world/camera"}')
    url = f"ws://127.0.0.1:{world_server.port}/v1/realtime/world/camera"
    with connect(
        url, additional_headers={"Authorization": "Bearer a-key-for-tests"}, compression=None
    ) as socket:
        socket.recv()
        image = np.zeros((96, 160, 3), np.uint8)
        poses = np.tile(np.eye(4), (21, 1, 1))
        message = {
            "endpoint": "infer",
            "prompt": "a",
            "image": _png(image),
            "cameras": {"poses": poses.tolist(), "intrinsics": [[100.0, 100.0, 80.0, 48.0]] * 21},
            "extra_body": {"height": 96, "width": 160},
        }
        socket.send(msgpack.packb(message))
        responses = [msgpack.unpackb(socket.recv(timeout=seconds(30))) for _ in range(2)]
        assert all("video" in response for response in responses), responses
        socket.send(msgpack.packb({"endpoint": "close"}))
        socket.recv(timeout=seconds(30))
    label = '{endpoint="realtime/world/camera"'
    wait_until(lambda: world_server.metric(f"omni_rt_sessions{label}") == 0)
    assert world_server.metric(f"omni_rt_sessions_opened_total{label}") == opened + 1
    assert world_server.metric(f"omni_rt_chunks_total{label}") == 2
    assert world_server.metric(f"omni_rt_frames_total{label}") == 21
    assert world_server.metric(f"omni_rt_time_to_first_frame_seconds_count{label}") == 1
    assert world_server.metric(f"omni_rt_inter_chunk_gap_seconds_count{label}") == 1
    assert world_server.metric(f"omni_rt_sessions_closed_total{label}") == 1


def _png(image_HWC: np.ndarray) -> bytes:
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image_HWC).save(buffer, "PNG")
    return buffer.getvalue()
