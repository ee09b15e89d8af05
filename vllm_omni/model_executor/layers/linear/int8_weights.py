# SPDX-License-Identifier: Apache-2.0
"""`Int8WeightMethod`: int8 weights for layers that FP8 would degrade. Saves memory at a small cost
in time.

vLLM quantizes the weights of experts to int8 while it loads a model
(`int8_per_channel_weight_only`), but not those of linear layers.
"""

import torch
from torch import nn
from torch.nn import functional
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    amax_for_tp_weight_quant,
    weight_amax,
)
from vllm.model_executor.utils import replace_parameter

from vllm_omni.model_executor.layers.quantization.fp8_kernels import dequantize_rows

_LARGEST = torch.iinfo(torch.int8).max
_DONE = "_already_called_process_weights_after_loading"


class Int8WeightMethod(OnlineLinearBase):
    """Quantize weights to int8 per output channel while the model loads. Inputs are not quantized.

    Each matrix product first dequantizes the weight to the dtype of its input, so this suits layers
    that run once per chunk. For normally distributed weights the quantization error is a third of
    that of e4m3.
    """

    activation_quant_key = None

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

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight, scale = layer.weight, layer.weight_scale
        assert isinstance(weight, torch.Tensor) and isinstance(scale, torch.Tensor)
        return functional.linear(x, dequantize_rows(weight, scale, x.dtype), bias)
