# SPDX-License-Identifier: Apache-2.0
"""Unmasked attention for one sequence, with the fastest kernel that the device supports.

vLLM's FlashAttention 3 is used on the CUDA devices that it supports. On other devices, torch's
scaled-dot-product attention selects cuDNN, flash attention or a CPU kernel. The caller makes
attention causal between chunks by passing only the visible keys. Text attention adds the usual
triangular mask, aligned to the last key.
"""

# T query tokens, S key tokens, N heads, H head dim

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from vllm_omni.model_executor.layers.fast_path import (
    FastPath,
    Lack,
    is_half_on_cuda,
    lacks_gpu,
    lacks_half,
)


@cache
def _flash_attention(*versions: int) -> Callable[..., torch.Tensor] | None:
    """Return vLLM's `flash_attn_varlen_func` for the first of the FlashAttention `versions` that
    the CUDA device supports, or None if it supports none of them.
    """
    found = [version for version in versions if not _lacks_flash_attention(version)]
    if not found:
        return None
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    return partial(flash_attn_varlen_func, fa_version=found[0])


def _lacks_flash_attention(version: int) -> Lack:
    """Return the reason why vLLM cannot run this FlashAttention version on the current CUDA device,
    or a falsy `Lack` if vLLM can.
    """
    try:
        from vllm.vllm_flash_attn.flash_attn_interface import fa_version_unsupported_reason
    except ImportError as error:
        return Lack(" ".join(str(error).split()), "install a CUDA build of vLLM")
    return Lack(fa_version_unsupported_reason(version) or "")


@cache
def flash_attention_3(device: torch.device, dtype: torch.dtype) -> FastPath:
    """Return whether `attention` uses FlashAttention 3 for tensors on this device and of this
    dtype.
    """
    lack = lacks_gpu(device) or lacks_half(dtype, "--dtype") or _lacks_flash_attention(3)
    return lack.of("flash_attention_3", "torch's scaled_dot_product_attention")


@cache
def cudnn_cross_attention(device: torch.device, dtype: torch.dtype) -> FastPath:
    """Return whether `cross_attention` uses cuDNN for tensors on this device and of this dtype."""
    attention_path = flash_attention_3(device, dtype)
    lack = Lack(attention_path.reason, attention_path.remedy) or Lack(
        "" if torch.backends.cudnn.is_available() else "torch is built without cuDNN"
    )
    return lack.of("cudnn_cross_attention", "the attention of other layers")


@cache  # unbounded, because captured CUDA graphs keep reading these tensors
def _cu_seqlens(length: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([0, length], dtype=torch.int32, device=device)


def attention(
    q_TNH: torch.Tensor,
    k_SNH: torch.Tensor,
    v_SNH: torch.Tensor,
    *,
    causal: bool = False,
    key_range: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return softmax(q k^T / sqrt(H)) v as [T, N, H] in the dtype of `q_TNH`.

    Args:
        q_TNH: Queries.
        k_SNH: Keys. The number of key heads may be a divisor of the number of query heads
            (grouped-query attention).
        v_SNH: Values, with as many heads as the keys.
        causal: Whether query t attends only to the first S - T + t + 1 keys. Requires S >= T.
        key_range: int32 [2] on the device of `q_TNH`: 0 and the number of leading keys to attend
            to. The host does not read this value, so one CUDA graph works for all lengths. Cannot
            be combined with `causal`. Default: attend to all keys.
        out: Contiguous tensor for the result. Default: a new tensor.
    """
    if key_range is not None:
        return _attention_to_first(q_TNH, k_SNH, v_SNH, key_range, out)
    causal = causal and q_TNH.shape[0] > 1
    if flash_attention_3(q_TNH.device, q_TNH.dtype).is_on and (flash := _flash_attention(3)):
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
            out=out,
        )
    q, k, v = _batch_of_one(q_TNH, k_SNH, v_SNH)
    mask = causal_lower_right(q.shape[2], k.shape[2]) if causal else None
    grouped = q.shape[1] != k.shape[1]
    result = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    return _written(result, out)


def cross_attention(q_TNH: torch.Tensor, k_SNH: torch.Tensor, v_SNH: torch.Tensor) -> torch.Tensor:
    """Return `attention` for many queries over a prompt's few keys.

    Hopper GPUs use cuDNN, because it is faster than FlashAttention 3 for so few keys. cuDNN builds
    an execution plan for each new size. Building plans costs little in total, because prompts have
    few different sizes. vLLM disables cuDNN in torch's automatic kernel selection, so this function
    calls cuDNN explicitly.
    """
    if cudnn_cross_attention(q_TNH.device, q_TNH.dtype).is_on:
        q, k, v = _batch_of_one(q_TNH, k_SNH, v_SNH)
        out: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, False
        )[0]
        return out.squeeze(0).transpose(0, 1)
    return attention(q_TNH, k_SNH, v_SNH)


def _batch_of_one(*tensors_TNH: torch.Tensor) -> list[torch.Tensor]:
    """Return each tensor as a view [1, N, T, H], the layout that torch's attention uses."""
    return [x_TNH.transpose(0, 1).unsqueeze(0) for x_TNH in tensors_TNH]


def _attention_to_first(
    q_TNH: torch.Tensor,
    k_SNH: torch.Tensor,
    v_SNH: torch.Tensor,
    key_range: torch.Tensor,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Return `attention` over the first `key_range[1]` keys. On CUDA, the host does not wait for
    the device.
    """
    if q_TNH.device.type == "cpu":
        seen = slice(0, int(key_range[1]))
        return attention(q_TNH, k_SNH[seen], v_SNH[seen], out=out)
    if is_half_on_cuda(q_TNH) and (flash := _flash_attention(3, 2)):
        return flash(
            q_TNH,
            k_SNH,
            v_SNH,
            max_seqlen_q=q_TNH.shape[0],
            cu_seqlens_q=_cu_seqlens(q_TNH.shape[0], q_TNH.device),
            max_seqlen_k=k_SNH.shape[0],
            cu_seqlens_k=key_range,
            out=out,
        )
    q, k, v = _batch_of_one(q_TNH, k_SNH, v_SNH)
    seen_S = torch.arange(k_SNH.shape[0], device=q.device) < key_range[1]
    result = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen_S, enable_gqa=q.shape[1] != k.shape[1]
    )
    return _written(result, out)


def _written(result_1NTH: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Return a result of torch's attention as [T, N, H], copied to `out` if that is given."""
    result_TNH = result_1NTH.squeeze(0).transpose(0, 1)
    return result_TNH if out is None else out.copy_(result_TNH)


def stack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack tensors along a new first dimension. The result is a view if there is only one part."""
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(list(parts))


def in_words(x: torch.Tensor) -> torch.Tensor:
    """View `x` as 8-byte elements if its last dimension allows it, because strided copies of
    narrower elements are slow.

    In compiled code, this function returns `x` itself, because compiled loops already use the
    widest loads.
    """
    if torch.compiler.is_compiling() or x.shape[-1] * x.itemsize % torch.int64.itemsize:
        return x
    return x.view(torch.int64)
