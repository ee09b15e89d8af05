# SPDX-License-Identifier: Apache-2.0
"""`/v1/realtime/world/camera` on a real `vllm serve --omni` with the null world, a real engine and
an API key.

The tests of all endpoints share the server (conftest.py). The last test kills the server's engine.
"""

import re
import time
from typing import Any

import pytest
from helpers.fake_engine import FIRST, LATER, camera, close_code, infer
from helpers.served import KEY, Served
from helpers.waits import seconds, wait_until
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from vllm_omni.runtime.exit_codes import ENGINE_DIED


def request(
    num_frames: int = FIRST, options: dict[str, Any] | None = None, **fields: Any
) -> dict[str, Any]:
    extra = {
        "height": 96,
        "width": 160,
        "video_format": "ndarray_u8",
        "seed": 3,
        "options": options or {},
    }
    return infer(num_frames, extra_body=extra, **fields)


def pixels(messages: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Return each frame's number and each chunk's signature, both read from the null world's
    pixels.
    """
    numbers = [int(frame[5, 5, 0]) for message in messages for frame in message["video"]]
    return numbers, [int(message["video"][0, 0, 0, 1]) for message in messages]


@pytest.mark.parametrize(
    "path", ["/v1/realtime/world/camera", "/v1/realtime_video/generate", "/v1/realtime/video"]
)
def test_the_api_key_guards_each_endpoint(served: Served, path: str) -> None:
    """Stock vLLM's middleware refuses a handshake without the API key."""
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
        with pytest.raises(InvalidStatus) as refused:
            connect(f"ws://127.0.0.1:{served.port}{path}", additional_headers=headers)
        assert refused.value.response.status_code == 401


def test_hello_reports_the_deployments_limits(served: Served) -> None:
    """In the hello message, sizes come from `--additional-config`, the message limit from the
    WebSocket options, and the other limits from environment variables.
    """
    with served.client() as client:
        assert client.hello["max_area"] == 96 * 160
        assert client.hello["limits"]["max_message_bytes"] == 64 << 20
        assert client.hello["max_frames_per_request"] == 105


def test_a_world_streams_continues_and_is_reproducible(served: Served) -> None:
    """A request for 33 frames followed by a request for 12 frames yields the same pixels as one
    request with the same inputs in another session.
    """
    path = camera(FIRST + 3 * LATER)
    with served.client() as client:
        client.send(request(cameras={**path, "poses": path["poses"][:33]}))
        messages = client.frames()
        client.send(request(cameras={**path, "poses": path["poses"][33:]}, image=None))
        messages += client.frames()
        assert client.request({"endpoint": "reset"}) == "reset successful"
        client.send(request(cameras=path))
        again = client.frames()
        client.send({"endpoint": "close"})
    assert pixels(messages)[0] == list(range(45))
    assert pixels(messages) == pixels(again)
    assert set(messages[1]["timing"]) == {
        "encode_ms",
        "denoise_ms",
        "decode_ms",
        "queue_ms",
        "mux_ms",
        "total_ms",
    }


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"fail_in": "denoise", "fail_at": 2}, "engine_error"),
        ({"fail_in": "decode"}, "engine_error"),
        ({"nan_at": 1}, "non_finite"),
        ({"bogus": 1}, "invalid_request"),
    ],
)
def test_a_failed_chunk_does_not_affect_the_session(
    served: Served, options: dict[str, Any], code: str
) -> None:
    """The error for a failed chunk is typed and reveals nothing about the server, and the next
    request is not affected.
    """
    path = camera(FIRST + LATER)
    later = {**path, "poses": path["poses"][FIRST:]}
    with served.client() as client:
        client.send(request())
        client.frames()
        error = client.request(request(cameras=later, image=None, options=options))
        assert error["code"] == code
        assert not re.search(r"/|\b0x|Traceback|File ", error["message"])
        client.send(request(cameras=later, image=None))
        numbers, signature = pixels(client.frames())
        assert numbers == list(range(FIRST, FIRST + LATER))
        client.request({"endpoint": "reset"})
        client.send(request(cameras=path))
        assert pixels(client.frames())[1][1:] == signature
        client.send({"endpoint": "close"})


def test_every_client_learns_of_a_dead_engine(served: Served) -> None:
    """Within a second of a `kill -9` of the engine, busy and idle clients get one error and close
    code 1011, and the server exits with status 70.
    """
    with served.client() as client, served.client() as idle:
        client.send(request(options={"steps": 100, "step_ms": 100.0}))
        wait_until(lambda: served.running_requests() == 1)
        served.engine().kill()
        started_s = time.monotonic()
        error = client.receive()
        assert (error["type"], error["code"]) == ("error", "engine_error")
        with pytest.raises(ConnectionClosed) as closed:
            client.receive()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1011
        assert idle.receive()["code"] == "engine_error"
        assert close_code(idle) == 1011
        assert time.monotonic() - started_s < seconds(1.0)
        assert served.process.wait(seconds(10)) == ENGINE_DIED
