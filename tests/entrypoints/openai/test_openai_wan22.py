# SPDX-License-Identifier: Apache-2.0
"""A tiny Wan 2.2 TI2V served with `vllm serve DIR --omni`: videos requested over HTTP, one at a
time and in a batch.

diffusers' `save_pretrained` wrote the directory, and no flag names the model family.
"""

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from helpers.openai_server import Served, serve
from helpers.waits import wait_until
from PIL import Image

from vllm_omni.model_executor.models.registry import get_family

pytestmark = pytest.mark.nightly

WIDTH, HEIGHT, STEPS = 96, 64, 3
SMALL: dict[str, Any] = {"num_frames": 5, "num_inference_steps": STEPS, "seed": 5}
MANY_STEPS = 600


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = tmp_path_factory.mktemp("wan2_2") / "ti2v"
    model.mkdir()
    get_family("wan2_2").make_tiny(model, 0, "ti2v")
    omni = {
        "height": HEIGHT,
        "width": WIDTH,
        "max_sessions": 4,
        "model": {"max_num_frames": 9, "max_num_inference_steps": MANY_STEPS},
    }
    log = tmp_path_factory.mktemp("wan2_2_server") / "server.log"
    yield from serve(
        model, log, omni=omni, VLLM_OMNI_MAX_RUNNING_VIDEOS="3", VLLM_OMNI_STATS_INTERVAL_S="3"
    )


def frames_of(server: Served, video_id: str) -> bytes:
    """Return the sprite sheet of all frames (JPEG). Equal frames yield bit-identical sprite sheets,
    but their video files may differ in their bytes.
    """
    return server.client.videos.download_content(video_id, variant="spritesheet").content


def make(server: Served, **fields: Any) -> bytes:
    video = server.client.videos.create_and_poll(
        prompt="a lighthouse", poll_interval_ms=50, extra_body=fields
    )
    assert video.status == "completed", video.error
    return frames_of(server, video.id)


def image() -> str:
    buffer = io.BytesIO()
    gradient = np.linspace(0, 255, HEIGHT * WIDTH * 3).reshape(HEIGHT, WIDTH, 3).astype(np.uint8)
    Image.fromarray(gradient).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def test_a_video_follows_prompt_seed_guidance_and_image(server: Served) -> None:
    """A single checkpoint generates video from text and from an image. A repeated request yields
    the same frames, and changing the seed, the guidance, the negative prompt, the start image or
    the flow shift changes them.
    """
    plain = make(server, **SMALL)
    assert make(server, **SMALL) == plain
    for change in (
        {"seed": 6},
        {"guidance_scale": 1.0},
        {"negative_prompt": "no cars"},
        {"input_reference": {"image_url": image()}},
        {"extra_params": {"flow_shift": 1.0}},
    ):
        assert make(server, **{**SMALL, **change}) != plain, change


def test_videos_made_together_equal_videos_made_alone(server: Served) -> None:
    """Three jobs with schedules of different lengths yield the same videos when they run together
    in one engine as when they run separately.
    """
    wanted = [{**SMALL, "seed": seed, "num_inference_steps": 8 + seed} for seed in range(3)]
    alone = [make(server, **fields) for fields in wanted]
    jobs = [
        server.client.videos.create(prompt="a lighthouse", extra_body=fields) for fields in wanted
    ]
    for job, expected in zip(jobs, alone, strict=True):
        wait_until(lambda job=job: server.client.videos.retrieve(job.id).status == "completed", 60)  # type: ignore[misc]
        assert frames_of(server, job.id) == expected


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_frames": 6}, "1 \\+ 4 k"),
        ({"num_frames": 13}, "at most 9"),
        ({"num_inference_steps": MANY_STEPS + 1}, f"allowed: 1 to {MANY_STEPS}"),
        ({"size": "80x64"}, "multiple of 32"),
    ],
)
def test_videos_that_cannot_be_made_are_refused_at_once(
    server: Served, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        server.client.videos.create(prompt="a", extra_body=fields)
