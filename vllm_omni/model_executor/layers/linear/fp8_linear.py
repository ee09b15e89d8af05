# SPDX-License-Identifier: Apache-2.0
"""FP8 matrix products with a scale per token and per output channel: cuBLAS where it is faster than
CUTLASS.

On NVIDIA GPUs vLLM chooses its CUTLASS kernel. On Hopper, cuBLAS (called by torch from CUDA 12.9
on) is faster for the wide layers of large video models, with the same errors; see
docs/architecture/speed_log.md.
"""

from functools import cache
from typing import Any

import torch
from torch import nn
from vllm import envs
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassFP8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8DynamicTokenSym,
    kFp8StaticChannelSym,
)

_LEAST_WIDTH = 4096
"""Minimum number of input and output channels. cuBLAS was not faster with 1536 channels, nor with
Lance's 2048."""


class RowwiseFP8Kernel(CutlassFP8ScaledMMLinearKernel):
    """vLLM's kernel with cuBLAS as its product, for bf16 results of layers that need no padding."""

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
        """Multiply and rescale. See vLLM's `apply_scaled_mm`.

        Args:
            A: Inputs, e4m3 [T, K].
            B: Weight, e4m3 [K, N], column-major.
            out_dtype: Type of the result.
            As: Scales of the inputs, fp32 [T, 1].
            Bs: Scales of the weight, fp32 [N, 1].
            bias: [N], or None.
            output_shape: Shape of the result.
        """
        padded = B.shape != (A.shape[1], output_shape[-1])
        if padded or out_dtype != torch.bfloat16:
            return super().apply_scaled_mm(
                A=A, B=B, out_dtype=out_dtype, As=As, Bs=Bs, bias=bias, output_shape=output_shape
            )
        result = torch._scaled_mm(
            A, B, As, Bs.view(1, -1), bias=bias, out_dtype=out_dtype, use_fast_accum=True
        )
        return result.view(output_shape)


def choose_kernel(layer: nn.Module) -> None:
    """Make `layer` use `RowwiseFP8Kernel` if that is faster. Call it after weights are created,
    before they are loaded."""
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
    """Return whether torch multiplies with cuBLAS on this device when both operands have a scale
    per row."""
    version = torch.version.cuda
    if (
        version is None
        or not torch.cuda.is_available()
        or torch.cuda.get_device_capability() != (9, 0)
    ):
        return False
    return tuple(int(part) for part in version.split(".")[:2]) >= (12, 9)
