# SPDX-License-Identifier: Apache-2.0
"""Tests of attention over a single sequence."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from vllm_omni.model_executor.layers.attention.attention import attention, cross_attention


def reference(
    q_TNH: torch.Tensor, k_SNH: torch.Tensor, v_SNH: torch.Tensor, causal: bool = False
) -> torch.Tensor:
    scores = torch.einsum("tnh,snh->nts", q_TNH.double(), k_SNH.double()) / q_TNH.shape[-1] ** 0.5
    if causal:
        queries, keys = scores.shape[1:]
        scores = scores.masked_fill(
            ~torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries), -torch.inf
        )
    return torch.einsum("nts,snh->tnh", scores.softmax(-1), v_SNH.double())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (6, 24), (1, 7)])
def test_attention_equals_its_definition(queries: int, keys: int, causal: bool) -> None:
    """Attention in fp32 is within 1e-5 of the textbook formula in fp64. A causal mask is aligned to
    the last key, so the last query attends to all keys.
    """
    torch.manual_seed(0)
    q, k, v = torch.randn(queries, 2, 16), torch.randn(keys, 2, 16), torch.randn(keys, 2, 16)
    torch.testing.assert_close(
        attention(q, k, v, causal=causal).double(),
        reference(q, k, v, causal=causal),
        atol=1e-5,
        rtol=0,
    )


@pytest.mark.parametrize("causal", [False, True])
def test_query_heads_may_share_a_key_head(causal: bool) -> None:
    """Grouped-query attention equals multi-head attention with repeated key and value heads."""
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 4, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    repeated = (x.repeat_interleave(2, dim=1) for x in (k, v))
    torch.testing.assert_close(
        attention(q, k, v, causal=causal), attention(q, *repeated, causal=causal), atol=1e-6, rtol=0
    )


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_cuda_kernel_agrees_within_bf16() -> None:
    """The CUDA kernel's result is within 2e-2 of the textbook formula. This tolerance allows for
    bf16's rounding error at values around one. The head size is 128, as in the released model.
    """
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, 4, 128, dtype=torch.bfloat16, device="cuda") for n in (64, 192, 192))
    torch.testing.assert_close(attention(q, k, v).double(), reference(q, k, v), atol=2e-2, rtol=0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("heads", "keys"), [(12, 512), (40, 512), (12, 257)])
def test_cross_attention_agrees_within_bf16(heads: int, keys: int) -> None:
    """Cross-attention accepts keys and values that are slices of a tensor shared by several layers,
    because models store them that way. The attention output is contiguous.
    """
    torch.manual_seed(0)
    q = torch.randn(300, heads, 128, dtype=torch.bfloat16, device="cuda")
    k, v = torch.randn(3, 2, keys, heads, 128, dtype=torch.bfloat16, device="cuda")[1]
    found = cross_attention(q, k, v)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), reference(q, k, v), atol=2e-2, rtol=0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cross_attention(q, k, v)
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(captured, found)
    if torch.cuda.get_device_capability() == (9, 0):
        assert any("cudnn" in event.key for event in traced.key_averages()), (
            "vLLM turns it off in torch's own choice"
        )


@pytest.mark.parametrize("seen", [1, 5, 9])
def test_a_key_range_limits_attention_to_its_keys(seen: int) -> None:
    """Attention with a key range equals attention to the corresponding slice of the keys."""
    q, k, v = (torch.randn(count, 4, 8) for count in (3, 9, 9))
    key_range = torch.tensor([0, seen], dtype=torch.int32)
    assert torch.equal(attention(q, k, v, key_range=key_range), attention(q, k[:seen], v[:seen]))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_cuda_kernel_reads_a_key_range_on_the_device(dtype: torch.dtype) -> None:
    """Grouped-query attention reads a partly filled ring buffer. The sizes are Waypoint's: 512
    queries and a head size of 64.
    """
    torch.manual_seed(0)
    q = torch.randn(512, 4, 64, dtype=dtype, device="cuda")
    k, v = (torch.randn(2048, 2, 64, dtype=dtype, device="cuda") for _ in range(2))
    for seen in (512, 1536, 2048):
        key_range = torch.tensor([0, seen], dtype=torch.int32, device="cuda")
        found = attention(q, k, v, key_range=key_range).double()
        wide = (x[:seen].repeat_interleave(2, dim=1) for x in (k, v))
        torch.testing.assert_close(
            found, reference(q, *wide), atol=2e-2 if dtype == torch.bfloat16 else 1e-4, rtol=0
        )
