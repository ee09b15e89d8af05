# SPDX-License-Identifier: Apache-2.0
"""The fused decoder's kernel is compared with the same pass in plain torch. On a CPU, the kernel
runs in Triton's interpreter.
"""

from itertools import product
from typing import Any

import pytest
import torch
from helpers.triton_interpreter import interpret

from vllm_omni.model_executor.models.wan.vae import stacked_frames
from vllm_omni.model_executor.models.wan.vae.stacked_frames import (
    DuplicatedPixels,
    FrameLayout,
    PendingSum,
)
from vllm_omni.model_executor.models.wan.vae.winograd import product_dtype

CASES: list[dict[str, Any]] = [
    {"channels": channels, "streams": streams, "frames": frames, "size": size, **options}
    for (channels, streams, frames, size), options in product(
        [(6, 1, 3, (4, 6)), (16, 2, 1, (2, 2)), (33, 2, 4, (6, 10))],
        [
            {"gamma": True, "layout": FrameLayout.SIDE_BY_SIDE},
            {
                "gamma": True,
                "layout": FrameLayout.SIDE_BY_SIDE,
                "bias": True,
                "residual": True,
                "want_sum": True,
            },
            {"gamma": True, "layout": FrameLayout.IN_TURN, "bias": True, "edge_rows": 1},
            {
                "gamma": True,
                "layout": FrameLayout.SIDE_BY_SIDE,
                "bias": True,
                "want_sum": True,
                "shuffled": True,
                "edge_rows": 1,
            },
            {"gamma": False, "layout": FrameLayout.SIDE_BY_SIDE, "bias": True, "residual": True},
            {"gamma": False, "layout": FrameLayout.IN_TURN},
        ],
    )
]
CASES += [
    {
        "channels": channels,
        "streams": streams,
        "frames": frames,
        "size": (4, 6),
        "gamma": True,
        **options,
    }
    for (channels, streams, frames), options in product(
        [(6, 1, 2), (33, 2, 4)],
        [
            {
                "layout": FrameLayout.COMBINED,
                "bias": True,
                "want_sum": True,
                "shuffled": True,
                "edge_rows": 1,
            },
            {
                "layout": FrameLayout.COMBINED,
                "bias": True,
                "residual": True,
                "want_sum": True,
                "products": True,
            },
            {"layout": FrameLayout.COMBINED, "bias": True, "products": True, "edge_rows": 1},
            {"layout": FrameLayout.SIDE_BY_SIDE, "bias": True, "residual": True, "products": True},
            {
                "layout": FrameLayout.IN_TURN,
                "bias": True,
                "residual": True,
                "products": True,
                "edge_rows": 1,
            },
        ],
    )
]
"""Cases in which F(2, 3) or F(4, 3) combines frames before a convolution, after a convolution, or
both.
"""
CASES += [
    {
        "channels": 33,
        "streams": 2,
        "frames": 1,
        "size": (4, 6),
        "gamma": True,
        "layout": FrameLayout.ALONE,
        **options,
    }
    for options in (
        {"bias": True, "residual": True, "want_sum": True},
        {"bias": True, "shuffled": True, "want_sum": True, "edge_rows": 1},
        {"bias": True, "want_newest": False},
    )
]
CASES += [
    {
        "channels": channels,
        "streams": 2,
        "frames": frames,
        "size": (4, 6),
        "gamma": True,
        "bias": True,
        "shuffled": True,
        "want_sum": True,
        "duplicated": (factor, repeats, last),
        "layout": layout,
    }
    for channels, frames, factor, repeats, last, layout in (
        (8, 2, 2, 8, False, FrameLayout.COMBINED),
        (8, 1, 2, 8, True, FrameLayout.ALONE),
        (6, 4, 1, 2, False, FrameLayout.COMBINED),
        (6, 3, 1, 2, False, FrameLayout.IN_TURN),
        (12, 4, 2, 4, False, FrameLayout.SIDE_BY_SIDE),
        (12, 1, 1, 2, True, FrameLayout.ALONE),
    )
]
"""Cases that add copies of the input, as each upsampling level in the Wan 2.2 decoder does."""


def check_pass(kernels: Any, case: dict[str, Any], dtype: torch.dtype, device: str) -> None:
    """Compare the kernels' `stack_frames` and `add_up` with the plain torch versions on random
    tensors.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    options = dict(case)
    channels, streams, count = (options.pop(name) for name in ("channels", "streams", "frames"))
    height, width = options.pop("size")
    shuffled, products = (options.pop(name, False) for name in ("shuffled", "products"))
    frames = streams * count
    x = (
        random(frames, height // 2 + 1, width // 2 + 1, 4 * channels)
        if shuffled
        else random(frames, height, width, channels)
    )
    if products:
        x = random(count + 2, streams, height, width, channels).to(product_dtype(dtype)) / 16
    bias = random(channels) if options.pop("bias", False) else None
    residual = random(frames, height, width, channels) if options.pop("residual", False) else None
    duplicated = options.pop("duplicated", None)
    if duplicated is not None:
        factor, repeats, last = duplicated
        below = random(
            frames if last else frames // factor,
            height // 2,
            width // 2,
            4 * factor * channels // repeats,
        )
    options["gamma"] = random(channels) + 2 if options.pop("gamma") else None
    past = random(streams, 2, height, width, channels)

    def activation(dtype: torch.dtype) -> PendingSum:
        of_x = product_dtype(dtype) if products else dtype
        terms: list[Any] = [
            None if term is None else term.to(dtype, copy=True) for term in (bias, residual)
        ]
        if duplicated is not None:
            terms[1] = DuplicatedPixels(below.to(dtype), factor, repeats, last)
        return PendingSum(x.to(of_x, copy=True), *terms, shuffled=shuffled, products=products)

    exact = {
        name: value.float() if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    expected = stacked_frames.stack_frames(activation(torch.float32), past.float(), **exact)
    found = kernels.stack_frames(activation(dtype), past, **options)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    edge = options.get("edge_rows", 0)
    own = slice(edge, found.frames.shape[-3] - edge)
    pairs = [
        (found.frames[..., own, :, :], expected.frames[..., own, :, :]),
    ]
    assert (found.newest is None) == (expected.newest is None)
    if found.newest is not None and expected.newest is not None:
        pairs.append((found.newest, expected.newest))
    assert (found.total is None) == (expected.total is None)
    if found.total is not None and expected.total is not None:
        pairs.append((found.total, expected.total))
    if not shuffled:
        pairs.append(
            (kernels.add_up(activation(dtype)), stacked_frames.add_up(activation(torch.float32)))
        )
    for value, wanted in pairs:
        torch.testing.assert_close(value.float(), wanted, atol=tolerance, rtol=tolerance)


@torch.inference_mode()
def interpreted(rank: int) -> None:
    from vllm_omni.model_executor.models.wan.vae import stack_kernels

    for case in CASES:
        check_pass(stack_kernels, case, torch.float32, "cpu")


def test_the_kernel_equals_plain_torch_in_the_interpreter() -> None:
    interpret(interpreted)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_equals_plain_torch_on_a_gpu(dtype: torch.dtype) -> None:
    from vllm_omni.model_executor.models.wan.vae import stack_kernels

    for case in CASES:
        check_pass(stack_kernels, case, dtype, "cuda")
