# SPDX-License-Identifier: Apache-2.0
"""The exact bytes of messages from `/v1/realtime_video/generate`.

(U) marks behaviour of SGLang's server that unmodified clients depend on.
"""

import io
import re
import zlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.fake_engine import FIRST, LATER, EndpointServer, FakeEngine
from helpers.live_clients import HEIGHT, WIDTH, GenerateClient, webui_unpack
from PIL import Image

from vllm_omni.entrypoints.realtime.chunk_source import ChunkControls
from vllm_omni.entrypoints.realtime.controls.control_track import ControlSample
from vllm_omni.entrypoints.realtime.encoding.frames import stamped_frames
from vllm_omni.entrypoints.realtime.encoding.implementations import machine_implementations
from vllm_omni.entrypoints.realtime.encoding.session_encoders import EncoderSpec, SessionEncoders
from vllm_omni.entrypoints.realtime.generate.frames import FrameBatcher

MakeEndpoint = Callable[..., EndpointServer]


@pytest.fixture
def client(endpoint: EndpointServer) -> Iterator[GenerateClient]:
    with GenerateClient(endpoint.port) as client:
        yield client


RAW_FIELDS = {
    "type",
    "request_id",
    "chunk_index",
    "content_type",
    "num_frames",
    "total_size",
    "frame_batch_index",
    "num_frame_batches",
    "is_final_frame_batch",
    "format",
    "width",
    "height",
    "channels",
    "bytes_per_frame",
    "raw_size",
    "encoding",
}
STATS_FIELDS = {
    "type",
    "session_id",
    "request_id",
    "chunk_index",
    "event_id",
    "request_prepare_ms",
    "scheduler_forward_ms",
    "pace_wait_ms",
    "header_write_ms",
    "raw_payload_build_ms",
    "raw_write_ms",
    "ws_write_ms",
    "chunk_total_ms",
    "num_batches",
    "num_frames",
    "raw_bytes",
    "ws_payload_bytes",
    "content_type",
}


def test_messages_have_the_known_form_byte_for_byte(endpoint: EndpointServer) -> None:
    """The header and payload form one map with sixteen header fields, and the stats message has
    eighteen fields. In both messages, `type` comes first and all numbers are integers. (U)
    """
    with GenerateClient(endpoint.port) as client:
        client.init(max_chunks=1)
        frames, stats = client.connection.recv(), client.connection.recv()
    assert isinstance(frames, bytes)
    assert isinstance(stats, bytes)
    assert frames.startswith(bytes.fromhex("de0011a474797065ab6672616d655f6261746368"))
    assert stats.startswith(bytes.fromhex("de0012a474797065ab6368756e6b5f7374617473"))
    assert b"\xcb" not in stats
    message, reported = webui_unpack(frames), webui_unpack(stats)
    assert set(message) == RAW_FIELDS | {"payload"}
    assert set(reported) == STATS_FIELDS
    assert (message["content_type"], message["format"], message["encoding"]) == (
        "application/x-raw-rgb",
        "rgb24",
        "raw",
    )
    assert (
        message["total_size"]
        == message["raw_size"]
        == FIRST * WIDTH * HEIGHT * 3
        == len(message["payload"])
    )
    assert re.fullmatch(r"[0-9a-f]{32}_[0-9a-f]{32}", message["request_id"])
    assert message["request_id"].startswith(reported["session_id"] + "_")
    assert reported["ws_payload_bytes"] == len(frames)
    assert reported["raw_bytes"] == message["total_size"]
    assert reported["event_id"] is None


@pytest.mark.parametrize(("width", "height", "inline"), [(48, 32, True), (64, 64, False)])
def test_large_payloads_are_separate_messages(
    make_endpoint: MakeEndpoint, width: int, height: int, inline: bool
) -> None:
    """A payload of 64 KiB or more is sent as a separate message after its header map. (U)"""
    endpoint = make_endpoint(info={"width": width, "height": height})
    with GenerateClient(endpoint.port) as client:
        client.init(size=f"{width}x{height}", max_chunks=2)
        types = []
        for _ in range(2):
            chunk = client.chunk()
            types += [header["type"] for header in chunk.headers]
            assert chunk.frames().shape == (FIRST if chunk.index == 0 else LATER, height, width, 3)
        assert types == ["frame_batch" if inline else "frame_batch_header"] * len(types)


def test_no_message_comes_between_header_and_payload(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """The server replies to a hundred invalid events while it sends chunks, but no reply comes
    between a header and its payload. (U)
    """
    endpoint = make_endpoint(info={"width": 128, "height": 64})
    with GenerateClient(endpoint.port) as client:
        client.init(size="128x64", max_chunks=20)
        for number in range(100):
            client.event("dance", number, event_id=number)
        errors, chunks = 0, 0
        # `receive` treats the message after a header as the header's payload.
        while chunks < 20 or errors < 100:
            message = client.receive()
            errors += message["type"] == "error"
            chunks += message["type"] == "chunk_stats"
        assert errors == 100


def test_chunks_are_split_by_frames(make_endpoint: MakeEndpoint) -> None:
    """A message contains at most 16 raw or 6 encoded frames, and the last message of a chunk is
    marked as such. (U)
    """
    endpoint = make_endpoint(info={"latent_frames_per_chunk": 5})  # first chunk of 17 frames
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("helpers.fake_engine.FIRST", 17)
        for kind, counts in (("raw", [16, 1]), ("jpeg", [6, 6, 5])):
            with GenerateClient(endpoint.port) as client:
                client.init(max_chunks=1, realtime_output_format=kind)
                assert [header["num_frames"] for header in client.chunk().headers] == counts


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_images_decode_to_the_size_in_the_header(client: GenerateClient, kind: str) -> None:
    """Every frame is one image file, whose length is in `payload_lengths`. Frames are scaled down
    to the preview width but never up. (U)
    """
    client.init(
        max_chunks=1,
        realtime_output_format=kind,
        realtime_preview_max_width=24,
        output_compression=90,
    )
    chunk = client.chunk()
    images = [Image.open(io.BytesIO(file)) for file in chunk.files()]
    header = chunk.headers[0]
    assert [image.size for image in images] == [(24, 16)] * FIRST
    assert images[0].format == kind.upper()
    assert (
        (header["width"], header["height"])
        == (header["preview_width"], header["preview_height"])
        == (24, 16)
    )
    assert (header["source_width"], header["source_height"]) == (WIDTH, HEIGHT)
    assert (header["content_type"], header["encoding"], header["format"]) == (
        f"image/{kind}",
        kind,
        kind,
    )
    assert header["bytes_per_frame"] == WIDTH * HEIGHT * 3
    assert len(header) + 1 == 21  # including `payload`, as in SGLang's server
    for number, image in enumerate(images):
        assert abs(int(np.asarray(image.convert("RGB"))[8, 12, 0]) - number) <= 3


@pytest.mark.parametrize("kind", ["raw", "delta_gzip", "delta-gzip", None])
def test_lossless_frames_are_lossless(client: GenerateClient, kind: str | None) -> None:
    """Lossless frames are sent either as raw bytes (U), or XORed with the previous frame and
    compressed with gzip per chunk.
    """
    client.init(max_chunks=3, realtime_output_format=kind)
    chunks = [client.chunk() for _ in range(3)]
    assert [number for chunk in chunks for number in chunk.numbers()] == list(
        range(FIRST + 2 * LATER)
    )
    assert [int(chunk.frames()[0, 0, 0, 0]) for chunk in chunks] == [0, 1, 2]
    if kind is not None and kind.startswith("delta"):
        assert (
            sum(len(payload) for chunk in chunks for payload in chunk.payloads)
            < chunks[0].stats["raw_bytes"] / 10
        )


@pytest.mark.parametrize("num_frames", [16, 17, 40])
def test_deltas_of_a_chunk_in_several_messages_refer_to_the_frame_before(num_frames: int) -> None:
    """If a chunk is sent in several messages, the first frame of each later message refers to the
    last frame of the previous message, and the header states this. The first message of a chunk has
    no reference frame.
    """
    frames_THWC = np.random.default_rng(0).integers(0, 256, (num_frames, 4, 6, 3), dtype=np.uint8)
    result = SimpleNamespace(frames_THWC=frames_THWC, wall_ms=1.0, world_pose_fields={})
    chunk: Any = SimpleNamespace(
        result=result,
        controls=ChunkControls(mark=ControlSample()),
        session_id="s",
        chunk_index=3,
        encoders=SessionEncoders(machine_implementations),
        stamped_frames=lambda fps: stamped_frames(
            frames_THWC, chunk_index=3, first_frame=0, fps=fps, input_id=None
        ),
    )
    render = FrameBatcher(EncoderSpec(codec="delta_gzip", fps=16.0))
    sent = [webui_unpack(b"".join(message.parts)) for message in render(chunk)]
    assert [message["num_frames"] for message in sent] == {16: [16], 17: [16, 1], 40: [16, 16, 8]}[
        num_frames
    ]
    assert [message.get("delta_reference") for message in sent] == [
        None,
        *["previous-frame"] * (len(sent) - 1),
    ]
    before, read = np.zeros((4, 6, 3), np.uint8), []
    for message in sent:
        for delta in np.frombuffer(zlib.decompress(message["payload"], 31), np.uint8).reshape(
            -1, 4, 6, 3
        ):
            before = before ^ delta
            read.append(before)
    assert np.array_equal(np.stack(read), frames_THWC)
