# SPDX-License-Identifier: Apache-2.0
"""What `/v1/realtime_video/generate` sends, byte for byte. U: unmodified clients depend on it."""

import io
import json
import re
import shutil
import subprocess
import zlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.fake_engine import FIRST, LATER, EndpointServer, FakeEngine
from helpers.live_clients import HEIGHT, WIDTH, GenerateClient, webui_unpack
from helpers.waits import seconds
from PIL import Image

from vllm_omni.entrypoints.realtime.chunk_source import Controls
from vllm_omni.entrypoints.realtime.controls.control_track import Sample
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


def test_messages_are_byte_for_byte_of_the_known_form(endpoint: EndpointServer) -> None:
    """U.

    Sixteen header fields and the payload in one map, eighteen in the stats, `type` first, whole
    numbers only.
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
def test_large_payloads_travel_alone(
    make_endpoint: MakeEndpoint, width: int, height: int, inline: bool
) -> None:
    """U. From 64 KiB on, a header map and the bytes as the next message."""
    endpoint = make_endpoint(info={"width": width, "height": height})
    with GenerateClient(endpoint.port) as client:
        client.init(size=f"{width}x{height}", max_chunks=2)
        types = []
        for _ in range(2):
            chunk = client.chunk()
            types += [header["type"] for header in chunk.headers]
            assert chunk.frames().shape == (FIRST if chunk.index == 0 else LATER, height, width, 3)
        assert types == ["frame_batch" if inline else "frame_batch_header"] * len(types)


def test_header_and_payload_stay_together_whatever_else_is_said(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """U.

    A hundred invalid events while chunks are sent: each answered, none between a header and its
    payload.
    """
    endpoint = make_endpoint(info={"width": 128, "height": 64})
    with GenerateClient(endpoint.port) as client:
        client.init(size="128x64", max_chunks=20)
        for number in range(100):
            client.event("dance", number, event_id=number)
        errors, chunks = 0, 0
        # `receive` takes the message behind a header for its payload
        while chunks < 20 or errors < 100:
            message = client.receive()
            errors += message["type"] == "error"
            chunks += message["type"] == "chunk_stats"
        assert errors == 100


def test_chunks_are_split_by_frames(make_endpoint: MakeEndpoint) -> None:
    """U. At most 16 raw frames or 6 encoded ones a message, with the last one flagged."""
    endpoint = make_endpoint(info={"latent_frames_per_chunk": 5})  # a first chunk of 17 frames
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("helpers.fake_engine.FIRST", 17)
        for kind, counts in (("raw", [16, 1]), ("jpeg", [6, 6, 5])):
            with GenerateClient(endpoint.port) as client:
                client.init(max_chunks=1, realtime_output_format=kind)
                assert [header["num_frames"] for header in client.chunk().headers] == counts


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_images_decode_to_the_size_that_was_notified(client: GenerateClient, kind: str) -> None:
    """U.

    One file a frame, lengths in `payload_lengths`, scaled down to the preview's width and never up.
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
    assert len(header) + 1 == 21  # with `payload`, as the original
    for number, image in enumerate(images):
        assert abs(int(np.asarray(image.convert("RGB"))[8, 12, 0]) - number) <= 3


@pytest.mark.parametrize("kind", ["raw", "delta_gzip", "delta-gzip", None])
def test_lossless_frames_are_lossless(client: GenerateClient, kind: str | None) -> None:
    """Raw bytes (U), or XOR with the frame before and gzip, a chunk at a time."""
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
    """The first of a message: the last of the message before, and the header says so; each chunk
    starts anew.
    """
    frames_THWC = np.random.default_rng(0).integers(0, 256, (num_frames, 4, 6, 3), dtype=np.uint8)
    result = SimpleNamespace(frames_THWC=frames_THWC, wall_ms=1.0, world_pose_fields={})
    chunk: Any = SimpleNamespace(
        result=result, controls=Controls(mark=Sample()), session_id="s", chunk_index=3
    )
    sent = [webui_unpack(b"".join(message.parts)) for message in FrameBatcher("delta_gzip")(chunk)]
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


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_javascript_reads_our_messages(endpoint: EndpointServer) -> None:
    """What a page's decoder makes of them equals what was meant: integers, texts and byte
    counts.
    """
    program = """
    const bytes = Buffer.from(process.argv[1], "hex"); const view = new DataView(bytes.buffer, bytes.byteOffset);
    let at = 0; const text = (n) => { at += n; return bytes.toString("utf8", at - n, at); };
    const read = () => { const b = bytes[at++];
      if (b < 0x80) return b; if (b < 0x90) return map(b & 15); if (b < 0xa0) return list(b & 15);
      if (b < 0xc0) return text(b & 31);
      switch (b) { case 0xc0: return null; case 0xc2: return false; case 0xc3: return true;
        case 0xcc: return bytes[at++]; case 0xcd: at += 2; return view.getUint16(at - 2);
        case 0xce: at += 4; return view.getUint32(at - 4); case 0xd9: return text(bytes[at++]);
        case 0xde: at += 2; return map(view.getUint16(at - 2)); }
      throw new Error("lead byte " + b); };
    const map = (n) => { const o = {}; for (let i = 0; i < n; i++) { const k = read(); o[k] = read(); } return o; };
    const list = (n) => Array.from({ length: n }, read);
    console.log(JSON.stringify(read()));"""  # noqa: E501
    with GenerateClient(endpoint.port) as client:
        client.init(max_chunks=1)
        client.connection.recv()
        stats = client.connection.recv()
    assert isinstance(stats, bytes)
    read = subprocess.run(
        ["node", "-e", program, stats.hex()],
        capture_output=True,
        text=True,
        check=True,
        timeout=seconds(60),
    )
    assert json.loads(read.stdout) == webui_unpack(stats)
