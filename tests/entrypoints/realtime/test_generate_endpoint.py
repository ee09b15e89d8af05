# SPDX-License-Identifier: Apache-2.0
"""Session lifecycle at `/v1/realtime_video/generate`, with real sockets, a real uvicorn server and
a fake engine.

(U) marks behaviour of SGLang's server that unmodified clients depend on.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.fake_engine import FIRST, LATER, EndpointServer, FakeEngine
from helpers.live_clients import HEIGHT, WIDTH, GenerateClient, png
from helpers.waits import seconds, wait_until

from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.generate.handler import PATHS
from vllm_omni.inputs import DiffusionParams
from vllm_omni.outputs import RequestFailed

MakeEndpoint = Callable[..., EndpointServer]
INIT = {"type": "init", "prompt": "a path", "size": f"{WIDTH}x{HEIGHT}", "first_frame": png()}


@pytest.fixture
def client(endpoint: EndpointServer) -> Iterator[GenerateClient]:
    with GenerateClient(endpoint.port) as client:
        yield client


@pytest.mark.parametrize(
    "message",
    [
        "text",
        b"\xc1",
        [1, 2],
        {"type": "init"},
        {**INIT, "type": "begin"},
        {**INIT, "max_chunks": 0},
        {**INIT, "enhance_prompt": True},
        {**INIT, "enable_frame_interpolation": True},
        {**INIT, "enable_upscaling": True},
        {**INIT, "first_frame": "/etc/passwd"},
        {**INIT, "first_frame": "http://127.0.0.1/x.png"},
        {**INIT, "first_frame": b"not a picture"},
        {**INIT, "first_frame": None},
        {**INIT, "seed": 1.5},
        {**INIT, "size": "48by32"},
        {**INIT, "size": "0x0"},
        {**INIT, "size": "0x96"},
        {**INIT, "size": "4800x3200"},
        {**INIT, "prompt": 5},
        {**INIT, "realtime_output_format": "mp4"},
        {**INIT, "condition_inputs": {"camera_actions": "w"}},
        {**INIT, "prompts": [{"prompt": "snow"}]},
        {**INIT, "prompts": [{"prompt": "", "chunk": 1}]},
        {**INIT, "prompts": [{"prompt": "snow", "chunk": -1}]},
        {**INIT, "prompts": [{"prompt": "snow", "chunk": 1}] * 65},
    ],
)
def test_a_bad_init_is_one_error_and_a_good_one_follows(
    client: GenerateClient, message: Any
) -> None:
    """Every invalid `init` gets exactly one error with the text that clients expect, and the
    connection accepts another `init`. (U)
    """
    client.send(message)
    assert client.receive() == {"type": "error", "content": "invalid generate request"}
    client.init(max_chunks=1)
    assert client.chunk().numbers() == list(range(FIRST))


def test_javascript_numbers_and_unknown_keys_are_accepted(
    client: GenerateClient, engine: FakeEngine
) -> None:
    """Integers may arrive as floats, because JavaScript clients may send them as floats. A request
    may contain settings that the deployment fixes, because the WebUI sends them. (U)
    """
    webui = {
        "num_frames": 9.0,
        "num_inference_steps": 4,
        "guidance_scale": 1.0,
        "realtime_causal_sink_size": 9,
    }
    client.init(seed=100000.0, fps=25, max_chunks=1.0, model="m", zoom={"a": [1]}, **webui)
    client.chunk()
    assert engine.chunks[0].params.seed == 100000
    assert engine.chunks[0].params.options == {}


@pytest.mark.parametrize("path", PATHS)
def test_max_chunks_end_with_a_normal_close(
    endpoint: EndpointServer, engine: FakeEngine, path: str
) -> None:
    """After the frames and stats of the last chunk, the connection is closed with 1000 `generation
    complete` and the session is freed. (U)
    """
    with GenerateClient(endpoint.port, path) as client:
        client.init(max_chunks=3)
        chunks = [client.chunk() for _ in range(3)]
        assert client.close_code() == (1000, "generation complete")
    assert [chunk.index for chunk in chunks] == [0, 1, 2]
    assert [number for chunk in chunks for number in chunk.numbers()] == list(
        range(FIRST + 2 * LATER)
    )
    wait_until(lambda: not engine.worlds and not len(endpoint.manager))


@pytest.mark.parametrize(
    ("info", "requested", "sent"),
    [
        (
            {"window_frames": 18, "sink_frames": 9},
            {"kv_cache_num_frames": 12, "sink_size": 3},
            (12, 3),
        ),
        (
            {"window_frames": 9, "sink_frames": 3},
            {"kv_cache_num_frames": 18, "sink_size": 9},
            (9, 3),
        ),
        ({"window_frames": 18, "sink_frames": 9}, {}, (None, None)),
        ({}, {"kv_cache_num_frames": 18, "sink_size": 9}, (None, None)),
    ],
)
def test_a_session_may_choose_its_causal_window(
    make_endpoint: MakeEndpoint,
    engine: FakeEngine,
    info: dict[str, int],
    requested: dict[str, int],
    sent: tuple[Any, Any],
) -> None:
    """The first chunk request contains the window chosen by the session, limited to the server's
    window. If the model does not support this choice, the server's window is used. (U)
    """
    with GenerateClient(make_endpoint(info=info).port) as client:
        client.init(
            max_chunks=2, **{f"realtime_causal_{name}": value for name, value in requested.items()}
        )
        client.chunk()
        client.chunk()
    first, second = engine.chunks
    assert (first.params.window_frames, first.params.sink_frames) == sent
    assert (second.params.window_frames, second.params.sink_frames) == (None, None)


def test_the_image_prompt_and_seed_start_the_world(
    client: GenerateClient, engine: FakeEngine
) -> None:
    """Only the first chunk request contains the image, prompt and seed. The default seed is 42.
    (U)
    """
    client.init(max_chunks=2)
    client.chunk()
    client.chunk()
    first, second = engine.chunks
    assert (first.params.prompt, first.params.seed, first.params.chunk_index) == ("a path", 42, 0)
    assert (first.params.width, first.params.height) == (WIDTH, HEIGHT)
    assert first.arrays["image"].shape == (HEIGHT, WIDTH, 3)
    assert (second.params.prompt, second.params.seed, second.arrays) == (None, None, {})


def test_idle_connections_take_no_slot(make_endpoint: MakeEndpoint) -> None:
    """An idle connection occupies no session slot, even after invalid `init` messages. (U)"""
    endpoint = make_endpoint(info={"max_sessions": 1})
    with (
        GenerateClient(endpoint.port),
        GenerateClient(endpoint.port) as bad,
        GenerateClient(endpoint.port) as good,
    ):
        bad.send({**INIT, "max_chunks": 0})
        assert bad.error() == "invalid generate request"
        good.init(max_chunks=1)
        good.chunk()


def test_a_full_server_waits_and_refuses(make_endpoint: MakeEndpoint, engine: FakeEngine) -> None:
    """On a full server, a client waits and then gets one error with the text that clients expect
    and close code 1008, while the running session continues. (U)
    """
    assert EndpointLimits().slot_wait_s == 15
    endpoint = make_endpoint(info={"max_sessions": 1}, slot_wait_s=1.0)
    engine.delay_s = 0.05
    with GenerateClient(endpoint.port) as first, GenerateClient(endpoint.port) as second:
        first.init()
        first.chunk()
        started_s = time.monotonic()
        second.init()
        assert second.error() == "another realtime session is already active"
        assert second.close_code()[0] == 1008
        assert 0.9 <= time.monotonic() - started_s < seconds(2.0)
        assert first.chunk().index == 1


def test_a_failed_chunk_ends_with_its_reason_and_a_close_frame(
    client: GenerateClient, engine: FakeEngine
) -> None:
    """Chunks generated before a chunk fails are delivered before the error. The error text contains
    no path or traceback.
    """

    def fail(params: DiffusionParams) -> None:
        if params.chunk_index == 2:
            raise RequestFailed("oom", "the device ran out of memory")

    engine.fail = fail
    client.init()
    assert [client.chunk().index, client.chunk().index] == [0, 1]
    assert client.error() == "error during generate loop: the device ran out of memory"
    code, reason = client.close_code()
    assert (code, reason) == (1011, "the device ran out of memory")


def test_a_text_frame_does_not_end_the_session(client: GenerateClient, engine: FakeEngine) -> None:
    """One WebSocket text frame does not end the session, but the third text frame closes the
    connection with 1003.
    """
    engine.delay_s = 0.05
    client.init()
    client.chunk()
    client.send("hello")
    contents, seen = [], 0
    while not contents or seen < 3:
        message = client.receive()
        contents += [message["content"]] if message["type"] == "error" else []
        seen += message["type"] == "chunk_stats"
    assert contents == ["invalid event"]
    client.send("hello")
    client.send("hello")
    assert client.close_code()[0] == 1003


def test_an_idle_connection_is_closed_but_a_stream_is_not(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """An idle connection is closed with 4010 and without an error message, because the WebUI would
    show such a message indefinitely. A client that only watches a stream is not idle.
    """
    endpoint = make_endpoint(idle_timeout_s=0.3)
    engine.delay_s = 0.2
    with GenerateClient(endpoint.port) as idle, GenerateClient(endpoint.port) as watching:
        watching.init()
        assert idle.close_code()[0] == 4010
        assert [watching.chunk().index for _ in range(5)] == [0, 1, 2, 3, 4]
