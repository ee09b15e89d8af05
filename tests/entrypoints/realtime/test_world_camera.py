# SPDX-License-Identifier: Apache-2.0
"""Normal operation of `/v1/realtime/world/camera` with real sockets, a real server and a fake
engine.
"""

import io
import re
from collections.abc import Callable
from pathlib import Path

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
from helpers.waits import wait_until
from PIL import Image

from vllm_omni.actions import ActionSpace
from vllm_omni.entrypoints.media.mp4 import decode_mp4
from vllm_omni.entrypoints.realtime.connection import codec
from vllm_omni.entrypoints.realtime.world_camera.handler import PATHS
from vllm_omni.inputs import Lora
from vllm_omni.worlds.description import read_description

MakeEndpoint = Callable[..., EndpointServer]


@pytest.mark.parametrize("path", PATHS)
def test_hello_comes_first_and_describes_the_model(endpoint: EndpointServer, path: str) -> None:
    """The hello message is sent first and contains the geometry, the session id and the limits."""
    with endpoint.client(path) as client:
        documented = {
            "patch_size": [1, 2, 2],
            "vae_stride": [4, 8, 8],
            "latent_frames_per_chunk": 3,
        }
        assert documented.items() <= client.hello.items()
        assert client.hello["max_area"] == 32 * 48
        assert (client.hello["first_chunk_frames"], client.hello["chunk_frames"]) == (FIRST, LATER)
        assert re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", client.hello["session_id"])
        assert client.hello["limits"]["max_message_bytes"] == 1 << 20


def test_hello_describes_a_trained_world(make_endpoint: MakeEndpoint, village: Path) -> None:
    """The hello message of a trained world contains the world's domain, prompts and start images.
    The hello message of any other model contains none of these fields.
    """
    description = read_description(village)
    assert description is not None
    with make_endpoint({"card": description, "height": 96, "width": 160}).client() as client:
        assert client.hello["domain"] == "tiny_village"
        world = client.hello["world"]
        assert [prompt["name"] for prompt in world["prompts"]] == ["day", "dusk", "snow"]
        assert {start["file"] for start in world["starts"]} == {
            start.file for start in description.starts
        }
        assert world["sizes"] == [[160, 96]]
    with make_endpoint().client() as client:
        assert not {"domain", "world"} & client.hello.keys()


@pytest.mark.parametrize(("height", "width", "warned"), [(96, 160, False), (48, 80, True)])
def test_an_untrained_size_is_generated_with_a_warning(
    make_endpoint: MakeEndpoint, village: Path, height: int, width: int, warned: bool
) -> None:
    """A session at an untrained size is accepted with a warning that names the requested and the
    trained size. Only the first chunk contains the warning.
    """
    with make_endpoint(
        {"card": read_description(village), "height": 96, "width": 160}
    ).client() as client:
        client.send(infer(FIRST + LATER, extra_body={"height": height, "width": width}))
        first, later = client.frames()
    assert (first["height"], first["width"]) == (height, width)
    text = (
        "untrained size: 80x48 was requested, this world was trained at 160x96; expect poor "
        "image quality"
    )
    assert first.get("warnings", []) == ([text] if warned else [])
    assert "warnings" not in later


def test_a_model_without_controls_closes_the_connection(make_endpoint: MakeEndpoint) -> None:
    """If the model has no controls, the server sends the reason and then closes the connection."""
    with make_endpoint(info={"actions": ActionSpace()}).client() as client:
        assert client.hello["code"] == "unsupported"
        assert close_code(client) == 1008


def test_chunks_arrive_one_by_one_and_continue(client: Client, engine: FakeEngine) -> None:
    """An infer message with 9 + 12 k poses results in k + 1 chunk messages, and the next infer
    message continues after these chunks.
    """
    client.send(infer(FIRST + 2 * LATER))
    messages = client.frames()
    assert [
        (m["index"], m["total"], m["chunk_index"], m["first_frame"], m["num_frames"])
        for m in messages
    ] == [
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
    """The client receives the first chunk while the engine is still generating the second."""
    engine.delay_s = 0.3
    client.send(infer(FIRST + 2 * LATER))
    client.receive()
    assert len(engine.worlds) == 1
    assert next(iter(engine.worlds.values())).chunk_index == 1


def test_the_engine_has_two_chunks_and_never_more(client: Client, engine: FakeEngine) -> None:
    """The next chunk is submitted before the current chunk is finished, but the engine never has
    more than two chunks at a time.
    """
    engine.delay_s = 0.05
    client.send(infer(FIRST + 5 * LATER))
    client.frames()
    assert engine.most_running == 2


def test_a_client_that_names_the_protocol_gets_done(client: Client) -> None:
    """`done` follows the last frame, but only for clients that announce the protocol version."""
    client.send(infer(protocol_version=1, request_id="r1"))
    client.frames()
    done = client.receive()
    assert (done["type"], done["request_id"], done["next_chunk_index"], done["frames"]) == (
        "done",
        "r1",
        1,
        FIRST,
    )


def test_each_mp4_message_is_a_complete_file(client: Client) -> None:
    """Each MP4 message contains a complete file with the requested size and frame rate."""
    client.send(infer(FIRST + LATER, extra_body={"height": 32, "width": 48, "fps": 8}))
    for message, count in zip(client.frames(), (FIRST, LATER), strict=True):
        frames_THWC, fps = decode_mp4(message["video"])
        assert (frames_THWC.shape, fps, message["codec"]) == ((count, 32, 48, 3), 8.0, "mp4")
        assert abs(int(frames_THWC[3, 16, 24, 0]) - (message["first_frame"] + 3)) <= 3


@pytest.mark.parametrize(("scale", "size"), [(1, (32, 48)), (4, (128, 192)), (8, (256, 384))])
def test_an_mp4_file_sent_in_addition_to_frames_may_be_larger(
    client: Client, scale: int, size: tuple[int, int]
) -> None:
    """The MP4 file that a client requests in addition to frames may be enlarged, for recordings of
    small worlds: each pixel becomes a square.
    """
    message = infer()
    message["extra_body"] |= {"with_mp4": True, "mp4_scale": scale}
    client.send(message)
    [reply] = client.frames()
    assert decode_mp4(reply["mp4"])[0].shape == (FIRST, *size, 3)
    assert reply["video"].shape == (FIRST, 32, 48, 3)


def test_jpeg_messages_hold_one_file_a_frame(client: Client) -> None:
    """A message in the `jpeg` format contains a list with one file per frame."""
    client.send(
        infer(extra_body={"height": 32, "width": 48, "video_format": "jpeg", "frames_per_chunk": 4})
    )
    messages = client.frames()
    assert [len(message["video"]) for message in messages] == [4, 4, 1]
    assert np.asarray(Image.open(io.BytesIO(messages[1]["video"][2]))).shape == (32, 48, 3)


@pytest.mark.parametrize("dialect", codec.MessageDialect)
def test_clients_of_the_first_version_are_supported(
    client: Client, dialect: codec.MessageDialect
) -> None:
    """Clients of the first protocol version send `camera` with array markers and may send 24 poses.
    They get float frames in groups of four with the correct `total`.
    """
    fields = {
        "cameras": None,
        "camera": camera(24),
        "extra_body": {"height": 32, "width": 48, "num_frames": 24},
    }
    client.send(infer(session_id="w1", **fields), dialect)
    messages = client.frames()
    assert [len(m["video"]) for m in messages] == [4, 4, 1, 4, 4, 4]
    assert [m["total"] for m in messages] == [6] * 6
    frames_THWC = np.concatenate([m["video"] for m in messages])
    assert (frames_THWC.dtype, frames_THWC.shape) == (np.float32, (21, 32, 48, 3))
    np.testing.assert_allclose(frames_THWC[20, 5, 5, 0], 20 / 255, rtol=1e-6)


def test_two_sessions_of_one_connection_run_side_by_side(
    client: Client, engine: FakeEngine
) -> None:
    """Requests for two sessions on one connection run concurrently."""
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
def test_images_reach_the_engine_at_the_sessions_size(
    client: Client, engine: FakeEngine, image: str
) -> None:
    """Images sent as bytes, arrays or data: URLs become uint8 RGB arrays of the requested height
    and width.
    """
    array = np.full((64, 96, 4), 200, np.uint8)
    array[..., 3] = 255
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
    """A request may contain held keys instead of a camera. Each chunk gets its part of the keys, as
    one list per latent frame.
    """
    keys = [["w"], ["w", "l"], [], ["s"], [], ["j"]]
    client.send(infer(cameras=None, actions=keys))
    assert len(client.frames()) == 2
    assert [call.params.actions for call in engine.chunks] == [keys[:3], keys[3:]]
    assert "poses" not in engine.chunks[0].arrays


def test_a_new_prompt_is_sent_once(client: Client, engine: FakeEngine) -> None:
    """The engine gets a new prompt with the first chunk of the request. A repeated prompt is not
    sent again.
    """
    client.send(infer())
    client.frames()
    client.send(infer(2 * LATER, image=None, prompt="rain"))
    assert [message["prompt_applied"] for message in client.frames()] == [True, False]
    client.send(infer(LATER, image=None, prompt="rain"))
    assert not client.frames()[0]["prompt_applied"]
    assert [call.params.prompt for call in engine.chunks] == ["a path", "rain", None, None]


def test_adapters_are_sent_with_the_first_chunk_of_their_request(
    client: Client, engine: FakeEngine
) -> None:
    """Adapters are sent with the first chunk of a request. The session keeps its adapters until a
    request names different adapters.
    """
    ink = [{"name": "ink", "scale": 0.5}]
    client.send(infer(extra_body={**infer().get("extra_body", {}), "lora": ink}))
    client.frames()
    client.send(infer(2 * LATER, image=None))
    client.frames()
    client.send(infer(LATER, image=None, extra_body={**infer().get("extra_body", {}), "lora": []}))
    client.frames()
    assert [call.params.lora for call in engine.chunks] == [
        [Lora(name="ink", scale=0.5)],
        None,
        None,
        [],
    ]
    client.send(infer(LATER, image=None, extra_body={"lora": [{"name": ""}]}))
    assert client.receive()["code"] == "invalid_request"


def test_an_image_for_a_started_session_is_a_warning(client: Client) -> None:
    """An image sent for a started session is ignored with a warning, unless the request has
    `restart`.
    """
    client.send(infer())
    client.frames()
    client.send(infer(LATER))
    message = client.frames()[0]
    assert message["chunk_index"] == 1
    assert "image ignored" in message["warnings"][0]
    client.send(infer(restart=True))
    assert client.frames()[0]["chunk_index"] == 0


def test_reset_starts_a_new_session(client: Client, engine: FakeEngine) -> None:
    """After a reset, an image is required and chunks count from 0. The engine frees the old
    session.
    """
    client.send(infer())
    client.frames()
    old = engine.chunks[0].params.session_id
    assert client.request({"endpoint": "reset"}) == "reset successful"
    assert client.error(infer(LATER, image=None)) == "missing_image"
    client.send(infer())
    assert client.frames()[0]["chunk_index"] == 0
    assert old not in engine.worlds


def test_reset_without_a_session_succeeds(client: Client) -> None:
    """A reset without a session succeeds. Clients that announce the protocol version get a map as
    the reply, whereas other clients get text.
    """
    assert client.request({"endpoint": "reset", "session_id": "nobody"}) == "reset successful"
    response = client.request({"endpoint": "reset", "protocol_version": 1})
    assert response == {
        "type": "reset",
        "status": "reset successful",
        "session_id": client.hello["session_id"],
    }


def test_reset_cancels_the_running_request(client: Client, engine: FakeEngine) -> None:
    """A reset ends the running request with `cancelled`, and the engine aborts its chunks."""
    engine.delay_s = 5.0
    client.send(infer(request_id="r1"))
    wait_until(lambda: engine.running == 1)
    client.send({"endpoint": "reset", "protocol_version": 1})
    responses = {client.receive()["type"]: True, client.receive()["type"]: True}
    assert set(responses) == {"error", "reset"}
    assert len(engine.aborted) == 1
    assert engine.running == 0


def test_stop_keeps_the_session_and_close_frees_it(client: Client, engine: FakeEngine) -> None:
    """`stop` keeps the session and `close` frees it. Either message also ends the connection
    if it names no session.
    """
    client.send(infer(session_id="a"))
    client.frames()
    stopped = client.request({"endpoint": "stop", "session_id": "a"})
    assert (stopped["type"], stopped["next_chunk_index"]) == ("stopped", 1)
    assert len(engine.worlds) == 1
    assert client.request({"endpoint": "close", "session_id": "a"})["type"] == "closed"
    wait_until(lambda: not engine.worlds)
    assert client.request({"endpoint": "stop"})["type"] == "stopped"
    assert close_code(client) == 1000


def test_an_aborted_first_chunk_leaves_no_session(
    endpoint: EndpointServer, engine: FakeEngine
) -> None:
    """If a session's first chunk is aborted, no session remains, and the engine is asked to free
    any state that it may have created for the session. The session id can be used for a new
    session.
    """
    engine.delay_s = 0.5
    with endpoint.client() as client:
        client.send(infer(session_id="a"))
        wait_until(lambda: engine.running == 1)
    wait_until(lambda: not engine.worlds and not len(endpoint.manager))
    engine.delay_s = 0.0
    with endpoint.client() as client:
        assert client.error(infer(session_id="a", image=None)) == "missing_image"


def test_a_session_continues_after_an_abort(endpoint: EndpointServer, engine: FakeEngine) -> None:
    """After an abort, the endpoint reads the session's position from the engine and continues from
    that position.
    """
    with endpoint.client() as client:
        client.send(infer(session_id="a"))
        client.frames()
        engine.delay_s = 1.0
        client.send(infer(2 * LATER, session_id="a", image=None))
        wait_until(lambda: engine.running == 2)
    wait_until(lambda: engine.running == 0)
    # simulate that the chunk was committed before the abort
    next(iter(engine.worlds.values())).chunk_index += 1
    engine.delay_s = 0.0
    with endpoint.client() as client:
        client.send(infer(2 * LATER, session_id="a", image=None))
        assert [message["chunk_index"] for message in client.frames()] == [2, 3]


def test_a_client_that_closes_its_session_and_leaves_frees_it(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """A client that closes its session may disconnect without waiting for the reply, and the
    session is still freed.
    """
    with make_endpoint().client() as client:
        client.send(infer(session_id="a"))
        client.frames()
        client.send({"endpoint": "close", "session_id": "a"})
    wait_until(lambda: not engine.worlds)


def test_idle_connections_are_closed_with_4010(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """Idle connections are closed with 4010. A connection that waits for a chunk is not idle."""
    with make_endpoint(idle_timeout_s=0.3).client() as client:
        engine.delay_s = 1.0
        client.send(infer())
        client.frames()
        assert client.receive()["code"] == "timeout"
        assert close_code(client) == 4010


def test_a_chunk_that_takes_too_long_is_aborted(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """When a chunk takes too long, the client gets a `timeout` error and the engine aborts the
    chunk.
    """
    with make_endpoint(chunk_timeout_s=0.2).client() as client:
        engine.delay_s = 5.0
        assert client.error(infer()) == "timeout"
        assert len(engine.aborted) == 1
