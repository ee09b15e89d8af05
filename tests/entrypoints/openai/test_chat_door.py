# SPDX-License-Identifier: Apache-2.0
"""Lance's doors open: `vllm serve --omni` as a user starts it, asked for an answer and a picture."""

import base64
import io
from collections.abc import Iterator

import pytest
from openai_server import Served
from PIL import Image
from test_openai_chat import IMAGE, ask, serve_lance


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve_lance(tmp_path_factory)


def test_a_picture_is_read_and_one_is_drawn(server: Served) -> None:
    """The greedy answer streams as what it is whole; the picture has the asked size."""
    whole = ask(server, IMAGE, temperature=0).choices[0]
    assert whole.message.content and whole.finish_reason in ("stop", "length")
    chunks = list(ask(server, IMAGE, temperature=0, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    drawn = server.client.images.generate(
        model="null", prompt="a cat", size="96x64", extra_body={"num_inference_steps": 2}
    )
    assert drawn.data is not None
    assert Image.open(io.BytesIO(base64.b64decode(drawn.data[0].b64_json or ""))).size == (96, 64)
