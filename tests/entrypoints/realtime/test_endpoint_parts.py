# SPDX-License-Identifier: Apache-2.0
"""Limits set by environment variables, the `StreamInfo` of a model, start images, and back-pressure
from a slow reader.
"""

import asyncio
import io
import re
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.waits import pause_task, seconds
from PIL import Image

from vllm_omni.entrypoints.engine.environment import read_struct
from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.json_values import MAX_JSON_VALUES
from vllm_omni.entrypoints.realtime.chunk_source import PlannedChunks
from vllm_omni.entrypoints.realtime.connection.delivery_window import DeliveryWindow
from vllm_omni.entrypoints.realtime.connection.images import load_image
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.entrypoints.realtime.sessions.run import (
    EncodedReply,
    ReplyOptions,
    SessionJob,
    SessionRun,
)
from vllm_omni.entrypoints.realtime.video import protocol
from vllm_omni.entrypoints.realtime.world_camera.protocol import hello
from vllm_omni.model_executor.models.registry import get_family

LIMITS = EndpointLimits(max_image_bytes=1 << 20, max_image_pixels=1 << 20)


# -- limits and stream metadata --------------------------------------------------------------------


def test_limits_come_from_the_environment() -> None:
    """Each limit can be set by an environment variable. A limit whose variable is not set keeps its
    default.
    """
    limits = read_struct(
        EndpointLimits,
        {"VLLM_OMNI_IDLE_TIMEOUT_S": "1.5", "VLLM_OMNI_MAX_CONNECTIONS": "3", "OTHER": "x"},
    )
    assert limits == EndpointLimits(idle_timeout_s=1.5, max_connections=3)


@pytest.mark.parametrize("value", ["", "x", "0", "-1", "1.5"])
def test_a_bad_limit_names_its_variable(value: str) -> None:
    """The error for an invalid limit is one line that states the variable, its value and the
    allowed values.
    """
    with pytest.raises(ValueError, match=f"VLLM_OMNI_MAX_CONNECTIONS='{value}': Expected"):
        read_struct(EndpointLimits, {"VLLM_OMNI_MAX_CONNECTIONS": value})


def config(
    family: str = "null_world", model: dict[str, Any] | None = None, ranks: int = 1, **values: Any
) -> Any:
    hf_config = SimpleNamespace(to_dict=lambda: {"omni_family": family, **values})
    omni = {"height": 64, "width": 128, "max_sessions": 3, "model": model or {}}
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf_config),
        parallel_config=SimpleNamespace(
            data_parallel_size=ranks, data_parallel_size_local=1, local_engines_only=False
        ),
        additional_config={"omni": omni},
    )


def test_a_family_overrides_only_the_values_that_differ(lingbot_world: Path) -> None:
    """A model family overrides only the values that differ from the defaults, which suit a model
    such as Causal Wan. Sizes and session limits come from the deployment.
    """
    assert StreamInfo.from_vllm_config(config(), "m") == StreamInfo(
        height=64, width=128, max_sessions=3, model="m"
    )
    assert StreamInfo.from_vllm_config(config(ranks=2), "m").max_sessions == 6
    checkpoint = get_family("lingbot_world").hf_config(lingbot_world)
    chunks = {"latent_frames_per_chunk": 2, "first_chunk_latent_frames": 4}
    info = StreamInfo.from_vllm_config(config("lingbot_world", chunks, **checkpoint), "m")
    assert (info.first_chunk_frames, info.chunk_frames, info.size_multiple) == (13, 8, (16, 16))
    assert info.preset == "reference"
    realtime = config("lingbot_world", {"preset": "realtime"}, **checkpoint)
    served = StreamInfo.from_vllm_config(realtime, "m")
    assert hello(served, EndpointLimits(), "a", 1)["preset"] == "realtime"
    info = StreamInfo(first_chunk_latent_frames=1)
    assert (info.first_chunk_frames, info.latent_frames(1), info.latent_frames(12)) == (1, 1, 3)


@pytest.mark.parametrize(
    ("frames", "first", "sizes", "rest"),
    [
        (9, True, [9], 0),
        (8, True, [], 8),
        (33, True, [9, 12, 12], 0),
        (24, False, [12, 12], 0),
        (20, False, [12], 8),
    ],
)
def test_frames_are_cut_into_whole_chunks(
    frames: int, first: bool, sizes: list[int], rest: int
) -> None:
    """Requests are divided into whole chunks: a session starts with 9 + 12 k frames and continues
    with 12 k frames per request.
    """
    assert StreamInfo().split(frames, first) == (sizes, rest)


# -- images ----------------------------------------------------------------------------------------


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


GREY = Image.new("RGB", (8, 8), (100, 100, 100))
SIDEWAYS = Image.fromarray(
    np.repeat(np.array([[[255, 0, 0]], [[0, 0, 255]]], np.uint8), 16, axis=1).repeat(8, axis=0)
)
ROTATED = Image.Exif()
ROTATED[0x0112] = 3  # upside down


@pytest.mark.parametrize(
    ("data", "colour"),
    [
        pytest.param(encoded(GREY, "PNG"), 100, id="png"),
        pytest.param(encoded(GREY, "JPEG"), 100, id="jpeg"),
        pytest.param(encoded(GREY, "WEBP", lossless=True), 100, id="webp"),
        pytest.param(encoded(GREY, "GIF"), 100, id="gif"),
        pytest.param(encoded(GREY.convert("L"), "PNG"), 100, id="grey"),
        pytest.param(
            encoded(Image.fromarray(np.full((8, 8), 25700, np.uint16)), "PNG"), 100, id="16-bit"
        ),
        pytest.param(encoded(GREY.convert("CMYK"), "JPEG"), 100, id="cmyk"),
        pytest.param(encoded(GREY.convert("P"), "PNG", transparency=0), 100, id="palette"),
        pytest.param(encoded(GREY.convert("RGBA"), "PNG"), 100, id="alpha"),
        pytest.param(encoded(Image.new("RGB", (1, 1), (100, 100, 100)), "PNG"), 100, id="1x1"),
    ],
)
def test_odd_but_legal_images_keep_their_colours(data: bytes, colour: int) -> None:
    """Unusual but valid images are converted to RGB at the requested size. Because of JPEG
    compression and palettes, colours may differ from the original by at most 3 levels.
    """
    image = load_image(data, 16, 24, LIMITS)
    assert (image.dtype, image.shape) == (np.uint8, (16, 24, 3))
    assert np.abs(image.astype(int) - colour).max() <= 3


HIDDEN = Image.new("RGBA", (8, 8), (255, 0, 255, 0))
HIDDEN_16 = Image.fromarray(np.full((8, 8), 25700, np.uint16))


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(encoded(HIDDEN, "PNG"), id="png"),
        pytest.param(encoded(HIDDEN, "WEBP", lossless=True, exact=True), id="webp"),
        pytest.param(encoded(HIDDEN, "GIF"), id="gif"),
        pytest.param(encoded(Image.new("LA", (8, 8), (9, 0)), "PNG"), id="grey and alpha"),
        pytest.param(
            encoded(Image.new("L", (8, 8), 9), "PNG", transparency=9),
            id="grey, one value transparent",
        ),
        pytest.param(
            encoded(HIDDEN_16, "PNG", transparency=25700), id="16-bit grey, one value transparent"
        ),
        pytest.param(encoded(Image.new("P", (8, 8), 0), "PNG", transparency=0), id="palette"),
        pytest.param(
            encoded(GREY, "PNG", transparency=(100, 100, 100)), id="one colour transparent"
        ),
        pytest.param(np.asarray(HIDDEN), id="array"),
    ],
)
def test_transparent_parts_become_white(source: Any) -> None:
    """Transparent pixels become white, so their hidden colour is not shown."""
    assert (load_image(source, 8, 8, LIMITS) == 255).all()


def test_half_transparent_parts_are_mixed_with_white() -> None:
    """Half-transparent pixels are mixed with white. For example, black with an alpha of 128 becomes
    middle grey.
    """
    assert (
        np.abs(
            load_image(np.full((8, 8, 4), (0, 0, 0, 128), np.uint8), 8, 8, LIMITS).astype(int) - 127
        ).max()
        <= 1
    )


def test_photos_are_turned_upright() -> None:
    """The EXIF orientation of a photo is applied: red is stored at the top of the photo and ends up
    at the bottom.
    """
    image = load_image(encoded(SIDEWAYS, "JPEG", exif=ROTATED, quality=95), 16, 16, LIMITS)
    assert image[2, 8, 2] > 200
    assert image[13, 8, 0] > 200


def bomb(width: int, height: int) -> bytes:
    """Return a PNG whose header declares the given size, however large."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return len(body).to_bytes(4) + kind + body + zlib.crc32(kind + body).to_bytes(4)

    header = width.to_bytes(4) + height.to_bytes(4) + bytes([8, 2, 0, 0, 0])
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(1000)))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (bomb(10_000, 10_000), "image_too_large"),
        (bomb(60_000, 60_000), "image_too_large"),
        (encoded(GREY, "PNG") + bytes(1 << 20), "image_too_large"),
        ("data:image/png;base64," + "A" * (3 << 20), "image_too_large"),
        (encoded(SIDEWAYS, "PNG")[:60], "invalid_image"),
        (encoded(GREY, "JPEG")[:300], "invalid_image"),
        (encoded(GREY, "TIFF"), "invalid_image"),
        (encoded(GREY, "BMP"), "invalid_image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "invalid_image"),
        (b"%PDF-1.7", "invalid_image"),
        ("http://127.0.0.1/x.png", "invalid_image"),
        ({"path": "/etc/passwd"}, "invalid_image"),
        (None, "invalid_image"),
    ],
)
def test_data_other_than_allowed_images_is_refused(data: Any, code: str) -> None:
    """Data that is not an allowed image is rejected with a fixed error text. The check uses only
    the header where possible.
    """
    with pytest.raises(EndpointError) as refused:
        load_image(data, 16, 16, LIMITS)
    assert refused.value.code == code
    assert not re.search(r"\b0x", refused.value.message)
    assert "/" not in refused.value.message.replace("data:image/", "")


# -- runs ------------------------------------------------------------------------------------------


def make_run() -> SessionRun:
    return SessionRun(
        SessionJob(
            request_id="r", source=PlannedChunks(), replies=ReplyOptions(render=lambda chunk: [])
        )
    )


def test_a_slow_reader_blocks_the_producer() -> None:
    """`wait_for_reader` returns only once few enough chunks are undelivered, however many messages
    each chunk consists of.
    """

    async def scenario() -> None:
        run = make_run()
        for number in range(6):
            run.append(
                EncodedReply(chunk_index=number // 2, part=number % 2, payload=b"x", num_bytes=1)
            )
        await run.wait_for_reader(3)
        held = asyncio.create_task(run.wait_for_reader(1))
        taken: list[bytes] = []
        gate = asyncio.Semaphore(0)

        async def deliver(payload: bytes) -> None:
            await gate.acquire()
            taken.append(payload)

        reader = asyncio.create_task(run.follow(deliver, object(), DeliveryWindow(0, 16.0)))
        for released in range(4):
            await pause_task(0.01)
            assert not held.done(), released
            gate.release()
        await asyncio.wait_for(held, seconds(1))
        reader.cancel()

    asyncio.run(scenario())


def test_undelivered_replies_are_never_dropped() -> None:
    """While a run is active, undelivered replies are never dropped. After it has finished, they may
    be dropped, and a reader then gets `resync_required`.
    """

    async def scenario() -> None:
        run = make_run()
        run.append(EncodedReply(0, 0, b"abc", 3))
        assert run.drop_oldest() == 0
        run.finish()
        assert run.drop_oldest() == 3
        with pytest.raises(EndpointError, match="resync_required"):
            await run.follow(lambda payload: asyncio.sleep(0), object(), DeliveryWindow(0, 16.0))

    asyncio.run(scenario())


def test_a_json_message_of_very_many_values_is_refused_before_it_is_decoded() -> None:
    """A message with too many values is rejected before it is decoded. A start message may still be
    large, because its image is a single value.
    """
    image = '{"image_reference":"' + "A" * 1_000_000 + '"}'
    assert len(protocol.decode(image, 2_000_000, "session.start")["image_reference"]) == 1_000_000
    with pytest.raises(EndpointError, match="more than 262144 values") as refused:
        protocol.decode('{"a":[' + "[]," * MAX_JSON_VALUES + "0]}", 2_000_000, "session.start")
    assert refused.value.code == "invalid_json"
