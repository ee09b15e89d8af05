# SPDX-License-Identifier: Apache-2.0
"""Refused requests at `/v1/realtime/world/camera` get a specific error code and have no effect."""

import contextlib
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.fake_engine import (
    FIRST,
    LATER,
    Client,
    EndpointServer,
    FakeEngine,
    camera,
    close_code,
    infer,
    numbers,
)
from websockets.exceptions import ConnectionClosed

from vllm_omni.entrypoints.realtime.connection import codec
from vllm_omni.inputs import DiffusionParams
from vllm_omni.outputs import RequestFailed

MakeEndpoint = Callable[..., EndpointServer]


EYE = np.eye(4, dtype=np.float32)


def poses(**changes: Any) -> dict[str, Any]:
    """Return a request's `cameras` field: the valid camera of the first chunk with `changes`
    applied.
    """
    return {"cameras": {**camera(FIRST), **changes}}


def bent(row: int, column: int, value: float) -> np.ndarray:
    bad = camera(FIRST)["poses"].copy()
    bad[4, row, column] = value
    return bad


BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"cameras": None}, "missing_camera"),
    ({"cameras": {"poses": camera(9)["poses"]}}, "missing_camera"),
    (
        {"camera": camera(9), "cameras": poses(poses=bent(0, 3, 1.0))["cameras"]},
        "invalid_camera",
    ),
    ({"actions": [["w"]] * 3}, "invalid_camera"),
    (poses(poses=bent(0, 3, float("nan"))), "non_finite_pose"),
    (poses(poses=bent(1, 3, float("inf"))), "non_finite_pose"),
    (poses(poses=bent(1, 3, 1e30)), "invalid_camera"),
    (poses(poses=bent(0, 0, 1.5)), "invalid_camera"),
    (poses(poses=bent(0, 0, -1.0)), "invalid_camera"),
    (poses(poses=bent(3, 3, 2.0)), "invalid_camera"),
    (poses(poses=camera(10)["poses"]), "invalid_camera"),
    (poses(poses=np.zeros((9, 3, 4), np.float32)), "invalid_camera"),
    (poses(poses=np.zeros((9, 4, 4), bool)), "invalid_camera"),
    (poses(poses=[[["1"] * 4] * 4] * 9), "invalid_camera"),
    (poses(poses=[[[1.0] * 4] * 4, [[1.0] * 3]]), "invalid_camera"),
    (poses(intrinsics=np.array([0.0, 1, 1, 1])), "invalid_camera"),
    (poses(intrinsics=np.ones((8, 4))), "invalid_camera"),
    ({"image": None}, "missing_image"),
    ({"image": b"GIF89a" + bytes(40)}, "invalid_image"),
    ({"image": b"\x89PNG\r\n\x1a\n"}, "invalid_image"),
    ({"image": "file:///etc/passwd"}, "invalid_image"),
    ({"image": "data:image/png;base64,%%%"}, "invalid_image"),
    ({"image": np.zeros((8, 8), np.uint8)}, "invalid_image"),
    ({"image": np.zeros((8, 8, 3), np.float32)}, "invalid_image"),
    ({"image": np.zeros((0, 8, 3), np.uint8)}, "invalid_image"),
    ({"extra_body": {"height": 32, "width": 40}}, "unsupported_size"),
    ({"extra_body": {"height": 64, "width": 48}}, "unsupported_size"),
    ({"extra_body": {"video_format": "gif"}}, "unsupported_codec"),
    ({"extra_body": {"num_frames": 21}}, "invalid_camera"),
    ({"extra_body": {"seed": -2}}, "invalid_request"),
    ({"extra_body": {"fps": float("nan")}}, "invalid_request"),
    ({"extra_body": {"height": "32"}}, "invalid_request"),
    ({"extra_body": {"options": {"x": np.zeros(3)}}}, "invalid_request"),
    ({"extra_body": []}, "invalid_request"),
    ({"session_id": "a/b"}, "invalid_request"),
    ({"session_id": "a", "extra_body": {"session_id": "b"}}, "invalid_request"),
    ({"prompt": 5}, "invalid_request"),
    ({"prompt": "x" * 9000}, "prompt_too_long"),
    ({"endpoint": "dance"}, "unknown_endpoint"),
    ({"endpoint": ["infer"]}, "unknown_endpoint"),
    ({"chunk_index": 3}, "out_of_order"),
    ({"endpoint": "branch", "session_id": "nobody"}, "session_evicted"),
    ({"endpoint": "resume", "session_id": "nobody"}, "session_evicted"),
]
"""Changes of a valid first request, each with the error code of the request."""


@pytest.mark.parametrize(("fields", "code"), BAD_REQUESTS)
def test_bad_requests_are_refused_by_name_and_change_nothing(
    client: Client, engine: FakeEngine, fields: dict[str, Any], code: str
) -> None:
    """Every invalid request gets an error code, the connection stays open, and no request reaches
    the engine.
    """
    assert client.error(infer(**fields)) == code
    assert engine.calls == []
    client.send(infer())
    assert numbers(client.frames()) == list(range(FIRST))


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        *BAD_REQUESTS,
        ({"images": {"back": np.zeros((8, 8, 3), np.uint8)}}, "invalid_image"),
        ({"prompt": None}, "invalid_request"),
        ({"prompt": ""}, "invalid_request"),
    ],
)
def test_a_refused_restart_does_not_change_the_session(
    client: Client, engine: FakeEngine, fields: dict[str, Any], code: str
) -> None:
    """After an invalid request with `restart`, the session continues with its next frame."""
    client.send(infer(session_id="walk"))
    client.frames()
    assert client.error(infer(**{"session_id": "walk", "restart": True, **fields})) == code
    assert [call.params.op for call in engine.calls] == ["generate"]
    client.send(infer(LATER, session_id="walk", image=None, prompt=None))
    assert numbers(client.frames()) == list(range(FIRST, FIRST + LATER))


def test_a_restart_that_the_engine_refuses_ends_the_session(
    client: Client, engine: FakeEngine
) -> None:
    """The engine checks model options and adapters. Before a restart reaches the engine, the
    session is freed, because the engine may need the session's memory.
    """

    def refuse_options(params: DiffusionParams) -> None:
        if params.options:
            raise RequestFailed("invalid_request", "unknown option")

    engine.fail = refuse_options
    client.send(infer(session_id="walk"))
    client.frames()
    options = {"height": 32, "width": 48, "options": {"fog": 1}}
    assert client.error(infer(session_id="walk", restart=True, extra_body=options)) == (
        "invalid_request"
    )
    assert client.error(infer(LATER, session_id="walk", image=None, prompt=None)) == (
        "missing_image"
    )
    client.send(infer(session_id="walk"))
    assert numbers(client.frames()) == list(range(FIRST))


def test_a_nearly_orthonormal_pose_is_corrected(client: Client, engine: FakeEngine) -> None:
    """A nearly orthonormal pose is corrected, so the engine gets rotations that are orthonormal to
    float32 precision.
    """
    client.send(infer(**poses(poses=bent(0, 1, 4e-3))))
    client.frames()
    rotation_N33 = engine.chunks[0].arrays["poses"][:, :3, :3]
    np.testing.assert_allclose(
        rotation_N33 @ rotation_N33.transpose(0, 2, 1), np.tile(np.eye(3), (9, 1, 1)), atol=1e-6
    )


@pytest.mark.parametrize(
    ("policy", "count", "frames"),
    [
        ("trim", 24, 21),
        ("trim", 9, 9),
        ("hold_last", 10, 21),
        ("hold_last", 3, 9),
        ("error", 21, 21),
    ],
)
def test_pose_policies(
    client: Client, engine: FakeEngine, policy: str, count: int, frames: int
) -> None:
    """The `trim` pose policy drops an incomplete chunk, and `hold_last` completes the chunk by
    repeating the last pose.
    """
    client.send(infer(count, extra_body={"pose_policy": policy, "video_format": "ndarray_u8"}))
    assert sum(message["num_frames"] for message in client.frames()) == frames
    sent = np.concatenate([call.arrays["poses"] for call in engine.chunks])
    np.testing.assert_array_equal(sent[-1], camera(count)["poses"][min(count, frames) - 1])


def test_intrinsics_of_another_image_are_scaled(client: Client, engine: FakeEngine) -> None:
    """Intrinsics are scaled from `intrinsics_size`, the image size that they refer to, to the
    server's reference size, 832 x 480.
    """
    path = {
        **camera(FIRST),
        "intrinsics": np.array([1280.0, 720.0, 640.0, 360.0]),
        "intrinsics_size": [1280, 720],
    }
    client.send(infer(cameras=path))
    client.frames()
    np.testing.assert_allclose(
        engine.chunks[0].arrays["intrinsics"], np.tile([832, 480, 416, 240], (9, 1)), rtol=1e-6
    )


@pytest.mark.parametrize(
    ("intrinsics", "size", "said"),
    [
        (
            [1900.0, 1900.0, 960.0, 540.0],
            None,
            "outside an image of 832x480. If the intrinsics are for an image of about 1920x1080",
        ),
        ([500.0, 500.0, -1.0, 240.0], None, "outside an image of 832x480"),
        (
            [500.0, 500.0, 416.0, 240.0],
            [64, 64],
            "outside an image of 64x64. If the intrinsics are for an image of about 832x480",
        ),
        ([500.0, 500.0, 416.0, 240.0], [832], "intrinsics_size must be [width, height]"),
        ([500.0, 500.0, 416.0, 240.0], [832, 0], "intrinsics_size must lie within"),
    ],
)
def test_intrinsics_that_fit_no_image_are_refused(
    client: Client, engine: FakeEngine, intrinsics: list[float], size: list[int] | None, said: str
) -> None:
    path = {**camera(FIRST), "intrinsics": np.array(intrinsics), "intrinsics_size": size}
    error = client.request(infer(cameras=path))
    assert error["code"] == "invalid_camera" and said in error["message"]
    assert not engine.chunks


@pytest.mark.parametrize(
    "shape",
    [
        *[(4,), (1, 4), (9, 4), (3, 3), (1, 3, 3), (9, 3, 3)],
        *[(4, 4), (1, 4, 4), (9, 4, 4)],
    ],
)
def test_intrinsics_may_have_nine_shapes(
    client: Client, engine: FakeEngine, shape: tuple[int, ...]
) -> None:
    """Intrinsics may be a vector or a matrix, either one for all frames or one per frame. One for
    all frames may be in a list.
    """
    matrix = np.eye(4)
    matrix[0, 0], matrix[1, 1], matrix[0, 2], matrix[1, 2] = 40, 41, 24, 16
    one = (
        np.array([40.0, 41, 24, 16])
        if shape[-1:] == (4,) and shape[-2:] != (4, 4)
        else matrix[: shape[-1], : shape[-1]]
    )
    client.send(infer(**poses(intrinsics=np.broadcast_to(one, shape).copy())))
    client.frames()
    np.testing.assert_array_equal(
        engine.chunks[0].arrays["intrinsics"], np.tile([40, 41, 24, 16], (9, 1))
    )


def test_size_of_a_started_session_is_fixed(make_endpoint: MakeEndpoint) -> None:
    """A request for a size other than the started session's size is rejected."""
    with make_endpoint(info={"height": 64, "width": 64}).client() as client:
        client.send(infer())
        client.frames()
        again = infer(LATER, image=None, extra_body={"height": 48, "width": 48})
        assert client.error(again) == "unsupported_size"


def test_undecodable_messages_end_the_connection_at_the_third(client: Client) -> None:
    """Two undecodable messages are allowed within ten seconds, and the third ends the
    connection.
    """
    assert client.error(b"\xc1") == "invalid_msgpack"
    assert client.error(b"") == "invalid_msgpack"
    client.send(b"\x93")
    assert close_code(client) == 1008


def test_text_frames_are_refused_and_the_third_closes(client: Client) -> None:
    """One WebSocket text frame does not end the session, but the third text frame closes the
    connection.
    """
    assert client.error("hello") == "invalid_frame"
    client.send(infer())
    client.frames()
    client.send("hello")
    client.send("hello")
    assert close_code(client) == 1003


def test_values_other_than_maps_are_refused_repeatedly(client: Client) -> None:
    """Valid msgpack values other than maps may be sent repeatedly. Each value is rejected, but the
    connection stays open, because these values do not count as undecodable.
    """
    for _ in range(5):
        assert client.error(codec.encode({})[:0] + b"\x91\x01") == "invalid_request"
    assert client.request({"endpoint": "ping", "t": 1.5})["t"] == 1.5


def test_errors_name_the_request(client: Client) -> None:
    """Errors contain `request_id` and `session_id`, even for an unknown message."""
    client.send(infer(request_id="r9", cameras=None))
    assert client.receive()["request_id"] == "r9"
    client.send({"request_id": "r10", "endpoint": "dance"})
    assert client.receive()["request_id"] == "r10"


def test_engine_failures_are_errors_of_one_request(client: Client, engine: FakeEngine) -> None:
    """If the engine fails, the chunks before the failure are delivered, and the error has the
    engine's code. The session continues.
    """

    def fail(params: DiffusionParams) -> None:
        if params.chunk_index == 1:
            raise RequestFailed("non_finite", "latents contain NaN")

    engine.fail = fail
    client.send(infer(FIRST + 2 * LATER))
    assert client.receive()["chunk_index"] == 0
    error = client.receive()
    assert (error["code"], error["retryable"]) == ("non_finite", True)
    engine.fail = lambda params: None
    client.send(infer(LATER, image=None))
    assert numbers(client.frames()) == list(range(FIRST, FIRST + LATER))


def test_unforeseen_failures_reveal_nothing_of_the_server(
    client: Client, engine: FakeEngine
) -> None:
    """An unforeseen failure is reported as `engine_error` with a fixed text that reveals nothing
    about the server.
    """

    def fail(params: DiffusionParams) -> None:
        raise ZeroDivisionError("/secret/path 0x7f00")

    engine.fail = fail
    error = client.request(infer())
    assert error["code"] == "engine_error"
    assert not re.search("secret|0x|Traceback|ZeroDivision", json.dumps(error))
    engine.fail = lambda params: None
    client.send(infer())
    client.frames()


def test_too_many_messages_close_the_connection_with_1008(make_endpoint: MakeEndpoint) -> None:
    """If a client sends too many messages, its connection is closed with 1008."""
    with make_endpoint(max_messages_per_s=20).client() as client:
        with contextlib.suppress(ConnectionClosed):
            for _ in range(10_000):
                client.send({"endpoint": "ping"})
        assert close_code(client) == 1008


def test_an_oversized_message_closes_with_1009(client: Client) -> None:
    """A message that exceeds the size limit given in the hello message closes the connection with
    1009.
    """
    with pytest.raises(ConnectionClosed) as closed:
        client.request(bytes(client.hello["limits"]["max_message_bytes"] + 1))
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1009
