# SPDX-License-Identifier: Apache-2.0
"""Tests of metrics on synthetic videos with known values and on broken videos."""

import numpy as np
import pytest

from vllm_omni.evaluation.measures import appearance, likeness_of_frames, view_return

HEIGHT, WIDTH, FRAMES = 24, 32, 20


def picture(level: float = 120.0, contrast: float = 40.0) -> np.ndarray:
    """Return a frame whose columns alternate between values above and below `level`. Shape: [H, W,
    3], float.
    """
    columns = np.where(np.arange(WIDTH) % 2 == 0, -contrast, contrast)
    return np.broadcast_to(level + columns[None, :, None], (HEIGHT, WIDTH, 3)).copy()


def video(*frames_HWC: np.ndarray) -> np.ndarray:
    return np.stack(frames_HWC).round().clip(0, 255).astype(np.uint8)


def test_sharpness_and_contrast_are_those_of_the_picture() -> None:
    """Sharpness is the difference between neighbouring columns, which is 80 levels in the test
    frame. Contrast is the distance from the mean, which is 40 levels.
    """
    found = appearance(video(picture()))
    assert found == {"sharpness": pytest.approx(80), "contrast": pytest.approx(40, rel=0.01)}


def test_blur_halves_sharpness_and_contrast() -> None:
    """If a video gradually loses half of its contrast, its sharpness ratio and its contrast ratio
    are about one half.
    """
    frames = [picture(contrast=40 * (1 - share / 2)) for share in np.linspace(0, 1, FRAMES)]
    found = appearance(video(*frames))
    assert found["sharpness_ratio"] == pytest.approx(0.51, abs=0.02)
    assert found["contrast_ratio"] == pytest.approx(0.51, abs=0.02)


def test_noise_raises_sharpness() -> None:
    noise = np.random.default_rng(0).normal(0, 60, (FRAMES, HEIGHT, WIDTH, 3))
    grows = np.linspace(0, 1, FRAMES)[:, None, None, None]
    frames = [picture(contrast=10) + part for part in noise * grows]
    assert appearance(video(*frames))["sharpness_ratio"] > 2


@pytest.mark.parametrize("amount", [0, 3, 10])
def test_flicker_is_the_change_of_brightness(amount: int) -> None:
    """Flicker is the change in brightness between frames. The test frames alternate between
    `amount` above and `amount` below a level, so the flicker is twice `amount`.
    """
    frames = [picture(120 + amount * (-1) ** n) for n in range(FRAMES)]
    found = appearance(video(*frames))
    assert found["flicker"] == pytest.approx(2 * amount, abs=1e-3)
    assert found["frame_difference"] == pytest.approx(2 * amount, abs=1e-3)


def test_a_steady_fade_is_drift_and_no_flicker() -> None:
    """A steady fade counts as drift, not as flicker.

    The brightness rises by 2 with each of 20 frames. Drift is measured between the first and the
    last tenth of the video, which are two frames each.
    """
    found = appearance(video(*[picture(100 + 2 * n) for n in range(FRAMES)]))
    assert found["colour_drift"] == pytest.approx(36, abs=0.01)
    assert found["flicker"] == pytest.approx(0, abs=1e-3)


def test_colour_drift_is_the_root_mean_square_over_the_colours() -> None:
    """Colour drift is the root mean square over the three colour channels. In the test video, only
    one channel changes, by 30.
    """
    first, last = picture(), picture()
    last[..., 2] += 30
    found = appearance(video(first, last))
    assert found["colour_drift"] == pytest.approx(30 / np.sqrt(3), abs=0.01)


def test_likeness_of_frames_is_that_of_the_error() -> None:
    found = likeness_of_frames(video(picture(), picture()), video(picture(), picture(120 + 25.5)))
    assert found["psnr"] == [100, pytest.approx(20, abs=0.2)]
    assert found["ssim"][0] == pytest.approx(1) and found["ssim"][1] < 0.99


def test_a_return_is_distinguished_from_standing_still_and_from_staying_away() -> None:
    here, there = picture(), picture()[:, ::-1]
    returned = view_return(video(here, there, here), away=1)
    assert returned["return_psnr"] == 100 and returned["return_gain"] > 80
    assert view_return(video(here, here, here), away=1)["return_gain"] == 0
    assert view_return(video(here, there, there), away=1)["return_gain"] == 0
