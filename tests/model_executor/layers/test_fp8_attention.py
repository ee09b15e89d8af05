# SPDX-License-Identifier: Apache-2.0
"""In attention with FP8 matrix products, scales are applied correctly, so quantization is the only
source of error.
"""

import pytest
import torch
from helpers.fp8_product import as_on_hopper, exact_product

from vllm_omni.model_executor.layers.attention import fp8_attention as module
from vllm_omni.model_executor.layers.attention.attention import attention
from vllm_omni.model_executor.layers.kv_cache.quantized_storage import ScaledFP8
from vllm_omni.model_executor.layers.quantization.e4m3 import FP8
from vllm_omni.model_executor.layers.quantization.fp8_kernels import plain_dequantize, quantize

TOKENS, KEYS, HEADS, DIM = 24, 96, 3, 16


def window(
    device: str, *, tokens: int = TOKENS, keys: int = KEYS, heads: int = HEADS, width: int = DIM
) -> tuple[torch.Tensor, torch.Tensor, ScaledFP8]:
    """Return bf16 queries, FP8 keys and values, and the storage format of the keys and values.

    Head n's keys are 30^n times as large as head 0's, and its queries are smaller by the same
    factor.
    """
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(tokens, heads, width, generator=generator)
    kv = torch.randn(2, keys, heads, width, generator=generator)
    sizes = 30.0 ** torch.arange(heads)[:, None]
    q, kv = (q / sizes).to(device, torch.bfloat16), (kv * sizes).to(device, torch.bfloat16)
    stored_as = ScaledFP8(torch.bfloat16, 1, heads, device)
    stored_as.fit_scales(0, *kv)
    stored = torch.empty(kv.shape, dtype=FP8, device=device)
    stored_as.store(0, *kv, stored)
    return q, stored, stored_as


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def test_the_scale_of_each_head_is_undone() -> None:
    """The output equals attention over the dequantized keys and values, apart from the error caused
    by quantizing the queries, the probabilities and the output.
    """
    q, stored, stored_as = window("cpu")
    scales = stored_as.scales
    assert scales is not None
    found = module.by_product(exact_product, q, stored, scales[0])
    wanted = attention(q.float(), *plain_dequantize(stored, scales[0], torch.float32))
    assert found.dtype == torch.bfloat16 and found.shape == q.shape
    for head in range(HEADS):
        assert relative(found[:, head], wanted[:, head]) < 0.06, head


def test_queries_may_be_quantized_beforehand() -> None:
    """Quantizing the queries in advance produces bit-identical attention results, even if the
    queries are a slice of a wider tensor. The test includes attention to all tokens and to selected
    tokens.
    """
    q, stored, stored_as = window("cpu")
    scales = stored_as.scales
    assert scales is not None
    assert not stored_as.quantizes_queries(TOKENS, stored), (
        "this machine multiplies dequantized values"
    )
    quantized = torch.empty(TOKENS, 3, HEADS, DIM, dtype=FP8)[:, 1]
    quantize((q,), module.query_scales(scales[0, :1]), quantized.unsqueeze(0))
    with as_on_hopper():
        for tokens in (None, torch.arange(KEYS).roll(7)[: 3 * TOKENS]):
            assert stored_as.quantizes_queries(TOKENS, stored, tokens)
            found = stored_as.attend_quantized(quantized, stored, tokens)
            assert found.dtype == FP8
            widened = plain_dequantize(
                found.unsqueeze(0), module.result_scales(scales[0, 1:]), torch.bfloat16
            )[0]
            assert torch.equal(widened, stored_as.attend(0, q, stored, tokens))
        assert not stored_as.quantizes_queries(TOKENS, stored[:, : 2 * TOKENS - 1]), "too few keys"


def test_a_cpu_attends_to_dequantized_values() -> None:
    q, stored, stored_as = window("cpu")
    scales = stored_as.scales
    assert scales is not None
    assert module.fp8_attention(q, stored, scales[0]) is None
    wanted = attention(q, *plain_dequantize(stored, scales[0], torch.bfloat16))
    assert torch.equal(stored_as.attend(0, q, stored), wanted)


@pytest.mark.cuda
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
def test_cudnn_computes_the_same_product() -> None:
    """cuDNN attention is as accurate as the emulated product. The test includes attention to all
    tokens and to selected tokens, with and without CUDA graphs.

    cuDNN's values are not equal to the emulated values, because cuDNN quantizes probabilities
    relative to the largest score so far.
    """
    pytest.importorskip(
        "cudnn", reason="needs cuDNN's Python package: pip install nvidia-cudnn-frontend"
    )
    q, stored, stored_as = window("cuda", tokens=300, keys=1300, heads=4, width=128)
    scales = stored_as.scales
    assert scales is not None
    found = module.fp8_attention(q, stored, scales[0])
    assert found is not None
    wanted = attention(q.float(), *plain_dequantize(stored, scales[0], torch.float32))
    emulated = module.by_product(exact_product, q, stored, scales[0])
    for head in range(q.shape[1]):
        error, expected = (relative(each[:, head], wanted[:, head]) for each in (found, emulated))
        assert error < 1.2 * expected < 0.08, (head, error, expected)

    chosen = torch.arange(1300, device="cuda").roll(400)[:1200]
    other = module.fp8_attention(q, stored, scales[0], chosen)
    moved = stored.view(torch.uint8)[:, chosen].view(FP8)
    again = module.fp8_attention(q, moved, scales[0])
    assert other is not None and again is not None and torch.equal(other, again)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = module.fp8_attention(q, stored, scales[0])
    graph.replay()
    assert replayed is not None and torch.equal(replayed, found)
