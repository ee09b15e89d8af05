# SPDX-License-Identifier: Apache-2.0
"""Passes over numbers of 8 bits: widen stored ones, round new ones. Those of windows are e4m3, of some weights int8.

Each is limited by memory. Plain torch needs two to four passes, the broadcast scale without wide loads; a Triton kernel
(`fp8_triton.py`) needs one. The plain versions define the result and run where there is none (a CPU, cards before Ada);
kernels give their bits: windows' scales are powers of two, and a weight's product with its scale is rounded once.
Held by tests/model_executor/layers/test_fp8_kernels.py; timed by benchmarks/attention_kernels.py.
"""

# K kinds (keys, values), T tokens of a chunk, S stored tokens, N heads, H head dim; O outputs and I inputs of a weight

from functools import cache
from types import ModuleType

import torch
from vllm.triton_utils import HAS_TRITON

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


@cache
def _kernels(device: torch.device) -> ModuleType | None:
    """The Triton kernels, if Triton converts e4m3 on this device."""
    if device.type != "cuda" or not HAS_TRITON or torch.cuda.get_device_capability(device) < (8, 9):
        return None
    from vllm_omni.model_executor.layers import fp8_triton

    return fp8_triton


def widen(
    stored_KSNH: torch.Tensor, scales_KN: torch.Tensor, dtype: torch.dtype, tokens_S: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `stored * scale` of each kind and head in `dtype`, a new [K, S, N, H].

    stored_KSNH: e4m3; a token's heads follow each other without gaps. scales_KN: fp32 powers of two.
    tokens_S: int64, the places of the tokens that are wanted, in that order; None = all.
    """
    if (kernels := _kernels(stored_KSNH.device)) is not None:
        widened: torch.Tensor = kernels.widen(stored_KSNH, scales_KN, dtype, tokens_S)
        return widened
    return plain_widen(stored_KSNH, scales_KN, dtype, tokens_S)


def widen_into(stored_KSNH: torch.Tensor, scales_KN: torch.Tensor, out_KSNH: torch.Tensor) -> None:
    """`widen` all tokens into `out`, whose tokens' heads follow each other without gaps, too."""
    if (kernels := _kernels(stored_KSNH.device)) is not None:
        kernels.widen_into(stored_KSNH, scales_KN, out_KSNH)
        return
    out_KSNH.copy_(plain_widen(stored_KSNH, scales_KN, out_KSNH.dtype))


def plain_widen(
    stored_KSNH: torch.Tensor, scales_KN: torch.Tensor, dtype: torch.dtype, tokens_S: torch.Tensor | None = None
) -> torch.Tensor:
    if tokens_S is not None:
        stored_KSNH = stored_KSNH.index_select(1, tokens_S)
    return stored_KSNH.to(dtype).mul_(scales_KN[:, None, :, None].to(dtype))


def widen_rows(stored_OI: torch.Tensor, scales_O1: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `stored * scale` of each row, rounded once, in `dtype`. stored_OI: int8. scales_O1: fp32."""
    if (kernels := _kernels(stored_OI.device)) is not None:
        widened: torch.Tensor = kernels.widen(stored_OI[None, None], scales_O1.view(1, -1), dtype, rows=1)
        return widened[0, 0]
    return plain_widen_rows(stored_OI, scales_O1, dtype)


def plain_widen_rows(stored_OI: torch.Tensor, scales_O1: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out_OI = torch.empty(stored_OI.shape, dtype=dtype, device=stored_OI.device)
    return torch.mul(stored_OI, scales_O1, out=out_OI)


def narrow(parts: tuple[torch.Tensor, ...], scales_KN: torch.Tensor, target_KTNH: torch.Tensor) -> None:
    """Write one or two tensors [T, N, H], divided by their heads' scales and cut to the range, into e4m3 `target`.

    scales_KN: fp32. target_KTNH: K = len(parts); a token's heads follow each other without gaps.
    """
    if (kernels := _kernels(target_KTNH.device)) is not None:
        kernels.narrow(parts, scales_KN, target_KTNH)
        return
    for part, scale_N, target_TNH in zip(parts, scales_KN, target_KTNH, strict=True):
        target_TNH.copy_(plain_narrow(part, scale_N))


def plain_narrow(x_TNH: torch.Tensor, scale_N: torch.Tensor) -> torch.Tensor:
    return (x_TNH / scale_N.unsqueeze(-1).to(x_TNH.dtype)).clamp_(-LARGEST, LARGEST).to(FP8)
