# SPDX-License-Identifier: Apache-2.0
"""Tests of PSNR and SSIM on videos for which both values are known in advance."""

import pytest
import torch
from skimage.metrics import structural_similarity
from torch.nn import functional

from vllm_omni.evaluation import likeness


@pytest.fixture
def clip() -> torch.Tensor:
    """Return smooth, asymmetric random videos. Shape: [2, 3, 3, 24, 32]."""
    noise = torch.rand(6, 3, 7, 9, generator=torch.Generator().manual_seed(4))
    return functional.interpolate(noise, size=(24, 32), mode="bilinear").view(2, 3, 3, 24, 32)


def test_psnr_is_that_of_the_error(clip: torch.Tensor) -> None:
    """A uniform error of 0.1 yields a PSNR of 20 dB. If only one of three frames has this error,
    the PSNR is 4.8 dB higher.
    """
    assert likeness.psnr(clip + 0.1, clip) == pytest.approx(torch.full((2,), 20.0), abs=1e-3)
    once = clip.clone()
    once[:, 1] += 0.1
    assert likeness.squared_error(once, clip)[0] == pytest.approx(
        torch.tensor([0.0, 0.01, 0.0]), abs=1e-7
    )
    assert likeness.psnr(once, clip) == pytest.approx(torch.full((2,), 24.771), abs=1e-3)


def test_ssim_equals_that_of_scikit_image(clip: torch.Tensor) -> None:
    """SSIM equals the value that scikit-image computes with Gaussian windows. Both values exclude
    the border.

    The tolerance of 1e-5 allows for rounding in fp32 sums.
    """
    other = (clip + 0.1 * torch.rand(clip.shape, generator=torch.Generator().manual_seed(5))).clamp(
        0, 1
    )
    found = likeness.ssim(other, clip)[1, 2]
    expected = structural_similarity(
        other[1, 2].permute(1, 2, 0).double().numpy(),
        clip[1, 2].permute(1, 2, 0).double().numpy(),
        channel_axis=-1,
        data_range=1.0,
        gaussian_weights=True,
        sigma=1.5,
        use_sample_covariance=False,
    )
    assert float(found) == pytest.approx(expected, abs=1e-5)
