# SPDX-License-Identifier: Apache-2.0
"""Reports which fast paths a machine supports and which ones an engine uses.

`FastPath` describes one fast path. Other modules decide whether a fast path is used; the functions
below only collect these decisions. There is one exception: if the engine's options do not require
FP8 attention or the quantization kernels, `engine_paths` lists them as disabled.
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
from vllm_omni.model_executor.layers.quantization.e4m3 import FP8
from vllm_omni.model_executor.layers.quantization.fp8_kernels import quantization_kernels
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
    """Return all fast paths that depend on the machine. A path is on if a model in bfloat16 can use
    it here.
    """
    return [path(this_device(), torch.bfloat16) for path in _OF_MACHINE]


def engine_paths(
    network: nn.Module, vllm_config: VllmConfig, device: torch.device
) -> list[FastPath]:
    """Return the fast paths for one of an engine's ranks, including disabled ones.

    Args:
        network: Model after its weights are loaded.
        vllm_config: vLLM's config for the engine.
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
