# SPDX-License-Identifier: Apache-2.0
"""Lance served with `vllm serve --omni`, started as a user would: a chat completion and an
image.
"""

import base64
import io
from collections.abc import Iterator

import openai
import pytest
from helpers.openai_server import Served
from PIL import Image
from test_openai_chat import HELLO, IMAGE, TALK, TOOL, send, serve_lance


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve_lance(tmp_path_factory)


def test_lance_describes_and_generates_an_image(server: Served) -> None:
    """A greedily decoded response is the same whether or not it is streamed. Text-only requests
    work, and a generated image has the requested size.
    """
    whole = send(server, IMAGE, temperature=0).choices[0]
    assert whole.message.content and whole.finish_reason in ("stop", "length")
    chunks = list(send(server, IMAGE, temperature=0, stream=True))
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    )
    for messages in (HELLO, TALK):
        assert (
            send(server, None, messages=messages, presence_penalty=0, tools=[])
            .choices[0]
            .message.content
        )
    with pytest.raises(openai.BadRequestError) as refused:
        send(server, None, messages=HELLO, tools=[TOOL])
    assert (refused.value.code, refused.value.param) == ("unsupported_parameter", "tools")
    generated = server.client.images.generate(
        model="null", prompt="a cat", size="96x64", extra_body={"num_inference_steps": 2}
    )
    assert generated.data is not None
    assert Image.open(io.BytesIO(base64.b64decode(generated.data[0].b64_json or ""))).size == (
        96,
        64,
    )
