# SPDX-License-Identifier: Apache-2.0
"""A seed of -1 at the realtime endpoints is replaced by a generated one, which the engine and the
client get.
"""

import base64

from helpers.fake_engine import FIRST, LATER, Client, EndpointServer, FakeEngine, infer
from helpers.live_clients import HEIGHT, WIDTH, GenerateClient, VideoClient, png

SIZE = {"height": HEIGHT, "width": WIDTH}


def test_the_camera_endpoint_returns_the_generated_seed_with_every_frame(
    client: Client, engine: FakeEngine
) -> None:
    """A later -1 keeps the session's seed without a warning."""
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
    """The session message of clients with extensions holds the seed."""
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
