# SPDX-License-Identifier: Apache-2.0
"""The one-pass FP8 kernels produce the same results as the plain PyTorch versions, which define the
content of FP8 windows.
"""

import pytest
import torch
from helpers.triton_interpreter import interpret

from vllm_omni.model_executor.layers.quantization.e4m3 import FP8
from vllm_omni.model_executor.layers.quantization.fp8_kernels import (
    dequantize,
    dequantize_into,
    dequantize_rows,
    fit_scales,
    plain_dequantize,
    plain_dequantize_rows,
    plain_quantize,
    plain_scales,
    quantize,
)

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]
SHAPES = [(7, 3, 16), (50, 5, 128), (9, 2, 24)]


def scales(kinds: int, heads: int, device: str) -> torch.Tensor:
    """Return power-of-two scales. Each kind (K or V) and each head has a different scale."""
    return 2.0 ** (torch.arange(kinds * heads, device=device).view(kinds, heads) % 7 - 3)


def stored(kinds: int, shape: tuple[int, int, int], device: str, spare: int = 0) -> torch.Tensor:
    """Return a slice of a longer buffer in which K and V are not adjacent in memory."""
    tokens, heads, width = shape
    generator = torch.Generator().manual_seed(tokens)
    numbers = 100 * torch.randn(kinds, tokens + spare, heads, width, generator=generator)
    return numbers.to(FP8).to(device)[:, :tokens]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_stored_values_are_multiplied_by_the_scale_of_their_head(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    """Dequantization is exact, because both dtypes represent every e4m3 value and multiplying by a
    power of two does not round.
    """
    buffer, scales_KN = stored(2, shape, device, spare=4), scales(2, shape[1], device)
    wanted = buffer.double() * scales_KN.double()[:, None, :, None]
    assert torch.equal(dequantize(buffer, scales_KN, dtype).double(), wanted)
    order = torch.arange(shape[0], device=device).flip(0)[::2].contiguous()
    assert torch.equal(dequantize(buffer, scales_KN, dtype, order).double(), wanted[:, order])
    apart = torch.empty(shape[0], 2, *shape[1:], dtype=FP8, device=device).copy_(
        buffer.transpose(0, 1)
    )
    out = torch.zeros(shape[0], 3, *shape[1:], dtype=dtype, device=device)
    dequantize_into(apart.transpose(0, 1), scales_KN, out.transpose(0, 1)[1:])
    assert torch.equal(out.transpose(0, 1)[1:].double(), wanted) and not out[:, 0].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_are_rounded_to_the_nearest_and_saturated(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    """The kernels convert values as torch does, including values in slices of larger tensors."""
    tokens, heads, width = shape
    generator = torch.Generator().manual_seed(1)
    kv = (200 * torch.randn(tokens, 3, heads, width, generator=generator)).to(device, dtype)
    scales_KN = scales(2, heads, device)
    target = stored(2, shape, device, spare=3)
    # A token's K and V are adjacent in this tensor.
    apart = torch.zeros(tokens, 3, heads, width, dtype=FP8, device=device)
    for position in (target, apart.transpose(0, 1)[1:]):
        quantize((kv[:, 1], kv[:, 2]), scales_KN, position)
        for kind in range(2):
            wanted = kv[:, 1 + kind].double() / scales_KN[kind].double().unsqueeze(-1)
            wanted = wanted.clamp(-448, 448).to(dtype).to(FP8)
            assert torch.equal(position[kind].float(), wanted.float())
    assert not apart[:, 0].float().any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 24), (3, 5120)])
def test_each_row_of_a_weight_has_its_scale(
    shape: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    """The product of a weight and its row's scale is rounded only once, whatever the scale."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8).to(device)
    scale = torch.rand(shape[0], 1, generator=generator).to(device)
    assert torch.equal(dequantize_rows(weight, scale, dtype), (weight.float() * scale).to(dtype))


LIMIT, LEAST = 28.0, 2.0**-10


def heads_of_many_sizes(shape: tuple[int, int, int]) -> torch.Tensor:
    """Return a tensor of shape [T, 3, N, H]. The values of head n are about 30^n times as large as
    those of head 0. The largest absolute value of each head is negative, belongs to the last token,
    and is at least eight times as large as the head's other values. The last head is zero for one
    of the three tensors and contains NaN for another.
    """
    tokens, heads, width = shape
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, 3, heads, width, generator=generator)
    x[-1, :, :, -1] = -64
    x *= 30.0 ** torch.arange(heads)[:, None]
    x[:, 1, -1] = 0
    x[tokens // 2, 2, -1, -1] = torch.nan
    return x


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, (1200, 3, 128)])
def test_scales_are_the_least_powers_of_two(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    """After division by the head's scale, each head's largest value lies between half the limit and
    the limit. If a head contains a NaN, its scale is NaN.
    """
    x = heads_of_many_sizes(shape).to(device, dtype)
    found = torch.zeros(2, shape[1], device=device)
    fit_scales((x[:, 0], x[:, 1]), LIMIT, LEAST, found)
    largest = x[:, :2].abs().amax(dim=(0, 3)).double().clamp_min(LEAST) / found.double()
    assert ((largest > LIMIT / 2) & (largest <= LIMIT)).all()
    assert (found.frexp().mantissa == 0.5).all()
    fit_scales((x[:, 2],), LIMIT, LEAST, found[:1])
    assert found[0, -1].isnan() and found[0, :-1].isfinite().all()


def test_a_head_that_reaches_the_limit_keeps_its_scale() -> None:
    """The scale doubles as soon as the largest value exceeds the limit, even by the last bit."""
    for scale in (2.0**-9, 1.0, 2.0**5):
        at_limit = torch.tensor([LIMIT * scale])
        above = torch.nextafter(at_limit, torch.tensor([torch.inf]))
        found = [plain_scales(x.view(1, 1, 1), LIMIT, LEAST).item() for x in (at_limit, above)]
        assert found == [scale, 2 * scale]


def _interpreted(rank: int) -> None:
    from vllm_omni.model_executor.layers.quantization import fp8_triton

    for shape in [(7, 3, 16), (600, 2, 24)]:
        x = heads_of_many_sizes(shape)
        scales = torch.zeros(2, shape[1])
        for second in (1, 2):
            fp8_triton.fit_scales((x[:, 0], x[:, second]), LIMIT, LEAST, scales)
            wanted = [plain_scales(x[:, kind], LIMIT, LEAST) for kind in (0, second)]
            assert torch.equal(scales.view(torch.int32), torch.stack(wanted).view(torch.int32))
    generator = torch.Generator().manual_seed(0)
    for tokens, heads, width in [(7, 3, 16), (9, 2, 24)]:
        buffer = (100 * torch.randn(2, tokens + 4, heads, width, generator=generator)).to(FP8)[
            :, :tokens
        ]
        scales = 2.0 ** (torch.arange(2 * heads).view(2, heads) - 2)
        order = torch.arange(tokens).flip(0)[::2].contiguous()
        for dtype in (torch.float32, torch.bfloat16):
            for tokens_S in (None, order):
                found = fp8_triton.dequantize(buffer, scales, dtype, tokens_S)
                assert torch.equal(found, plain_dequantize(buffer, scales, dtype, tokens_S))
            stored = buffer.transpose(0, 1).contiguous().transpose(0, 1)
            out = torch.zeros(tokens, 3, heads, width, dtype=dtype)
            fp8_triton.dequantize_into(stored, scales, out.transpose(0, 1)[1:])
            assert (
                torch.equal(out.transpose(0, 1)[1:], plain_dequantize(buffer, scales, dtype))
                and not out[:, 0].any()
            )
        # All values are exactly representable in e4m3, because Triton's interpreter loses carries
        # when it rounds to e4m3.
        exact = (300 * torch.randn(tokens, 3, heads, width, generator=generator)).to(FP8).float()
        kv = torch.where(exact.abs() == 448, 2 * exact, exact)
        apart = torch.zeros(tokens, 3, heads, width, dtype=FP8)
        for position in (buffer, apart.transpose(0, 1)[1:]):
            fp8_triton.quantize((kv[:, 1], kv[:, 2]), scales, position)
            for kind in range(2):
                assert torch.equal(
                    position[kind].float(), plain_quantize(kv[:, 1 + kind], scales[kind]).float()
                )
        assert not apart[:, 0].float().any()
    weight = torch.randint(-127, 128, (5, 24), generator=generator, dtype=torch.int8)
    # Scales are powers of two, because Triton's interpreter truncates to bf16 instead of rounding.
    scale = 2.0 ** torch.arange(-2, 3).view(5, 1)
    for dtype in (torch.float32, torch.bfloat16):
        found = fp8_triton.dequantize(weight[None, None], scale.view(1, -1), dtype, rows=1)
        assert torch.equal(found[0, 0], plain_dequantize_rows(weight, scale, dtype))


def test_interpreted_kernels_equal_the_plain_versions() -> None:
    interpret(_interpreted)
