# SPDX-License-Identifier: Apache-2.0
"""Attention over FP8 keys and values. On Hopper, both matrix products run in FP8 (e4m3) with cuDNN.

Queries and the result are also quantized to e4m3; softmax runs in fp32. cuDNN accepts a single
scale per tensor, whereas a K/V window has one scale per head. The per-head scales are therefore
applied where this is exact: the queries are multiplied by the key scales before quantization, and
the result is multiplied by the value scales. All scales are powers of two, and none depends on the
queries.

This module builds the cuDNN graphs with cuDNN's Python package, which vLLM's CUDA builds require.
Calls with the same sizes have bitwise reproducible results. `benchmarks/attention_kernels.py`
measures the speed.
"""

# T query tokens, S stored tokens, N heads, H head dim

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from vllm_omni.model_executor.layers.attention.attention import in_words
from vllm_omni.model_executor.layers.fast_path import FastPath, lacks_hopper, lacks_package
from vllm_omni.model_executor.layers.quantization.e4m3 import FP8
from vllm_omni.model_executor.layers.quantization.fp8_kernels import dequantize, quantize

logger = logging.getLogger("vllm." + __name__)

_QUERY_SCALE = 8.0
"""Factor applied to the queries before they are quantized. After multiplication by the key scales,
queries have magnitudes of about 1/4. With this factor, few of them are subnormal in e4m3.
"""
_PROBABILITY_SCALE = 256.0
"""Factor applied to the attention probabilities before they are quantized. Before normalisation,
the probabilities are at most 1.
"""
_RESULT_SCALE = 4.0
"""Factor applied to the result before it is quantized. The result is a weighted mean of the scaled
values, which are below 448 / 16 in the first chunk. With this factor, values in later chunks may be
four times as large as in the first chunk without exceeding the e4m3 maximum of 448.
"""
_FEWEST_KEYS = 2
"""Minimum ratio of keys to queries at which FP8 is used. At lower ratios, bf16 attention is equally
fast.
"""

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps queries [T, N, H], keys [S, N, H] and values [S, N, H] to the result [T, N, H]. All of these
tensors are e4m3. The caller divides the queries by `query_scales` and multiplies the result by
`result_scales`."""


def fp8_attention(
    q_TNH: torch.Tensor,
    stored_2SNH: torch.Tensor,
    scales_2N: torch.Tensor,
    tokens_S: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Return attention over quantized keys and values, or None if FP8 is not faster.

    Args:
        q_TNH: Queries, not quantized.
        stored_2SNH: Keys and values, e4m3.
        scales_2N: Scales per head, fp32 powers of two.
        tokens_S: int64 positions of the visible tokens, in order. Default: all tokens.

    Returns:
        The result in the dtype of `q_TNH`. None if dequantizing first is equally fast, or if this
        device or its cuDNN does not support FP8 attention.
    """
    product = fp8_product(len(q_TNH), stored_2SNH, tokens_S)
    return (
        None
        if product is None
        else by_product(product, q_TNH, _chosen(stored_2SNH, tokens_S), scales_2N)
    )


def fp8_product(
    num_queries: int, stored_2SNH: torch.Tensor, tokens_S: torch.Tensor | None = None
) -> Product | None:
    """Return the FP8 attention function that `fp8_attention` uses for this number of queries, or
    None if `fp8_attention` does not use FP8 for them.
    """
    _, keys, *head = stored_2SNH.shape
    keys = keys if tokens_S is None else len(tokens_S)
    if keys < _FEWEST_KEYS * num_queries or not cudnn_fp8_attention(stored_2SNH.device).is_on:
        return None
    heads, width = head
    stride = (
        stored_2SNH.stride()
        if tokens_S is None
        else (keys * heads * width, heads * width, width, 1)
    )
    return _product(
        (num_queries, heads, width), (2, keys, heads, width), stride, stored_2SNH.device
    )


def by_product(
    product: Product, q_TNH: torch.Tensor, stored_2SNH: torch.Tensor, scales_2N: torch.Tensor
) -> torch.Tensor:
    """Quantize the queries, call `product` and return its dequantized result."""
    quantized_1TNH = torch.empty((1, *q_TNH.shape), dtype=FP8, device=q_TNH.device)
    quantize((q_TNH,), query_scales(scales_2N[:1]), quantized_1TNH)
    out_TNH = product(quantized_1TNH[0], *stored_2SNH)
    return dequantize(out_TNH.unsqueeze(0), result_scales(scales_2N[1:]), q_TNH.dtype)[0]


def quantized_attention(
    q_TNH: torch.Tensor, stored_2SNH: torch.Tensor, tokens_S: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the result of `fp8_attention` in e4m3, for queries in e4m3.

    The caller has divided the queries by `query_scales` and must multiply the result by
    `result_scales`. Call this function only if `fp8_product` does not return None.
    """
    product = fp8_product(len(q_TNH), stored_2SNH, tokens_S)
    assert product is not None, "queries are rounded for a product"
    adjacent_TNH = in_words(q_TNH).contiguous().view(FP8)
    return product(adjacent_TNH, *_chosen(stored_2SNH, tokens_S))


def query_scales(k_scales: torch.Tensor) -> torch.Tensor:
    """Compute the divisors for quantizing the queries from the per-head key scales."""
    return (k_scales * _QUERY_SCALE).reciprocal()


def result_scales(v_scales: torch.Tensor) -> torch.Tensor:
    """Compute the factors for dequantizing the result of FP8 attention from the per-head value
    scales.
    """
    return v_scales / _RESULT_SCALE


def _chosen(stored_2SNH: torch.Tensor, tokens_S: torch.Tensor | None) -> torch.Tensor:
    return (
        stored_2SNH
        if tokens_S is None
        else stored_2SNH.view(torch.uint8).index_select(1, tokens_S).view(FP8)
    )


@cache
def cudnn_fp8_attention(device: torch.device) -> FastPath:
    """Return whether FP8 attention with cuDNN is available: `device` must be a Hopper GPU, and
    cuDNN's Python package must be installed.
    """
    lack = lacks_hopper(device) or lacks_package("cudnn", "nvidia-cudnn-frontend")
    return lack.of("cudnn_fp8_attention", "FP8 keys and values are dequantized before attention")


@cache  # unbounded, because captured CUDA graphs use these tensors
def _product(
    q_shape: tuple[int, ...],
    stored_shape: tuple[int, ...],
    stored_stride: tuple[int, ...],
    device: torch.device,
) -> Product | None:
    """Return cuDNN's FP8 attention for tensors of these sizes, or None if cuDNN rejects them."""
    import cudnn

    fp32, e4m3 = cudnn.data_type.FLOAT, cudnn.data_type.FP8_E4M3
    handle = _handle(device)
    graph = cudnn.pygraph(
        io_data_type=e4m3, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle
    )

    def tensor(name: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> Any:
        """Return cuDNN's descriptor of a tensor [tokens, heads, channels]."""
        tokens, heads, width = shape
        return graph.tensor(
            name=name,
            dim=[1, heads, tokens, width],
            stride=[tokens * stride[0], stride[1], stride[0], stride[2]],
            data_type=e4m3,
        )

    def number(name: str) -> Any:
        return graph.tensor(name=name, dim=[1] * 4, stride=[1] * 4, data_type=fp32)

    _, heads, width = q_shape
    contiguous = (heads * width, width, 1)
    inputs = {
        "q": tensor("q", q_shape, contiguous),
        "k": tensor("k", stored_shape[1:], stored_stride[1:]),
        "v": tensor("v", stored_shape[1:], stored_stride[1:]),
    }
    values = {"descale_q": 1.0, "descale_k": 1.0, "descale_v": 1.0, "scale_o": _RESULT_SCALE}
    values |= {"scale_s": _PROBABILITY_SCALE, "descale_s": 1 / _PROBABILITY_SCALE}
    scales = {name: number(name) for name in values}
    softmax_scale = width**-0.5 / _QUERY_SCALE
    out, _, *largest = graph.sdpa_fp8(
        **inputs, **scales, attn_scale=softmax_scale, generate_stats=False
    )
    out.set_output(True).set_dim([1, heads, q_shape[0], width])
    out.set_stride([q_shape[0] * heads * width, width, heads * width, 1]).set_data_type(e4m3)
    for each in largest:  # maxima of probabilities and of the result; cuDNN always writes them
        each.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(fp32)
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
    except cudnn.cudnnGraphNotSupportedError as error:
        logger.warning(
            "cuDNN has no FP8 attention for queries %s and keys %s (%s); FP8 keys and values are "
            "dequantized before attention instead",
            q_shape,
            stored_shape[1:],
            " ".join(str(error).split())[:200],
        )
        return None
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=device)
    retained = {
        scales[name]: torch.full((1,), value, device=device) for name, value in values.items()
    }
    retained |= {each: torch.zeros(1, device=device) for each in largest}

    def product(q_TNH: torch.Tensor, k_SNH: torch.Tensor, v_SNH: torch.Tensor) -> torch.Tensor:
        out_TNH = torch.empty_like(q_TNH)
        tensors = retained | dict(
            zip((*inputs.values(), out), (q_TNH, k_SNH, v_SNH, out_TNH), strict=True)
        )
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        graph.execute(
            {node: x.data_ptr() for node, x in tensors.items()}, workspace.data_ptr(), handle=handle
        )
        return out_TNH

    return product


@cache
def _handle(device: torch.device) -> Any:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()
