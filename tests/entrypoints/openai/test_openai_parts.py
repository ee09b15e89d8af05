# SPDX-License-Identifier: Apache-2.0
"""Request bodies, field checks, errors, images and masks of the OpenAI routes, tested without a
server.
"""

import asyncio
import base64
import io
import json
import struct
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import av
import numpy as np
import pytest
from helpers.instant_engine import InstantEngine
from helpers.waits import seconds, until
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from starlette.requests import Request

from vllm_omni.entrypoints.errors import ApiError, from_failure, respond_to_errors
from vllm_omni.entrypoints.json_values import MAX_JSON_VALUES
from vllm_omni.entrypoints.media.mp4 import encode_mp4
from vllm_omni.entrypoints.openai.body import ParsedBody, read_body
from vllm_omni.entrypoints.openai.chat import ChatRoutes
from vllm_omni.entrypoints.openai.client_threads import ClientThreads
from vllm_omni.entrypoints.openai.image_files import encode_image_file, read_mask, read_upload
from vllm_omni.entrypoints.openai.limits import MediaLimits
from vllm_omni.entrypoints.openai.protocol import ImageGenerationRequest, VideoRequest, read_request
from vllm_omni.entrypoints.openai.served import ServedModel
from vllm_omni.entrypoints.openai.videos import clips
from vllm_omni.entrypoints.openai.videos.clips import is_clip, read_clip
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.model_executor.models.capabilities import Capabilities
from vllm_omni.outputs import RequestFailed

LIMITS = EndpointLimits(max_image_pixels=100 * 100)


def body_of(
    data: bytes, content_type: str = "application/json", max_bytes: int = 10_000, parts: int = 1
) -> ParsedBody:
    """Return the parsed body of a request whose bytes arrive in at most `parts` pieces."""
    step = -(-len(data) // parts) if data else 1
    items = [data[start : start + step] for start in range(0, len(data), step)] or [b""]

    async def receive() -> dict[str, Any]:
        part = items.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(items)}

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/",
        "headers": [(b"content-type", content_type.encode())],
    }
    return asyncio.run(read_body(Request(scope, receive), max_bytes))


def form(*parts: tuple[str, str | bytes]) -> tuple[bytes, str]:
    """Return a multipart body and its content type. Values of type bytes are sent as files."""
    lines = b""
    for name, value in parts:
        kind = '; filename="f.png"\r\nContent-Type: image/png' if isinstance(value, bytes) else ""
        data = value if isinstance(value, bytes) else value.encode()
        lines += (
            f'--B\r\nContent-Disposition: form-data; name="{name}"{kind}\r\n\r\n'.encode()
            + data
            + b"\r\n"
        )
    return lines + b"--B--\r\n", "multipart/form-data; boundary=B"


def encoded(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


# -- bodies ----------------------------------------------------------------------------------------


def test_a_form_gives_fields_and_files_in_order() -> None:
    """In a form, `image[]` is equivalent to `image`, and fields with brackets in their names or
    JSON in their values become objects.
    """
    body = body_of(
        *form(
            ("prompt", "a cat"),
            ("image[]", b"one"),
            ("image[]", b"two"),
            ("mask", b"m"),
            ("extra_params[step_ms]", "2.5"),
            ("extra_params[mode]", "fast"),
            ("camera_actions", '[["w"], []]'),
        ),
        parts=7,
    )
    assert body.files == {"image": [b"one", b"two"], "mask": [b"m"]}
    assert body.fields == {
        "prompt": "a cat",
        "extra_params": {"step_ms": 2.5, "mode": "fast"},
        "camera_actions": [["w"], []],
    }


def test_the_body_limit_does_not_depend_on_the_declared_length() -> None:
    """The body limit applies to the bytes received, whatever length the client declared."""
    assert body_of(b'{"a": "' + b"x" * 89 + b'"}', max_bytes=98, parts=9).fields["a"] == "x" * 89
    with pytest.raises(ApiError) as refused:
        body_of(b'{"a": "' + b"x" * 90 + b'"}', max_bytes=98, parts=9)
    assert refused.value.status == 413


@pytest.mark.parametrize(
    ("data", "content_type", "code"),
    [
        (b"", "application/json", "invalid_json"),
        (b"[1]", "application/json", "invalid_json"),
        (b'{"a": NaN}', "application/json", "invalid_json"),
        (b"\xff\xfe", "application/json", "invalid_json"),
        (b"[" * 5000, "application/json", "invalid_json"),
        (b"<a/>", "text/xml", "unsupported_media_type"),
        (b"x", "multipart/form-data", "invalid_form"),
        (form(("extra_params", "{1"))[0], "multipart/form-data; boundary=B", "invalid_json"),
    ],
)
def test_invalid_bodies_are_refused(data: bytes, content_type: str, code: str) -> None:
    """Every invalid body is rejected with a fixed error text and code."""
    with pytest.raises(ApiError) as refused:
        body_of(data, content_type)
    assert refused.value.code == code and refused.value.status in (400, 415)


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=300),
    st.sampled_from(["application/json", "multipart/form-data; boundary=B"]),
)
def test_any_bytes_are_a_body_or_an_api_error(data: bytes, content_type: str) -> None:
    """Any bytes are either read as a body or rejected with an `ApiError`."""
    for candidate in (
        data,
        b"--B\r\nContent-Disposition: form-data; name=" + data + b"\r\n\r\nx\r\n--B--",
    ):
        try:
            body = body_of(candidate, content_type)
        except ApiError:
            continue
        assert isinstance(body.fields, dict)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            [*ImageGenerationRequest.model_fields, *VideoRequest.model_fields, "bogus"]
        ),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.text(max_size=3), inner, max_size=3)
            ),
            max_leaves=5,
        ),
        max_size=6,
    )
)
def test_any_fields_are_a_request_or_an_api_error(fields: dict[str, Any]) -> None:
    """Any fields result in either a request or a short error response."""
    for cls in (ImageGenerationRequest, VideoRequest):
        refused: ApiError | None = None
        try:
            read_request(cls, fields)
        except ApiError as error:
            refused = error
        assert refused is None or (refused.status == 400 and len(refused.response().body) < 2000)


@pytest.mark.parametrize(
    ("cls", "field", "value"),
    [
        (ImageGenerationRequest, "n", True),
        (ImageGenerationRequest, "output_compression", True),
        (ImageGenerationRequest, "stream", 1),
        (VideoRequest, "seconds", True),
        (VideoRequest, "fps", True),
        (VideoRequest, "seed", False),
    ],
)
def test_json_types_are_strict(cls: Any, field: str, value: Any) -> None:
    """JSON values must have the types given in the schema, whereas form fields are text."""
    with pytest.raises(ApiError, match=f"'{field}': Input should be a valid") as refused:
        read_request(cls, {"prompt": "a", field: value})
    assert refused.value.status == 400
    form = {"prompt": "a", "n": "3", "stream": "true"}
    request = read_request(ImageGenerationRequest, form, is_form=True)
    assert (request.n, request.stream) == (3, True)


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "status", "retry"),
    [
        ("invalid_request", 400, False),
        ("unsupported_size", 400, False),
        ("a_word_of_a_new_model", 400, False),
        ("capacity", 503, True),
        ("oom", 503, True),
        ("engine_dead", 503, False),
        ("non_finite", 500, False),
        ("timeout", 504, False),
    ],
)
def test_failures_of_the_engine_have_a_status(code: str, status: int, retry: bool) -> None:
    """Errors caused by the client have a 4xx status, and all other errors have a 5xx status."""
    response = from_failure(RequestFailed(code, "text")).response()
    assert response.status_code == status
    assert ("retry-after" in response.headers) == retry
    error = json.loads(response.body)["error"]
    assert error == {
        "message": "text",
        "type": "server_error" if status >= 500 else "invalid_request_error",
        "param": None,
        "code": code,
    }


def test_an_unforeseen_error_reveals_nothing_of_the_server() -> None:
    """The text of an unforeseen error appears only in the log."""

    class Routes:
        @respond_to_errors
        async def route(self) -> Any:
            raise RuntimeError("secret /path")

    call: Callable[[], Awaitable[Any]] = Routes().route
    response = asyncio.run(call())  # type: ignore[arg-type]
    assert response.status_code == 500 and b"secret" not in response.body


# -- images ----------------------------------------------------------------------------------------


def test_uploads_keep_their_size_and_lose_alpha_and_rotation() -> None:
    """An uploaded image is converted to RGB at its own size, with its EXIF rotation applied."""
    exif = Image.Exif()
    exif[0x0112] = 6  # displayed rotated by 90 degrees
    data = encoded(Image.new("RGB", (30, 20), (9, 9, 9)), "JPEG", exif=exif)
    assert read_upload(data, "image", LIMITS).shape == (30, 20, 3)
    assert read_upload(encoded(Image.new("RGBA", (30, 20))), "image", LIMITS).shape == (20, 30, 3)


def test_bombs_are_refused_from_the_header() -> None:
    """Decompression bombs are rejected based on their header, because a PNG of 100 Mpx may take up
    only a few kB.
    """
    with pytest.raises(ApiError) as refused:
        read_upload(encoded(Image.new("1", (10_000, 10_000))), "image", LIMITS)
    assert (refused.value.code, refused.value.param) == ("image_too_large", "image")


def test_a_mask_is_white_where_the_upload_is_transparent() -> None:
    """The mask is white (255) where the upload is transparent and black elsewhere. An upload
    without an alpha channel, or with a size other than the image's, is rejected.
    """
    mask = Image.new("RGBA", (30, 20), (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (0, 0, 10, 20))
    read = read_mask(encoded(mask), 20, 30, LIMITS)
    assert read.shape == (20, 30) and (read[:, :10] == 255).all() and (read[:, 10:] == 0).all()
    for wrong, says in (
        (mask.resize((20, 20)), "must be equal"),
        (mask.convert("RGB"), "no alpha"),
    ):
        with pytest.raises(ApiError, match=says):
            read_mask(encoded(wrong), 20, 30, LIMITS)
    with pytest.raises(ApiError, match="no alpha"):
        read_mask(encoded(mask.convert("RGB"), "JPEG"), 20, 30, LIMITS)


def test_a_mask_is_rotated_as_its_image() -> None:
    """A mask's EXIF rotation is applied, just as an image's is."""
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    mask = Image.new("RGBA", (30, 20), (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (0, 0, 30, 5))
    read = read_mask(encoded(mask, exif=exif), 20, 30, LIMITS)
    assert (read[15:] == 255).all() and (read[:15] == 0).all()


def test_png_is_lossless() -> None:
    """PNG output is lossless, and other formats are encoded with the requested quality."""
    image = np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8)
    back = np.asarray(Image.open(io.BytesIO(encode_image_file(image, "png", None, None))))
    assert np.array_equal(image, back)
    assert len(encode_image_file(image, "jpeg", 5, None)) < len(
        encode_image_file(image, "jpeg", None, None)
    )


@pytest.mark.parametrize("name", ["AVIF", "BMP", "TIFF", "ICO", "JPEG2000"])
def test_an_image_in_another_format_is_refused_by_name(name: str) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (48, 32), "red").save(buffer, name)
    said = "JPEG 2000" if name == "JPEG2000" else name
    assert not is_clip(buffer.getvalue())
    with pytest.raises(ApiError, match=f"{said} is not supported; send PNG, JPEG, WebP or GIF"):
        read_upload(buffer.getvalue(), "image", EndpointLimits())


def test_heic_is_refused_by_name() -> None:
    """A HEIC image is rejected with an error that names the format, although its first bytes
    resemble those of MP4.
    """
    data = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64)
    assert not is_clip(data)
    with pytest.raises(ApiError, match="HEIC is not supported"):
        read_upload(data, "image", EndpointLimits())


@pytest.mark.parametrize("name", ["PNG", "WEBP", "GIF"])
def test_the_first_frame_of_an_animation_is_used(name: str) -> None:
    buffer = io.BytesIO()
    first, second = (Image.new("RGB", (48, 32), color) for color in ("red", "blue"))
    first.save(buffer, name, save_all=True, append_images=[second])
    red, _, blue = read_upload(buffer.getvalue(), "image", EndpointLimits())[0, 0]
    assert red > 240 and blue < 40


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        *((name, "libx264") for name in ("mpegts", "flv", "matroska", "mov")),
        ("avi", "mpeg4"),
        ("asf", "msmpeg4"),
        ("mpeg", "mpeg2video"),
    ],
)
def test_containers_of_clips_are_recognised_and_read(container: str, codec: str) -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream: Any = file.add_stream(codec, rate=24)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for level in range(9):
            frame = av.VideoFrame.from_ndarray(
                np.full((32, 48, 3), 20 * level, np.uint8), format="rgb24"
            )
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    assert is_clip(buffer.getvalue())
    levels = read_clip(buffer.getvalue(), 24.0, 9, "input_reference")[:, 0, 0, 0].astype(int)
    assert len(levels) == 9 and abs(levels - 20 * np.arange(9)).max() < 8


def clip(frames: int, fps: int) -> bytes:
    return encode_mp4(
        np.random.default_rng(0).integers(0, 256, (frames, 64, 96, 3), dtype=np.uint8), fps=fps
    )


@pytest.mark.parametrize(
    ("frames", "fps", "most", "read"),
    [(9, 12, 72, 9), (30, 30, 72, 12), (48, 12, 17, 17), (1, 12, 72, 1)],
)
def test_a_clip_is_read_at_the_models_rate(frames: int, fps: int, most: int, read: int) -> None:
    """A clip from a file or a data: URL is sampled at no more than 12 frames per second and up to
    the model's number of frames.
    """
    data = clip(frames, fps)
    assert is_clip(data)
    assert read_clip(data, 12.0, most, "input_reference").shape == (read, 64, 96, 3)
    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    assert is_clip(url) and read_clip(url, 12.0, most, "messages").shape == (read, 64, 96, 3)


@pytest.mark.parametrize(
    ("name", "bound"),
    [("_MAX_FRAMES", 29), ("_MAX_PIXELS", 30 * 64 * 96 - 1), ("_MAX_FRAME_PIXELS", 64 * 96 - 1)],
)
def test_a_clip_that_is_too_large_is_refused_before_it_is_decoded(
    name: str, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clip that is too large is rejected before it is decoded: the number of frames, the pixels
    per frame, and their product are known from its packets and header.
    """
    monkeypatch.setattr(clips, name, bound)
    monkeypatch.setattr(clips, "as_displayed", None)
    with pytest.raises(ApiError, match="the clip is too large") as refused:
        read_clip(clip(30, 30), 12.0, 72, "messages")
    assert refused.value.code == "video_too_large"


@pytest.mark.parametrize(("name", "bound"), [("_MAX_FRAMES", 20), ("_MAX_PIXELS", 20 * 64 * 96)])
def test_a_clip_with_more_frames_than_packets_is_refused_during_decoding(
    name: str, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clips, name, bound)
    monkeypatch.setattr(clips, "_measure", lambda *_: (10, 1.0))
    with pytest.raises(ApiError, match="the clip is too large"):
        read_clip(clip(30, 30), 12.0, 72, "messages")


def test_a_clip_is_decoded_only_while_its_client_is_there() -> None:
    calls = iter([False] * 40)
    with pytest.raises(clips.ClientDisconnectedError):
        read_clip(clip(30, 30), 12.0, 72, "messages", lambda: next(calls, True))


def test_an_upright_clip_of_a_phone_is_read_upright() -> None:
    """A clip from a phone, which stores upright video sideways with a rotation matrix, is rotated
    upright.
    """
    data = bytearray(clip(9, 12))
    matrix = data.find(b"tkhd") + 44
    data[matrix : matrix + 36] = struct.pack(
        ">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 64 << 16, 0, 1 << 30
    )
    assert read_clip(bytes(data), 12.0, 72, "input_reference").shape == (9, 96, 64, 3)


@pytest.mark.parametrize(
    "wrong", [clip(9, 12)[:300], b"\0\0\0\x18ftypnothing", "data:video/mp4;base64,%%%"]
)
def test_unreadable_clips_are_refused(wrong: bytes | str) -> None:
    assert is_clip(wrong)
    with pytest.raises(ApiError) as refused:
        read_clip(wrong, 12.0, 72, "input_reference")
    assert (refused.value.status, refused.value.code, refused.value.param) == (
        400,
        "invalid_video",
        "input_reference",
    )


def test_an_image_is_no_clip() -> None:
    for name in ("PNG", "JPEG", "WEBP"):
        buffer = io.BytesIO()
        Image.new("RGB", (8, 8)).save(buffer, name)
        assert not is_clip(buffer.getvalue())
    assert not is_clip("data:image/png;base64,AAAA")


def test_a_disconnect_before_a_non_streamed_response_cancels_its_request() -> None:
    """When a client disconnects before it has received a non-streamed response, its engine request
    is cancelled.
    """
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32)).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
    messages = [{"role": "user", "content": content}]
    parts = [
        {
            "type": "http.request",
            "body": json.dumps({"messages": messages}).encode(),
            "more_body": False,
        },
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, Any]:
        if len(parts) == 1:
            await until(lambda: engine.requests)
        return parts.pop(0)

    async def send() -> None:
        engine.release = asyncio.Event()  # never set, so the response never ends
        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        with ThreadPoolExecutor(1) as executor:
            routes = ChatRoutes(engine, served, MediaLimits(), LIMITS, ClientThreads(executor))
            await asyncio.wait(
                [asyncio.create_task(routes.completions(Request(scope, receive)))],
                timeout=seconds(20),
            )

    engine = InstantEngine()
    served = ServedModel(
        ("m",), Capabilities(tasks=("text_to_image",), reads=("image",)), 96, 64, 96 * 64, 4
    )
    asyncio.run(send())
    assert (len(engine.requests), engine.cancelled) == (1, 1)


def test_a_body_of_very_many_values_is_refused_before_it_is_decoded() -> None:
    """A body with too many values is rejected before it is decoded, because decoding would delay
    every other client. Text of any length counts as one value.
    """
    text = json.dumps({"prompt": "x" * 1_000_000}).encode()
    assert len(body_of(text, max_bytes=2_000_000).fields["prompt"]) == 1_000_000
    many = b'{"prompt":[' + b"[]," * MAX_JSON_VALUES + b"0]}"
    with pytest.raises(ApiError, match="more than 262144 values") as refused:
        body_of(many, max_bytes=2_000_000)
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")


def test_seconds_may_be_text_in_json() -> None:
    assert read_request(VideoRequest, {"prompt": "a cat", "seconds": "4"}).seconds == 4
