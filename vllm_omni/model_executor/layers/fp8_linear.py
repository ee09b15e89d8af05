# SPDX-License-Identifier: Apache-2.0
"""Products of FP8 inputs and weights, each with a scale of its own for every row: cuBLAS's where it is the faster.

vLLM's choice on NVIDIA cards is its CUTLASS kernel. On Hopper cuBLAS, which torch calls from CUDA 12.9 on, takes 9 to
17 % less time for the wide layers of large video models, with the same errors (docs/architecture/speed_log.md).
Held by tests/model_executor/layers/test_fp8_linear.py.
"""

from functools import cache
from typing import Any

import torch
from torch import nn
from vllm import envs
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassFP8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym, kFp8StaticChannelSym

_LEAST_WIDTH = 4096
"""Fewest input and output channels: with 1536 cuBLAS was no faster, with 2048 of Lance neither."""


class RowwiseFP8Kernel(CutlassFP8ScaledMMLinearKernel):
    """vLLM's kernel with another product, for bf16 results of layers whose sizes need no padding."""

    def apply_scaled_mm(
        self,
        *,
        A: torch.Tensor,
        B: torch.Tensor,
        out_dtype: torch.dtype,
        As: torch.Tensor,
        Bs: torch.Tensor,
        bias: torch.Tensor | None,
        output_shape: list[int],
    ) -> torch.Tensor:
        """A: e4m3 [T, K]. B: e4m3 [K, N], a column after the other. As, Bs: fp32 [T, 1], [N, 1]. bias: [N]."""
        padded = B.shape != (A.shape[1], output_shape[-1])
        if padded or out_dtype != torch.bfloat16:
            return super().apply_scaled_mm(
                A=A, B=B, out_dtype=out_dtype, As=As, Bs=Bs, bias=bias, output_shape=output_shape
            )
        result = torch._scaled_mm(A, B, As, Bs.view(1, -1), bias=bias, out_dtype=out_dtype, use_fast_accum=True)
        return result.view(output_shape)


def choose_kernel(layer: nn.Module) -> None:
    """Let a layer whose weights were created, not yet loaded, multiply by `RowwiseFP8Kernel` if that is the faster."""
    method: Any = getattr(layer, "quant_method", None)
    kernel = getattr(method, "fp8_linear", None)
    if type(kernel) is not CutlassFP8ScaledMMLinearKernel or envs.VLLM_BATCH_INVARIANT:
        return
    keys = kernel.config.activation_quant_key, kernel.config.weight_quant_key
    if keys != (kFp8DynamicTokenSym, kFp8StaticChannelSym):
        return
    weight: Any = layer.weight
    if min(weight.shape) >= _LEAST_WIDTH and has_rowwise_cublas():
        method.fp8_linear = RowwiseFP8Kernel(kernel.config, kernel.layer_param_names)


@cache
def has_rowwise_cublas() -> bool:
    """Whether torch multiplies by cuBLAS here, where both sides have a scale for each row."""
    version = torch.version.cuda
    if version is None or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return False
    return tuple(int(part) for part in version.split(".")[:2]) >= (12, 9)
