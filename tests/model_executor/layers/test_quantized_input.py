# SPDX-License-Identifier: Apache-2.0
"""A linear layer produces the same result whether its inputs are quantized in advance or by the
layer itself.
"""

import pytest
import torch
from helpers.quantized_layers import of_rounded_weight
from helpers.triton_interpreter import interpret, with_carries
from torch.nn import functional
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym

from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.layers.linear.linear import (
    ColumnLinear,
    LinearPrecision,
    RowLinear,
    gelu_of,
)
from vllm_omni.model_executor.layers.linear.quantized_input import (
    LEAST_SCALE,
    quantize_tokens,
    split_tokens,
    takes_quantized,
)
from vllm_omni.model_executor.layers.quantization.e4m3 import FP8, LARGEST

TOKENS, WIDTH, OUT = 6, 32, 48
on_a_gpu = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a GPU with FP8 matrix products",
    ),
]


def filled(layer: ColumnLinear | RowLinear) -> ColumnLinear | RowLinear:
    for parameter in layer.parameters():
        parameter.data = torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(len(parameter))
        )
    return layer


@pytest.mark.parametrize("kind", [ColumnLinear, RowLinear])
@pytest.mark.parametrize("bias", [True, False])
def test_a_quantized_input_is_multiplied_with_its_scales(
    kind: type[ColumnLinear | RowLinear], bias: bool
) -> None:
    layer = filled(kind(WIDTH, OUT, ParallelContext(), LinearPrecision(), "a", bias=bias))
    assert not takes_quantized(layer)
    weight = of_rounded_weight(layer)
    assert takes_quantized(layer)
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    given = quantize_tokens(x, torch.bfloat16)
    result = layer(given)
    assert (result.shape, result.dtype) == ((2, TOKENS, OUT), torch.bfloat16)
    wanted = functional.linear(given.data.float() * given.scale, weight, layer.bias)
    assert torch.allclose(result.float(), wanted, rtol=1e-2, atol=1e-2)


def test_adapted_layers_and_the_batch_invariant_mode_quantize_for_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = filled(ColumnLinear(WIDTH, OUT, ParallelContext(), LinearPrecision(), "a"))
    of_rounded_weight(layer)
    method = layer.quant_method
    layer.quant_method = type("AdaptedMethod", (), {"base": method})()
    assert not takes_quantized(layer)
    layer.quant_method = method
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert not takes_quantized(layer)


def test_each_token_is_scaled_by_its_largest_value() -> None:
    x = torch.tensor([[1.0, -4.0, 0.5], [0.0, 0.0, 0.0], [1e-3, 2e-3, -1e-3]])
    made = quantize_tokens(x, torch.bfloat16)
    assert made.data.dtype == FP8 and made.scale.shape == (3, 1)
    assert torch.allclose(
        made.scale[:, 0], torch.tensor([4 / LARGEST, LEAST_SCALE, 2e-3 / LARGEST]), atol=0
    )
    assert torch.allclose(made.data.float() * made.scale, x, rtol=0.04)
    assert made.data.float()[0, 1] == -LARGEST


def test_parts_of_an_input_keep_the_scales_of_their_tokens() -> None:
    x = torch.randn(5, WIDTH)
    parts = split_tokens(quantize_tokens(x, torch.bfloat16), 2)
    assert [tuple(part.orig_shape) for part in parts] == [(2, WIDTH), (2, WIDTH), (1, WIDTH)]
    assert torch.allclose(
        torch.cat([part.data.float() * part.scale for part in parts]), x, rtol=0.07, atol=0.01
    )
    assert torch.equal(torch.cat(split_tokens(x, 2)), x)


@pytest.mark.parametrize("key", [kFp8StaticTensorSym, None])
def test_layers_with_other_activation_scales_take_no_quantized_input(key: object) -> None:
    layer = filled(ColumnLinear(WIDTH, OUT, ParallelContext(), LinearPrecision(), "a"))
    of_rounded_weight(layer)
    layer.quant_method.fp8_linear.config.activation_quant_key = key
    assert not takes_quantized(layer)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_a_gpu)])
def test_the_gelu_of_a_product_is_the_gelu_of_its_result(device: str) -> None:
    """On a GPU, one kernel computes both the matrix product and the GELU, and applies the GELU
    before the sum is rounded.
    """
    with torch.device(device):
        layer = ColumnLinear(256, 512, ParallelContext(), LinearPrecision(), "a").to(torch.bfloat16)
        layer.weight.data.normal_(0, 1 / 16)
        layer.bias.data.normal_(0, 1)
        x = torch.randn(2, 96, 256, dtype=torch.bfloat16)
        exact = functional.gelu(
            functional.linear(x.float(), layer.weight.float(), layer.bias.float()),
            approximate="tanh",
        )
    made = gelu_of(layer, x)
    assert (made.shape, made.dtype) == (exact.shape, torch.bfloat16)
    assert (made.float() - exact).norm() / exact.norm() < 4e-3


@torch.inference_mode()
def interpreted(rank: int) -> None:
    from vllm_omni.model_executor.layers.triton_rows import quantize_rows

    wide = torch.randn(2, 3, 100, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for x in (wide, wide[..., 4:44], wide[..., ::2], wide[:0]):
        made, wanted = quantize_rows(x), quantize_tokens(x, x.dtype)
        assert (made.orig_shape, made.orig_dtype) == (x.shape, x.dtype)
        assert (made.data.shape, made.scale.shape) == (wanted.data.shape, wanted.scale.shape)
        torch.testing.assert_close(made.scale, wanted.scale, rtol=1e-5, atol=0)
        numbers, others = made.data.float(), wanted.data.float()
        numbers = with_carries(numbers, others)
        assert (numbers - others).norm() <= 2e-2 * others.norm()


def test_the_interpreted_kernel_quantizes_like_the_plain_function() -> None:
    interpret(interpreted)


@pytest.mark.cuda
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a GPU with FP8 matrix products",
)
def test_vllm_quantizes_the_same_way() -> None:
    from vllm import _custom_ops as ops

    from vllm_omni.model_executor.layers.triton_rows import quantize_rows

    x = torch.randn(300, 5120, device="cuda", dtype=torch.bfloat16)
    numbers, scale = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    for quantize in (quantize_tokens, lambda x, _: quantize_rows(x)):
        made = quantize(x, x.dtype)
        assert torch.allclose(made.scale, scale, rtol=1e-6)
        assert (made.data.float() != numbers.float()).float().mean() < 1e-3
