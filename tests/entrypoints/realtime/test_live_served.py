# SPDX-License-Identifier: Apache-2.0
"""The realtime endpoints of a real `vllm serve --omni`: its engine, its API key, the OpenAI video
route, and HAProxy in front of it.
"""

import base64
import contextlib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openai
import pytest
from helpers.fake_engine import FIRST, LATER, Client, infer
from helpers.haproxy import needs_haproxy, running_proxy
from helpers.live_clients import GenerateClient, VideoClient, png
from helpers.served import AUTHORIZED, HEIGHT, KEY, MAX_SESSIONS, WIDTH, Served
from helpers.waits import pause, wait_until
from test_live_faults import vanish
from websockets.sync.client import connect

from vllm_omni.entrypoints.media.mp4 import decode_mp4


@contextlib.contextmanager
def generating(served: Served, **fields: Any) -> Iterator[GenerateClient]:
    with GenerateClient(served.port, additional_headers=AUTHORIZED) as client:
        client.init(
            **{"size": f"{WIDTH}x{HEIGHT}", "first_frame": png(WIDTH, HEIGHT), "seed": 3, **fields}
        )
        yield client


def signatures(client: GenerateClient, count: int) -> list[int]:
    """Return the signature that the null world paints in each chunk, and check the frame
    numbers.
    """
    found: list[int] = []
    for index in range(count):
        frames_THWC = client.chunk(60).frames()
        first = 0 if index == 0 else FIRST + LATER * (index - 1)
        np.testing.assert_array_equal(
            frames_THWC[:, 5, 5, 0], (first + np.arange(len(frames_THWC))) % 256
        )
        found.append(int(frames_THWC[0, 0, 0, 1]))
    return found


def test_a_stream_is_reproducible_and_a_prompt_changes_it(served: Served) -> None:
    """The same init gives the same frames in another session. A prompt switch changes the
    frames.
    """
    with generating(served, max_chunks=6) as client:
        plain = signatures(client, 6)
        assert client.close_code() == (1000, "generation complete")
    with generating(served, max_chunks=6) as client:
        assert signatures(client, 6) == plain
    with generating(served, max_chunks=40, realtime_output_pacing=True, fps=120) as client:
        client.event("prompt", "rain", event_id=1)
        switched = signatures(client, 6)
    assert switched[0] == plain[0]
    assert switched != plain


def test_sessions_fill_the_engine(served: Served) -> None:
    """Three sessions run together and a fourth is refused. The slot of a client that vanishes
    becomes free.
    """
    with contextlib.ExitStack() as stack:
        slow = {"realtime_output_pacing": True, "fps": 24}
        clients = [stack.enter_context(generating(served, **slow)) for _ in range(MAX_SESSIONS)]
        for client in clients:
            assert client.chunk(60).index == 0
        with generating(served) as late:
            assert late.error() == "another realtime session is already active"
            assert late.close_code()[0] == 1008
        for client in clients:
            assert client.chunk(60).index == 1
        vanish(clients[0])
        with generating(served, max_chunks=1) as next_client:
            assert next_client.chunk(60).index == 0
        for client in clients[1:]:
            vanish(client)
    wait_until(lambda: served.running_requests() == 0)


def test_fragments_of_a_real_stream_are_a_video(served: Served) -> None:
    """A client sends JSON and receives fragmented MP4 from the real engine. `session.stop` ends the
    stream.
    """
    image = "data:image/png;base64," + base64.b64encode(png(WIDTH, HEIGHT)).decode()
    start = {
        "type": "session.start",
        "prompt": "a path",
        "image_reference": {"image_url": image},
        "seed": 3,
    }
    with VideoClient(served.port, additional_headers=AUTHORIZED) as client:
        client.send({**start, "num_frames": FIRST + 2 * LATER})
        assert client.receive(60)["type"] == "video.start"
        done, chunks = client.until("session.done")
        assert (done["chunks"], client.close_code()[0]) == (3, 1000)
        video_THWC, fps = decode_mp4(b"".join(chunk["data"] for chunk in chunks))
        assert (video_THWC.shape, fps) == ((FIRST + 2 * LATER, HEIGHT, WIDTH, 3), 16.0)
    with VideoClient(served.port, additional_headers=AUTHORIZED) as client:
        client.send({**start, "extra_params": {"pace_to_media_time": True}})
        client.receive(60)
        client.receive(60)
        pause(0.1)
        client.send({"type": "session.stop"})
        done, _ = client.until("session.done")
        assert done["stopped"]
        assert client.close_code()[0] == 1000
    wait_until(lambda: served.running_requests() == 0)


def test_access_units_of_a_real_stream_are_a_video(served: Served) -> None:
    """Frame n of the null world has grey level n. `/omni/ready` names the encoder."""
    with generating(served, max_chunks=3, realtime_output_format="h264") as client:
        units = [unit for _ in range(3) for unit in client.chunk(60).payloads]
    video_THWC, _ = decode_mp4(b"".join(units))  # FFmpeg also reads a raw stream
    assert len(video_THWC) == FIRST + 2 * LATER
    np.testing.assert_allclose(video_THWC[:, 20, 20, 0], np.arange(len(video_THWC)), atol=4)
    with urllib.request.urlopen(f"http://127.0.0.1:{served.port}/omni/ready") as response:
        encoders = msgspec.json.decode(response.read())["encoders"]
    assert [encoder["codec"] for encoder in encoders] == ["h264", "jpeg"]


@pytest.mark.filterwarnings("ignore:The Sora API")
def test_a_world_makes_a_video(served: Served) -> None:
    """A video of 13 frames takes a chunk and a part of the next one. Frame n of the null world has
    grey level n.
    """
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


@needs_haproxy
def test_a_session_through_haproxy_has_the_same_frames(served: Served, tmp_path: Path) -> None:
    """HAProxy reads the readiness of a real server and forwards its sockets unchanged."""
    with running_proxy(tmp_path, {"a": f"127.0.0.1:{served.port}"}) as proxy:
        proxy.wait_until_checked(1)
        frames_THWC = first_chunk(proxy.port, "proxied")
    assert frames_THWC.shape == (9, HEIGHT, WIDTH, 3)
    assert np.array_equal(frames_THWC, first_chunk(served.port, "direct"))
