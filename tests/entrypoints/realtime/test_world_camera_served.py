# SPDX-License-Identifier: Apache-2.0
"""The door behind the real thing: `vllm serve --omni` as a subprocess, its engine, its API key; the
null world.

The server is shared with the other doors' tests (conftest.py); the last test kills its engine.
"""

import re
import socket
import struct
import time
from typing import Any

import psutil
import pytest
from helpers.fake_engine import FIRST, LATER, camera, close_code, infer
from helpers.served import KEY, Served
from helpers.waits import seconds, wait_until
from websockets.exceptions import ConnectionClosed, InvalidStatus

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
    """(frame number of every frame, signature of every chunk) as the null world paints them."""
    numbers = [int(frame[5, 5, 0]) for message in messages for frame in message["video"]]
    return numbers, [int(message["video"][0, 0, 0, 1]) for message in messages]


def test_the_api_key_guards_the_endpoint(served: Served) -> None:
    """Stock vLLM's middleware refuses the handshake without the key."""
    for headers in ({"X": "y"}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
        with pytest.raises(InvalidStatus) as refused:
            served.client(**headers)
        assert refused.value.response.status_code == 401


def test_hello_reports_the_deployments_limits(served: Served) -> None:
    """Sizes from `--additional-config`, the message limit from the WebSocket options, the rest
    from the environment.
    """
    with served.client() as client:
        assert client.hello["max_area"] == 96 * 160
        assert client.hello["limits"]["max_message_bytes"] == 64 << 20
        assert client.hello["max_frames_per_request"] == 105


def test_a_world_streams_continues_and_is_reproducible(served: Served) -> None:
    """33 frames, then 12 more; the same inputs in another session, cut differently, give the
    same pixels.
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


def test_a_branch_starts_from_its_parents_state(served: Served) -> None:
    """Parent and branch, steered alike, stay alike; steered differently, they part."""
    with served.client() as client:
        client.send(request(session_id="parent"))
        client.frames()
        client.request({"endpoint": "branch", "session_id": "parent", "new_session_id": "child"})
        signatures = {}
        for session_id in ("parent", "child"):
            client.send(request(LATER, image=None, session_id=session_id))
            signatures[session_id] = pixels(client.frames())[1]
        assert signatures["parent"] == signatures["child"]
        client.send(request(LATER, image=None, session_id="child", prompt="rain"))
        child = pixels(client.frames())[1]
        client.send(request(LATER, image=None, session_id="parent"))
        assert pixels(client.frames())[1] != child
        for session_id in ("parent", "child"):
            assert (
                client.request({"endpoint": "close", "session_id": session_id})["type"] == "closed"
            )


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"fail_in": "denoise", "fail_at": 2}, "engine_error"),
        ({"fail_in": "decode"}, "engine_error"),
        ({"nan_at": 1}, "non_finite"),
        ({"bogus": 1}, "invalid_request"),
    ],
)
def test_a_failed_chunk_harms_no_one(served: Served, options: dict[str, Any], code: str) -> None:
    """The error is typed, says nothing of the server, and the next request gives what it would
    have given.
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


def test_a_disconnect_frees_the_engine_within_a_step(served: Served) -> None:
    """A chunk of 10 s with steps of 0.1 s: killed without a close frame, it is gone long before
    its end.
    """
    client = served.client()
    client.send(request(FIRST + LATER, options={"steps": 100, "step_ms": 100.0}))
    wait_until(lambda: served.running_requests() == 1)
    raw = client.connection.socket
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.shutdown(socket.SHUT_RD)
    raw.close()
    started_s = time.monotonic()
    wait_until(lambda: served.running_requests() == 0, 5.0)
    assert time.monotonic() - started_s < seconds(2.0)
    client.connection.close()


def test_a_full_server_says_so_and_closing_makes_room(served: Served) -> None:
    """Three sessions fit; the engine agrees with the door on that."""
    with served.client() as client:
        for number in range(3):
            client.send(request(session_id=f"full-{number}"))
            client.frames()
        assert client.error(request(session_id="full-3")) == "capacity"
        client.request({"endpoint": "close", "session_id": "full-1"})
        client.send(request(session_id="full-3"))
        client.frames()
        for number in (0, 2, 3):
            client.request({"endpoint": "close", "session_id": f"full-{number}"})


def test_a_dead_engine_is_notified_to_every_client_at_once(served: Served) -> None:
    """One terminal error and close code 1011 within a second of `kill -9`, idle or not; the
    server exits with 70.
    """
    with served.client() as client, served.client() as idle:
        client.send(request(options={"steps": 100, "step_ms": 100.0}))
        wait_until(lambda: served.running_requests() == 1)
        family = psutil.Process(served.process.pid).children(recursive=True)
        engine = next(child for child in family if "EngineCore" in " ".join(child.cmdline()))
        engine.kill()
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
