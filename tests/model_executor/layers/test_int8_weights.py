# SPDX-License-Identifier: Apache-2.0
"""Tests of layers with int8 weights in a model that quantizes its other layers to FP8."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.triton_interpreter import interpret
from torch import nn
from torch.nn import functional
from vllm import _custom_ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels import linear as linear_kernels
from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassInt8ScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    Int8ScaledMMLinearKernel,
)
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.utils.quant_utils import kInt8DynamicTokenSym
from vllm.platforms import PlatformEnum

from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.layers.fast_path import FastPath, Lack
from vllm_omni.model_executor.layers.linear import int8_weights
from vllm_omni.model_executor.layers.linear.int8_weights import (
    Int8WeightMethod,
    int8_products,
    takes_int8,
)
from vllm_omni.model_executor.layers.linear.linear import (
    ColumnLinear,
    LinearPrecision,
    PlainLinearMethod,
)
from vllm_omni.model_executor.models.lingbot_world import transformer as lingbot_transformer

pytestmark = pytest.mark.usefixtures("uncompiled")

FP8 = {"dtype": "bfloat16", "quantization": "fp8_per_channel"}


def cutlass_kernel(**options: Any) -> Int8ScaledMMLinearKernel:
    """Return the int8 kernel that vLLM would choose on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_kernels.current_platform, "_enum", PlatformEnum.CUDA)
        patch.setattr(CutlassInt8ScaledMMLinearKernel, "is_supported", lambda *_: (True, None))
        return linear_kernels.init_int8_linear_kernel(**options)


class EverythingInt8(LinearPrecision):
    def get_quant_method(self, layer: nn.Module, prefix: str) -> Int8WeightMethod:
        return Int8WeightMethod()


def camera_layers(runner: Any) -> dict[str, LinearBase]:
    return {
        name: module
        for name, module in runner.network.named_modules()
        if isinstance(module, LinearBase) and ".cam_" in name
    }


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_weights_are_within_half_a_step_and_inputs_stay_exact(
    lingbot_world: Path, make_runner: Callable[..., Any], num_tokens: int
) -> None:
    exact = {
        name: layer.weight.clone()
        for name, layer in camera_layers(make_runner(lingbot_world, dtype="bfloat16")).items()
    }
    layers = camera_layers(make_runner(lingbot_world, **FP8))
    assert layers.keys() == exact.keys() and len(layers) >= 4
    for name, layer in layers.items():
        assert isinstance(layer.quant_method, Int8WeightMethod)
        weight, scale = layer.weight, layer.weight_scale
        assert isinstance(weight, torch.Tensor) and isinstance(scale, torch.Tensor)
        assert weight.dtype == torch.int8 and scale.shape == (len(weight), 1)
        assert torch.equal(weight.abs().amax(1), torch.full((len(weight),), 127))
        error = (weight * scale - exact[name].float()).abs()
        assert bool((error <= scale * 0.501).all())
        x = torch.randn(num_tokens, weight.shape[1], dtype=torch.bfloat16)
        expected = functional.linear(x, (weight * scale).bfloat16(), layer.bias)
        assert torch.equal(layer(x), expected)


def int8_layer_error(device: str, num_tokens: int, quantize: Any = None) -> torch.Tensor:
    """Return, for each token, the relative error of a layer with int8 matrix products. Shape:
    [num_tokens]. `quantize` is applied to the layer's input.
    """
    inputs, outputs = 512, 256
    config = VllmConfig()
    config.model_config = SimpleNamespace(dtype=torch.bfloat16)  # type: ignore[assignment]
    with set_current_vllm_config(config), torch.device(device):
        torch.manual_seed(0)
        layer: Any = ColumnLinear(inputs, outputs, ParallelContext(), EverythingInt8(), "cam")
        weight, bias = torch.randn(outputs, inputs).bfloat16(), torch.randn(outputs)
        layer.weight = nn.Parameter(weight, requires_grad=False)  # previously on the `meta` device
        layer.bias.data.copy_(bias)
        layer.quant_method.process_weights_after_loading(layer)
        x = torch.randn(num_tokens, inputs).bfloat16()
        x[0] *= 1000
        assert takes_int8([layer]) == (quantize is not None or device == "cuda")
        result = layer(x if quantize is None else quantize(x))
    assert result.dtype == x.dtype and layer.weight.dtype == torch.int8
    expected = functional.linear(x.double(), weight.double(), bias.double())
    return (result - expected).norm(dim=1) / expected.norm(dim=1)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("num_tokens", [1, 37, 4680])
def test_products_on_a_gpu_are_close_to_those_of_exact_inputs(
    single_rank: None, num_tokens: int
) -> None:
    """Each token's inputs have their own scale, so a token with large values does not reduce other
    tokens' precision. It makes no difference whether the layer or `int8_rows` quantizes them.
    """
    from vllm_omni.model_executor.layers.triton_rows import int8_rows

    assert int8_products(torch.device("cuda"), torch.bfloat16).is_on
    for quantize in (None, int8_rows):
        error = int8_layer_error("cuda", num_tokens, quantize)
        assert 1e-4 < float(error.max()) < 0.02


@torch.inference_mode()
def interpreted(rank: int) -> None:
    from vllm_omni.model_executor.layers.triton_rows import int8_rows

    generator = torch.Generator().manual_seed(0)
    x, term = (torch.randn(5, 100, generator=generator).bfloat16() for _ in range(2))
    x[1], term[1] = 0, 0
    for made, wanted in (
        (int8_rows(x), x.float()),
        (int8_rows(x, term), x.float() + term.float()),
        (int8_rows(x, silu=True), functional.silu(x.float())),
        (int8_rows(x[:0]), x[:0].float()),
    ):
        assert (made.data.dtype, made.orig_dtype, made.orig_shape) == (
            torch.int8,
            x.dtype,
            wanted.shape,
        )
        scale = wanted.abs().amax(-1, keepdim=True) / 127
        torch.testing.assert_close(made.scale, scale, rtol=1e-5, atol=0)
        error = (made.data.float() * made.scale - wanted).abs()
        assert bool((error <= scale * 0.501).all())


def test_interpreted_kernel_rounds_to_the_nearest_step() -> None:
    interpret(interpreted)


@pytest.mark.parametrize("num_tokens", [1, 37])
def test_a_gpu_multiplies_by_the_kernel_of_vllm(single_rank: None, num_tokens: int) -> None:
    """Products run through vLLM's real kernel class. Its two CUDA operations are replaced with
    reference implementations. An input that was quantized before gives the same result.
    """
    shapes = []

    def quantized(x: torch.Tensor) -> QuantizedActivation:
        data, scale, _ = quantize(x, symmetric=True)
        return QuantizedActivation(data, scale, x.dtype, x.shape, kInt8DynamicTokenSym)

    def quantize(x: torch.Tensor, *_: Any, symmetric: bool) -> tuple[torch.Tensor, ...]:
        assert symmetric
        scale = x.float().abs().amax(-1, keepdim=True) / 127
        return (x.float() / scale).round().to(torch.int8), scale, None  # type: ignore[return-value]

    def multiply(
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        out_dtype: torch.dtype,
        bias: torch.Tensor,
    ) -> torch.Tensor:
        assert a.dtype == b.dtype == torch.int8 and bias.dtype == out_dtype
        shapes.append((*a.shape, *b.shape, *scale_a.shape, *scale_b.shape))
        product = (a.float() @ b.float()) * scale_a * scale_b.view(1, -1)
        return (product + bias.float()).to(out_dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(int8_weights, "init_int8_linear_kernel", cutlass_kernel)
        patch.setattr(int8_weights, "int8_products", lambda *_: FastPath("int8_products", ""))
        patch.setattr(_custom_ops, "scaled_int8_quant", quantize)
        patch.setattr(_custom_ops, "cutlass_scaled_mm", multiply)
        patch.setattr(int8_weights, "lacks_triton", lambda: Lack("Triton is not used here"))
        error = int8_layer_error("cpu", num_tokens)
        patch.setattr(int8_weights, "lacks_triton", Lack)
        assert torch.equal(int8_layer_error("cpu", num_tokens, quantized), error)
    assert shapes == 2 * [(num_tokens, 512, 512, 256, num_tokens, 1, 256, 1)]
    assert 1e-4 < float(error.max()) < 0.02


def test_the_camera_modulation_of_int8_inputs_is_close_to_that_of_exact_inputs(
    lingbot_world: Path, make_runner: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The camera layers quantize their shared input once, and the operations between them quantize
    their results. The CUDA operations are replaced with reference implementations.
    """
    transformer = make_runner(lingbot_world, **FP8).network.transformer
    camera = torch.randn(384, 2, 8, 12, generator=torch.Generator().manual_seed(0))
    exact = transformer.camera_modulation(camera)
    calls = []

    def int8_rows(x: torch.Tensor, term: Any = None, *, silu: bool = False) -> QuantizedActivation:
        calls.append((term is not None, silu))
        total = (functional.silu(x) if silu else x).float() + (0 if term is None else term.float())
        scale = total.abs().amax(-1, keepdim=True) / 127
        data = (total / scale).round().to(torch.int8)
        return QuantizedActivation(data, scale, x.dtype, x.shape, kInt8DynamicTokenSym)

    def product(_: Any, layer: Any, x: QuantizedActivation, bias: torch.Tensor) -> torch.Tensor:
        weight = layer.weight * layer.weight_scale
        return functional.linear(x.data.float() * x.scale, weight, bias.float()).to(x.orig_dtype)

    monkeypatch.setattr(Int8WeightMethod, "product", product)
    monkeypatch.setattr(lingbot_transformer, "takes_int8", lambda layers: len(list(layers)) > 0)
    monkeypatch.setattr("vllm_omni.model_executor.layers.triton_rows.int8_rows", int8_rows)
    found = transformer.camera_modulation(camera)
    blocks = len(exact)
    assert calls == [(False, False), *blocks * [(False, True), (True, False)]]
    for modulation, wanted in zip(found, exact, strict=True):
        assert (modulation.shape, modulation.dtype) == (wanted.shape, wanted.dtype)
        assert 0 < float((modulation - wanted).norm() / wanted.norm()) < 0.02


def test_ignored_layers_stay_as_loaded(
    lingbot_world: Path, make_runner: Callable[..., Any]
) -> None:
    retained = {"ignore": ["re:.*cam_scale_layer"]}
    layers = camera_layers(make_runner(lingbot_world, **FP8, quantization_config=retained))
    plain = {
        name for name, layer in layers.items() if isinstance(layer.quant_method, PlainLinearMethod)
    }
    assert plain == {name for name in layers if name.endswith("cam_scale_layer")}
