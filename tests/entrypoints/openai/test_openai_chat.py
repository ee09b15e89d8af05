# SPDX-License-Identifier: Apache-2.0
"""A tiny Lance served with `vllm serve --omni` and called through the `openai` client: images,
edits, videos, and chat completions.
"""

import base64
import http.client
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from helpers.openai_server import KEY, Served, serve
from helpers.waits import wait_until
from PIL import Image
from safetensors.torch import load_file, save_file

from vllm_omni.entrypoints.media.mp4 import encode_mp4
from vllm_omni.model_executor.models.registry import get_family

pytestmark = pytest.mark.nightly

SMALL = {
    "max_image_pixels": 128 * 128,
    "max_video_pixels": 64 * 96,
    "max_num_frames": 9,
    "max_new_tokens": 40_000,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve_lance(tmp_path_factory)


def serve_lance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = tmp_path_factory.mktemp("lance")
    get_family("lance").make_tiny(model, 0, "video")
    never_end_a_response(model / "Lance_3B_Video")
    omni = {"batch_invariant": False, "max_sessions": 8, "model": SMALL}
    yield from serve(model, tmp_path_factory.mktemp("lance_server") / "server.log", omni=omni)


def never_end_a_response(decoder: Path) -> None:
    """Set the logit of the end token to 0, which is below many other logits at each position, so
    that the end token is never the most likely token.
    """
    end_token = json.loads((decoder / "generation_config.json").read_text())["eos_token_id"]
    weights = load_file(decoder / "model.safetensors")
    for name in ("lm_head", "model.embed_tokens"):  # tied weights
        weights[f"language_model.{name}.weight"][end_token] = 0
    save_file(weights, decoder / "model.safetensors", {"format": "pt"})


def png(seed: int = 0, width: int = 90, height: int = 60) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def mp4(frames: int = 9) -> bytes:
    return encode_mp4(
        np.random.default_rng(0).integers(0, 256, (frames, 64, 96, 3), dtype=np.uint8), fps=12
    )


def data_url(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def question(part: dict[str, Any] | None, text: str = "What is it?") -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": [*([part] if part else []), {"type": "text", "text": text}]}
    ]


IMAGE = {"type": "image_url", "image_url": {"url": data_url(png(), "image/png")}}
VIDEO = {"type": "video_url", "video_url": {"url": data_url(mp4(), "video/mp4")}}
SMALL_INPUT = {"extra_params": {"resolution": "image_256res"}}
LONG: dict[str, Any] = {"max_tokens": 40_000, "temperature": 0}
"""A greedily decoded response never ends, because of `never_end_a_response`. A sampled response may
end at any time. Generating 40,000 tokens takes 90 s on two cores, which is longer than the timeout
of `wait_until` and longer than a client may wait for a slot while other work runs (10 s measured).
"""


def send(server: Served, part: dict[str, Any] | None, **fields: Any) -> Any:
    fields = {"max_tokens": 20, "messages": question(part), "extra_body": SMALL_INPUT, **fields}
    return server.client.chat.completions.create(model="null", **fields)


def test_an_image_is_generated_and_edited(server: Served) -> None:
    steps = {"num_inference_steps": 2}
    generated = server.client.images.generate(
        model="null", prompt="a cat", n=2, size="96x64", extra_body=steps
    )
    assert generated.data is not None and len(generated.data) == 2
    assert generated.data[0].b64_json != generated.data[1].b64_json
    edited = server.client.images.edit(
        model="null", image=("a.png", png()), prompt="no hat", extra_body={**steps, **SMALL_INPUT}
    )
    assert edited.data is not None
    image = Image.open(io.BytesIO(base64.b64decode(edited.data[0].b64_json or "")))
    assert image.size == (304, 224)


@pytest.mark.parametrize(
    ("width", "height", "size"), [(1920, 1080, (336, 192)), (1200, 1600, (224, 304))]
)
def test_a_photograph_of_any_shape_is_edited(
    server: Served, width: int, height: int, size: tuple[int, int]
) -> None:
    """An edited photograph has the size of the nearest bucket, which is about 256x256 pixels in
    this test.
    """
    edited = server.client.images.edit(
        model="null",
        image=("a.png", png(width=width, height=height)),
        prompt="no hat",
        extra_body={"num_inference_steps": 1, **SMALL_INPUT},
    )
    assert edited.data is not None
    assert Image.open(io.BytesIO(base64.b64decode(edited.data[0].b64_json or ""))).size == size


def finished(server: Served, **fields: Any) -> Any:
    video = server.client.videos.create(model="null", **fields)
    wait_until(
        lambda: server.client.videos.retrieve(video.id).status in ("completed", "failed"), 60
    )
    return server.client.videos.retrieve(video.id)


@pytest.mark.parametrize("as_url", [False, True])
def test_a_video_is_edited(server: Served, as_url: bool) -> None:
    """The clip in `input_reference` (a file or a data: URL) determines the size and length of the
    edited video.
    """
    extra = {"num_inference_steps": 2, "extra_params": {"resolution": "video_192p"}}
    if as_url:
        extra["input_reference"] = {"video_url": data_url(mp4(), "video/mp4")}
        video = finished(server, prompt="make it red", extra_body=extra)
    else:
        clip = ("clip.mp4", mp4(), "video/mp4")
        video = finished(server, prompt="make it red", input_reference=clip, extra_body=extra)
    assert (video.status, video.size, video.seconds) == ("completed", "304x224", "0.75")
    assert server.client.videos.download_content(video.id).read()[4:8] == b"ftyp"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"input_reference": ("a.mp4", mp4(), "video/mp4"), "seconds": "4"},
            "seconds follows the video",
        ),
        ({"input_reference": ("a.mp4", mp4()[:300], "video/mp4")}, "as a video"),
        ({"extra_body": {"size": "1024x1024", "num_frames": 9}}, "allowed and near"),
    ],
)
def test_a_wrong_video_call_is_refused_with_a_reason(
    server: Served, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        server.client.videos.create(model="null", prompt="waves", **fields)


@pytest.mark.parametrize("part", [IMAGE, VIDEO], ids=["image", "video"])
def test_a_streamed_response_equals_the_whole_one(server: Served, part: dict[str, Any]) -> None:
    whole = send(server, part)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage.completion_tokens <= 20 and whole.usage.prompt_tokens > 60
    chunks = list(send(server, part, stream=True, stream_options={"include_usage": True}))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert sum(1 for text in texts if text) > 1
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][
        -1
    ] == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage


def test_a_system_message_and_a_stop_text_matter(server: Served) -> None:
    plain = send(server, IMAGE).choices[0].message.content
    system = [{"role": "system", "content": "Be brief."}, *question(IMAGE)]
    assert send(server, None, messages=system).choices[0].message.content != plain
    stopped = send(server, IMAGE, stop=plain[2:4]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (
        plain[: plain.index(plain[2:4])],
        "stop",
    )


HELLO = [{"role": "user", "content": "hello"}]
TALK = [
    *question(IMAGE),
    {"role": "assistant", "content": "A cat."},
    {"role": "user", "content": "What colour?"},
]


def test_a_conversation_has_all_its_turns(server: Served) -> None:
    """The model receives every earlier turn of a conversation with its image. Conversations without
    images are accepted.
    """
    hello = send(server, None, messages=HELLO)
    assert hello.choices[0].message.content
    later = send(server, None, messages=TALK)
    alone = send(server, None, messages=TALK[-1:])
    other = send(
        server, None, messages=[TALK[0], {"role": "assistant", "content": "A tall dog."}, TALK[2]]
    )
    tokens = [response.usage.prompt_tokens for response in (hello, alone, later, other)]
    assert tokens[0] < tokens[1] + 20 < tokens[2] and tokens[2] != tokens[3]
    assert later.choices[0].message.content != other.choices[0].message.content
    parts = send(server, None, messages=TALK, stream=True)
    assert (
        "".join(part.choices[0].delta.content or "" for part in parts)
        == later.choices[0].message.content
    )


TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


def test_a_disconnect_before_a_non_streamed_response_frees_the_engine(server: Served) -> None:
    """When a client disconnects, its engine request is aborted even if the response is not
    streamed, because the server checks for disconnects.
    """
    assert (
        send(server, IMAGE, **{**LONG, "max_tokens": 4000}).choices[0].finish_reason == "length"
    ), "it never ends"
    wait_until(lambda: server.ready()[1]["sessions"] == 0)
    requested = {"model": "null", "messages": question(IMAGE), **SMALL_INPUT, **LONG}
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(requested), headers)
    wait_until(lambda: server.ready()[1]["sessions"] == 1)
    connection.close()
    wait_until(lambda: server.ready()[1]["sessions"] == 0)


def test_a_client_that_leaves_frees_its_session(server: Served) -> None:
    stream = send(server, IMAGE, stream=True, **LONG)
    next(iter(stream))
    wait_until(lambda: server.ready()[1]["sessions"] == 1)
    stream.close()
    wait_until(lambda: server.ready()[1]["sessions"] == 0)
    assert send(server, IMAGE).choices[0].message.content


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": question(IMAGE) + question(IMAGE)}, "2 images and clips"),
        (
            {"messages": [*question(IMAGE), {"role": "assistant", "content": "A cat."}]},
            "last message must be a user",
        ),
        (
            {
                "messages": question(
                    {"type": "image_url", "image_url": {"url": "http://example.org/a.png"}}
                )
            },
            "data: URLs",
        ),
        (
            {
                "messages": question(
                    {"type": "image_url", "image_url": {"url": data_url(b"x", "image/png")}}
                )
            },
            "image",
        ),
        (
            {
                "messages": question(
                    {"type": "video_url", "video_url": {"url": data_url(b"x", "video/mp4")}}
                )
            },
            "as a video",
        ),
        ({"messages": question(IMAGE, "")}, "at least 1 character"),
        ({"messages": question(IMAGE), "max_tokens": 10**6}, "above this server's"),
        ({"messages": question(IMAGE), "temperature": 3}, "temperature"),
        ({"messages": question(IMAGE), "extra_body": {"extra_params": {"colour": 1}}}, "colour"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_wrong_call_is_refused_with_a_reason(
    server: Served, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        server.client.chat.completions.create(model="null", **fields)
