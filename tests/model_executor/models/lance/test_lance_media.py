# SPDX-License-Identifier: Apache-2.0
"""Tests that compare buckets, cropping, resizing and frame sampling with the original
implementation's tables and Pillow.
"""

import numpy as np
import pytest
import torch
from PIL import Image

from vllm_omni.model_executor.models.lance.media import (
    PRESETS,
    buckets,
    crop_box,
    fit,
    for_vit,
    nearest_bucket,
    sampled_frames,
)


@pytest.mark.parametrize(
    ("side", "multiple", "expected"),
    [
        (768, 16, [(496, 1152), (576, 1024), (672, 896), (768, 768), (896, 672), (1024, 576)]),
        (672, 28, [(420, 1008), (504, 896), (560, 756), (672, 672), (756, 560), (896, 504)]),
        (640, 16, [(416, 976), (480, 848), (560, 752), (640, 640), (752, 560), (848, 480)]),
        (616, 28, [(392, 924), (448, 812), (504, 700), (588, 588), (700, 504), (812, 448)]),
    ],
)
def test_the_buckets_are_the_originals(
    side: int, multiple: int, expected: list[tuple[int, int]]
) -> None:
    assert list(buckets(side, multiple)) == expected


def test_the_widest_bucket_is_clipped_to_the_position_table() -> None:
    """An image that is 1152 pixels wide has 72 latent columns, but the position table has only
    64.
    """
    assert buckets(768, 16, 1024)[0] == (496, 1024)


@pytest.mark.parametrize(
    ("size", "expected"), [((600, 600), 3), ((1080, 1920), 1), ((1920, 1080), 5), ((100, 1000), 0)]
)
def test_an_image_takes_the_bucket_of_the_nearest_ratio(
    size: tuple[int, int], expected: int
) -> None:
    assert nearest_bucket(size, buckets(768, 16)) == expected


def test_the_crop_is_centred_and_as_large_as_possible() -> None:
    assert crop_box((100, 300), (64, 64)) == (0, 100, 100, 100)
    assert crop_box((300, 100), (64, 128)) == (125, 0, 50, 100)


@pytest.mark.parametrize("target", [(48, 80), (112, 160)])
def test_resizing_equals_pillows_bicubic(target: tuple[int, int]) -> None:
    """Enlarging or shrinking a smooth image produces the same result as Pillow within one uint8
    level. The results are not bit-identical, because Pillow rounds between its two passes.
    """
    y, x = torch.meshgrid(torch.arange(66), torch.arange(110), indexing="ij")
    image = torch.stack((60 + y, 40 + x, 128 + 60 * torch.sin(x / 5 + y / 7)), dim=-1).to(
        torch.uint8
    )
    top, left, height, width = crop_box((66, 110), target)
    window = Image.fromarray(image.numpy()).crop((left, top, left + width, top + height))
    expected = np.asarray(window.resize((target[1], target[0]), Image.Resampling.BICUBIC))
    ours = fit(image.unsqueeze(0), target)[:, 0].permute(1, 2, 0)
    difference = (ours - torch.from_numpy(expected.astype(np.float32))).abs()
    assert difference.max() <= 1


def test_the_vision_tower_receives_whole_patches() -> None:
    pixels = for_vit(torch.zeros(1, 90, 160, 3, dtype=torch.uint8), PRESETS["image_768res"])
    assert pixels.shape == (3, 1, 504, 896)
    torch.testing.assert_close(
        pixels[:, 0, 0, 0],
        -torch.tensor([0.48145466, 0.4578275, 0.40821073])
        / torch.tensor([0.26862954, 0.26130258, 0.27577711]),
    )


@pytest.mark.parametrize(
    ("frames", "fps", "retained"),
    [(93, 24, 45), (121, 24, 57), (300, 30, 69), (1, 30, 1), (2, 1, 2)],
)
def test_a_clip_is_sampled_at_twelve_frames_per_second(
    frames: int, fps: float, retained: int
) -> None:
    """Sampling keeps the first and last frames and uses at most six seconds of the clip. It returns
    4 k + 1 frames, or all frames if the clip is shorter.
    """
    chosen = sampled_frames(frames, fps)
    assert len(chosen) == retained or len(chosen) == 1
    assert chosen[0] == 0 and (len(chosen) == 1 or chosen[-1] == frames - 1)
    assert (len(chosen) - 1) % 4 == 0 or frames < 5
