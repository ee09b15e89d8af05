# SPDX-License-Identifier: Apache-2.0
"""Unmasked attention of one sequence, by the fastest kernel the device has.

On CUDA devices that vLLM's FlashAttention 3 supports, that kernel; otherwise torch's scaled-dot-product attention
(which picks cuDNN, flash or a CPU kernel). Causality between chunks is given by which keys are passed in; text adds
the usual triangle, aligned to the last key.
"""

# T query tokens, S key tokens, N heads, H head dim

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right


@cache
def _flash_attention(*versions: int) -> Callable[..., torch.Tensor] | None:
    """Return vLLM's `flash_attn_varlen_func`, of the first version that runs on the current CUDA device; else None."""
    try:
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, is_fa_version_supported
    except ImportError:
        return None
    found = [version for version in versions if is_fa_version_supported(version)]
    return partial(flash_attn_varlen_func, fa_version=found[0]) if found else None


@cache  # without end: a captured CUDA graph keeps reading them
def _cu_seqlens(length: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([0, length], dtype=torch.int32, device=device)


def attention(
    q_TNH: torch.Tensor,
    k_SNH: torch.Tensor,
    v_SNH: torch.Tensor,
    *,
    causal: bool = False,
    key_range: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return softmax(q k^T / sqrt(H)) v as [T, N, H] in the type of `q_TNH`.

    Every query sees every key or, when causal, query t the first S - T + t + 1 of them (S >= T). Keys and values may
    have fewer heads than queries (grouped-query attention).
    key_range: int32 [2] on the device of `q_TNH`, 0 and how many of the first keys are seen: a number that the host
    need not know, so that one CUDA graph serves every length. Not together with `causal`.
    """
    if key_range is not None:
        return _attention_to_first(q_TNH, k_SNH, v_SNH, key_range)
    causal = causal and q_TNH.shape[0] > 1
    if _is_half(q_TNH) and (flash := _flash_attention(3)):
        queries, keys = q_TNH.shape[0], k_SNH.shape[0]
        return flash(
            q_TNH,
            k_SNH,
            v_SNH,
            max_seqlen_q=queries,
            cu_seqlens_q=_cu_seqlens(queries, q_TNH.device),
            max_seqlen_k=keys,
            cu_seqlens_k=_cu_seqlens(keys, q_TNH.device),
            causal=causal,
        )
    q, k, v = _batch_of_one(q_TNH, k_SNH, v_SNH)
    mask = causal_lower_right(q.shape[2], k.shape[2]) if causal else None
    grouped = q.shape[1] != k.shape[1]
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    return out.squeeze(0).transpose(0, 1)


def cross_attention(q_TNH: torch.Tensor, k_SNH: torch.Tensor, v_SNH: torch.Tensor) -> torch.Tensor:
    """`attention` of many queries to a prompt's few keys, of sizes that come again and again.

    On Hopper by cuDNN, which is faster there than FlashAttention 3, and makes a plan of every size it meets. vLLM turns
    cuDNN off in torch's own choice of kernels; it is called by name here.
    """
    if _is_half(q_TNH) and _flash_attention(3) and torch.backends.cudnn.is_available():
        q, k, v = _batch_of_one(q_TNH, k_SNH, v_SNH)
        out: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, False)[0]
        return out.squeeze(0).transpose(0, 1)
    return attention(q_TNH, k_SNH, v_SNH)


def _batch_of_one(*tensors_TNH: torch.Tensor) -> list[torch.Tensor]:
    """[1, N, T, H] of each, views: the order of torch's kernels."""
    return [x_TNH.transpose(0, 1).unsqueeze(0) for x_TNH in tensors_TNH]


def _is_half(q_TNH: torch.Tensor) -> bool:
    return q_TNH.is_cuda and q_TNH.dtype in (torch.bfloat16, torch.float16)


def _attention_to_first(
    q_TNH: torch.Tensor, k_SNH: torch.Tensor, v_SNH: torch.Tensor, key_range: torch.Tensor
) -> torch.Tensor:
    """`attention` to the first `key_range[1]` keys; on CUDA nothing waits for that number."""
    if q_TNH.device.type == "cpu":
        seen = slice(0, int(key_range[1]))
        return attention(q_TNH, k_SNH[seen], v_SNH[seen])
    if _is_half(q_TNH) and (flash := _flash_attention(3, 2)):
        return flash(
            q_TNH,
            k_SNH,
            v_SNH,
            max_seqlen_q=q_TNH.shape[0],
            cu_seqlens_q=_cu_seqlens(q_TNH.shape[0], q_TNH.device),
            max_seqlen_k=k_SNH.shape[0],
            cu_seqlens_k=key_range,
        )
    q, k, v = _batch_of_one(q_TNH, k_SNH, v_SNH)
    seen_S = torch.arange(k_SNH.shape[0], device=q.device) < key_range[1]
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen_S, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)


def stack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack along a new first dimension; a view when there is one part."""
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(list(parts))


def in_words(x: torch.Tensor) -> torch.Tensor:
    """A view of `x` in numbers of eight bytes where its last dimension allows: strided copies of shorter are slow.

    `x` itself in compiled code, whose loops read as wide as they can.
    """
    if torch.compiler.is_compiling() or x.shape[-1] * x.itemsize % torch.int64.itemsize:
        return x
    return x.view(torch.int64)
