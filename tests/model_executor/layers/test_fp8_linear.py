# SPDX-License-Identifier: Apache-2.0
"""Layers with FP8 weights use either cuBLAS or vLLM's CUTLASS kernel, and cuBLAS is as accurate as
CUTLASS.
"""

from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels.linear.scaled_mm import cutlass
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassFP8ScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    FP8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8DynamicTokenSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
)

from vllm_omni.model_executor.layers.fast_path import Lack
from vllm_omni.model_executor.layers.linear import fp8_linear
from vllm_omni.model_executor.layers.linear.fp8_linear import RowwiseFP8Kernel, choose_kernel
from vllm_omni.model_executor.layers.linear.quantized_input import quantize_tokens

Cutlass = CutlassFP8ScaledMMLinearKernel


def chosen(
    monkeypatch: pytest.MonkeyPatch,
    *,
    weights: Any = kFp8StaticChannelSym,
    cublas: bool = True,
    shape: tuple[int, int] = (13824, 5120),
) -> type:
    """Return the kernel class chosen for a layer that vLLM has assigned its CUTLASS kernel to.

    Args:
        cublas: Whether the GPU supports row-wise FP8 in cuBLAS.
    """
    monkeypatch.setattr(cutlass, "cutlass_fp8_supported", lambda: True)
    lack = Lack("" if cublas else "this GPU has none")
    monkeypatch.setattr(fp8_linear, "_lacks_rowwise_cublas", lambda device: lack)
    config = FP8ScaledMMLinearLayerConfig(
        weights, kFp8DynamicTokenSym, shape, torch.bfloat16, torch.bfloat16
    )
    layer = nn.Module()
    layer.weight = torch.empty(shape, device="meta")
    layer.quant_method = type("Method", (), {})()
    with set_current_vllm_config(VllmConfig()):
        given = Cutlass(config, ("weight", "weight_scale", "input_scale", "input_scale_ub"))
        layer.quant_method.fp8_linear = given
        choose_kernel(layer)
    taken = layer.quant_method.fp8_linear
    assert taken.config is config and taken.layer_param_names == given.layer_param_names
    return type(taken)


@pytest.mark.parametrize(
    ("options", "invariant", "kernel"),
    [
        ({}, "0", RowwiseFP8Kernel),
        ({"shape": (2048, 11008)}, "0", RowwiseFP8Kernel),
        ({"shape": (8960, 1536)}, "0", Cutlass),
        ({"shape": (2560, 5120)}, "0", Cutlass),
        ({"shape": (1536, 1536)}, "0", Cutlass),
        ({"weights": kFp8StaticTensorSym}, "0", Cutlass),
        ({"cublas": False}, "0", Cutlass),
        ({}, "1", Cutlass),
    ],
)
def test_only_large_layers_with_row_scales_use_cublas(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], invariant: str, kernel: type
) -> None:
    """A layer keeps vLLM's kernel if its weight is small, if its weights do not have one scale per
    row, if cuBLAS has no row-wise FP8 on the GPU, or if batch-invariant mode is on.
    """
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
    assert chosen(monkeypatch, **options) is kernel


@pytest.mark.parametrize(("tokens", "found"), [(127, "cutlass"), (128, "cublas")])
def test_few_tokens_use_cutlass(monkeypatch: pytest.MonkeyPatch, tokens: int, found: str) -> None:
    def cublas(a: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        calls.append("cublas")
        return torch.zeros(len(a), 32)

    calls: list[str] = []
    monkeypatch.setattr(Cutlass, "apply_scaled_mm", lambda *_, **__: calls.append("cutlass"))
    monkeypatch.setattr(torch, "_scaled_mm", cublas)
    RowwiseFP8Kernel.__new__(RowwiseFP8Kernel).apply_scaled_mm(
        A=torch.zeros(tokens, 16),
        B=torch.zeros(16, 32),
        out_dtype=torch.bfloat16,
        As=torch.ones(tokens, 1),
        Bs=torch.ones(32, 1),
        bias=None,
        output_shape=[tokens, 32],
    )
    assert calls == [found]


def test_layers_without_fp8_weights_are_unchanged() -> None:
    layer = nn.Linear(4, 4)
    choose_kernel(layer)
    assert not hasattr(layer, "quant_method")


@pytest.mark.cuda
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "sizes", [(4680, 5120, 13824), (4680, 13824, 5120), (2340, 1536, 1536), (130, 512, 256)]
)
def test_cublas_is_as_accurate_as_cutlass(sizes: tuple[int, int, int], bias: bool) -> None:
    from vllm import _custom_ops as ops

    tokens, width, out = sizes
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight = (
        torch.randn(shape, width, device="cuda", generator=generator) for shape in (tokens, out)
    )
    a, b = quantize_tokens(x, torch.bfloat16), quantize_tokens(weight / width**0.5, torch.bfloat16)
    terms = torch.randn(out, device="cuda", generator=generator).bfloat16() if bias else None
    exact = (a.data.float() * a.scale).double() @ (b.data.float() * b.scale).double().t()
    exact = exact if terms is None else exact + terms.double()
    kernel = RowwiseFP8Kernel.__new__(RowwiseFP8Kernel)
    found = kernel.apply_scaled_mm(
        A=a.data,
        B=b.data.t(),
        out_dtype=torch.bfloat16,
        As=a.scale,
        Bs=b.scale,
        bias=terms,
        output_shape=[tokens, out],
    )
    of_vllm = ops.cutlass_scaled_mm(a.data, b.data.t(), a.scale, b.scale, torch.bfloat16, terms)

    def error(result: torch.Tensor) -> float:
        return float((result.double() - exact).norm() / exact.norm())

    assert error(found) < 1.05 * error(of_vllm) < 1e-2
