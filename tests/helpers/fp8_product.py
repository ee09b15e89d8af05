# SPDX-License-Identifier: Apache-2.0
"""A replacement for cuDNN's FP8 attention, for machines without a Hopper GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from vllm_omni.model_executor.layers.attention import fp8_attention
from vllm_omni.model_executor.layers.fast_path import FastPath
from vllm_omni.model_executor.layers.quantization.e4m3 import FP8


def exact_product(q_TNH: torch.Tensor, k_SNH: torch.Tensor, v_SNH: torch.Tensor) -> torch.Tensor:
    """Compute attention in fp32, and quantize intermediate values where cuDNN quantizes them."""
    q_NTH, k_NSH, v_NSH = (x.float().transpose(0, 1) for x in (q_TNH, k_SNH, v_SNH))
    scores = q_NTH @ k_NSH.transpose(1, 2) * (q_TNH.shape[-1] ** -0.5 / fp8_attention._QUERY_SCALE)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    scale = fp8_attention._PROBABILITY_SCALE
    rounded = (weights * scale).to(FP8).float() / scale
    out_NTH = rounded @ v_NSH / weights.sum(-1, keepdim=True) * fp8_attention._RESULT_SCALE
    return out_NTH.transpose(0, 1).contiguous().to(FP8)


@contextmanager
def as_on_hopper() -> Iterator[None]:
    """Make `fp8_attention` use `exact_product` instead of cuDNN.

    The replacement asserts that its inputs have the shapes and strides that the product was created
    for.
    """

    def product(
        q_shape: tuple[int, ...],
        stored_shape: tuple[int, ...],
        stored_stride: tuple[int, ...],
        device: torch.device,
    ) -> fp8_attention.Product:
        def checked(q_TNH: torch.Tensor, k_SNH: torch.Tensor, v_SNH: torch.Tensor) -> torch.Tensor:
            assert q_TNH.dtype == k_SNH.dtype == v_SNH.dtype == FP8
            assert q_TNH.shape == q_shape and q_TNH.is_contiguous()
            for stored in (k_SNH, v_SNH):
                assert (stored.shape, stored.stride()) == (stored_shape[1:], stored_stride[1:])
            return exact_product(q_TNH, k_SNH, v_SNH)

        return checked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8_attention, "cudnn_fp8_attention", lambda device: FastPath("", ""))
        patch.setattr(fp8_attention, "_product", product)
        yield
