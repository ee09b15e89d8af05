# SPDX-License-Identifier: Apache-2.0
"""Images and videos through the official `openai` client, with a real server, a real engine and an
API key.
"""

import base64
import io
import json
import re
import socket
import struct
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import openai
import pytest
from helpers.openai_server import HEIGHT, KEY, WIDTH, Served, seconds_until
from helpers.waits import seconds, wait_until
from PIL import Image

from vllm_omni.entrypoints.media.mp4 import decode_mp4

# The client emits a warning that concerns OpenAI's own service.
pytestmark = pytest.mark.filterwarnings("ignore:The Sora API")

RED = (200, 10, 30)


@pytest.fixture
def client(image_server: Served) -> openai.OpenAI:
    return image_server.client


def png(
    color: tuple[int, ...] = RED, size: tuple[int, int] = (64, 48), mode: str = "RGB"
) -> tuple[str, bytes]:
    buffer = io.BytesIO()
    Image.new(mode, size, color).save(buffer, "PNG")
    return "picture.png", buffer.getvalue()


def pixels(data: Any) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data.b64_json))).convert("RGB"))


def slow(steps: int, step_ms: float, **more: Any) -> dict[str, Any]:
    return {"num_inference_steps": steps, "extra_params": {"step_ms": step_ms}, **more}


def reference(**fields: str) -> dict[str, Any]:
    """Return arguments that pass the start image as a reference (a URL or an id), because the
    client's own argument accepts only files.
    """
    return {"extra_body": {"input_reference": fields}}


# -- models and access -----------------------------------------------------------------------------


def test_the_served_model_is_listed(client: openai.OpenAI) -> None:
    """`/v1/models`, which is a route of stock vLLM, lists the served model."""
    assert [model.id for model in client.models.list()] == ["null"]


def test_every_route_requires_the_key(image_server: Served) -> None:
    """On every route, a request without the API key is refused before it reaches the engine."""
    unauthorized = image_server.connect(key="wrong")
    for call in (
        lambda: unauthorized.images.generate(prompt="a"),
        lambda: unauthorized.images.edit(image=png(), prompt="a"),
        lambda: unauthorized.videos.create(prompt="a"),
        lambda: unauthorized.videos.list(),
        lambda: unauthorized.videos.download_content("video_x"),
    ):
        with pytest.raises(openai.AuthenticationError):
            call()


# -- images ----------------------------------------------------------------------------------------


def test_images_are_reproducible_in_any_batch(
    client: openai.OpenAI,
) -> None:
    """Image i of a call is generated with seed `seed + i`, whether the images are generated in one
    engine request or in two.
    """
    six = client.images.generate(prompt="a cat", n=6, extra_body={"seed": 3})
    one = client.images.generate(prompt="a cat", extra_body={"seed": 8})
    assert len(six.data) == 6 and six.size == f"{WIDTH}x{HEIGHT}" and six.output_format == "png"
    assert np.array_equal(pixels(six.data[5]), pixels(one.data[0]))
    assert len({pixels(image).tobytes() for image in six.data}) == 6
    assert one.seed == 8


@pytest.mark.parametrize(
    "change",
    [{"negative_prompt": "dogs"}, {"num_inference_steps": 9}, {"guidance_scale": 1.0}, {"seed": 4}],
)
def test_every_extension_reaches_the_model(client: openai.OpenAI, change: dict[str, Any]) -> None:
    """Each extension field in `extra_body` changes the image."""
    plain = client.images.generate(prompt="a cat", extra_body={"seed": 3})
    changed = client.images.generate(prompt="a cat", extra_body={"seed": 3, **change})
    assert not np.array_equal(pixels(plain.data[0]), pixels(changed.data[0]))


@pytest.mark.parametrize(
    ("output_format", "magic"), [("png", b"\x89PNG"), ("jpeg", b"\xff\xd8"), ("webp", b"RIFF")]
)
def test_images_have_the_requested_format(
    client: openai.OpenAI, output_format: Any, magic: bytes
) -> None:
    """Images have the requested format and size."""
    reply = client.images.generate(prompt="a", output_format=output_format, size="80x64")  # type: ignore[call-overload]
    data = base64.b64decode(reply.data[0].b64_json)
    assert data.startswith(magic) and reply.output_format == output_format
    assert Image.open(io.BytesIO(data)).size == (80, 64) and reply.size == "80x64"


def test_a_url_leads_to_the_image_and_needs_the_key(image_server: Served) -> None:
    """With `response_format="url"`, the server stores the image for a limited time, and reading it
    requires the API key.
    """
    fields = {"prompt": "a", "output_format": "webp", "extra_body": {"seed": 1}}
    url = image_server.client.images.generate(response_format="url", **fields).data[0].url
    assert url.startswith(image_server.url)
    status, headers, data = image_server.get(url.removeprefix(image_server.url))
    assert (status, headers["content-type"]) == (200, "image/webp")
    assert data == base64.b64decode(image_server.client.images.generate(**fields).data[0].b64_json)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(url)
    assert image_server.get("/v1/files/file_AAAAAAAAAAAAAAAAAAAAAA/content")[0] == 404
    assert image_server.get("/v1/files/..%2f..%2fetc%2fpasswd/content")[0] == 404


def test_images_can_be_streamed(client: openai.OpenAI) -> None:
    """Each streamed image arrives in one event, with its seed, and is the same image as in a
    non-streamed response.
    """
    plain = client.images.generate(prompt="a", n=5, extra_body={"seed": 2})
    events = list(client.images.generate(prompt="a", n=5, stream=True, extra_body={"seed": 2}))
    assert [event.type for event in events] == ["image_generation.completed"] * 5
    assert [event.b64_json for event in events] == [image.b64_json for image in plain.data]
    assert [event.seed for event in events] == [2, 3, 4, 5, 6]


def test_a_streamed_image_can_be_generated_again(client: openai.OpenAI) -> None:
    """An event contains the seed that the server has drawn for its image."""
    events = list(client.images.generate(prompt="a", n=2, stream=True))
    again = client.images.generate(prompt="a", extra_body={"seed": events[1].seed})
    assert again.data[0].b64_json == events[1].b64_json


def test_a_failure_while_streaming_is_an_error_event(client: openai.OpenAI) -> None:
    """A failure during streaming is sent as an error event, which the client raises as an
    exception.
    """
    with pytest.raises(openai.APIError, match="failed"):
        list(
            client.images.generate(
                prompt="a", stream=True, extra_body={"extra_params": {"fail_in": "decode"}}
            )
        )


def test_an_edit_gets_all_images_and_the_mask(client: openai.OpenAI) -> None:
    """The model receives all images and the mask of an edit, and the edited image keeps its size.
    The null model's image shows the mean colour and the number of its inputs.
    """
    mask = png((0, 0, 0, 0), mode="RGBA")
    one = pixels(client.images.edit(image=png(), prompt="a").data[0])
    two = pixels(client.images.edit(image=[png(), png((0, 90, 30))], prompt="a", mask=mask).data[0])
    assert one.shape == (48, 64, 3)
    assert tuple(one[0, 0]) == RED and one[0, 8, 0] == 10
    assert tuple(two[0, 0]) == (100, 50, 30) and two[0, 8, 0] == 120


def test_an_edit_may_be_json_with_data_urls(image_server: Served) -> None:
    """Clients without multipart support may send an edit as JSON with data: URLs."""
    url = "data:image/png;base64," + base64.b64encode(png()[1]).decode()
    body = {"prompt": "a", "images": [{"image_url": url}], "response_format": "b64_json"}
    request = urllib.request.Request(
        f"{image_server.url}/v1/images/edits",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        reply = json.load(response)
    assert reply["size"] == "64x48"


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "status", "code", "param", "says"),
    [
        ({"n": 11}, 400, "invalid_value", "n", "less than or equal to 10; got 11"),
        ({"size": "81x64"}, 400, "invalid_value", "size", "multiple of 8.*allowed and near: 80x64"),
        ({"size": "8000x8000"}, 400, "invalid_value", "size", "at most 15360"),
        ({"size": "big"}, 400, "invalid_value", "size", "got 'big'"),
        (
            {"output_format": "gif"},
            400,
            "invalid_value",
            "output_format",
            "'png', 'jpeg' or 'webp'",
        ),
        ({"background": "transparent"}, 400, "invalid_value", "background", "'auto', 'opaque'"),
        ({"model": "other"}, 404, "model_not_found", "model", "served: null"),
        ({"extra_body": {"steps": 3}}, 400, "unknown_parameter", "steps", "num_inference_steps"),
        (
            {"extra_body": {"num_inference_steps": 201}},
            400,
            "invalid_value",
            "num_inference_steps",
            "1 to 200",
        ),
        ({"extra_body": {"seed": -2}}, 400, "invalid_value", "seed", "greater than or equal to -1"),
        (
            {"extra_body": {"seed": 2**64}},
            400,
            "invalid_value",
            "seed",
            "less than or equal to 18446744073709551615; got 18446744073709551616",
        ),
        (
            {"extra_body": {"extra_params": {"bogus": 1}}},
            400,
            "invalid_request",
            None,
            "allowed keys: step_ms",
        ),
        (
            {"extra_body": {"extra_params": {"step_ms": 2**70}}},
            400,
            "invalid_value",
            "extra_params",
            "cannot be sent",
        ),
        (
            {"extra_body": {"extra_params": {"fail_in": "denoise"}}},
            500,
            "engine_error",
            None,
            "failed",
        ),
        ({"extra_body": {"extra_params": {"nan_at": 1}}}, 500, "non_finite", None, "NaN"),
    ],
)
def test_refusals_have_the_form_of_openais_errors(
    image_server: Served,
    fields: dict[str, Any],
    status: int,
    code: str,
    param: str | None,
    says: str,
) -> None:
    """An error has OpenAI's format (status, type, code, param, and allowed values) and reveals no
    internals of the server.
    """
    with pytest.raises(openai.APIStatusError) as refused:
        image_server.client.images.generate(prompt="a", **fields)
    error = refused.value
    assert (error.status_code, error.code, error.param) == (status, code, param)
    assert error.type == ("invalid_request_error" if status < 500 else "server_error")
    assert re.search(says, error.message)
    assert not re.search(r"/home|/tmp|\b0x[0-9a-f]{6}|Traceback|File \"", error.message)
    assert set(error.body) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("upload", "code"),
    [
        (b"no picture at all", "invalid_image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "invalid_image"),
        (png(size=(1000, 1000))[1], "image_too_large"),
        (png()[1][:60], "invalid_image"),
    ],
)
def test_bad_uploads_are_refused_by_content(
    client: openai.OpenAI, upload: bytes, code: str
) -> None:
    """Bad uploads are rejected based on the format and size in their header."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.images.edit(image=("picture.png", upload), prompt="a")
    assert (refused.value.code, refused.value.param) == (code, "image")


def test_a_body_beyond_the_limit_is_refused_while_it_arrives(client: openai.OpenAI) -> None:
    """A body that exceeds the limit gets 413, whatever its content, before all of it has
    arrived.
    """
    with pytest.raises(openai.APIStatusError) as refused:
        client.images.edit(image=("picture.png", bytes(5 << 20)), prompt="a")
    assert (refused.value.status_code, refused.value.code) == (413, "body_too_large")


# -- videos ----------------------------------------------------------------------------------------


def test_a_video_is_made_polled_listed_downloaded_and_deleted(image_server: Served) -> None:
    """The official client creates, polls, lists, downloads and deletes a video."""
    client = image_server.client
    video = client.videos.create_and_poll(
        prompt="waves",
        seconds="1",  # type: ignore[arg-type]
        size="80x64",  # type: ignore[arg-type]
        input_reference=png(),
        poll_interval_ms=50,
        extra_body={"fps": 24, "seed": 5},
    )
    assert (video.status, video.progress, video.error) == ("completed", 100, None)
    assert video.object == "video" and video.model == "null" and video.prompt == "waves"
    # The request is for 24 frames, but the model generates 1 + 4 k frames.
    assert (video.size, video.num_frames, video.seed) == ("80x64", 25, 5)
    assert float(video.seconds) == pytest.approx(25 / 24, rel=1e-4)
    assert video.completed_at >= video.created_at and video.expires_at > video.completed_at
    frames, fps = decode_mp4(client.videos.download_content(video.id).content)
    assert frames.shape == (25, 64, 80, 3) and fps == pytest.approx(24)
    # Frame n has the grey level n.
    assert np.abs(frames[:, 40, 40, 0].astype(int) - np.arange(25)).max() <= 3
    assert np.abs(frames[3, 2, 2].astype(int) - RED).max() <= 12  # start image's colour
    thumbnail = Image.open(
        io.BytesIO(client.videos.download_content(video.id, variant="thumbnail").content)
    )
    sheet = Image.open(
        io.BytesIO(client.videos.download_content(video.id, variant="spritesheet").content)
    )
    assert thumbnail.size == (80, 64) and sheet.width > 4 * 80
    assert video.id in [listed.id for listed in client.videos.list()]
    assert client.videos.delete(video.id).deleted
    for call in (client.videos.retrieve, client.videos.download_content, client.videos.delete):
        with pytest.raises(openai.NotFoundError):
            call(video.id)


def test_a_download_may_be_partial(image_server: Served) -> None:
    """A download may request a `Range`, as video players and resumed downloads do."""
    video = image_server.client.videos.create_and_poll(prompt="a", poll_interval_ms=50)
    path = f"/v1/videos/{video.id}/content"
    whole = image_server.get(path)[2]
    status, headers, part = image_server.get(path, Range="bytes=10-109")
    assert (status, part) == (206, whole[10:110])
    assert headers["content-range"] == f"bytes 10-109/{len(whole)}"
    assert image_server.get(path, Range=f"bytes={len(whole)}-")[0] == 416


@pytest.mark.parametrize("how", ["delete", "cancel"])
def test_ending_a_job_frees_the_engine_within_a_step(image_server: Served, how: str) -> None:
    """The session of a 20 s job ends shortly after the request to end the job, because each step
    takes only 0.2 s. `cancel` keeps the job's record.
    """
    client = image_server.client
    video = client.videos.create(prompt="a", extra_body=slow(100, 200.0))
    wait_until(lambda: client.videos.retrieve(video.id).progress > 0)
    wait_until(lambda: image_server.ready()[1]["sessions"] == 1)
    if how == "delete":
        client.videos.delete(video.id)
    else:
        ended = client.post(f"/videos/{video.id}/cancel", cast_to=dict)
        assert ended["status"] == "failed" and ended["error"]["code"] == "cancelled"
    # A step takes 0.2 s, and /omni/ready reads the statistics at most four times per second.
    assert seconds_until(lambda: image_server.ready()[1]["sessions"] == 0) < seconds(1.5)
    if how == "cancel":
        assert client.videos.retrieve(video.id).status == "failed"
        with pytest.raises(openai.UnprocessableEntityError):
            client.videos.download_content(video.id)
        client.videos.delete(video.id)


def test_a_client_that_leaves_frees_the_engine(image_server: Served) -> None:
    """An image call that takes 20 s is aborted when its client resets the connection."""
    body = json.dumps({"prompt": "a", **slow(100, 200.0)}).encode()
    head = (
        f"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", image_server.port)) as raw:
        raw.sendall(head.encode() + body)
        wait_until(lambda: image_server.ready()[1]["sessions"] == 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert seconds_until(lambda: image_server.ready()[1]["sessions"] == 0) < seconds(1.5)


def test_jobs_beyond_the_queue_are_refused_with_429_and_when_to_come_back(
    image_server: Served,
) -> None:
    """One job runs, two wait, and the next request gets 429. A waiting job that is deleted never
    runs. While the queue is full, readiness reports `capacity` and `/health` returns 200.
    """
    client = image_server.client
    videos = [client.videos.create(prompt="a", extra_body=slow(100, 100.0)) for _ in range(3)]
    with pytest.raises(openai.RateLimitError) as refused:
        client.videos.create(prompt="a")
    assert refused.value.code == "too_many_jobs"
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert image_server.ready()[0] == 503 and image_server.ready()[1]["status"] == "capacity"
    assert image_server.get("/health")[0] == 200
    wait_until(lambda: client.videos.retrieve(videos[0].id).status == "in_progress")
    assert [client.videos.retrieve(video.id).status for video in videos[1:]] == ["queued", "queued"]
    for video in reversed(videos):
        client.videos.delete(video.id)
    assert image_server.ready()[1]["status"] == "ready"


@pytest.mark.parametrize(
    ("fields", "code", "param", "says"),
    [
        (
            {"extra_body": {"num_frames": 18}},
            "invalid_value",
            "num_frames",
            "1 \\+ 4 k, at most 241; near: 17",
        ),
        ({"extra_body": {"num_frames": 242}}, "invalid_value", "num_frames", "near: 241"),
        ({"seconds": "60"}, "invalid_value", "seconds", "at most 241"),
        ({"seconds": "abc"}, "invalid_value", "seconds", "valid number"),
        (
            {"seconds": "1", "extra_body": {"num_frames": 17}},
            "invalid_value",
            "num_frames",
            "not both",
        ),
        (
            {"extra_body": {"camera_actions": '[["w"]]'}},
            "unsupported_by_model",
            "camera_actions",
            "it can:",
        ),
        (
            reference(image_url="http://127.0.0.1/x.png"),
            "invalid_value",
            "input_reference",
            "no URLs",
        ),
        (reference(file_id="file_1"), "invalid_value", "input_reference", "no URLs"),
        (
            {"input_reference": ("a.png", b"nothing")},
            "invalid_image",
            "input_reference",
            "cannot be read",
        ),
    ],
)
def test_videos_that_cannot_be_made_are_refused_at_once(
    client: openai.OpenAI, fields: dict[str, Any], code: str, param: str, says: str
) -> None:
    """A request for a video that cannot be generated is rejected with 400 and the allowed values
    before a job is created.
    """
    with pytest.raises(openai.BadRequestError) as refused:
        client.videos.create(prompt="a", **fields)
    assert (refused.value.code, refused.value.param) == (code, param)
    assert re.search(says, refused.value.message)


def test_lists_are_paged(client: openai.OpenAI) -> None:
    """List requests support `limit`, `after` and `order`, and the client's iterator reads all
    pages.
    """
    made = [client.videos.create_and_poll(prompt="a", poll_interval_ms=20).id for _ in range(3)]
    assert [video.id for video in client.videos.list(limit=1)][:3] == made[::-1]
    page = client.videos.list(limit=2)
    assert page.has_more and page.last_id == made[1]
    ascending = [video.id for video in client.videos.list(order="asc", after=made[0])]
    assert ascending == made[1:]
    for kwargs in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "video_x"}):
        with pytest.raises(openai.BadRequestError):
            client.videos.list(**kwargs)  # type: ignore[arg-type]


# -- operations ------------------------------------------------------------------------------------


def test_metrics_count_calls_jobs_and_bytes(image_server: Served) -> None:
    """Counters for calls, jobs and bytes are exported through vLLM's own `/metrics` endpoint."""
    before = image_server.metric('omni_requests_total{endpoint="images",status="completed"}')
    image_server.client.images.generate(prompt="a")
    assert (
        image_server.metric('omni_requests_total{endpoint="images",status="completed"}')
        == before + 1
    )
    assert image_server.metric('omni_rt_chunk_seconds_count{endpoint="images",stage="denoise"}') > 0
    assert image_server.metric("omni_engine_session_slots") == 3
    assert image_server.metric('omni_held_bytes{kind="sessions_limit"}') > 0
    assert image_server.metric("vllm:num_requests_running") == 0


def test_the_log_is_short_and_holds_no_prompts(image_server: Served) -> None:
    """A job logs two lines and an image call logs one line. None of these lines contains the
    prompt.
    """
    secret = "a prompt that must stay out of the log"
    image_server.client.images.generate(prompt=secret)
    video = image_server.client.videos.create_and_poll(prompt=secret, poll_interval_ms=20)
    lines = image_server.log.read_text().splitlines()
    assert sum(f"id={video.id}" in line for line in lines) == 2
    assert any("image_call " in line and "status=completed" in line for line in lines)
    assert not any(secret in line for line in lines)


def test_realtime_endpoints_require_a_world_model(image_server: Served) -> None:
    """A server without a world model rejects the realtime handshake with 404."""
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    for path in ("/v1/realtime/world/camera", "/v1/realtime_video/generate", "/v1/realtime/video"):
        with pytest.raises(InvalidStatus) as refused:
            connect(
                f"ws://127.0.0.1:{image_server.port}{path}",
                additional_headers={"Authorization": f"Bearer {KEY}"},
            )
        assert refused.value.response.status_code == 404
