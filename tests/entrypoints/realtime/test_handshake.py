# SPDX-License-Identifier: Apache-2.0
"""Handshakes of the realtime endpoints (origins and subprotocols), and expensive work that runs off
the event loop.
"""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.fake_engine import Client, EndpointServer, FakeEngine, infer
from starlette.datastructures import Headers
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from vllm_omni.entrypoints.realtime.connection.connection import normalize_origin, origin_allowed
from vllm_omni.entrypoints.realtime.encoding import images
from vllm_omni.entrypoints.realtime.world_camera import handler
from vllm_omni.entrypoints.realtime.world_camera.handler import PATHS

MakeEndpoint = Callable[..., EndpointServer]


def test_other_origins_are_refused_before_the_upgrade(make_endpoint: MakeEndpoint) -> None:
    """Pages of other origins are refused before the upgrade. Pages of listed origins and of the
    server's own origin are accepted.
    """
    endpoint = make_endpoint(origins=["https://play.example/", "https://other.example"])
    for origin in ("https://evil.example", "https://play.example.evil", "null"):
        with pytest.raises(InvalidStatus) as refused:
            endpoint.client(origin=origin)
        assert refused.value.response.status_code == 403
    for origin in ("https://play.example", f"http://127.0.0.1:{endpoint.port}"):
        with endpoint.client(origin=origin) as client:
            assert client.hello["protocol"] == "omni.world.camera"


@pytest.mark.parametrize(
    ("origin", "host", "allowed"),
    [
        ("https://play.example", "play.example", True),
        ("https://play.example", "play.example:443", True),
        ("http://play.example", "play.example:80", True),
        ("https://play.example", "Play.Example", True),
        ("https://[2001:db8::1]", "[2001:db8::1]:443", True),
        ("https://play.example:8443", "play.example:8443", True),
        ("https://listed.example:443", "play.example", True),
        ("https://evil.example", "play.example:443", False),
        ("https://play.example:444", "play.example:443", False),
        ("http://play.example", "play.example:443", False),
        ("https://play.example:8443", "play.example", False),
        ("null", "play.example", False),
        ("", "", False),
        ("https://", "", False),
        ("https://:443", "", False),
        ("play.example", "play.example", False),
    ],
)
def test_an_origin_is_compared_without_its_default_port(
    origin: str, host: str, allowed: bool
) -> None:
    """An origin is compared without its default port, because a proxy may add `:443` or `:80` to
    `Host` whereas browsers omit the port from `Origin`.
    """
    listed = {normalize_origin("https://Listed.example/")}
    assert origin_allowed(Headers({"origin": origin, "host": host}), listed) is allowed


@pytest.mark.parametrize(("listed", "origin"), [("null", "null"), ("*", "https://any.example")])
def test_pages_from_a_file_or_any_origin_can_be_allowed(
    make_endpoint: MakeEndpoint, listed: str, origin: str
) -> None:
    """`--allowed-origins '["null"]'` allows pages from a file, and `'["*"]'` allows pages of any
    origin.
    """
    with make_endpoint(origins=[listed]).client(origin=origin) as client:
        assert client.hello["protocol"] == "omni.world.camera"


@pytest.mark.parametrize(
    ("path", "offered"),
    [
        ("/v1/realtime_video/generate", "omni.v1"),
        ("/v1/realtime/video", "omni.v1"),
        (PATHS[0], "omni.world.camera.v1"),
    ],
)
def test_a_subprotocol_is_echoed(endpoint: EndpointServer, path: str, offered: str) -> None:
    """If a client offers another subprotocol in addition to a ticket, the server selects that
    subprotocol, because browsers require a selection. If a client offers no subprotocol, the server
    selects none.
    """
    url = f"ws://127.0.0.1:{endpoint.port}{path}"
    with connect(url, subprotocols=["ticket.x", offered]) as first, connect(url) as second:
        assert (first.subprotocol, second.subprotocol) == (offered, None)


def test_heavy_work_stays_off_the_event_loop(
    client: Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large messages and images are decoded, and video is encoded, in worker threads, so other
    clients are not delayed.
    """
    threads: dict[str, str] = {}

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            threads[name] = threading.current_thread().name
            return function(*args, **kwargs)

        return call

    for module, name in ((handler, "decode"), (handler, "load_image"), (images, "encode_mp4")):
        monkeypatch.setattr(module, name, watched(name, getattr(module, name)))
    large = np.random.default_rng(0).integers(0, 255, (200, 200, 3), np.uint8)
    client.send(infer(image=large, extra_body={"height": 32, "width": 48}))
    client.frames()
    assert sorted(threads) == ["decode", "encode_mp4", "load_image"]
    assert all(thread.startswith("ThreadPoolExecutor") for thread in threads.values()), threads
