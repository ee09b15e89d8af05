# SPDX-License-Identifier: Apache-2.0
"""The shipped village on a fixed walk, compared with its recording and with the rendered truth.

TINY_WORLD_PATH names another checkpoint of the village. test_lingbot_golden_video.py runs released
LingBot weights.
"""

import numpy as np
import pytest
import torch
from PIL import Image
from village_walk import (
    GOLDEN,
    HEIGHT,
    WALK,
    WIDTH,
    made_frames,
    recorded_frames,
    start_image,
    village,
)

from training.tiny_world.render import Renderer
from training.tiny_world.score import against_truth, latent_frames
from training.tiny_world.truth import rendered

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def videos() -> list[torch.Tensor]:
    return made_frames(village(), start_image())


def test_the_village_equals_its_recording(videos: list[torch.Tensor]) -> None:
    """On a CPU no value differs by more than 8 and images are within 45 dB, because processors
    differ in the order of fp32 sums and each latent frame depends on earlier ones. On CUDA,
    where convolutions may use TF32, the limit is 35 dB.
    """
    with Image.open(GOLDEN) as image:
        recorded = np.asarray(image).astype(int)
    error = recorded_frames(videos[0]).numpy().astype(int) - recorded
    cuda = torch.cuda.is_available()
    assert 10 * np.log10(255**2 / max(np.square(error).mean(), 1e-9)) >= (35 if cuda else 45)
    assert cuda or np.abs(error).max() <= 8


def test_concurrent_sessions_are_equal(videos: list[torch.Tensor]) -> None:
    once, again = videos
    assert once.shape == (33, HEIGHT, WIDTH, 3) and torch.equal(once, again)


def test_the_village_is_close_to_the_rendered_truth(videos: list[torch.Tensor]) -> None:
    """PSNR and, because it rewards blur, sharpness are compared per chunk. A reversed walk is far
    from both limits.
    """
    truth = rendered(Renderer("cpu", HEIGHT, WIDTH, compiled=False, frames_per_call=1), [WALK])
    found = against_truth(latent_frames(videos[:1]), truth)
    assert all(db >= least for db, least in zip(found["psnr"], (21, 18.5, 18.5), strict=True))
    assert min(found["sharpness"]) >= 0.75
    backwards = against_truth(latent_frames([videos[0].flip(0)]), truth)
    assert backwards["psnr"][0] < found["psnr"][0] - 5
