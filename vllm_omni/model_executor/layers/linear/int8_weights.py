# SPDX-License-Identifier: Apache-2.0
"""`Int8WeightMethod`: int8 weights for layers where FP8 weights would degrade quality.

While it loads a model, vLLM quantizes experts' weights to int8 (`int8_per_channel_weight_only`),
but not linear layers' weights. vLLM's int8 kernel for linear layers is intended for checkpoints
stored in int8. This module uses it for weights that the module itself quantizes.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from vllm import _custom_ops as ops
from vllm import envs
from vllm.model_executor.kernels.linear import init_int8_linear_kernel
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassInt8ScaledMMLinearKernel
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    amax_for_tp_weight_quant,
    weight_amax,
)
from vllm.model_executor.utils import replace_parameter

from vllm_omni.model_executor.layers.fast_path import (
    FastPath,
    Lack,
    lacks_half,
    lacks_hopper,
    lacks_triton,
)
from vllm_omni.model_executor.layers.quantization.fp8_kernels import dequantize_rows

_LARGEST = torch.iinfo(torch.int8).max
_DONE = "_already_called_process_weights_after_loading"


@cache
def int8_products(device: torch.device, dtype: torch.dtype) -> FastPath:
    """Return whether layers with int8 weights compute their matrix products in int8 for inputs of
    this dtype.

    vLLM has an int8 kernel for GPUs from Turing to Hopper, but this function requires Hopper,
    because the kernel was measured only there.
    """
    lack = (
        lacks_hopper(device)
        or lacks_half(dtype, "--dtype")
        or Lack("VLLM_BATCH_INVARIANT is set" if envs.VLLM_BATCH_INVARIANT else "")
    )
    return lack.of("int8_products", "int8 weights are dequantized before each product")


def int8_layers(network: nn.Module, device: torch.device, dtype: torch.dtype) -> FastPath:
    """Return whether a network has layers whose matrix products run in int8."""
    path = int8_products(device, dtype)
    methods = (getattr(layer, "quant_method", None) for layer in network.modules())
    if any(isinstance(method, Int8WeightMethod) for method in methods):
        return path
    return path.disabled("no layer has int8 weights")


class Int8WeightMethod(OnlineLinearBase):
    """Quantize weights to int8 per output channel while the model loads.

    On a Hopper GPU, the matrix products run in int8, with inputs quantized per token. On other
    devices, the weight is dequantized before each matrix product, and the inputs are not quantized.
    For normally distributed values, int8's quantization error is a third of e4m3's.
    """

    activation_quant_key = None
    _kernel: Any = None
    """vLLM's int8 matrix-product kernel, or None if the weight is dequantized."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if getattr(layer, _DONE, False):
            return
        weight = self.get_weight_for_quantization(layer)
        amax = weight_amax(weight, dim=-1, keepdim=True)
        split = layer.input_size != layer.input_size_per_partition
        scale = (
            amax_for_tp_weight_quant(amax, split)
            .float()
            .clamp_(min=torch.finfo(torch.float32).tiny)
            / _LARGEST
        )
        replace_parameter(layer, "weight", (weight / scale).round_().to(torch.int8))
        replace_parameter(layer, "weight_scale", scale)
        setattr(layer, _DONE, True)
        if int8_products(weight.device, self.input_dtype).is_on:
            self._kernel = init_int8_linear_kernel(
                is_channelwise=True,
                is_static_input_scheme=False,
                input_symmetric=True,
                module_name=type(self).__name__,
            )
            for name in ("input_scale", "input_zero_point", "azp_adj"):  # the kernel reads them
                layer.register_parameter(name, None)
            self._kernel.process_weights_after_loading(layer)

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self._kernel is not None:
            bias = None if bias is None else bias.to(x.dtype)  # the kernel accepts no other dtype
            result: torch.Tensor = self._kernel.apply_weights(layer, x, bias)
            return result
        weight, scale = layer.weight, layer.weight_scale
        assert isinstance(weight, torch.Tensor) and isinstance(scale, torch.Tensor)
        return functional.linear(x, dequantize_rows(weight, scale, x.dtype), bias)

    @property
    def takes_int8(self) -> bool:
        """Return whether `product` can be used: vLLM's int8 kernel is the one that uses CUTLASS."""
        return type(self._kernel) is CutlassInt8ScaledMMLinearKernel

    def product(
        self, layer: Any, x: QuantizedActivation, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the layer's matrix product with an int8 input [T, D] that has one scale per token,
        in the dtype that the input had before quantization. `takes_int8` must be true.
        """
        return ops.cutlass_scaled_mm(
            x.data,
            layer.weight,
            scale_a=x.scale,
            scale_b=layer.weight_scale,
            out_dtype=x.orig_dtype,
            bias=None if bias is None else bias.to(x.orig_dtype),
        )


def takes_int8(layers: Iterable[LinearBase]) -> bool:
    """Return whether all `layers` accept int8 inputs with one scale per token, and the kernel that
    produces such inputs (`triton_rows.int8_rows`) is available.

    A layer with a LoRA adapter does not accept them, because the adapter needs the unquantized
    input.
    """
    methods = [layer.quant_method for layer in layers]
    accept = [isinstance(method, Int8WeightMethod) and method.takes_int8 for method in methods]
    return bool(accept) and all(accept) and not lacks_triton()
