# SPDX-License-Identifier: Apache-2.0
"""What a client of `/v1/realtime/world/camera` sees: real sockets, a real uvicorn server, a fake engine."""

import contextlib
import io
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_engine import FIRST, LATER, Client, DoorServer, FakeEngine, camera, infer, wait_until
from PIL import Image
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from vllm_omni.entrypoints.media import decode_mp4
from vllm_omni.entrypoints.realtime import codec, render, world_camera
from vllm_omni.entrypoints.realtime.world_camera import PATHS
from vllm_omni.inputs import DiffusionParams
from vllm_omni.outputs import RequestFailed

MakeDoor = Callable[..., DoorServer]


def close_code(client: Client) -> int:
    """Read until the server closes; returns its code."""
    try:
        while True:
            client.receive()
    except ConnectionClosed as closed:
        return closed.rcvd.code if closed.rcvd is not None else 1006


def numbers(messages: list[dict[str, Any]]) -> list[int]:
    """Session frame numbers as painted into the frames by the fake engine."""
    return [int(frame[1, 1, 0]) for message in messages for frame in message["video"]]


# -- hello and frames --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_hello_comes_first_and_describes_the_model(door: DoorServer, path: str) -> None:
    """A client learns the geometry, its session id and the bounds before it says anything."""
    with door.client(path) as client:
        documented = {"patch_size": [1, 2, 2], "vae_stride": [4, 8, 8], "latent_frames_per_chunk": 3}
        assert documented.items() <= client.hello.items()
        assert client.hello["max_area"] == 32 * 48
        assert (client.hello["first_chunk_frames"], client.hello["chunk_frames"]) == (FIRST, LATER)
        assert re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", client.hello["session_id"])
        assert client.hello["limits"]["max_message_bytes"] == 1 << 20


def test_the_subprotocol_is_echoed(door: DoorServer) -> None:
    """A client that offers the protocol's name gets it back."""
    with door.client(subprotocols=["other", "omni.world.camera.v1"]) as client:
        assert client.connection.subprotocol == "omni.world.camera.v1"


def test_a_model_without_camera_closes_with_policy(make_door: MakeDoor) -> None:
    """The client is told why before the connection closes."""
    with make_door(facts={"camera": False}).client() as client:
        assert client.hello["code"] == "unsupported"
        assert close_code(client) == 1008


def test_chunks_arrive_one_by_one_and_continue(client: Client, engine: FakeEngine) -> None:
    """An infer of 9 + 12k poses gives k + 1 messages; the next infer goes on from there."""
    client.send(infer(FIRST + 2 * LATER))
    messages = client.frames()
    assert [(m["index"], m["total"], m["chunk_index"], m["first_frame"], m["num_frames"]) for m in messages] == [
        (0, 3, 0, 0, 9),
        (1, 3, 1, 9, 12),
        (2, 3, 2, 21, 12),
    ]
    client.send(infer(LATER, image=None, prompt=None))
    messages += client.frames()
    assert messages[-1]["chunk_id"] == 3
    assert numbers(messages) == list(range(FIRST + 3 * LATER))
    poses = np.concatenate([call.arrays["poses"] for call in engine.chunks[:3]])
    np.testing.assert_array_equal(poses, camera(FIRST + 2 * LATER)["poses"])
    assert [call.params.chunk_index for call in engine.chunks] == [0, 1, 2, 3]
    assert ["image" in call.arrays for call in engine.chunks] == [True, False, False, False]


def test_a_chunk_is_sent_before_the_next_one_exists(client: Client, engine: FakeEngine) -> None:
    """Streaming is real: the first chunk arrives while the engine works on the second."""
    engine.delay_s = 0.3
    client.send(infer(FIRST + 2 * LATER))
    client.receive()
    assert len(engine.worlds) == 1
    assert next(iter(engine.worlds.values())).chunk_index == 1


def test_the_engine_has_two_chunks_and_never_more(client: Client, engine: FakeEngine) -> None:
    """The next chunk is submitted before the current one is done."""
    engine.delay_s = 0.05
    client.send(infer(FIRST + 5 * LATER))
    client.frames()
    assert engine.most_running == 2


def test_a_client_that_names_the_protocol_gets_done(client: Client) -> None:
    """`done` follows the last frame, only for clients that announced that they know it."""
    client.send(infer(protocol_version=1, request_id="r1"))
    client.frames()
    done = client.receive()
    assert (done["type"], done["request_id"], done["next_chunk_index"], done["frames"]) == ("done", "r1", 1, FIRST)


def test_mp4_messages_play_alone(client: Client) -> None:
    """Each mp4 message is a file of its own, at the size and rate that was asked for."""
    client.send(infer(FIRST + LATER, extra_body={"height": 32, "width": 48, "fps": 8}))
    for message, count in zip(client.frames(), (FIRST, LATER), strict=True):
        frames_THWC, fps = decode_mp4(message["video"])
        assert (frames_THWC.shape, fps, message["codec"]) == ((count, 32, 48, 3), 8.0, "mp4")
        assert abs(int(frames_THWC[3, 16, 24, 0]) - (message["first_frame"] + 3)) <= 3


def test_jpeg_messages_hold_one_file_a_frame(client: Client) -> None:
    """`jpeg` gives a list of files."""
    client.send(infer(extra_body={"height": 32, "width": 48, "video_format": "jpeg", "frames_per_chunk": 4}))
    messages = client.frames()
    assert [len(message["video"]) for message in messages] == [4, 4, 1]
    assert np.asarray(Image.open(io.BytesIO(messages[1]["video"][2]))).shape == (32, 48, 3)


@pytest.mark.parametrize("dialect", codec.Dialect)
def test_first_version_clients_get_what_they_expect(client: Client, dialect: codec.Dialect) -> None:
    """`camera` with array markers: float frames in groups of four, `total` right from the start, 24 poses are fine."""
    fields = {"cameras": None, "camera": camera(24), "extra_body": {"height": 32, "width": 48, "num_frames": 24}}
    client.send(infer(session_id="w1", **fields), dialect)
    messages = client.frames()
    assert [len(m["video"]) for m in messages] == [4, 4, 1, 4, 4, 4]
    assert [m["total"] for m in messages] == [6] * 6
    frames_THWC = np.concatenate([m["video"] for m in messages])
    assert (frames_THWC.dtype, frames_THWC.shape) == (np.float32, (21, 32, 48, 3))
    np.testing.assert_allclose(frames_THWC[20, 5, 5, 0], 20 / 255, rtol=1e-6)


def test_another_connection_continues_a_named_session(door: DoorServer) -> None:
    """One connection a call works, as clients of the first version do it."""
    with door.client() as client:
        client.send(infer(session_id="w1"))
        client.frames()
    with door.client() as client:
        client.send(infer(LATER, session_id="w1", image=None))
        assert client.frames()[0]["chunk_index"] == 1


def test_two_sessions_of_one_connection_run_side_by_side(client: Client, engine: FakeEngine) -> None:
    """Requests of different sessions do not wait for each other."""
    engine.delay_s = 0.2
    client.send(infer(session_id="a"))
    client.send(infer(session_id="b"))
    assert {client.receive()["session_id"], client.receive()["session_id"]} == {"a", "b"}
    assert engine.most_running == 2


@pytest.mark.parametrize(
    "image",
    [
        pytest.param("png", id="png"),
        pytest.param("array", id="array"),
        pytest.param("url", id="data-url"),
    ],
)
def test_images_reach_the_engine_at_the_sessions_size(client: Client, engine: FakeEngine, image: str) -> None:
    """Bytes, arrays and data URLs all become uint8 RGB of the requested height and width."""
    array = np.full((64, 96, 4), 200, np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    import base64

    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    client.send(infer(image={"png": buffer.getvalue(), "array": array, "url": url}[image]))
    client.frames()
    sent = engine.chunks[0].arrays["image"]
    assert (sent.dtype, sent.shape) == (np.uint8, (32, 48, 3))
    assert (sent == 200).all()


def test_actions_replace_a_camera(client: Client, engine: FakeEngine) -> None:
    """Held keys, one list a latent frame, are handed to the engine chunk by chunk."""
    keys = [["w"], ["w", "l"], [], ["s"], [], ["j"]]
    client.send(infer(cameras=None, actions=keys))
    assert len(client.frames()) == 2
    assert [call.params.actions for call in engine.chunks] == [keys[:3], keys[3:]]
    assert "poses" not in engine.chunks[0].arrays


def test_a_new_prompt_is_sent_once(client: Client, engine: FakeEngine) -> None:
    """A prompt switch reaches the engine with its first chunk; repeating the prompt is no switch."""
    client.send(infer())
    client.frames()
    client.send(infer(2 * LATER, image=None, prompt="rain"))
    assert [message["prompt_applied"] for message in client.frames()] == [True, False]
    client.send(infer(LATER, image=None, prompt="rain"))
    assert not client.frames()[0]["prompt_applied"]
    assert [call.params.prompt for call in engine.chunks] == ["a path", "rain", None, None]


def test_an_image_for_a_begun_session_is_a_warning(client: Client) -> None:
    """It is ignored, visibly; `restart` begins again."""
    client.send(infer())
    client.frames()
    client.send(infer(LATER))
    message = client.frames()[0]
    assert message["chunk_index"] == 1
    assert "image ignored" in message["warnings"][0]
    client.send(infer(restart=True))
    assert client.frames()[0]["chunk_index"] == 0


# -- refusals ----------------------------------------------------------------------------------------------------------

EYE = np.eye(4, dtype=np.float32)


def poses(**changes: Any) -> dict[str, Any]:
    """Nine good poses with one thing wrong."""
    return {"cameras": {**camera(FIRST), **changes}}


def bent(row: int, column: int, value: float) -> np.ndarray:
    bad = camera(FIRST)["poses"].copy()
    bad[4, row, column] = value
    return bad


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"cameras": None}, "missing_camera"),
        ({"cameras": {"poses": camera(9)["poses"]}}, "missing_camera"),
        ({"camera": camera(9), "cameras": poses(poses=bent(0, 3, 1.0))["cameras"]}, "invalid_camera"),
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
        ({"extra_body": {"seed": -1}}, "invalid_request"),
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
    ],
)
def test_bad_requests_are_refused_by_name_and_change_nothing(
    client: Client, engine: FakeEngine, fields: dict[str, Any], code: str
) -> None:
    """Each mistake has its code; the connection goes on and the engine never hears of it."""
    assert client.error(infer(**fields)) == code
    assert engine.calls == []
    client.send(infer())
    assert numbers(client.frames()) == list(range(FIRST))


def test_a_pose_within_rounding_of_a_rotation_is_made_one(client: Client, engine: FakeEngine) -> None:
    """What the engine gets is orthonormal to float32 precision."""
    client.send(infer(**poses(poses=bent(0, 1, 4e-3))))
    client.frames()
    rotation_N33 = engine.chunks[0].arrays["poses"][:, :3, :3]
    np.testing.assert_allclose(rotation_N33 @ rotation_N33.transpose(0, 2, 1), np.tile(np.eye(3), (9, 1, 1)), atol=1e-6)


@pytest.mark.parametrize(
    ("policy", "count", "frames"),
    [("trim", 24, 21), ("trim", 9, 9), ("hold_last", 10, 21), ("hold_last", 3, 9), ("error", 21, 21)],
)
def test_pose_policies(client: Client, engine: FakeEngine, policy: str, count: int, frames: int) -> None:
    """`trim` drops the rest of a chunk, `hold_last` repeats the last pose to fill it."""
    client.send(infer(count, extra_body={"pose_policy": policy, "video_format": "ndarray_u8"}))
    assert sum(message["num_frames"] for message in client.frames()) == frames
    sent = np.concatenate([call.arrays["poses"] for call in engine.chunks])
    np.testing.assert_array_equal(sent[-1], camera(count)["poses"][min(count, frames) - 1])


@pytest.mark.parametrize("shape", [(4,), (9, 4), (3, 3), (9, 3, 3), (4, 4), (9, 4, 4)])
def test_intrinsics_come_in_six_shapes(client: Client, engine: FakeEngine, shape: tuple[int, ...]) -> None:
    """A vector or matrix, for all frames or for each."""
    matrix = np.eye(4)
    matrix[0, 0], matrix[1, 1], matrix[0, 2], matrix[1, 2] = 40, 41, 24, 16
    one = (
        np.array([40.0, 41, 24, 16])
        if shape[-1:] == (4,) and shape[-2:] != (4, 4)
        else matrix[: shape[-1], : shape[-1]]
    )
    client.send(infer(**poses(intrinsics=np.broadcast_to(one, shape).copy())))
    client.frames()
    np.testing.assert_array_equal(engine.chunks[0].arrays["intrinsics"], np.tile([40, 41, 24, 16], (9, 1)))


def test_size_of_a_begun_session_is_fixed(make_door: MakeDoor) -> None:
    """Another size is an error, not a silent change."""
    with make_door(facts={"height": 64, "width": 64}).client() as client:
        client.send(infer())
        client.frames()
        again = infer(LATER, image=None, extra_body={"height": 48, "width": 48})
        assert client.error(again) == "unsupported_size"


def test_undecodable_messages_end_the_connection_at_the_third(client: Client) -> None:
    """Two are forgiven within ten seconds."""
    assert client.error(b"\xc1") == "invalid_msgpack"
    assert client.error(b"") == "invalid_msgpack"
    client.send(b"\x93")
    assert close_code(client) == 1008


def test_text_frames_are_refused_and_the_third_closes(client: Client) -> None:
    """Text in the middle of a session does not end it at once."""
    assert client.error("hello") == "invalid_frame"
    client.send(infer())
    client.frames()
    client.send("hello")
    client.send("hello")
    assert close_code(client) == 1003


def test_other_values_than_maps_are_refused_and_forgiven(client: Client) -> None:
    """Well-formed msgpack of the wrong shape does not count as noise."""
    for _ in range(5):
        assert client.error(codec.encode({})[:0] + b"\x91\x01") == "invalid_request"
    assert client.ask({"endpoint": "ping", "t": 1.5})["t"] == 1.5


def test_errors_name_the_request(client: Client) -> None:
    """`request_id` and `session_id` of the failed request come back, also when it was not understood."""
    client.send(infer(request_id="r9", cameras=None))
    assert client.receive()["request_id"] == "r9"
    client.send({"request_id": "r10", "endpoint": "dance"})
    assert client.receive()["request_id"] == "r10"


def test_engine_failures_are_errors_of_one_request(client: Client, engine: FakeEngine) -> None:
    """The chunks before it arrive, its code is passed on, the session goes on where it was."""

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


def test_unforeseen_failures_say_nothing_of_the_server(client: Client, engine: FakeEngine) -> None:
    """A bug behind the door is an `engine_error` with a fixed text."""

    def fail(params: DiffusionParams) -> None:
        raise ZeroDivisionError("/secret/path 0x7f00")

    engine.fail = fail
    error = client.ask(infer())
    assert error["code"] == "engine_error"
    assert not re.search("secret|0x|Traceback|ZeroDivision", json.dumps(error))
    engine.fail = lambda params: None
    client.send(infer())
    client.frames()


def test_too_many_messages_close_with_policy(make_door: MakeDoor) -> None:
    """A flood is cut off."""
    with make_door(max_messages_per_s=20).client() as client:
        with contextlib.suppress(ConnectionClosed):
            for _ in range(10_000):
                client.send({"endpoint": "ping"})
        assert close_code(client) == 1008


def test_an_oversized_message_closes_with_1009(client: Client) -> None:
    """The limit that hello announced is the one that counts."""
    with pytest.raises(ConnectionClosed) as closed:
        client.ask(bytes(client.hello["limits"]["max_message_bytes"] + 1))
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1009


# -- ends and cancellation ---------------------------------------------------------------------------------------------


def test_reset_begins_a_new_world(client: Client, engine: FakeEngine) -> None:
    """After reset an image is needed again and chunks count from 0; the engine has freed the old world."""
    client.send(infer())
    client.frames()
    old = engine.chunks[0].params.session_id
    assert client.ask({"endpoint": "reset"}) == "reset successful"
    assert client.error(infer(LATER, image=None)) == "missing_image"
    client.send(infer())
    assert client.frames()[0]["chunk_index"] == 0
    assert old not in engine.worlds


def test_reset_of_nothing_succeeds_and_speaks_both_dialects(client: Client) -> None:
    """Idempotent; clients that announce the protocol get a map."""
    assert client.ask({"endpoint": "reset", "session_id": "nobody"}) == "reset successful"
    answer = client.ask({"endpoint": "reset", "protocol_version": 1})
    assert answer == {"type": "reset", "status": "reset successful", "session_id": client.hello["session_id"]}


def test_reset_cancels_the_running_request(client: Client, engine: FakeEngine) -> None:
    """Its request ends with `cancelled`, its chunks are aborted in the engine."""
    engine.delay_s = 5.0
    client.send(infer(request_id="r1"))
    wait_until(lambda: engine.running == 1)
    client.send({"endpoint": "reset", "protocol_version": 1})
    answers = {client.receive()["type"]: True, client.receive()["type"]: True}
    assert set(answers) == {"error", "reset"}
    assert len(engine.aborted) == 1
    assert engine.running == 0


def test_stop_keeps_the_world_and_close_frees_it(client: Client, engine: FakeEngine) -> None:
    """Naming a session acts on it; naming none also ends the connection."""
    client.send(infer(session_id="a"))
    client.frames()
    stopped = client.ask({"endpoint": "stop", "session_id": "a"})
    assert (stopped["type"], stopped["next_chunk_index"]) == ("stopped", 1)
    assert len(engine.worlds) == 1
    assert client.ask({"endpoint": "close", "session_id": "a"})["type"] == "closed"
    wait_until(lambda: not engine.worlds)
    assert client.ask({"endpoint": "stop"})["type"] == "stopped"
    assert close_code(client) == 1000


def test_disconnect_aborts_the_running_chunk_at_once(door: DoorServer, engine: FakeEngine) -> None:
    """An abrupt end (RST) in the middle of a chunk frees the engine long before the chunk would have ended."""
    engine.delay_s = 5.0
    client = door.client()
    client.send(infer(FIRST + LATER))
    wait_until(lambda: engine.running == 2)
    raw = client.connection.socket
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.shutdown(socket.SHUT_RD)
    raw.close()
    started_s = time.monotonic()
    wait_until(lambda: engine.running == 0, 2.0)
    assert time.monotonic() - started_s < 1.0
    assert len(engine.aborted) == 2
    client.connection.close()


def test_a_first_chunk_cut_off_leaves_no_world(door: DoorServer, engine: FakeEngine) -> None:
    """The session begins afresh; the engine is told to forget what it may have begun."""
    engine.delay_s = 0.5
    with door.client() as client:
        client.send(infer(session_id="a"))
        wait_until(lambda: engine.running == 1)
    wait_until(lambda: not engine.worlds and not len(door.manager))
    engine.delay_s = 0.0
    with door.client() as client:
        assert client.error(infer(session_id="a", image=None)) == "missing_image"


def test_a_session_survives_a_cut_and_finds_its_place(door: DoorServer, engine: FakeEngine) -> None:
    """After an abort the door asks the engine where it is, and goes on there."""
    with door.client() as client:
        client.send(infer(session_id="a"))
        client.frames()
        engine.delay_s = 1.0
        client.send(infer(2 * LATER, session_id="a", image=None))
        wait_until(lambda: engine.running == 2)
    wait_until(lambda: engine.running == 0)
    next(iter(engine.worlds.values())).chunk_index += 1  # as if the abort had come a moment too late
    engine.delay_s = 0.0
    with door.client() as client:
        client.send(infer(2 * LATER, session_id="a", image=None))
        assert [message["chunk_index"] for message in client.frames()] == [2, 3]


def test_idle_connections_are_closed_with_4010(make_door: MakeDoor, engine: FakeEngine) -> None:
    """Waiting for a chunk is not idling."""
    with make_door(idle_timeout_s=0.3).client() as client:
        engine.delay_s = 1.0
        client.send(infer())
        client.frames()
        assert client.receive()["code"] == "timeout"
        assert close_code(client) == 4010


def test_a_chunk_that_takes_too_long_is_dropped(make_door: MakeDoor, engine: FakeEngine) -> None:
    """The client gets `timeout`, the engine an abort."""
    with make_door(chunk_timeout_s=0.2).client() as client:
        engine.delay_s = 5.0
        assert client.error(infer()) == "timeout"
        assert len(engine.aborted) == 1


def test_a_client_that_never_reads_is_cut_off(make_door: MakeDoor, engine: FakeEngine) -> None:
    """It loses its connection within the send deadline; the engine does not work ahead for it; others go on."""
    door = make_door(facts={"height": 480, "width": 832}, send_deadline_s=1.0)
    size = {"height": 480, "width": 832, "video_format": "ndarray_u8"}
    deaf = socket.create_connection(("127.0.0.1", door.port))
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    from websockets.client import ClientProtocol
    from websockets.uri import parse_uri

    protocol = ClientProtocol(parse_uri(f"ws://127.0.0.1:{door.port}{PATHS[0]}"))
    protocol.send_request(protocol.connect())
    for data in protocol.data_to_send():
        deaf.sendall(data)
    while not protocol.handshake_exc and protocol.state.name == "CONNECTING":
        protocol.receive_data(deaf.recv(4096))
    protocol.send_binary(codec.encode(infer(FIRST + 20 * LATER, extra_body=size)))
    for data in protocol.data_to_send():
        deaf.sendall(data)
    wait_until(lambda: len(engine.chunks) > 1)
    wait_until(lambda: not door.server.server_state.connections, 2.5)  # the kernel's own timeout comes at 3 s
    assert len(engine.chunks) <= 8
    wait_until(lambda: engine.running == 0)
    deaf.close()
    with door.client() as client:
        client.send(infer(session_id="other", extra_body=size))
        client.frames()


# -- repetition, branches, capacity ------------------------------------------------------------------------------------


def test_a_repeated_request_gets_the_same_answer(client: Client, engine: FakeEngine) -> None:
    """The engine is asked once; another body under the same id is a conflict."""
    client.send(infer(request_id="r1"))
    first = client.frames()
    client.send(infer(request_id="r1"))
    again = client.frames()
    assert len(engine.chunks) == 1
    np.testing.assert_array_equal(first[0]["video"], again[0]["video"])
    assert client.error(infer(request_id="r1", prompt="other")) == "request_id_conflict"


def test_a_request_cut_off_goes_on_when_repeated(door: DoorServer, engine: FakeEngine) -> None:
    """A client may send the same request until it is answered: no frame is lost, none is generated twice."""
    request = infer(FIRST + 3 * LATER, request_id="r1", session_id="a")
    engine.delay_s = 0.1
    with door.client() as client:
        client.send(request)
        assert client.receive()["index"] == 0
    wait_until(lambda: engine.running == 0)
    with door.client() as client:
        client.send(request)
        messages = client.frames()
    assert [message["index"] for message in messages] == [0, 1, 2, 3]
    assert numbers(messages) == list(range(FIRST + 3 * LATER))
    assert next(iter(engine.worlds.values())).chunk_index == 4


def test_a_running_request_can_be_taken_over(door: DoorServer, engine: FakeEngine) -> None:
    """The older connection is closed with 4009, the newer one gets every message."""
    engine.delay_s = 0.3
    request = infer(FIRST + LATER, request_id="r1", session_id="a")
    with door.client() as old, door.client() as new:
        old.send(request)
        assert old.receive()["index"] == 0
        new.send(request)
        assert [message["index"] for message in new.frames()] == [0, 1]
        assert close_code(old) == 4009
    assert len(engine.chunks) == 2


def test_resume_replays_what_was_missed(door: DoorServer, engine: FakeEngine) -> None:
    """Frames after the last chunk the client has come again; too far back is `resync_required`."""
    with door.client() as client:
        session_id = client.hello["session_id"]
        client.send(infer(FIRST + 2 * LATER))
        client.frames()
    with door.client() as client:
        resumed = client.ask({"endpoint": "resume", "session_id": session_id, "last_chunk_id": 0})
        assert (resumed["type"], resumed["next_chunk_index"], resumed["replayed"]) == ("resumed", 3, 2)
        assert [client.receive()["chunk_id"], client.receive()["chunk_id"]] == [1, 2]
        client.send(infer(LATER, session_id=session_id, image=None))
        assert client.frames()[0]["chunk_id"] == 3


def test_resume_beyond_the_journal_asks_for_a_resync(make_door: MakeDoor) -> None:
    """The journal is bounded in bytes."""
    door = make_door(journal_bytes=2 * LATER * 32 * 48 * 3)
    with door.client() as client:
        session_id = client.hello["session_id"]
        client.send(infer(FIRST + 4 * LATER))
        client.frames()
    with door.client() as client:
        refused = client.ask({"endpoint": "resume", "session_id": session_id, "last_chunk_id": 0})
        assert (refused["code"], refused["next_chunk_index"]) == ("resync_required", 5)
        assert client.ask({"endpoint": "resume", "session_id": session_id, "last_chunk_id": 3})["replayed"] == 1


def test_chunk_index_is_a_lock(client: Client) -> None:
    """A request for another chunk than the next is refused and says which one is."""
    client.send(infer(chunk_index=0))
    client.frames()
    error = client.ask(infer(LATER, image=None, chunk_index=5))
    assert (error["code"], error["expected"]) == ("out_of_order", 1)
    client.send(infer(LATER, image=None, chunk_index=1))
    client.frames()


def test_a_third_request_of_a_session_is_busy(client: Client, engine: FakeEngine) -> None:
    """One runs, one waits; the waiting one follows on."""
    engine.delay_s = 0.2
    client.send(infer())
    client.send(infer(LATER, image=None))
    assert client.error(infer(LATER, image=None, request_id="third")) == "session_busy"
    assert client.frames()[0]["chunk_index"] == 0
    assert client.frames()[0]["chunk_index"] == 1


def test_branches_go_their_own_way(client: Client, engine: FakeEngine) -> None:
    """A branch continues from where its parent was; the parent does not notice."""
    client.send(infer(FIRST + LATER, session_id="a"))
    client.frames()
    answer = client.ask({"endpoint": "branch", "session_id": "a", "new_session_id": "b"})
    assert (answer["type"], answer["session_id"], answer["next_chunk_index"]) == ("branched", "b", 2)
    for session_id, last in (("b", 3), ("b", 4), ("a", 3)):
        client.send(infer(LATER, session_id=session_id, image=None))
        assert client.frames()[0]["chunk_index"] == last - 1
    assert len(engine.worlds) == 2
    assert client.error({"endpoint": "branch", "session_id": "a", "new_session_id": "b"}) == "invalid_request"


def test_capacity_is_said_at_once_and_comes_back(make_door: MakeDoor, engine: FakeEngine) -> None:
    """A session in use is never evicted; a client without any session is closed with 1013."""
    door = make_door(facts={"max_sessions": 2})
    with door.client() as first, door.client() as second:
        for client in (first, second):
            client.send(infer())
            client.frames()
        with door.client() as third:
            refused = third.ask(infer())
            assert (refused["code"], refused["retryable"]) == ("capacity", True)
            assert close_code(third) == 1013
        first.connection.close()
        with door.client() as third:
            wait_until(lambda: not any(len(s.connections) == 0 and s.is_busy for s in door.manager._sessions.values()))
            third.send(infer())
            third.frames()
    wait_until(lambda: len(engine.worlds) == 2)


def test_a_new_world_waits_for_the_room_of_an_old_one(make_door: MakeDoor, engine: FakeEngine) -> None:
    """Restarting and evicting free a world first: an engine that is full never sees one too many."""
    engine.max_worlds, engine.close_delay_s = 1, 0.2
    door = make_door(facts={"max_sessions": 1})
    with door.client() as client:
        client.send(infer())
        client.frames()
        client.send(infer(restart=True))
        client.frames()
    wait_until(lambda: not any(session.connections for session in door.manager._sessions.values()))
    with door.client() as client:
        client.send(infer())
        client.frames()


def test_an_evicted_session_says_so(make_door: MakeDoor, engine: FakeEngine) -> None:
    """A session left alone is closed, in the engine too; continuing it is a retryable error, not a surprise."""
    door = make_door(facts={"session_idle_s": 0.2})
    with door.client() as client:
        client.send(infer(session_id="a"))
        client.frames()
        wait_until(lambda: not engine.worlds)
        assert client.error(infer(LATER, session_id="a", image=None)) == "session_evicted"
        client.send(infer(session_id="a"))
        assert client.frames()[0]["chunk_index"] == 0


def test_a_session_the_engine_lost_is_evicted(client: Client, engine: FakeEngine) -> None:
    """The client hears it in the door's words and may begin again."""
    client.send(infer())
    client.frames()
    engine.worlds.clear()
    assert client.error(infer(LATER, image=None)) == "session_evicted"
    client.send(infer())
    assert client.frames()[0]["chunk_index"] == 0


def test_principals_do_not_share_session_ids(door: DoorServer, engine: FakeEngine) -> None:
    """The same id under another key is another world."""
    for token in ("one", "two"):
        with door.client(additional_headers={"Authorization": f"Bearer {token}"}) as client:
            client.send(infer(session_id="a"))
            assert client.frames()[0]["chunk_index"] == 0
    assert len(engine.worlds) == 2


# -- handshake ---------------------------------------------------------------------------------------------------------


def test_foreign_origins_are_refused_before_the_upgrade(make_door: MakeDoor) -> None:
    """A web page elsewhere cannot use a visitor's server; listed origins and the server's own can."""
    door = make_door(allowed_origins="https://play.example, https://other.example")
    for origin in ("https://evil.example", "null"):
        with pytest.raises(InvalidStatus) as refused:
            door.client(origin=origin)
        assert refused.value.response.status_code == 403
    for origin in ("https://play.example", f"http://127.0.0.1:{door.port}"):
        with door.client(origin=origin) as client:
            assert client.hello["protocol"] == "omni.world.camera"


def test_connections_are_bounded(make_door: MakeDoor) -> None:
    """One more is refused with 503 before the upgrade; a place that becomes free is given away again."""
    door = make_door(max_connections=2)
    with door.client(), door.client() as second:
        with pytest.raises(InvalidStatus) as refused:
            door.client()
        assert refused.value.response.status_code == 503
        second.connection.close()
        wait_until(lambda: len(door.server.server_state.connections) == 1)
        door.client().connection.close()


def test_heavy_work_stays_off_the_event_loop(
    client: Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding large messages, reading images and encoding video block nobody else's cadence."""
    threads: dict[str, str] = {}

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            threads[name] = threading.current_thread().name
            return function(*args, **kwargs)

        return call

    for module, name in ((world_camera, "decode"), (world_camera, "load_image"), (render, "encode_mp4")):
        monkeypatch.setattr(module, name, watched(name, getattr(module, name)))
    large = np.random.default_rng(0).integers(0, 255, (200, 200, 3), np.uint8)
    client.send(infer(image=large, extra_body={"height": 32, "width": 48}))
    client.frames()
    assert sorted(threads) == ["decode", "encode_mp4", "load_image"]
    assert all(thread.startswith("ThreadPoolExecutor") for thread in threads.values()), threads


def test_a_first_version_client_works_with_its_own_codec(door: DoorServer) -> None:
    """The message loop of the first example client for this path: msgpack with OpenPI's hooks, a connection a call."""
    msgpack = pytest.importorskip("msgpack")

    def pack_array(value: Any) -> Any:
        fields = {b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
        return {b"__ndarray__": True, **fields}

    def unpack_array(fields: dict[Any, Any]) -> Any:
        if b"__ndarray__" in fields:
            return np.ndarray(buffer=fields[b"data"], dtype=np.dtype(fields[b"dtype"]), shape=fields[b"shape"])
        return fields

    path, video = camera(48), []
    path["intrinsics"] = np.tile(path["intrinsics"], (48, 1))
    for start in (0, 24):
        extra = {"height": 32, "width": 48, "num_frames": 24, "fps": 16, "session_id": "w1", "frames_per_chunk": 4}
        request = {
            "prompt": "a path",
            "camera": {name: array[start : start + 24] for name, array in path.items()},
            "extra_body": {**extra, "seed": 42},
            "session_id": "w1",
        }
        if start == 0:
            request["image"] = np.zeros((48, 64, 3), np.uint8)
        with connect(f"ws://127.0.0.1:{door.port}{PATHS[0]}", max_size=None, ping_interval=None) as world:
            assert msgpack.unpackb(world.recv(), object_hook=unpack_array)["latent_frames_per_chunk"] == 3
            world.send(msgpack.packb(request, default=pack_array))
            chunks: list[Any] = []
            total = None
            while total is None or len(chunks) < total:
                message = msgpack.unpackb(world.recv(), object_hook=unpack_array)
                assert message["type"] == "frame", message
                total = message["total"]
                chunks.append(message["video"])
            video.append(np.concatenate(chunks, axis=0))
    assert [part.shape for part in video] == [(21, 32, 48, 3), (24, 32, 48, 3)]
    np.testing.assert_allclose(np.concatenate(video)[:, 9, 9, 2] * 255, np.arange(45), atol=1e-4)


def test_abrupt_ends_leave_nothing_behind(make_door: MakeDoor, engine: FakeEngine) -> None:
    """A hundred clients vanish, most of them in the middle of a chunk: no task, request, connection or world stays."""
    door = make_door(facts={"max_sessions": 2, "session_idle_s": 0.5})
    engine.delay_s = 0.02
    for number in range(100):
        client = door.client()
        client.send(infer(FIRST + 3 * LATER))
        if number % 3:
            wait_until(lambda: engine.running)
        if number % 3 == 2:
            client.receive()
        raw = client.connection.socket
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.shutdown(socket.SHUT_RD)
        raw.close()
        client.connection.close()
    wait_until(lambda: not engine.running and not door.server.server_state.connections)
    wait_until(lambda: not engine.worlds and not len(door.manager))
    wait_until(lambda: len(door.manager._tasks) == 1)  # the sweeper
    assert engine._live == {}
