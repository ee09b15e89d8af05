# SPDX-License-Identifier: Apache-2.0
"""Apart from rounding, the Winograd convolutions F(2, 3) and F(4, 3) along the time axis equal
direct convolution. In fp16, they are more accurate than direct convolution in bf16.
"""

import pytest
import torch
from torch.nn import functional

from vllm_omni.model_executor.models.wan.vae.stacked_frames import (
    FrameLayout,
    PendingSum,
    add_up,
    stack_frames,
)
from vllm_omni.model_executor.models.wan.vae.winograd import OF_FRAMES, product_dtype


def _convolved(
    past: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Return the Winograd convolution. Shape: [B, T, H, W, O].

    Args:
        past: Preceding frames, [B, 2, H, W, C].
        x: Frames, [B, T, H, W, C].
        weight: Convolution weight, [O, C, 3, 3, 3].
    """
    stacked = stack_frames(PendingSum(x.flatten(0, 1)), past, layout=FrameLayout.COMBINED)
    weights = OF_FRAMES[x.shape[1]].transformed(weight)
    products = [
        functional.conv2d(frames.permute(0, 3, 1, 2), of_one, padding=1).permute(0, 2, 3, 1)
        for frames, of_one in zip(stacked.frames, weights, strict=True)
    ]
    return add_up(PendingSum(torch.stack(products), bias, products=True)).unflatten(0, x.shape[:2])


def _case(frames: int) -> tuple[torch.Tensor, ...]:
    """Return two streams of similar frames after SiLU, and weights that are exactly representable
    in bf16.
    """
    generator = torch.Generator().manual_seed(0)
    still = torch.randn(2, 1, 6, 7, 64, generator=generator)
    x = functional.silu(still + 0.5 * torch.randn(2, frames + 2, 6, 7, 64, generator=generator))
    weight = torch.randn(48, 64, 3, 3, 3, generator=generator) / (27 * 64) ** 0.5
    bias = torch.randn(48, generator=generator) / 10
    return x, weight.bfloat16().float(), bias.bfloat16().float()


def _direct(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = functional.conv3d(x.permute(0, 4, 1, 2, 3), weight, bias, padding=(0, 1, 1))
    return y.permute(0, 2, 3, 4, 1)


@pytest.mark.parametrize("frames", list(OF_FRAMES))
def test_combined_frames_equal_a_causal_convolution(frames: int) -> None:
    x, weight, bias = _case(frames)
    found = _convolved(x[:, :2], x[:, 2:], weight, bias)
    torch.testing.assert_close(found, _direct(x, weight, bias), atol=2e-5, rtol=0)


@pytest.mark.parametrize("frames", list(OF_FRAMES))
def test_fp16_products_are_more_accurate_than_bf16_frames(frames: int) -> None:
    """In a bf16 network, the products in fp16 are more accurate than frames in bf16. The test
    compares the values that the next pass sums in fp32.
    """
    x, weight, bias = _case(frames)
    exact = _direct(x.double(), weight.double(), bias.double())
    of_bf16 = (
        _direct(x.bfloat16().float(), weight, torch.zeros_like(bias)).bfloat16().float() + bias
    )
    # The bias is fp32, so the sum is not rounded to bf16.
    past = x[:, :2].bfloat16()
    stacked = stack_frames(
        PendingSum(x[:, 2:].flatten(0, 1)), past, layout=FrameLayout.COMBINED
    ).frames
    weights = OF_FRAMES[frames].transformed(weight.bfloat16())
    assert stacked.dtype == weights.dtype == product_dtype(torch.bfloat16) == torch.float16
    products = [
        functional.conv2d(each.permute(0, 3, 1, 2).float(), of_one.float(), padding=1)
        .half()
        .permute(0, 2, 3, 1)
        for each, of_one in zip(stacked, weights, strict=True)
    ]
    of_products = add_up(PendingSum(torch.stack(products), bias, products=True)).view_as(exact)

    def error(found: torch.Tensor) -> float:
        return float((found - exact).norm() / exact.norm())

    assert error(of_products) < error(of_bf16) < 1e-2
