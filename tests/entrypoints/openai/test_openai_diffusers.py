# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen-Image served with `vllm serve DIR --omni` returns images that are bit-identical to
those of diffusers.
"""

import base64
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from helpers.openai_server import Served, serve
from PIL import Image

STEPS = 3


@pytest.fixture(scope="module")
def qwen_image(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("diffusers_pipeline", "qwen_image")


@pytest.fixture(scope="module")
def server(qwen_image: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = {
        "max_pixels": 64 * 64,
        "defaults": {"width": 48, "height": 32, "num_inference_steps": STEPS},
    }
    log = tmp_path_factory.mktemp("diffusers_server") / "server.log"
    yield from serve(qwen_image, log, omni={"model": options})


def pixels(data: Any) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data.b64_json))).convert("RGB"))


def test_images_over_http_equal_diffusers(server: Served, qwen_image: Path) -> None:
    """At the deployment's default size and number of steps, two images generated with guidance and
    a negative prompt equal those of diffusers.
    """
    import diffusers

    extra = {"seed": 5, "negative_prompt": "rain", "guidance_scale": 3.0}
    response = server.client.images.generate(prompt="a red fox", n=2, extra_body=extra)
    assert response.data is not None
    pipeline = diffusers.QwenImagePipeline.from_pretrained(qwen_image)
    for number, data in enumerate(response.data):
        expected = pipeline(
            "a red fox",
            negative_prompt="rain",
            true_cfg_scale=3.0,
            width=48,
            height=32,
            num_inference_steps=STEPS,
            generator=torch.Generator().manual_seed(5 + number),
        ).images[0]
        assert np.array_equal(pixels(data), np.asarray(expected))


def test_the_pipelines_own_options_and_refusals_reach_the_client(server: Served) -> None:
    """`extra_params` contains the pipeline's own options. Unknown options and impossible sizes get
    400 with the reason.
    """
    suffixed = server.client.images.generate(
        prompt="a red fox",
        size="64x64",
        extra_body={"seed": 1, "extra_params": {"prompt_suffix": "en"}},
    )
    plain = server.client.images.generate(prompt="a red fox", size="64x64", extra_body={"seed": 1})
    assert suffixed.data is not None and plain.data is not None
    assert not np.array_equal(pixels(suffixed.data[0]), pixels(plain.data[0]))
    with pytest.raises(openai.BadRequestError, match="has no option 'strength'; it has"):
        server.client.images.generate(prompt="a", extra_body={"extra_params": {"strength": 0.5}})
    with pytest.raises(openai.BadRequestError, match="5:4"):
        server.client.images.generate(
            prompt="a", extra_body={"extra_params": {"aspect_ratio": "5:4"}}
        )
    with pytest.raises(openai.BadRequestError):
        server.client.images.generate(prompt="a", size="1024x1024")
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32)).save(buffer, "PNG")
    with pytest.raises(openai.BadRequestError, match="cannot edit images"):
        server.client.images.edit(image=("a.png", buffer.getvalue()), prompt="a")
    assert server.get("/health")[0] == 200
