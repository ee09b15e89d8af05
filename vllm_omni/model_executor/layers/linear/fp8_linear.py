# SPDX-License-Identifier: Apache-2.0
"""FP8 matrix products with one scale per token and one per output channel. cuBLAS is used where it
is faster than CUTLASS.

On NVIDIA GPUs, vLLM chooses its CUTLASS kernel. On Hopper, cuBLAS (which torch calls with CUDA 12.9
and newer) is faster for large weights and has the same numerical error; see
docs/architecture/speed_log.md.
"""

from typing import Any

import torch
from torch import nn
from vllm import envs
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassFP8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8DynamicTokenSym,
    kFp8StaticChannelSym,
)

from vllm_omni.model_executor.layers.fast_path import FastPath, Lack, lacks_hopper, this_device

_LEAST_ELEMENTS = 16 << 20
"""Minimum size of a weight, in elements, for its layer to use cuBLAS. cuBLAS is not faster for the
attention layers of models with 1536 or 2048 channels.
"""
_LEAST_TOKENS = 128
"""Minimum number of tokens in a product for cuBLAS to be used. CUTLASS has separate kernels for
fewer tokens.
"""


class RowwiseFP8Kernel(CutlassFP8ScaledMMLinearKernel):
    """vLLM's CUTLASS kernel, with cuBLAS for the matrix product if the result is bf16, the layer
    needs no padding, and there are enough tokens.
    """

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
            out_dtype: The result's dtype.
            As: Input scales, fp32 [T, 1].
            Bs: Weight scales, fp32 [N, 1].
            bias: Bias [N], or None.
            output_shape: The result's shape.
        """
        padded = B.shape != (A.shape[1], output_shape[-1])
        if padded or out_dtype != torch.bfloat16 or len(A) < _LEAST_TOKENS:
            return super().apply_scaled_mm(
                A=A, B=B, out_dtype=out_dtype, As=As, Bs=Bs, bias=bias, output_shape=output_shape
            )
        result = torch._scaled_mm(
            A, B, As, Bs.view(1, -1), bias=bias, out_dtype=out_dtype, use_fast_accum=True
        )
        return result.view(output_shape)


def choose_kernel(layer: nn.Module) -> None:
    """Make `layer` use `RowwiseFP8Kernel` if that is faster. Call this function after the weights
    have been created and before they are loaded.
    """
    kernel = fp8_kernel(layer)
    if kernel is not None and not _lacks_cublas(layer):
        method: Any = layer.quant_method
        method.fp8_linear = RowwiseFP8Kernel(kernel.config, kernel.layer_param_names)


def fp8_kernel(layer: nn.Module) -> Any:
    """Return the kernel of a layer that has FP8 weights. None: the layer has no FP8 weights."""
    return getattr(getattr(layer, "quant_method", None), "fp8_linear", None)


def cublas_fp8(device: torch.device) -> FastPath:
    """Return whether layers with FP8 weights can use cuBLAS on this device."""
    return _of_cublas(_lacks_rowwise_cublas(device))


def cublas_fp8_layers(network: nn.Module) -> FastPath:
    """Return whether any of a network's layers with FP8 weights uses cuBLAS."""
    layers = [layer for layer in network.modules() if fp8_kernel(layer) is not None]
    if not layers:
        return _of_cublas(Lack("no layer has FP8 weights (--quantization)"))
    if any(isinstance(fp8_kernel(layer), RowwiseFP8Kernel) for layer in layers):
        return _of_cublas(Lack())
    # Layers may lack different requirements. Report one that has a remedy if possible.
    return _of_cublas(max(map(_lacks_cublas, layers), key=lambda lack: bool(lack.remedy)))


def _of_cublas(lack: Lack) -> FastPath:
    return lack.of("cublas_fp8", "vLLM's kernel for FP8 products")


def _lacks_cublas(layer: nn.Module) -> Lack:
    """Return the reason why a layer with FP8 weights uses the kernel that vLLM has chosen instead
    of cuBLAS.
    """
    kernel = fp8_kernel(layer)
    if type(kernel) is not CutlassFP8ScaledMMLinearKernel:
        return Lack(f"vLLM has chosen {type(kernel).__name__}")
    if envs.VLLM_BATCH_INVARIANT:
        return Lack("VLLM_BATCH_INVARIANT is set")
    keys = kernel.config.activation_quant_key, kernel.config.weight_quant_key
    if keys != (kFp8DynamicTokenSym, kFp8StaticChannelSym):
        return Lack("the weights have other scales than one per output channel")
    weight: Any = layer.weight
    if weight.numel() < _LEAST_ELEMENTS:
        return Lack(f"CUTLASS is as fast for weights with fewer than {_LEAST_ELEMENTS} elements")
    return _lacks_rowwise_cublas(this_device())


def _lacks_rowwise_cublas(device: torch.device) -> Lack:
    """Check that torch can call cuBLAS on this device for operands with a scale per row."""
    version = torch.version.cuda
    lack = lacks_hopper(device) or Lack("" if version else "torch is not built for CUDA")
    if lack or tuple(int(part) for part in str(version).split(".")[:2]) >= (12, 9):
        return lack
    return Lack(f"torch is built for CUDA {version}", "install a build of torch for CUDA 12.9")
