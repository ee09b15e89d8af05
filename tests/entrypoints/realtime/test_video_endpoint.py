# SPDX-License-Identifier: Apache-2.0
"""`/v1/realtime/video` with real sockets, a real uvicorn server and a fake engine."""

import base64
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers.fake_engine import FIRST, LATER, EndpointServer, FakeEngine
from helpers.live_clients import HEIGHT, WIDTH, VideoClient, png
from helpers.waits import seconds, wait_until

from vllm_omni.actions import ActionSpace
from vllm_omni.entrypoints.media.mp4 import decode_mp4
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.entrypoints.realtime.video.handler import PATHS
from vllm_omni.inputs import DiffusionParams, Lora
from vllm_omni.outputs import RequestFailed

MakeEndpoint = Callable[..., EndpointServer]
IMAGE = {"image_url": "data:image/png;base64," + base64.b64encode(png()).decode()}
START = {
    "type": "session.start",
    "prompt": "a path",
    "width": WIDTH,
    "height": HEIGHT,
    "image_reference": IMAGE,
}


@pytest.fixture
def client(endpoint: EndpointServer) -> Iterator[VideoClient]:
    with VideoClient(endpoint.port) as client:
        yield client


def camera(mode: str = "target", translation: Any = (0, 0, 1), **data: Any) -> dict[str, Any]:
    return {
        "multi_modal_data": {"camera": {"mode": mode, "data": {"translation": translation, **data}}}
    }


def interaction(event: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "session.interaction", "interaction": {"event": event, **fields}}


def responses(client: VideoClient, kind: str, count: int = 1) -> list[dict[str, Any]]:
    """Return the next `count` messages of the given type, skipping the chunks between them."""
    found = []
    while len(found) < count:
        message = client.receive()
        found += [message] if message["type"] == kind else []
    return found


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_from_start_to_done(
    endpoint: EndpointServer, engine: FakeEngine, path: str
) -> None:
    """A stream consists of the start message, chunks with metadata, the `done` message, and close
    code 1000. The concatenated bytes are a video that contains every frame.
    """
    with VideoClient(endpoint.port, path) as client:
        started = client.request({**START, "num_frames": FIRST + 2 * LATER, "fps": 8, "seed": 3})
        assert (started["type"], started["format"]) == ("video.start", "m4s")
        assert (
            started["config"]["width"],
            started["config"]["height"],
            started["config"]["fps"],
        ) == (48, 32, 8)
        done, chunks = client.until("session.done")
        assert client.close_code() == (1000, "generation complete")
    assert (done["chunks"], done["stopped"], done["request_id"]) == (
        3,
        False,
        started["request_id"],
    )
    assert [chunk["num_frames"] for chunk in chunks] == [FIRST, LATER, LATER]
    assert [chunk["generation_chunk_index"] for chunk in chunks] == [0, 1, 2]
    assert [chunk["transport_chunk_index"] for chunk in chunks] == [0, 1, 2]
    assert {chunk["kind"] for chunk in chunks} == {"media"}
    assert chunks[0]["mime_type"].startswith('video/mp4; codecs="avc1.')
    video_THWC, fps = decode_mp4(b"".join(chunk["data"] for chunk in chunks))
    assert (len(video_THWC), fps) == (FIRST + 2 * LATER, 8.0)
    np.testing.assert_allclose(video_THWC[:, 16, 24, 0], np.arange(FIRST + 2 * LATER), atol=3)
    assert engine.chunks[0].params.seed == 3
    wait_until(lambda: not engine.worlds and not len(endpoint.manager))


def test_without_num_frames_it_runs_until_stop(client: VideoClient, engine: FakeEngine) -> None:
    """Without `num_frames`, a stream runs until `session.stop` aborts its chunk. `done` reports the
    abort, and the connection is closed normally.
    """
    client.send(START)
    client.receive()
    client.receive()
    engine.delay_s = 5.0
    wait_until(
        lambda: engine.running == 1 and engine.chunks[-1].started_s < time.monotonic() - 0.05
    )
    started_s = time.monotonic()
    client.send({"type": "session.stop"})
    done, _ = client.until("session.done")
    assert done["stopped"]
    assert client.close_code() == (1000, "stopped by the client")
    assert time.monotonic() - started_s < seconds(2.0)
    wait_until(lambda: not engine.running and not engine.worlds)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (b"\x00", "must be a JSON text"),
        ("{", "Invalid JSON"),
        ("[1]", "must be a JSON object"),
        ({"type": "start"}, "Expected session.start"),
        ({**START, "format": "webm"}, "expected 'm4s'"),
        ({**START, "model": "other"}, "Model mismatch"),
        ({**START, "num_frames": 10}, "num_frames must be 9 + 12k"),
        ({**START, "num_frames": 3}, "num_frames must be 9 + 12k"),
        ({**START, "width": 40}, "width must be a multiple"),
        ({**START, "height": None}, "width and height"),
        ({**START, "prompt": " "}, "prompt"),
        ({**START, "prompt": None}, "Invalid session.start"),
        ({**START, "fps": "fast"}, "Invalid session.start"),
        ({**START, "image_reference": None}, "image_reference"),
        ({**START, "image_reference": {"image_url": "http://127.0.0.1/x.png"}}, "PNG"),
        (
            {**START, "image_reference": {"image_url": "data:image/png;base64,AAAA"}},
            "cannot be read",
        ),
        ({**START, "extra_params": {"preencode_mp4": True}}, "preencode_mp4"),
    ],
)
def test_a_bad_start_gets_an_error_and_is_closed(
    client: VideoClient, engine: FakeEngine, message: Any, said: str
) -> None:
    """A client that sends an invalid start message gets one error and a close frame, and no request
    reaches the engine.
    """
    client.send(message)
    error = client.receive()
    assert error["type"] == "error"
    assert said in error["message"]
    assert client.close_code()[0] == 1008
    assert engine.calls == []


def test_a_start_must_come_in_time(make_endpoint: MakeEndpoint) -> None:
    """The start message must arrive within a timeout, whose default is ten seconds."""
    with VideoClient(make_endpoint(start_timeout_s=0.2).port) as client:
        assert client.receive()["message"] == "Timeout waiting for session.start"
        assert client.close_code()[0] == 1008


def test_large_start_images_are_accepted(make_endpoint: MakeEndpoint) -> None:
    """Start images are limited only by the image limit and the server's maximum message size,
    whereas the original implementation rejects start messages above 4 MiB.
    """
    endpoint = make_endpoint(max_image_bytes=600_000)
    noise = np.random.default_rng(0).integers(0, 255, (400, 400, 3), np.uint8)
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    with VideoClient(endpoint.port) as client:
        assert (
            client.request({**START, "image_reference": {"image_url": url}})["type"]
            == "video.start"
        )


def test_interactions_are_queued_before_they_act(client: VideoClient, engine: FakeEngine) -> None:
    """An interaction is queued before it takes effect. When a prompt takes effect, the chunk's
    metadata names the event, and the engine gets the prompt once.
    """
    engine.delay_s = 0.1
    client.send(START)
    client.receive()
    client.receive()
    client.send(interaction({"prompt": "rain"}, event_id="e1"))
    (queued,) = responses(client, "session.interaction.queued")
    assert queued["event_id"] == "e1"
    chunks = responses(client, "video.chunk_metadata", 3)
    assert [chunk["started_event_ids"] for chunk in chunks].count(["e1"]) == 1
    assert [call.params.prompt for call in engine.chunks].count("rain") == 1


def test_a_target_steers_the_camera(client: VideoClient, engine: FakeEngine) -> None:
    """After a camera command, chunk requests contain poses instead of keys, and the camera reaches
    the target after the given number of chunks. The y axis is inverted.
    """
    engine.delay_s = 0.1
    client.send(START)
    client.receive()
    client.receive()
    client.send(interaction(camera(translation=[0, 1, 2]), event_id="go", transition_chunks=2))
    responses(client, "session.interaction.queued")
    chunks = responses(client, "video.chunk_metadata", 4)
    at = next(number for number, chunk in enumerate(chunks) if "go" in chunk["started_event_ids"])
    assert chunks[at]["active_event_ids"] == ["go"]
    assert chunks[at + 1]["completed_event_ids"] == ["go"]
    steered = [call for call in engine.chunks if "poses" in call.arrays]
    assert all(call.params.actions is None for call in steered)
    np.testing.assert_allclose(steered[0].arrays["poses"][-1, :3, 3], [0, -0.5, 1.0], atol=1e-6)
    np.testing.assert_allclose(steered[1].arrays["poses"][-1, :3, 3], [0, -1, 2], atol=1e-6)
    view = StreamInfo(height=32, width=48).key_intrinsics(48, 32)
    np.testing.assert_allclose(
        steered[0].arrays["intrinsics"], np.tile(view, (LATER, 1)), rtol=1e-6
    )


def test_a_key_script_steers_the_first_chunks(client: VideoClient, engine: FakeEngine) -> None:
    """A key script is followed by idle entries, and a camera command during the script is
    rejected.
    """
    engine.delay_s = 0.05
    script = [["w"], ["w", "l"], [], ["s"]]
    client.send(
        {**START, "num_frames": FIRST + LATER, "extra_params": {"camera_action_script": script}}
    )
    client.receive()
    client.send(interaction(camera(), event_id="go"))
    (error,) = responses(client, "error")
    assert (error["code"], error["event_id"]) == ("interaction_failed", "go")
    client.until("session.done")
    assert [call.params.actions for call in engine.chunks] == [
        [["w"], ["w", "l"], []],
        [["s"], [], []],
    ]


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("{", "invalid_json"),
        ("[]", "invalid_request"),
        ({"type": "dance"}, "invalid_request"),
        ({"type": "session.interaction"}, "invalid_request"),
        (interaction({}), "invalid_request"),
        (interaction({"prompt": ""}), "invalid_request"),
        (interaction({"prompt": "x" * 9000}), "prompt_too_long"),
        (interaction({"prompt": "rain"}, event_id=""), "invalid_request"),
        (interaction({"prompt": "rain"}, transition_chunks=-1), "invalid_request"),
        (interaction(camera(mode="teleport")), "invalid_request"),
        (interaction(camera(translation=[0, 1])), "invalid_request"),
        (interaction(camera(translation=[0, 1, 1e30])), "invalid_request"),
        (interaction(camera(rotation=[0, 0, 0, 0])), "invalid_camera"),
        (interaction(camera(actions=["w"])), "invalid_request"),
        (interaction({"multi_modal_data": {"sound": {}}}), "invalid_request"),
        (
            '{"type": "session.interaction", "interaction": {"event": {"prompt": NaN}}}',
            "invalid_json",
        ),
        (json.dumps(interaction({"prompt": "x"})) + " " * 140_000, "invalid_request"),
        (b"\x00\x01", "invalid_frame"),
    ],
)
def test_a_bad_message_is_one_error_and_the_stream_continues(
    client: VideoClient, engine: FakeEngine, message: Any, code: str
) -> None:
    """An invalid message gets one error, and later controls still work. In the original
    implementation, controls stopped working after a binary message.
    """
    engine.delay_s = 0.02
    client.send(START)
    client.receive()
    client.send(message)
    (error,) = responses(client, "error")
    assert error["code"] == code
    client.send({"type": "session.ping"})
    responses(client, "session.pong")
    responses(client, "video.chunk_metadata", 2)
    assert {call.params.prompt for call in engine.chunks} == {"a path", None}


def test_an_event_id_is_used_once(client: VideoClient, engine: FakeEngine) -> None:
    """A second event with the same id is a conflict and has no effect."""
    engine.delay_s = 0.05
    client.send(START)
    client.receive()
    client.send(interaction({"prompt": "rain"}, event_id="e"))
    client.send(interaction({"prompt": "snow"}, event_id="e"))
    (error,) = responses(client, "error")
    assert (error["code"], error["event_id"]) == ("event_id_conflict", "e")
    responses(client, "video.chunk_metadata", 3)
    assert "snow" not in [call.params.prompt for call in engine.chunks]


def test_a_failed_chunk_gets_an_error_and_is_closed(
    client: VideoClient, engine: FakeEngine
) -> None:
    """The error for a failed chunk has a code and the stream's id, and the close code is 1011."""

    def fail(params: DiffusionParams) -> None:
        if params.chunk_index == 1:
            raise RequestFailed("non_finite", "latents contain NaN")

    engine.fail = fail
    client.send(START)
    started = client.receive()
    (error,) = responses(client, "error")
    assert (error["code"], error["request_id"]) == ("non_finite", started["request_id"])
    assert client.close_code()[0] == 1011


def test_adapters_at_the_start_and_by_interaction(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """Adapters may be selected in the start message and by interactions. An interaction may contain
    only adapters, which take effect at the start of a chunk.
    """
    engine.delay_s = 0.05
    endpoint = make_endpoint()
    with VideoClient(endpoint.port) as client:
        assert client.request({**START, "lora": [{"name": "ink"}]})["type"] == "video.start"
        client.send(interaction({"lora": []}))
        responses(client, "session.interaction.queued")
        responses(client, "video.chunk_metadata", 3)
    sent = [call.params.lora for call in engine.chunks]
    assert sent[0] in ([Lora(name="ink")], []) and sent.count([]) == 1


def test_a_stream_selects_an_adapter_by_its_model(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """`model` may name an adapter. If `lora` gives a scale for the adapter, that scale applies."""
    endpoint = make_endpoint()
    endpoint.manager.adapters = lambda: ("ink",)
    choices: list[dict[str, Any]] = [
        {},
        {"lora": [{"name": "ink", "scale": 0.5}]},
        {"lora": [{"name": "oil"}]},
    ]
    for lora in choices:
        with VideoClient(endpoint.port) as client:
            client.request({**START, "model": "ink", **lora, "num_frames": FIRST})
            client.until("session.done")
    ink, oil, half = Lora(name="ink"), Lora(name="oil"), Lora(name="ink", scale=0.5)
    assert [call.params.lora for call in engine.chunks] == [[ink], [half], [ink, oil]]
    with VideoClient(endpoint.port) as client:
        assert (
            "this server runs 'null', 'ink'"
            in client.request({**START, "model": "other"})["message"]
        )


def test_a_model_without_camera_or_image_is_steered_by_prompts(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """For a model that has no camera and takes no start image, the engine gets neither keys nor
    poses, a camera command is rejected, and no image is required.
    """
    engine.delay_s = 0.05
    endpoint = make_endpoint(info={"actions": ActionSpace(image="none")})
    start = {key: value for key, value in START.items() if key != "image_reference"}
    with VideoClient(endpoint.port) as client:
        assert client.request(start)["type"] == "video.start"
        client.send(interaction(camera()))
        (error,) = responses(client, "error")
        assert error["code"] == "interaction_failed"
        client.send(interaction({"prompt": "rain"}))
        responses(client, "session.interaction.queued")
        responses(client, "video.chunk_metadata", 3)
    assert [call.params.actions for call in engine.chunks[:3]] == [None] * 3
    assert [call.params.prompt for call in engine.chunks].count("rain") == 1
