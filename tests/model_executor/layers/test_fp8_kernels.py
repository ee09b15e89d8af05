# SPDX-License-Identifier: Apache-2.0
"""One-pass kernels over FP8 numbers give what the plain versions give, which are what FP8 windows are defined by."""

import os
import subprocess
import sys

import pytest
import torch

from vllm_omni.model_executor.layers import fp8_kernels
from vllm_omni.model_executor.layers.attention import attention, fp8_attention
from vllm_omni.model_executor.layers.fp8_kernels import FP8, narrow, narrow_queries, plain_narrow, plain_widen, widen

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
    ),
]
SHAPES = [(7, 3, 16), (50, 5, 128), (9, 2, 24)]
TINY_E4M3 = 2.0**-10
"""Half of the smallest e4m3 number."""


def scales(kinds: int, heads: int, device: str) -> torch.Tensor:
    """Powers of two, another one for each kind and head."""
    return 2.0 ** (torch.arange(kinds * heads, device=device).view(kinds, heads) % 7 - 3)


def stored(kinds: int, shape: tuple[int, int, int], device: str, spare: int = 0) -> torch.Tensor:
    """A part of a longer buffer: the kinds are not next to each other."""
    tokens, heads, width = shape
    generator = torch.Generator().manual_seed(tokens)
    numbers = 100 * torch.randn(kinds, tokens + spare, heads, width, generator=generator)
    return numbers.to(FP8).to(device)[:, :tokens]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_stored_numbers_are_multiplied_by_the_scale_of_their_head(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    """To the bit: e4m3 fits either type, and a power of two scales exactly."""
    buffer, scales_KN = stored(2, shape, device, spare=4), scales(2, shape[1], device)
    wanted = buffer.double() * scales_KN.double()[:, None, :, None]
    assert torch.equal(widen(buffer, scales_KN, dtype).double(), wanted)
    order = torch.arange(shape[0], device=device).flip(0)[::2].contiguous()
    assert torch.equal(widen(buffer, scales_KN, dtype, order).double(), wanted[:, order])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_are_rounded_to_the_nearest_and_cut(
    shape: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    """As torch's own conversion does, also from tensors that are parts of others."""
    tokens, heads, width = shape
    generator = torch.Generator().manual_seed(1)
    kv = (200 * torch.randn(tokens, 3, heads, width, generator=generator)).to(device, dtype)
    scales_KN = scales(2, heads, device)
    target = stored(2, shape, device, spare=3)
    narrow((kv[:, 1], kv[:, 2]), scales_KN, target)
    for kind in range(2):
        wanted = kv[:, 1 + kind].double() / scales_KN[kind].double().unsqueeze(-1)
        wanted = wanted.clamp(-448, 448).to(dtype).to(FP8)
        assert torch.equal(target[kind].float(), wanted.float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_queries_use_the_range_of_their_head(kv_heads: int, device: str) -> None:
    """The largest number of a head needs no cutting and no bit of the range is wasted; query heads of one key head
    share a scale."""
    size_N = torch.tensor([0.01, 1.0, 30.0, 0.0])
    q = (torch.randn(6, 4, 16, generator=torch.Generator().manual_seed(0)) * size_N[:, None]).to(device)
    rounded, scale_1N = narrow_queries(q, kv_heads)
    assert rounded.dtype == FP8 and scale_1N.shape == (1, kv_heads)
    scale_N = scale_1N[0].repeat_interleave(4 // kv_heads)[:, None]
    largest = rounded.float().abs().amax(dim=(0, 2)).view(kv_heads, -1).amax(dim=1)
    assert ((largest > 200) & (largest <= 448))[: kv_heads - 1].all()
    assert ((rounded.float() * scale_N - q).abs() <= 2.0**-4 * q.abs() + TINY_E4M3 * scale_N).all()


def test_scales_may_stand_before_or_behind_the_products() -> None:
    """Keys' scales multiplied into queries and values' into the result give the bits of scaled keys and values."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(6, 4, 16, generator=generator).bfloat16()
    buffer, scales_KN = (torch.randn(2, 20, 4, 16, generator=generator)).to(FP8), scales(2, 4, "cpu")
    k_scale, v_scale = scales_KN.bfloat16().unsqueeze(-1)
    folded = attention(q * k_scale, *buffer.bfloat16()) * v_scale
    assert torch.equal(folded, attention(q, *plain_widen(buffer, scales_KN, torch.bfloat16)))


@pytest.mark.cuda
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="no CUDA device of Hopper's kind",
)
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("seen", [None, 300])
def test_products_of_fp8_numbers(kv_heads: int, seen: int | None) -> None:
    """FlashAttention 3 takes scales of e4m3 queries, keys and values; 6e-2 is twice e4m3's own rounding of values."""
    q = torch.randn(200, 4, 128, device="cuda").bfloat16()
    kv, scales_KN = torch.randn(2, 400, kv_heads, 128, device="cuda"), scales(2, kv_heads, "cuda")
    buffer = torch.empty(kv.shape, dtype=FP8, device="cuda")
    narrow((kv[0].bfloat16(), kv[1].bfloat16()), scales_KN, buffer)
    rounded, q_scale_1N = narrow_queries(q, kv_heads)
    key_range = None if seen is None else torch.tensor([0, seen], dtype=torch.int32, device="cuda")
    found = fp8_attention(rounded, *buffer, (q_scale_1N, scales_KN[:1], scales_KN[1:]), key_range=key_range)
    wanted = attention(q.float(), *widen(buffer, scales_KN, torch.float32)[:, :seen])
    assert (found.float() - wanted).norm() < 6e-2 * wanted.norm()


_INTERPRETED = """
import torch
from vllm_omni.model_executor.layers import fp8_triton
from vllm_omni.model_executor.layers.fp8_kernels import FP8, plain_largest, plain_narrow, plain_widen
generator = torch.Generator().manual_seed(0)
for tokens, heads, width in [(7, 3, 16), (9, 2, 24)]:
    buffer = (100 * torch.randn(2, tokens + 4, heads, width, generator=generator)).to(FP8)[:, :tokens]
    scales = 2.0 ** (torch.arange(2 * heads).view(2, heads) - 2)
    order = torch.arange(tokens).flip(0)[::2].contiguous()
    for dtype in (torch.float32, torch.bfloat16):
        for tokens_S in (None, order):
            found = fp8_triton.widen(buffer, scales, dtype, tokens_S)
            assert torch.equal(found, plain_widen(buffer, scales, dtype, tokens_S))
    # Of numbers that need no rounding: the interpreter's own rounding to e4m3 loses carries.
    exact = (300 * torch.randn(tokens, 3, heads, width, generator=generator)).to(FP8).float()
    kv = torch.where(exact.abs() == 448, 2 * exact, exact)
    fp8_triton.narrow((kv[:, 1], kv[:, 2]), scales, buffer)
    for kind in range(2):
        assert torch.equal(buffer[kind].float(), plain_narrow(kv[:, 1 + kind], scales[kind]).float())
    assert torch.equal(fp8_triton.largest(kv[:, 1]), plain_largest(kv[:, 1]))
print("equal")
"""


def test_kernels_address_what_the_plain_versions_do() -> None:
    """By Triton's interpreter, in a process of its own (Triton decides at import)."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", _INTERPRETED], env=environment, capture_output=True, text=True)
    assert done.stdout.endswith("equal\n"), done.stderr[-2000:]


def test_a_cpu_runs_the_plain_versions() -> None:
    assert fp8_kernels._kernels(torch.device("cpu")) is None
    x, scale_N = torch.tensor([[[1000.0, 3.3]]]), torch.tensor([2.0])
    assert plain_narrow(x, scale_N).float().tolist() == [[[448.0, 1.625]]]
