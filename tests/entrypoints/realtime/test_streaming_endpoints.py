# SPDX-License-Identifier: Apache-2.0
"""Behaviour that the two streaming endpoints share: waiting for a free session slot, pacing, and
timed prompts.
"""

import base64
import time
from collections.abc import Callable
from typing import Any

import pytest
from helpers.fake_engine import FIRST, LATER, Client, EndpointServer, FakeEngine, infer
from helpers.live_clients import HEIGHT, WIDTH, GenerateClient, VideoClient, png
from helpers.waits import pause, seconds, wait_until
from prometheus_client import REGISTRY
from test_quotas_at_endpoints import Clock, quotas
from test_video_endpoint import START

MakeEndpoint = Callable[..., EndpointServer]
StreamClient = GenerateClient | VideoClient
ENDPOINTS = {GenerateClient: "realtime_video/generate", VideoClient: "realtime/video"}

both_endpoints = pytest.mark.parametrize("connect", ENDPOINTS)


def start(client: StreamClient, num_chunks: int | None = None, **fields: Any) -> None:
    """Start a stream.

    Args:
        fields: The `fps`, `is_paced` and `prompts` settings, which each endpoint gets under its own
            names.
    """
    is_paced, prompts = fields.pop("is_paced", False), fields.pop("prompts", None)
    extra: dict[str, Any] = {"prompts": prompts} if prompts else {}
    if isinstance(client, VideoClient):
        if num_chunks is not None:
            fields["num_frames"] = FIRST + (num_chunks - 1) * LATER
        client.send({**START, **fields, "extra_params": {**extra, "pace_to_media_time": is_paced}})
    else:
        client.init(**fields, **extra, max_chunks=num_chunks, realtime_output_pacing=is_paced)


def wait_for_chunk(client: StreamClient) -> None:
    if isinstance(client, GenerateClient):
        client.chunk()
    else:
        while client.receive()["type"] != "video.chunk_metadata":
            pass


@both_endpoints
def test_pacing_spaces_chunks_as_they_play(
    endpoint: EndpointServer, connect: type[StreamClient]
) -> None:
    """With pacing at 120 frames per second, chunks of 12 frames are sent 100 ms apart, although the
    engine generates them instantly.
    """
    with connect(endpoint.port) as client:
        start(client, 8, fps=120, is_paced=True)
        arrivals = []
        for _ in range(8):
            wait_for_chunk(client)
            arrivals.append(time.monotonic())
    assert (arrivals[-1] - arrivals[1]) / 6 == pytest.approx(LATER / 120, rel=0.15)


@both_endpoints
def test_timed_prompts_act_from_their_chunk(
    endpoint: EndpointServer, engine: FakeEngine, connect: type[StreamClient]
) -> None:
    """A timed prompt takes effect at the first chunk that starts at or after its time, and may
    replace the prompt of the start message.
    """
    prompts = [
        {"prompt": "dawn", "seconds": 0},
        {"prompt": "snow", "chunk": 1},
        {"prompt": "night", "seconds": 2.2},
    ]
    with connect(endpoint.port) as client:
        start(client, 4, fps=10, prompts=prompts)
        for _ in range(4):
            wait_for_chunk(client)
    assert [call.params.prompt for call in engine.chunks] == ["dawn", "snow", None, "night"]


def refusals(connect: type[StreamClient], code: str) -> float:
    labels = {"endpoint": ENDPOINTS[connect], "reason": code}
    return REGISTRY.get_sample_value("omni_rt_sessions_rejected_total", labels) or 0.0


@both_endpoints
@pytest.mark.parametrize("code", ["session_limit", "quota_exceeded", "draining"])
def test_only_a_full_server_is_waited_for(
    make_endpoint: MakeEndpoint, engine: FakeEngine, connect: type[StreamClient], code: str
) -> None:
    """A client waits for a session only if the server is full. If the client has reached its own
    limit or the server is stopping, the client is refused immediately, and metrics count the
    refusal once.
    """
    engine.delay_s = 0.05
    endpoint = make_endpoint(sessions_per_client=1 if code == "session_limit" else 64)
    if code == "quota_exceeded":
        endpoint.manager.quotas = quotas(Clock(), sessions=1)
    before = refusals(connect, code)
    quota = {"key": "default", "quota": "sessions"}
    quota_before = REGISTRY.get_sample_value("omni_quota_refusals_total", quota) or 0.0
    with connect(endpoint.port) as first, connect(endpoint.port) as second:
        start(first)
        wait_until(lambda: len(endpoint.manager) == 1)
        if code == "draining":
            endpoint.manager.drain.is_draining = True
        started_s = time.monotonic()
        start(second)
        second.close_code()
        assert time.monotonic() - started_s < seconds(3.0)
        wait_until(lambda: refusals(connect, code) == before + 1)
    if code == "quota_exceeded":
        assert REGISTRY.get_sample_value("omni_quota_refusals_total", quota) == quota_before + 1


@both_endpoints
def test_a_start_that_waits_without_success_counts_once(
    make_endpoint: MakeEndpoint, engine: FakeEngine, connect: type[StreamClient]
) -> None:
    """A start that waits for a session in vain counts as one refusal, however many attempts the
    server makes.
    """
    endpoint = make_endpoint(info={"max_sessions": 1}, slot_wait_s=0.5)
    engine.delay_s = 0.05
    before = refusals(connect, "capacity")
    with connect(endpoint.port) as first, connect(endpoint.port) as second:
        start(first)
        wait_until(lambda: len(endpoint.manager) == 1)
        start(second)
        second.close_code()
    wait_until(lambda: refusals(connect, "capacity") == before + 1)


@both_endpoints
@pytest.mark.parametrize("how", ["closes", "vanishes"])
def test_a_client_that_leaves_while_it_waits_is_noticed(
    make_endpoint: MakeEndpoint, engine: FakeEngine, connect: type[StreamClient], how: str
) -> None:
    """If a client disconnects while it waits for a session, its connection is freed immediately,
    and no session is opened for it later.
    """
    endpoint = make_endpoint(info={"max_sessions": 1})
    engine.delay_s = 0.05
    with connect(endpoint.port) as first:
        start(first)
        wait_until(lambda: len(endpoint.manager) == 1)
        second = connect(endpoint.port)
        start(second)
        pause(0.3)
        assert endpoint.manager.guard.num_connections == 2
        if how == "closes":
            second.connection.close()
        else:
            second.connection.socket.shutdown(2)
        wait_until(lambda: endpoint.manager.guard.num_connections == 1, 3.0)


def test_messages_sent_during_the_wait_arrive_in_order(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """Events that a client sends while it waits for its session take effect in the first chunks, in
    order.
    """
    endpoint = make_endpoint(info={"max_sessions": 1})
    engine.delay_s = 0.05
    with GenerateClient(endpoint.port) as second:
        with GenerateClient(endpoint.port) as first:
            first.init()
            first.chunk()
            second.init(max_chunks=3)
            second.event("prompt", "snow")
            second.event("prompt", "night")
            pause(0.3)
        chunks = [second.chunk() for _ in range(3)]
    assert [chunk.index for chunk in chunks] == [0, 1, 2]
    prompts = [call.params.prompt for call in engine.chunks[-3:]]
    assert prompts == ["a path", "night", None]


SIZE = {"height": HEIGHT, "width": WIDTH}


def test_the_camera_endpoint_returns_the_generated_seed_with_every_frame(
    client: Client, engine: FakeEngine
) -> None:
    """Every frame message contains the seed that the camera endpoint generated. A later seed of -1
    keeps the session's seed without a warning.
    """
    client.send(infer(FIRST, extra_body={**SIZE, "seed": -1}))
    (first,) = client.frames()
    client.send(infer(LATER, image=None, extra_body={"seed": -1}))
    (second,) = client.frames()
    assert engine.chunks[0].params.seed == first["seed"] == second["seed"] >= 0
    assert "warnings" not in second
    assert engine.chunks[1].params.seed is None


def test_the_camera_endpoint_takes_seeds_of_64_bits(client: Client, engine: FakeEngine) -> None:
    client.send(infer(FIRST, extra_body={**SIZE, "seed": 2**64 - 1}))
    (first,) = client.frames()
    assert engine.chunks[0].params.seed == first["seed"] == 2**64 - 1


def test_the_generate_endpoint_returns_the_generated_seed_with_the_session(
    endpoint: EndpointServer, engine: FakeEngine
) -> None:
    """The session message, which clients with extensions receive, contains the generated seed."""
    with GenerateClient(endpoint.port) as client:
        client.known_types = client.known_types | {"session"}
        client.init(seed=-1, max_chunks=1, extensions=["receipts"])
        session = client.receive()
        client.chunk()
    assert session["type"] == "session"
    assert engine.chunks[0].params.seed == session["seed"] >= 0


def test_the_video_endpoint_returns_the_generated_seed_with_the_start(
    endpoint: EndpointServer, engine: FakeEngine
) -> None:
    image = {"image_url": "data:image/png;base64," + base64.b64encode(png()).decode()}
    with VideoClient(endpoint.port) as client:
        start = {
            "type": "session.start",
            "prompt": "a path",
            **SIZE,
            "image_reference": image,
            "seed": -1,
        }
        started = client.request({**start, "num_frames": FIRST})
        client.until("session.done")
    assert engine.chunks[0].params.seed == started["config"]["seed"] >= 0
