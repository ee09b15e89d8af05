# SPDX-License-Identifier: Apache-2.0
"""H.264 over the two WebSocket endpoints: every message contains one access unit, which the tests
decode as WebCodecs does.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import av
import msgspec
import numpy as np
import pytest
from helpers.fake_engine import FIRST, LATER, Client, EndpointServer, FakeEngine, infer
from helpers.live_clients import ExtendedClient
from helpers.relay import Network, TcpRelay, running
from helpers.waits import seconds
from websockets.sync.client import connect

from vllm_omni.entrypoints.realtime.encoding.bitrate import BitrateControl
from vllm_omni.entrypoints.realtime.encoding.frames import (
    EncodedPart,
    FrameStamp,
    stamped_frames,
)
from vllm_omni.entrypoints.realtime.encoding.h264 import MAX_BITRATE, MIN_BITRATE, H264Encoder
from vllm_omni.entrypoints.realtime.encoding.implementations import machine_implementations
from vllm_omni.entrypoints.realtime.encoding.session_encoders import EncoderSpec, SessionEncoders
from vllm_omni.entrypoints.realtime.world_camera.handler import PATHS

MakeEndpoint = Callable[..., EndpointServer]
SIZE = {"height": 32, "width": 48}


def decode_units(units: list[bytes]) -> np.ndarray:
    """Return the decoded frames. Shape: [T, H, W, 3]."""
    decoder: Any = av.CodecContext.create("h264", "r")
    frames = [frame for unit in units for frame in decoder.decode(av.Packet(unit))]
    frames += decoder.decode(None)
    return np.stack([frame.to_ndarray(format="rgb24") for frame in frames])


def generate(
    client: Client, num_frames: int, number: int = 0, **extra: Any
) -> list[dict[str, Any]]:
    """Request frames as H.264 and return the messages received."""
    is_first = num_frames == FIRST
    client.send(
        infer(
            num_frames,
            image=np.full((32, 48, 3), 7, np.uint8) if is_first else None,
            request_id=f"request-{num_frames}-{number}",
            extra_body={**(SIZE if is_first else {}), "video_format": "h264", **extra},
        )
    )
    return client.frames()


def test_requests_of_a_session_are_one_stream(client: Client) -> None:
    """The requests of a session form one stream, in which only the first frame is a key frame.
    Frame n from the fake engine has brightness n, and each message contains its frame number, time
    and request id.
    """
    messages = generate(client, FIRST) + generate(client, LATER) + generate(client, LATER, number=1)
    assert [message["first_frame"] for message in messages] == list(range(FIRST + 2 * LATER))
    assert [message["is_key_frame"] for message in messages] == [
        True,
        *[False] * (FIRST + 2 * LATER - 1),
    ]
    assert messages[0]["codec_string"].startswith("avc1.42c0")
    fps = messages[0]["fps"]
    assert [message["time_us"] for message in messages] == [
        round(frame * 1e6 / fps) for frame in range(len(messages))
    ]
    assert {message["input_id"] for message in messages[FIRST : FIRST + LATER]} == {"request-12-0"}
    assert {message["chunk_frames"] for message in messages[FIRST:]} == {LATER}
    video_THWC = decode_units([message["video"] for message in messages])
    np.testing.assert_allclose(video_THWC[:, 20, 30, 1], np.arange(len(messages)), atol=3)


def test_a_bad_network_lowers_the_bitrate_and_loses_no_frame(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """A network with a bandwidth of 4 Mbit/s, 2 % packet loss and up to 50 ms of jitter is too slow
    for a video of noise at the initial bitrate. Every frame still arrives in order, and the bitrate
    falls below the bandwidth.
    """
    engine.noise = True
    endpoint = make_endpoint(info={"height": 96, "width": 160, "fps": 24.0})
    network = Network(loss=0.02, jitter_ms=50, bits_per_s=4e6)
    with (
        running(TcpRelay(endpoint.port, network, network)) as relay,
        Client(connect(f"ws://127.0.0.1:{relay.port}{PATHS[0]}", compression=None)) as client,
    ):
        numbers: list[int] = []
        transfer: dict[str, float] = {}
        for number in range(5):
            body: dict[str, Any] = {"video_format": "h264", **transfer}
            if number == 0:
                body |= {"height": 96, "width": 160}
            client.send(
                infer(
                    LATER if number else FIRST,
                    image=None if number else np.zeros((96, 160, 3), np.uint8),
                    request_id=f"request-{number}",
                    extra_body=body,
                )
            )
            messages = [client.receive()]
            first_s = time.monotonic()
            while not messages[-1]["final"]:
                messages.append(client.receive())
            transfer = {"transfer_ms": 1000 * (time.monotonic() - first_s)}
            numbers += [message["first_frame"] for message in messages]
        (session,) = endpoint.manager.sessions()
        spec = EncoderSpec(codec="h264", fps=24.0)
        encoder = session.encoders.get(spec)
    assert numbers == list(range(FIRST + 4 * LATER))
    assert isinstance(encoder, H264Encoder)
    assert encoder.bits_per_s < 4_000_000


def test_a_client_that_lost_frames_gets_a_key_frame(client: Client) -> None:
    """A client that has lost frames can request a key frame, from which a decoder can start without
    any earlier chunk.
    """
    generate(client, FIRST)
    messages = generate(client, LATER, key_frame=True)
    assert [message["is_key_frame"] for message in messages] == [True, *[False] * (LATER - 1)]
    video_THWC = decode_units([message["video"] for message in messages])
    np.testing.assert_allclose(video_THWC[:, 20, 30, 1], np.arange(FIRST, FIRST + LATER), atol=3)


def test_a_branch_starts_with_a_key_frame(client: Client) -> None:
    """A branch starts with a key frame, because another viewer may decode it with a separate
    decoder.
    """
    generate(client, FIRST)
    client.send({"endpoint": "branch", "new_session_id": "copy"})
    assert client.receive()["type"] == "branched"
    assert generate(client, LATER, session_id="copy")[0]["is_key_frame"]


def test_a_recording_in_addition_to_h264_is_one_file_per_chunk(client: Client) -> None:
    """If a client requests a recording in addition to H.264, the last message of each chunk
    contains the chunk's recording as one file.
    """
    messages = generate(client, FIRST, with_mp4=True)
    assert ["mp4" in message for message in messages] == [*[False] * (FIRST - 1), True]


def test_generate_sends_an_access_unit_per_message(endpoint: EndpointServer) -> None:
    """At the generate endpoint, the header of an access unit contains what a decoder requires, and
    the `key_frame` extension requests a key frame.
    """
    with ExtendedClient(endpoint.port) as client:
        client.init(realtime_output_format="h264", extensions=["key_frame", "credit"], max_chunks=3)
        assert client.receive()["type"] == "session"
        units: list[bytes] = []
        keys: list[int] = []
        for chunk_index in range(3):
            if chunk_index == 2:
                client.send({"type": "key_frame"})
            client.send({"type": "credit", "chunks": 1})
            chunk = client.chunk()
            assert {header["content_type"] for header in chunk.headers} == {"video/h264"}
            keys += [header["first_frame"] for header in chunk.headers if header["is_key_frame"]]
            units += chunk.payloads
    assert keys == [0, FIRST + LATER]
    video_THWC = decode_units(units)
    np.testing.assert_allclose(video_THWC[:, 20, 30, 1], np.arange(FIRST + 2 * LATER), atol=3)


def test_an_unknown_codec_is_refused_and_nothing_starts(
    endpoint: EndpointServer, client: Client
) -> None:
    """Both endpoints reject an unknown codec with an error and open no session."""
    client.send(infer(extra_body={"video_format": "av1"}))
    refusal = client.receive()
    assert (refusal["code"], refusal["param"]) == ("unsupported_codec", "video_format")
    with connect(f"ws://127.0.0.1:{endpoint.port}/v1/realtime_video/generate") as socket:
        socket.send(
            msgspec.msgpack.encode({"type": "init", "prompt": "", "realtime_output_format": "av1"})
        )
        reply = msgspec.msgpack.decode(socket.recv())
    assert (reply["type"], reply["content"]) == ("error", "invalid generate request")
    assert len(endpoint.manager) == 0


def test_the_bitrate_follows_the_client() -> None:
    """If a chunk takes most of its playing time to arrive, the target bitrate falls immediately.
    After many fast chunks, the target rises again, within the limits.
    """
    control = BitrateControl()
    control.note_transfer(0.8, 1.0)
    assert control.bits_per_s == 0.6 * MAX_BITRATE
    for _ in range(20):
        control.note_transfer(0.8, 1.0)
    assert control.bits_per_s == MIN_BITRATE
    control.note_transfer(0.1, 1.0)
    assert MIN_BITRATE < control.bits_per_s < 1.2 * MIN_BITRATE
    for _ in range(100):
        control.note_transfer(0.1, 1.0)
    assert control.bits_per_s == MAX_BITRATE


def test_frames_are_sent_while_later_ones_are_encoded(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames are sent while later frames are encoded. The test blocks the encoder before the third
    frame until the client has received the first frame.
    """
    go_on = threading.Event()
    encode_frame = H264Encoder._encode_frame

    def held_back(self: H264Encoder, context: Any, frame: Any, stamp: FrameStamp) -> EncodedPart:
        if stamp.frame == 2:
            assert go_on.wait(seconds(10)), "the first frame has not arrived"
        return encode_frame(self, context, frame, stamp)

    monkeypatch.setattr(H264Encoder, "_encode_frame", held_back)
    client.send(infer(extra_body={**SIZE, "video_format": "h264"}))
    assert client.receive()["first_frame"] == 0
    go_on.set()
    assert [message["first_frame"] for message in client.frames()] == list(range(1, FIRST))


def test_the_time_of_the_encoder_is_not_the_time_of_the_network() -> None:
    """A slow encoder does not lower the bitrate, although the client measures the sum of encoding
    and transfer time.
    """
    encoders = SessionEncoders(partial(machine_implementations, use_gpu=False))
    spec = EncoderSpec(codec="h264", fps=24.0)
    frames_THWC = np.zeros((1, 32, 48, 3), np.uint8)
    frames = stamped_frames(frames_THWC, chunk_index=0, first_frame=0, fps=24.0, input_id=None)
    encoders.encode(spec, frames)
    encoders._spent_s = 0.4
    encoder = encoders.get(spec)
    assert isinstance(encoder, H264Encoder)
    encoders.note_arrival(0.5, playing_s=0.5)
    assert encoder.bits_per_s == MAX_BITRATE
    encoders.note_arrival(0.7, playing_s=0.5)
    assert encoder.bits_per_s == 0.6 * MAX_BITRATE


def test_a_report_of_a_slow_transfer_lowers_the_bitrate(
    endpoint: EndpointServer, client: Client
) -> None:
    """The bitrate falls when `transfer_ms` in a request reports that the client's previous chunk
    was slow to arrive.
    """
    generate(client, FIRST)
    generate(client, LATER, transfer_ms=60_000)
    (session,) = endpoint.manager.sessions()
    (encoder,) = session.encoders._encoders.values()
    assert encoder.bits_per_s == 0.6 * MAX_BITRATE  # type: ignore[attr-defined]
