# SPDX-License-Identifier: Apache-2.0
"""Who may come in, what stays off the event loop, and what is left when everybody has gone."""

import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.fake_engine import FIRST, LATER, Client, EndpointServer, FakeEngine, camera, infer
from helpers.waits import wait_until
from starlette.datastructures import Headers
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from vllm_omni.entrypoints.realtime import render
from vllm_omni.entrypoints.realtime.connection.connection import normalize_origin, origin_allowed
from vllm_omni.entrypoints.realtime.world_camera import handler
from vllm_omni.entrypoints.realtime.world_camera.handler import PATHS

MakeEndpoint = Callable[..., EndpointServer]


def test_other_origins_are_refused_before_the_upgrade(make_endpoint: MakeEndpoint) -> None:
    """A web page elsewhere cannot use a visitor's server; listed origins and the server's own
    can.
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
    """A proxy may add `:443` or `:80` to `Host`; browsers leave the default port out of
    `Origin`.
    """
    listed = {normalize_origin("https://Listed.example/")}
    assert origin_allowed(Headers({"origin": origin, "host": host}), listed) is allowed


@pytest.mark.parametrize(("listed", "origin"), [("null", "null"), ("*", "https://any.example")])
def test_pages_from_a_file_and_from_anywhere_can_be_let_in(
    make_endpoint: MakeEndpoint, listed: str, origin: str
) -> None:
    """As `--allowed-origins '["null"]'` and `'["*"]'` say."""
    with make_endpoint(origins=[listed]).client(origin=origin) as client:
        assert client.hello["protocol"] == "omni.world.camera"


@pytest.mark.parametrize("path", ["/v1/realtime_video/generate", "/v1/realtime/video"])
def test_a_subprotocol_is_echoed_at_the_streaming_endpoints(
    endpoint: EndpointServer, path: str
) -> None:
    """A browser that brings a ticket as a subprotocol must get another one back; who offers none
    gets none.
    """
    url = f"ws://127.0.0.1:{endpoint.port}{path}"
    with connect(url, subprotocols=["omni.v1", "other"]) as first, connect(url) as second:
        assert (first.subprotocol, second.subprotocol) == ("omni.v1", None)


def test_connections_are_bounded(make_endpoint: MakeEndpoint) -> None:
    """One more is refused with 503 before the upgrade; a place that becomes free is given away
    again.
    """
    endpoint = make_endpoint(max_connections=2)
    with endpoint.client(), endpoint.client() as second:
        with pytest.raises(InvalidStatus) as refused:
            endpoint.client()
        assert refused.value.response.status_code == 503
        second.connection.close()
        wait_until(lambda: len(endpoint.server.server_state.connections) == 1)
        endpoint.client().connection.close()


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

    for module, name in ((handler, "decode"), (handler, "load_image"), (render, "encode_mp4")):
        monkeypatch.setattr(module, name, watched(name, getattr(module, name)))
    large = np.random.default_rng(0).integers(0, 255, (200, 200, 3), np.uint8)
    client.send(infer(image=large, extra_body={"height": 32, "width": 48}))
    client.frames()
    assert sorted(threads) == ["decode", "encode_mp4", "load_image"]
    assert all(thread.startswith("ThreadPoolExecutor") for thread in threads.values()), threads


def test_a_first_version_client_works_with_its_own_codec(endpoint: EndpointServer) -> None:
    """The message loop of the first example client for this path: msgpack with OpenPI's hooks, a
    connection a call.
    """
    msgpack = pytest.importorskip("msgpack")

    def pack_array(value: Any) -> Any:
        fields = {b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
        return {b"__ndarray__": True, **fields}

    def unpack_array(fields: dict[Any, Any]) -> Any:
        if b"__ndarray__" in fields:
            return np.ndarray(
                buffer=fields[b"data"], dtype=np.dtype(fields[b"dtype"]), shape=fields[b"shape"]
            )
        return fields

    path, video = camera(48), []
    path["intrinsics"] = np.tile(path["intrinsics"], (48, 1))
    for start in (0, 24):
        extra = {
            "height": 32,
            "width": 48,
            "num_frames": 24,
            "fps": 16,
            "session_id": "w1",
            "frames_per_chunk": 4,
        }
        request = {
            "prompt": "a path",
            "camera": {name: array[start : start + 24] for name, array in path.items()},
            "extra_body": {**extra, "seed": 42},
            "session_id": "w1",
        }
        if start == 0:
            request["image"] = np.zeros((48, 64, 3), np.uint8)
        with connect(
            f"ws://127.0.0.1:{endpoint.port}{PATHS[0]}", max_size=None, ping_interval=None
        ) as world:
            assert (
                msgpack.unpackb(world.recv(), object_hook=unpack_array)["latent_frames_per_chunk"]
                == 3
            )
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


def test_abrupt_ends_leave_nothing_behind(make_endpoint: MakeEndpoint, engine: FakeEngine) -> None:
    """A hundred clients vanish, most of them in the middle of a chunk: no task, request,
    connection or world stays.
    """
    endpoint = make_endpoint(info={"max_sessions": 2, "session_idle_s": 0.5})
    engine.delay_s = 0.02
    for number in range(100):
        client = endpoint.client()
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
    wait_until(lambda: not engine.running and not endpoint.server.server_state.connections)
    wait_until(lambda: not engine.worlds and not len(endpoint.manager))
    wait_until(lambda: len(endpoint.manager._tasks) == 1)  # the sweeper
    assert engine.live == {}
