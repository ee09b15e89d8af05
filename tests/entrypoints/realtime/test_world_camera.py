# SPDX-License-Identifier: Apache-2.0
"""What a client of `/v1/realtime/world/camera` sees when all goes well: real sockets and server,
a fake engine.
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
    """A client learns the geometry, its session id and the bounds before it says anything."""
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


def test_hello_reports_of_a_trained_world(make_endpoint: MakeEndpoint, village: Path) -> None:
    """Its domain, its prompts and where its pictures are; other models' greetings have no such
    keys.
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
def test_a_size_the_world_was_not_trained_for_is_made_with_a_warning(
    make_endpoint: MakeEndpoint, village: Path, height: int, width: int, warned: bool
) -> None:
    """It says which size was asked for and which it was trained at, once, with the first chunk."""
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


def test_the_subprotocol_is_echoed(endpoint: EndpointServer) -> None:
    """A client that offers the protocol's name gets it back."""
    with endpoint.client(subprotocols=["other", "omni.world.camera.v1"]) as client:
        assert client.connection.subprotocol == "omni.world.camera.v1"


def test_a_model_that_nothing_steers_closes_with_policy(make_endpoint: MakeEndpoint) -> None:
    """The client is told why before the connection closes."""
    with make_endpoint(info={"actions": ActionSpace()}).client() as client:
        assert client.hello["code"] == "unsupported"
        assert close_code(client) == 1008


def test_chunks_arrive_one_by_one_and_continue(client: Client, engine: FakeEngine) -> None:
    """An infer of 9 + 12k poses gives k + 1 messages; the next infer goes on from there."""
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
    assert (done["type"], done["request_id"], done["next_chunk_index"], done["frames"]) == (
        "done",
        "r1",
        1,
        FIRST,
    )


def test_mp4_messages_play_alone(client: Client) -> None:
    """Each mp4 message is a file of its own, at the size and rate that was asked for."""
    client.send(infer(FIRST + LATER, extra_body={"height": 32, "width": 48, "fps": 8}))
    for message, count in zip(client.frames(), (FIRST, LATER), strict=True):
        frames_THWC, fps = decode_mp4(message["video"])
        assert (frames_THWC.shape, fps, message["codec"]) == ((count, 32, 48, 3), 8.0, "mp4")
        assert abs(int(frames_THWC[3, 16, 24, 0]) - (message["first_frame"] + 3)) <= 3


@pytest.mark.parametrize(("scale", "size"), [(1, (32, 48)), (4, (128, 192)), (8, (256, 384))])
def test_a_file_alongside_the_frames_may_be_larger(
    client: Client, scale: int, size: tuple[int, int]
) -> None:
    """For recordings of small worlds: each pixel becomes a square."""
    message = infer()
    message["extra_body"] |= {"with_mp4": True, "mp4_scale": scale}
    client.send(message)
    [reply] = client.frames()
    assert decode_mp4(reply["mp4"])[0].shape == (FIRST, *size, 3)
    assert reply["video"].shape == (FIRST, 32, 48, 3)


def test_jpeg_messages_hold_one_file_a_frame(client: Client) -> None:
    """`jpeg` gives a list of files."""
    client.send(
        infer(extra_body={"height": 32, "width": 48, "video_format": "jpeg", "frames_per_chunk": 4})
    )
    messages = client.frames()
    assert [len(message["video"]) for message in messages] == [4, 4, 1]
    assert np.asarray(Image.open(io.BytesIO(messages[1]["video"][2]))).shape == (32, 48, 3)


@pytest.mark.parametrize("dialect", codec.Dialect)
def test_first_version_clients_get_what_they_expect(client: Client, dialect: codec.Dialect) -> None:
    """`camera` with array markers: float frames in groups of four, `total` right from the start,
    24 poses are fine.
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


def test_another_connection_continues_a_named_session(endpoint: EndpointServer) -> None:
    """One connection a call works, as clients of the first version do it."""
    with endpoint.client() as client:
        client.send(infer(session_id="w1"))
        client.frames()
    with endpoint.client() as client:
        client.send(infer(LATER, session_id="w1", image=None))
        assert client.frames()[0]["chunk_index"] == 1


def test_two_sessions_of_one_connection_run_side_by_side(
    client: Client, engine: FakeEngine
) -> None:
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
def test_images_reach_the_engine_at_the_sessions_size(
    client: Client, engine: FakeEngine, image: str
) -> None:
    """Bytes, arrays and data URLs all become uint8 RGB of the requested height and width."""
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
    """Held keys, one list a latent frame, are handed to the engine chunk by chunk."""
    keys = [["w"], ["w", "l"], [], ["s"], [], ["j"]]
    client.send(infer(cameras=None, actions=keys))
    assert len(client.frames()) == 2
    assert [call.params.actions for call in engine.chunks] == [keys[:3], keys[3:]]
    assert "poses" not in engine.chunks[0].arrays


def test_a_new_prompt_is_sent_once(client: Client, engine: FakeEngine) -> None:
    """A prompt switch reaches the engine with its first chunk; repeating the prompt is no
    switch.
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
    """The session goes on with them until a request names others."""
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
    """It is ignored, visibly; `restart` begins again."""
    client.send(infer())
    client.frames()
    client.send(infer(LATER))
    message = client.frames()[0]
    assert message["chunk_index"] == 1
    assert "image ignored" in message["warnings"][0]
    client.send(infer(restart=True))
    assert client.frames()[0]["chunk_index"] == 0
