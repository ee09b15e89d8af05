# SPDX-License-Identifier: Apache-2.0
"""Layers with int8 weights in a model whose other layers are quantized to FP8."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from vllm.model_executor.layers.linear import LinearBase

from vllm_omni.model_executor.layers.linear.int8_weights import Int8WeightMethod
from vllm_omni.model_executor.layers.linear.linear import PlainLinearMethod

pytestmark = pytest.mark.usefixtures("uncompiled")

FP8 = {"dtype": "bfloat16", "quantization": "fp8_per_channel"}


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


def test_ignored_layers_stay_as_loaded(
    lingbot_world: Path, make_runner: Callable[..., Any]
) -> None:
    retained = {"ignore": ["re:.*cam_scale_layer"]}
    layers = camera_layers(make_runner(lingbot_world, **FP8, quantization_config=retained))
    plain = {
        name for name, layer in layers.items() if isinstance(layer.quant_method, PlainLinearMethod)
    }
    assert plain == {name for name in layers if name.endswith("cam_scale_layer")}
