# SPDX-License-Identifier: Apache-2.0
"""Lists the fast paths that a machine supports and those that an engine uses.

`FastPath` describes one fast path. Other modules decide whether a fast path is used, and the
functions below only collect these decisions. The one exception is that `engine_paths` lists FP8
attention and the quantization kernels as disabled if the options of the engine do not need them.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import nn
from vllm.config import VllmConfig

from vllm_omni.model_executor.dtypes import kv_cache_dtype
from vllm_omni.model_executor.interfaces import HasFastPaths
from vllm_omni.model_executor.layers.attention.attention import (
    cudnn_cross_attention,
    flash_attention_3,
)
from vllm_omni.model_executor.layers.attention.fp8_attention import cudnn_fp8_attention
from vllm_omni.model_executor.layers.fast_path import FastPath, joined, this_device
from vllm_omni.model_executor.layers.fused_ops import pointwise_kernels
from vllm_omni.model_executor.layers.linear.fp8_linear import cublas_fp8, cublas_fp8_layers
from vllm_omni.model_executor.layers.linear.int8_weights import int8_layers, int8_products
from vllm_omni.model_executor.layers.linear.quantized_input import quantized_input_layers
from vllm_omni.model_executor.layers.quantization.fp8_kernels import FP8, quantization_kernels
from vllm_omni.model_executor.models.wan.vae.fused_layers import fused_vae

_OF_MACHINE: Final[Sequence[Callable[[torch.device, torch.dtype], FastPath]]] = (
    flash_attention_3,
    cudnn_cross_attention,
    lambda device, _: cudnn_fp8_attention(device),
    lambda device, _: quantization_kernels(device),
    lambda device, _: pointwise_kernels(device),
    lambda device, _: cublas_fp8(device),
    int8_products,
    fused_vae,
)


def machine_paths() -> list[FastPath]:
    """Return the fast paths that a model in bfloat16 can use on this machine."""
    return [path(this_device(), torch.bfloat16) for path in _OF_MACHINE]


def engine_paths(
    network: nn.Module, vllm_config: VllmConfig, device: torch.device
) -> list[FastPath]:
    """Return the fast paths of one rank of an engine, including disabled ones.

    Args:
        network: Model after its weights are loaded.
        vllm_config: vLLM's config of the engine.
        device: Device that the rank runs on.
    """
    dtype = vllm_config.model_config.dtype
    assert isinstance(dtype, torch.dtype)
    stores_fp8 = kv_cache_dtype(vllm_config.cache_config.cache_dtype) == FP8
    attention, kernels = cudnn_fp8_attention(device), quantization_kernels(device)
    if not stores_fp8:
        attention = attention.disabled("keys and values are not FP8 (--kv-cache-dtype)")
    if not stores_fp8 and vllm_config.quant_config is None:
        kernels = kernels.disabled("nothing is quantized")
    return [
        flash_attention_3(device, dtype),
        cudnn_cross_attention(device, dtype),
        attention,
        kernels,
        pointwise_kernels(device),
        cublas_fp8_layers(network),
        int8_layers(network, device, dtype),
        quantized_input_layers(network),
        *joined(
            module.fast_paths for module in network.modules() if isinstance(module, HasFastPaths)
        ),
    ]
