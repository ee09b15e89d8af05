# SPDX-License-Identifier: Apache-2.0
"""The streaming doors behind the real thing: `vllm serve --omni` as a subprocess, its engine,
its API key.
"""

import base64
import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers.fake_engine import FIRST, LATER
from helpers.live_clients import GenerateClient, VideoClient, png
from helpers.served import AUTHORIZED, HEIGHT, MAX_SESSIONS, WIDTH, Served
from helpers.waits import pause, wait_until
from test_live_faults import vanish
from websockets.exceptions import InvalidStatus

from vllm_omni.entrypoints.media.mp4 import decode_mp4


@contextlib.contextmanager
def generating(served: Served, **fields: Any) -> Iterator[GenerateClient]:
    with GenerateClient(served.port, additional_headers=AUTHORIZED) as client:
        client.init(
            **{"size": f"{WIDTH}x{HEIGHT}", "first_frame": png(WIDTH, HEIGHT), "seed": 3, **fields}
        )
        yield client


def signatures(client: GenerateClient, count: int) -> list[int]:
    """What the null world paints of each chunk's content into its first pixel; frame numbers are
    checked on the way.
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


def test_the_api_key_guards_both_endpoints(served: Served) -> None:
    """401 before the upgrade."""
    for client in (GenerateClient, VideoClient):
        with pytest.raises(InvalidStatus) as refused:
            client(served.port)
        assert refused.value.response.status_code == 401


def test_the_only_rank_computes_with_as_many_threads_as_the_user_says(served: Served) -> None:
    """OMP_NUM_THREADS, read by OpenMP in the process that a user's server spawns."""
    assert f"this rank uses {os.environ['OMP_NUM_THREADS']} CPU threads" in served.log


def test_a_stream_is_reproducible_and_a_prompt_changes_it(served: Served) -> None:
    """The same init gives the same frames in another session; a prompt switch parts them."""
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


def test_as_many_sessions_as_the_engine_has_room_for(served: Served) -> None:
    """Three side by side; the fourth is refused; when one vanishes in mid-stream its room is
    free again.
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
    """JSON in, fragmented MP4 out, through the real engine; stop ends it."""
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
