# SPDX-License-Identifier: Apache-2.0
"""Linear layers with FP8 weights that run in fp32 on devices without FP8 matrix products."""

import torch
from torch import nn
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassFP8ScaledMMLinearKernel
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym

from vllm_omni.model_executor.layers.linear.quantized_input import product, quantize_tokens


class PlainProduct(CutlassFP8ScaledMMLinearKernel):
    """A kernel for any device. It has the interface and results of vLLM's kernel, but not its
    padding.
    """

    def __init__(self) -> None:
        self.config = type("Config", (), {"activation_quant_key": kFp8DynamicTokenSym})()  # type: ignore[assignment]

    def apply_scaled_mm(self, *, A, B, out_dtype, As, Bs, bias, output_shape):  # type: ignore[no-untyped-def]
        result = (A.float() * As) @ (B.float() * Bs.view(1, -1))
        return (result if bias is None else result + bias.float()).to(out_dtype).view(output_shape)


class QuantizedMethod:
    """A quantization method like vLLM's for FP8 weights, with `fp8_linear` as its kernel."""

    def __init__(self) -> None:
        self.fp8_linear = PlainProduct()

    def apply(
        self, layer: LinearBase, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return product(layer, quantize_tokens(x, x.dtype), bias)


def of_rounded_weight(layer: LinearBase) -> torch.Tensor:
    """Quantize a layer's weight with one scale per output channel, and return the dequantized
    weight.
    """
    weight = quantize_tokens(layer.weight.data, torch.float32)
    layer.weight = nn.Parameter(weight.data.t(), requires_grad=False)
    layer.weight_scale = nn.Parameter(weight.scale, requires_grad=False)
    layer.quant_method = QuantizedMethod()
    return weight.data.float() * weight.scale
