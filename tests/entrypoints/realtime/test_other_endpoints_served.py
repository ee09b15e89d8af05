# SPDX-License-Identifier: Apache-2.0
"""On the realtime doors' server: a world's video over the OpenAI route, and a session through
`vllm-omni router`.
"""

import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import numpy as np
import openai
import pytest
from helpers.fake_engine import Client, infer
from helpers.ports import port_for_a_server
from helpers.served import AUTHORIZED, HEIGHT, KEY, WIDTH, Served
from helpers.waits import seconds, wait_until
from websockets.sync.client import connect

from vllm_omni.entrypoints.media.mp4 import decode_mp4


@pytest.mark.filterwarnings("ignore:The Sora API")
def test_a_world_makes_a_video(served: Served) -> None:
    """13 frames are a chunk and a part of the next; frame n of the null world has grey level n."""
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{served.port}/v1", api_key=KEY, max_retries=0
    ) as client:
        video_id = client.videos.create(
            prompt="a field", extra_body={"seed": 1, "num_frames": 13}
        ).id
        wait_until(lambda: client.videos.retrieve(video_id).status in ("completed", "failed"), 60)
        assert client.videos.retrieve(video_id).status == "completed"
        frames_THWC, _ = decode_mp4(client.videos.download_content(video_id).content)
    assert np.abs(frames_THWC[:, 40, 40, 0].astype(int) - np.arange(13)).max() <= 3


@pytest.fixture
def routed_port(served: Served) -> Iterator[int]:
    """`vllm-omni router` before the one server."""
    port = port_for_a_server()
    command = [
        sys.executable,
        "-m",
        "vllm_omni.entrypoints.cli.main",
        "router",
        "--host",
        "127.0.0.1",
    ]
    command += [
        "--port",
        str(port),
        "--backend",
        f"http://127.0.0.1:{served.port}",
        "--check-interval-s",
        "0.2",
    ]
    router = subprocess.Popen(command)
    try:
        wait_until(lambda: responses(f"http://127.0.0.1:{port}/omni/ready"), 60)
        yield port
    finally:
        router.terminate()
        router.wait(seconds(10))


def responses(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=seconds(5)) as response:
            return response.status == 200
    except OSError:
        return False


def first_chunk(port: int, session_id: str) -> np.ndarray:
    url = f"ws://127.0.0.1:{port}/v1/realtime/world/camera"
    extra = {"height": HEIGHT, "width": WIDTH, "video_format": "ndarray_u8", "seed": 3}
    with Client(
        connect(url, compression=None, max_size=None, additional_headers=AUTHORIZED)
    ) as client:
        client.send(infer(9, session_id=session_id, extra_body=extra))
        frames_THWC = np.concatenate([reply["video"] for reply in client.frames()])
        client.request({"endpoint": "close", "session_id": session_id})
    return frames_THWC


def test_a_session_through_the_router_is_the_servers(served: Served, routed_port: int) -> None:
    frames_THWC = first_chunk(routed_port, "routed")
    assert frames_THWC.shape == (9, HEIGHT, WIDTH, 3)
    assert np.array_equal(frames_THWC, first_chunk(served.port, "direct"))
