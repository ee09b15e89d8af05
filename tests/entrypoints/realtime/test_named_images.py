# SPDX-License-Identifier: Apache-2.0
"""Named images at the three realtime endpoints: the tensors that reach the engine, and the errors
for invalid images.
"""

import base64
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from helpers.fake_engine import FIRST, EndpointServer, FakeEngine, infer
from helpers.live_clients import ExtendedClient, VideoClient, png

from vllm_omni.actions import CAMERA_SPACE, ActionSpace, NamedImage

MakeEndpoint = Callable[..., EndpointServer]
SPACE = ActionSpace(
    buttons=CAMERA_SPACE.buttons,
    pose=True,
    images=(NamedImage("head", "head"), NamedImage("back", "back")),
)
NEEDED = ActionSpace(
    buttons=CAMERA_SPACE.buttons, pose=True, images=(NamedImage("head", "head", "required"),)
)
HEAD, BACK = png(20, 30), png(24, 16)
ALLOWED = "this model takes head, back"


@pytest.fixture
def endpoint(make_endpoint: MakeEndpoint) -> EndpointServer:
    return make_endpoint(info={"actions": SPACE})


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def shapes(engine: FakeEngine, chunk: int) -> dict[str, tuple[int, ...]]:
    arrays: Mapping[str, np.ndarray] = engine.chunks[chunk].arrays
    return {name: array.shape for name, array in arrays.items() if name.startswith("images.")}


# -- /v1/realtime/world/camera ---------------------------------------------------------------------


def test_the_greeting_lists_the_images_of_the_model(endpoint: EndpointServer) -> None:
    with endpoint.client() as client:
        assert client.hello["actions"]["images"] == [
            {"name": "head", "title": "head", "use": "optional"},
            {"name": "back", "title": "back", "use": "optional"},
        ]


def test_images_come_with_the_first_chunk_in_their_own_size(
    endpoint: EndpointServer, engine: FakeEngine
) -> None:
    """Named images may be sent as a file, a data: URL or an array, and keep their own size. The
    start image is resized to the video size.
    """
    with endpoint.client() as client:
        client.send(infer(FIRST + 12, images={"head": HEAD, "back": data_url(BACK)}))
        client.frames()
    assert shapes(engine, 0) == {"images.head": (30, 20, 3), "images.back": (16, 24, 3)}
    assert engine.chunks[0].arrays["image"].shape == (32, 48, 3)
    assert shapes(engine, 1) == {}
    with endpoint.client() as client:
        client.send(infer(images={"head": np.full((9, 8, 3), 5, np.uint8)}))
        client.frames()
    assert shapes(engine, 2) == {"images.head": (9, 8, 3)}


def test_a_restart_may_have_other_images(endpoint: EndpointServer, engine: FakeEngine) -> None:
    with endpoint.client() as client:
        client.send(infer(images={"head": HEAD}))
        client.frames()
        client.send(infer(12, images={"back": BACK}))
        assert client.frames()[0]["warnings"] == [
            "image ignored: the session has started; send restart to start again"
        ]
        client.send(infer(images={"back": BACK}, restart=True))
        client.frames()
    assert [shapes(engine, chunk) for chunk in range(3)] == [
        {"images.head": (30, 20, 3)},
        {},
        {"images.back": (16, 24, 3)},
    ]


@pytest.mark.parametrize(
    ("images", "code", "says"),
    [
        ({"side": HEAD}, "invalid_image", f"unknown images side; {ALLOWED}"),
        (
            {f"view{n}": HEAD for n in range(6)},
            "invalid_image",
            f"unknown images view0, view1, view2; {ALLOWED}",
        ),
        ({f"view{n}": HEAD for n in range(17)}, "invalid_request", "images"),
        ({"head": b"no image"}, "invalid_image", "cannot be read"),
        ({"head": np.zeros((8, 8), np.uint8)}, "invalid_image", r"uint8 [H, W, 3]"),
        ({"head": 3}, "invalid_image", "send PNG"),
        ([HEAD], "invalid_request", "images"),
    ],
    ids=["unknown", "six", "too many", "no image", "shape", "type", "list"],
)
def test_bad_images_are_refused(
    endpoint: EndpointServer, engine: FakeEngine, images: Any, code: str, says: str
) -> None:
    """A bad image is rejected with an error that states what is allowed, and the connection still
    accepts requests.
    """
    with endpoint.client() as client:
        response = client.request(infer(images=images))
        assert (response["type"], response["code"]) == ("error", code)
        assert says in response["message"]
        client.send(infer())
        client.frames()
    assert len(engine.chunks) == 1


def test_a_required_image_is_asked_for(make_endpoint: MakeEndpoint) -> None:
    endpoint = make_endpoint(info={"actions": NEEDED})
    with endpoint.client() as client:
        response = client.request(infer())
        assert response["code"] == "missing_image"
        assert "this model requires the image head in images" in response["message"]


def test_a_model_without_named_images_refuses_them(make_endpoint: MakeEndpoint) -> None:
    with make_endpoint().client() as client:
        response = client.request(infer(images={"head": HEAD}))
        assert response["code"] == "invalid_image"
        assert "this model takes no named images" in response["message"]


def test_all_images_share_the_limit_of_bytes(make_endpoint: MakeEndpoint) -> None:
    endpoint = make_endpoint(info={"actions": SPACE}, max_image_bytes=len(HEAD) + len(BACK) - 1)
    with endpoint.client() as client:
        response = client.request(infer(images={"head": HEAD, "back": BACK}))
        assert response["code"] == "image_too_large"
        client.send(infer(images={"head": HEAD}))
        client.frames()


# -- /v1/realtime_video/generate and /v1/realtime/video --------------------------------------------


def test_the_generate_endpoint_takes_images(endpoint: EndpointServer, engine: FakeEngine) -> None:
    with ExtendedClient(endpoint.port) as client:
        client.init(images={"head": HEAD, "back": data_url(BACK)})
        client.chunk()
    assert shapes(engine, 0) == {"images.head": (30, 20, 3), "images.back": (16, 24, 3)}


@pytest.mark.parametrize("images", [{"side": HEAD}, {"head": 3}, {"head": "https://a/b.png"}])
def test_the_generate_endpoint_refuses_bad_images(endpoint: EndpointServer, images: Any) -> None:
    with ExtendedClient(endpoint.port) as client:
        client.init(images=images, extensions=["receipts"])
        response = client.receive()
        while response["type"] != "error":
            response = client.receive()
        assert response["code"] == "invalid_image"


def test_the_video_endpoint_takes_images(endpoint: EndpointServer, engine: FakeEngine) -> None:
    start = {
        "type": "session.start",
        "prompt": "a path",
        "width": 48,
        "height": 32,
        "image_reference": {"image_url": data_url(png())},
    }
    with VideoClient(endpoint.port) as client:
        client.send({**start, "images": {"side": {"image_url": data_url(HEAD)}}})
        refusal, _ = client.until("error")
        assert ALLOWED in refusal["message"]
    with VideoClient(endpoint.port) as client:
        client.send({**start, "images": {"head": {"image_url": data_url(HEAD)}}})
        client.until("video.start")
        client.receive()
    assert shapes(engine, 0) == {"images.head": (30, 20, 3)}
