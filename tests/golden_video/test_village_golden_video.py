# SPDX-License-Identifier: Apache-2.0
"""Tests that compare a fixed walk through the shipped village with a recording and with the
rendered ground truth.

The TINY_WORLD_PATH environment variable selects another village checkpoint.
test_lingbot_golden_video.py tests released LingBot weights.
"""

import numpy as np
import pytest
import torch
from PIL import Image
from village_walk import GOLDEN, HEIGHT, WALK, WIDTH, kept, made_frames, start_image, village

from training.tiny_world.render import Renderer
from training.tiny_world.score import against_truth, latent_frames
from training.tiny_world.truth import rendered

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def videos() -> list[torch.Tensor]:
    return made_frames(village(), start_image())


def test_the_village_looks_as_recorded(videos: list[torch.Tensor]) -> None:
    """On a CPU, no pixel value differs from the recording by more than 8, and the frames' PSNR is
    at least 45 dB.

    Processors add fp32 values in different orders, and such differences grow, because each latent
    frame depends on the previous ones. On CUDA, where convolutions may use TF32, the PSNR limit is
    35 dB.
    """
    with Image.open(GOLDEN) as image:
        recorded = np.asarray(image).astype(int)
    error = kept(videos[0]).numpy().astype(int) - recorded
    cuda = torch.cuda.is_available()
    assert 10 * np.log10(255**2 / max(np.square(error).mean(), 1e-9)) >= (35 if cuda else 45)
    assert cuda or np.abs(error).max() <= 8


def test_sessions_side_by_side_are_equal(videos: list[torch.Tensor]) -> None:
    once, again = videos
    assert once.shape == (33, HEIGHT, WIDTH, 3) and torch.equal(once, again)


def test_the_village_is_like_the_truth(videos: list[torch.Tensor]) -> None:
    """Each chunk is close to the ground truth in PSNR and in sharpness. Sharpness is tested too,
    because PSNR by itself rewards blur.

    The frames of a different walk would miss both limits by a wide margin.
    """
    truth = rendered(Renderer("cpu", HEIGHT, WIDTH, compiled=False, frames_per_call=1), [WALK])
    found = against_truth(latent_frames(videos[:1]), truth)
    assert all(db >= least for db, least in zip(found["psnr"], (21, 18.5, 18.5), strict=True))
    assert min(found["sharpness"]) >= 0.75
    backwards = against_truth(latent_frames([videos[0].flip(0)]), truth)
    assert backwards["psnr"][0] < found["psnr"][0] - 5
