# SPDX-License-Identifier: Apache-2.0
"""FP8 inputs for linear layers: the op that produces an input also quantizes it, in the same pass
over memory.

vLLM's layers quantize their input per token in a separate pass over memory, before the matrix
product. vLLM's kernels accept quantized inputs (`QuantizedActivation`), but on NVIDIA GPUs they
declare support only for inputs with a single static scale. `product` therefore calls the underlying
matrix product, which also supports per-token scales.
"""

# T tokens, D channels

from typing import Any

import torch
from torch import nn
from vllm import envs
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassFP8ScaledMMLinearKernel
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym

from vllm_omni.model_executor.layers.fast_path import FastPath, Lack
from vllm_omni.model_executor.layers.linear.fp8_linear import fp8_kernel
from vllm_omni.model_executor.layers.quantization.e4m3 import FP8, LARGEST

LEAST_SCALE = 1 / (LARGEST * 512)
"""vLLM's lower bound for scales. It applies to tokens whose values are all close to zero."""
Input = torch.Tensor | QuantizedActivation
"""Input of a linear layer, [..., D]."""


def takes_quantized(layer: nn.Module) -> bool:
    """Return whether `layer` accepts e4m3 inputs with per-token scales.

    A layer with a LoRA adapter does not accept them, because the adapter needs the unquantized
    input.
    """
    return fp8_kernel(layer) is not None and not _refuses_quantized(layer)


def quantized_input_layers(network: nn.Module) -> FastPath:
    """Return whether a network's linear layers accept quantized inputs."""
    layers = [layer for layer in network.modules() if fp8_kernel(layer) is not None]
    lacks = [_refuses_quantized(layer) for layer in layers]
    lack = next(filter(None, lacks), Lack())
    if not layers:
        lack = Lack("no layer has FP8 weights (--quantization)")
    elif not all(lacks):
        lack = Lack()
    return lack.of("quantized_inputs", "a separate pass quantizes the input of each layer")


def _refuses_quantized(layer: nn.Module) -> Lack:
    """Return why a layer that has FP8 weights requires an unquantized input, or an empty `Lack` if
    it does not.
    """
    kernel = fp8_kernel(layer)
    if not isinstance(kernel, CutlassFP8ScaledMMLinearKernel):
        return Lack(f"vLLM has chosen {type(kernel).__name__}")
    if envs.VLLM_BATCH_INVARIANT:
        return Lack("VLLM_BATCH_INVARIANT is set")
    is_dynamic = kernel.config.activation_quant_key == kFp8DynamicTokenSym
    return Lack("" if is_dynamic else "the inputs have a static scale")


def product(layer: Any, x: QuantizedActivation, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the layer's matrix product, in the dtype that `x` had before quantization. The layer
    must satisfy `takes_quantized`, or `int8_weights.takes_int8` if `x` is int8.
    """
    if x.data.dtype == torch.int8:
        of_int8: torch.Tensor = layer.quant_method.product(layer, x, bias)
        return of_int8
    rows_TD, width = x.data.view(-1, x.data.shape[-1]), layer.weight.shape[1]
    result: torch.Tensor = fp8_kernel(layer).apply_scaled_mm(
        A=rows_TD,
        B=layer.weight,
        out_dtype=x.orig_dtype,
        As=x.scale.view(-1, 1),
        Bs=layer.weight_scale,
        bias=bias,
        output_shape=[*x.orig_shape[:-1], width],
    )
    return result


def quantized(data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> QuantizedActivation:
    """Return a quantized activation.

    Args:
        data: e4m3 [..., D].
        scale: fp32 [..., 1]; the input is `data` times `scale`.
        dtype: Dtype of the input before quantization.
    """
    return QuantizedActivation(data, scale, dtype, data.shape, kFp8DynamicTokenSym)


def quantize_tokens(x: torch.Tensor, dtype: torch.dtype) -> QuantizedActivation:
    """Quantize a tensor [..., D] as vLLM's layers do: map the largest magnitude of each token to
    the e4m3 maximum. `dtype` is the dtype of the input before quantization.
    """
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) / LARGEST).clamp_(min=LEAST_SCALE)
    return quantized((x / scale).clamp_(-LARGEST, LARGEST).to(FP8), scale, dtype)


def split_tokens(x: Input, count: int) -> list[Input]:
    """Split an input [T, D] into parts of `count` tokens. The last part may be shorter."""
    if isinstance(x, torch.Tensor):
        return list(x.split(count))
    parts = zip(x.data.split(count), x.scale.split(count), strict=True)
    return [quantized(data, scale, x.orig_dtype) for data, scale in parts]
