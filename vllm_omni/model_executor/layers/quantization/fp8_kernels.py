# SPDX-License-Identifier: Apache-2.0
"""Quantize and dequantize 8-bit tensors: e4m3 for K/V windows, int8 for some weights.

Quantizing and dequantizing are memory-bound. torch's own operations need two to four passes over
memory, and broadcasting the scale prevents wide loads. The Triton kernels (`fp8_triton.py`) need
only one pass. The torch versions define the expected result, and run on CPUs and on GPUs older than
Ada. The Triton kernels return bitwise equal results, because window scales are powers of two and
the product of a weight and its scale is rounded once. `benchmarks/attention_kernels.py` measures
the speed.
"""

# K kinds (keys, values), T tokens of a chunk, S stored tokens, N heads, H head dim; O outputs and I
# inputs of a weight

from functools import cache
from types import ModuleType

import torch

from vllm_omni.model_executor.layers.fast_path import FastPath, lacks_capability, lacks_triton
from vllm_omni.model_executor.layers.quantization.e4m3 import FP8, LARGEST, MANTISSA


@cache
def quantization_kernels(device: torch.device) -> FastPath:
    """Return whether Triton can convert to and from e4m3 on this device."""
    lack = lacks_capability(device, (8, 9)) or lacks_triton()
    return lack.of("quantization_kernels", "several passes of plain torch")


@cache
def _kernels(device: torch.device) -> ModuleType | None:
    """Return the module that contains the Triton kernels if this device supports them
    (`quantization_kernels`), otherwise None.
    """
    if not quantization_kernels(device).is_on:
        return None
    from vllm_omni.model_executor.layers.quantization import fp8_triton

    return fp8_triton


def dequantize(
    stored_KSNH: torch.Tensor,
    scales_KN: torch.Tensor,
    dtype: torch.dtype,
    tokens_S: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `stored * scale`, with one scale per kind and head, as a new tensor [K, S, N, H] in
    `dtype`.

    Args:
        stored_KSNH: e4m3. The heads of a token are contiguous.
        scales_KN: fp32 powers of two.
        dtype: Dtype of the result.
        tokens_S: int64 positions of the tokens to dequantize, in order. Default: all.
    """
    if (kernels := _kernels(stored_KSNH.device)) is not None:
        widened: torch.Tensor = kernels.dequantize(stored_KSNH, scales_KN, dtype, tokens_S)
        return widened
    return plain_dequantize(stored_KSNH, scales_KN, dtype, tokens_S)


def dequantize_into(
    stored_KSNH: torch.Tensor, scales_KN: torch.Tensor, out_KSNH: torch.Tensor
) -> None:
    """Dequantize all tokens into `out`. The heads of each token must also be contiguous in
    `out`.
    """
    if (kernels := _kernels(stored_KSNH.device)) is not None:
        kernels.dequantize_into(stored_KSNH, scales_KN, out_KSNH)
        return
    out_KSNH.copy_(plain_dequantize(stored_KSNH, scales_KN, out_KSNH.dtype))


def plain_dequantize(
    stored_KSNH: torch.Tensor,
    scales_KN: torch.Tensor,
    dtype: torch.dtype,
    tokens_S: torch.Tensor | None = None,
) -> torch.Tensor:
    if tokens_S is not None:
        stored_KSNH = stored_KSNH.index_select(1, tokens_S)
    return stored_KSNH.to(dtype).mul_(scales_KN[:, None, :, None].to(dtype))


def dequantize_rows(
    stored_OI: torch.Tensor, scales_O1: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return a dequantized weight: `stored * scale`, with one scale per output channel, rounded
    once to `dtype`.

    Args:
        stored_OI: Weight, int8.
        scales_O1: Scales per output channel, fp32.
        dtype: Dtype of the result.
    """
    if (kernels := _kernels(stored_OI.device)) is not None:
        widened: torch.Tensor = kernels.dequantize(
            stored_OI[None, None], scales_O1.view(1, -1), dtype, rows=1
        )
        return widened[0, 0]
    return plain_dequantize_rows(stored_OI, scales_O1, dtype)


def plain_dequantize_rows(
    stored_OI: torch.Tensor, scales_O1: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    out_OI = torch.empty(stored_OI.shape, dtype=dtype, device=stored_OI.device)
    return torch.mul(stored_OI, scales_O1, out=out_OI)


def quantize(
    parts: tuple[torch.Tensor, ...], scales_KN: torch.Tensor, target_KTNH: torch.Tensor
) -> None:
    """Quantize one or two tensors [T, N, H] into `target`: divide by the scales and clamp to the
    e4m3 range.

    Args:
        parts: The tensors to quantize.
        scales_KN: One scale per tensor and head, fp32.
        target_KTNH: e4m3, with K = len(parts). The heads of a token are contiguous.
    """
    if (kernels := _kernels(target_KTNH.device)) is not None:
        kernels.quantize(parts, scales_KN, target_KTNH)
        return
    for part, scale_N, target_TNH in zip(parts, scales_KN, target_KTNH, strict=True):
        target_TNH.copy_(plain_quantize(part, scale_N))


def plain_quantize(x_TNH: torch.Tensor, scale_N: torch.Tensor) -> torch.Tensor:
    return (x_TNH / scale_N.unsqueeze(-1).to(x_TNH.dtype)).clamp_(-LARGEST, LARGEST).to(FP8)


def fit_scales(
    parts: tuple[torch.Tensor, ...], limit: float, least: float, scales_KN: torch.Tensor
) -> None:
    """Set the scale of each head to the smallest power of two that brings the head's largest
    absolute value to at most `limit`.

    Args:
        parts: One or two tensors [T, N, H].
        limit: Upper bound for the scaled values.
        least: Lower bound for a head's largest absolute value. It keeps the scale above zero if all
            values are zero.
        scales_KN: fp32 tensor that receives the scales, with K = len(parts). The scale of a head
            that contains NaN is NaN.
    """
    if (kernels := _kernels(scales_KN.device)) is not None:
        kernels.fit_scales(parts, limit, least, scales_KN)
        return
    for x_TNH, scale_N in zip(parts, scales_KN, strict=True):
        scale_N.copy_(plain_scales(x_TNH, limit, least))


def plain_scales(x_TNH: torch.Tensor, limit: float, least: float) -> torch.Tensor:
    """Return the scales of one tensor; see `fit_scales`.

    Adding a mantissa of all ones carries into the exponent unless the value is already a power of
    two. This rounds up to the exact power of two, which `log2` does not guarantee.
    """
    scale_N = x_TNH.abs().amax(dim=(0, 2)).float().clamp_min(least) / limit
    bits_N = (scale_N.view(torch.int32) + MANTISSA) & ~MANTISSA
    return torch.where(scale_N.isnan(), scale_N, bits_N.view(torch.float32))
