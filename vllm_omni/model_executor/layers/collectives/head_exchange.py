# SPDX-License-Identifier: Apache-2.0
"""`HeadExchange`: self-attention over K/V windows, with a Ulysses all-to-all before and after it.

A rank computes queries, keys and values for all heads, but only for its own tokens. The rank's K/V
windows hold all tokens, but only for the rank's own heads. An all-to-all therefore reshards from
tokens to heads before attention, and back after it.

If windows store FP8, `QuantizedExchange` quantizes keys and values before the all-to-all instead of
after it, directly into the send buffer. If attention also runs in FP8, `QuantizedQueriesExchange`
also quantizes the queries, and dequantizes the attention output after the all-to-all that follows
attention. Compared with quantizing after the all-to-all, quantizing before it halves the number of
bytes sent and leaves windows and results bitwise unchanged. Each rank stores only the scales of its
own heads, so the ranks gather all scales once per forward pass. The gathered scales are copies; the
windows remain the only owner of the scales. A session's first chunk uses `HeadExchange` itself,
because its keys and values determine the scales.
"""

# B batch entries (one chunk of one session each), L layers, T_r tokens of this rank, T tokens of
# all ranks, N heads, N_r heads of this rank, H head dim

from collections.abc import Sequence

import torch

from vllm_omni.model_executor.layers.attention.attention import stack
from vllm_omni.model_executor.layers.attention.fp8_attention import query_scales, result_scales
from vllm_omni.model_executor.layers.collectives.head_all_to_all import (
    HeadAllToAll,
    head_all_to_all,
    heads_apart,
    heads_to_tokens,
    tokens_to_heads,
)
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.layers.kv_cache.quantized_storage import KVSlot
from vllm_omni.model_executor.layers.kv_cache.window import (
    KVWindow,
    WindowAttention,
    WindowItem,
)
from vllm_omni.model_executor.layers.quantization.e4m3 import FP8
from vllm_omni.model_executor.layers.quantization.fp8_kernels import dequantize_into, quantize


def head_exchange(
    parallel: ParallelContext, items: Sequence[WindowItem], num_tokens: int
) -> "HeadExchange":
    """Return the `HeadExchange` for one forward pass. The call is collective. All ranks get an
    instance of the same class.

    Args:
        parallel: This rank's parallel layout.
        items: The batch's chunks.
        num_tokens: Number of tokens in one chunk, across all ranks.
    """
    if parallel.sequence_parallel:
        windows = [item.window.quantized_ahead(item.frames) for item in items]
        rounding = [window for window in windows if window is not None]
        if len(rounding) == len(items):
            frames = [item.frames for item in items]
            rounds = all(
                w.quantizes_queries(f, num_tokens) for w, f in zip(rounding, frames, strict=True)
            )
            kind = QuantizedQueriesExchange if rounds else QuantizedExchange
            return kind(parallel, num_tokens, rounding)
    return HeadExchange(parallel, num_tokens)


class HeadExchange(WindowAttention):
    """Attention with an all-to-all of unquantized tensors. Without sequence parallelism, no data
    moves.
    """

    def __init__(self, parallel: ParallelContext, num_tokens: int) -> None:
        self.parallel = parallel
        self.num_tokens = num_tokens

    def buffers(self, items: Sequence[WindowItem], layer: int) -> list[KVSlot] | None:
        return None if self.parallel.sequence_parallel else super().buffers(items, layer)

    def attend(
        self,
        items: Sequence[WindowItem],
        layer: int,
        q_BTNH: torch.Tensor,
        k_BTNH: torch.Tensor,
        v_BTNH: torch.Tensor,
        write_only: bool,
    ) -> torch.Tensor | None:
        """Write the K/V of `layer` into the windows, then compute attention.

        Args:
            items: The batch's chunks.
            layer: Index of the layer on this rank.
            q_BTNH: Queries for this rank's tokens, [B, T_r, N, H].
            k_BTNH: Keys, with the same shape as the queries.
            v_BTNH: Values, with the same shape as the queries.
            write_only: Whether to return None after writing, without computing attention.

        Returns:
            The attention output, [B, T_r, N, H], valid until the next call. None if `write_only`.
        """
        q, k, v = tokens_to_heads(self.parallel, (q_BTNH, k_BTNH, v_BTNH), self.num_tokens)
        for item, k_TNH, v_TNH in zip(items, k, v, strict=True):
            item.window.write(layer, item.frames, k_TNH, v_TNH)
        if write_only:
            self.parallel.barrier()
            return None
        return heads_to_tokens(self.parallel, self.attend_to_written(items, layer, q))


class QuantizedExchange(HeadExchange):
    """A `HeadExchange` that quantizes keys and values before the all-to-all and sends queries
    unquantized.
    """

    def __init__(
        self, parallel: ParallelContext, num_tokens: int, windows: Sequence[KVWindow]
    ) -> None:
        super().__init__(parallel, num_tokens)
        self.windows = tuple(windows)
        own_BL2N = stack([window.scales for window in windows])
        # scales of keys and values, [B, L, rank, 2, N_r]
        self.scales = torch.stack(parallel.all_gather(own_BL2N), dim=2)

    def attend(
        self,
        items: Sequence[WindowItem],
        layer: int,
        q_BTNH: torch.Tensor,
        k_BTNH: torch.Tensor,
        v_BTNH: torch.Tensor,
        write_only: bool,
    ) -> torch.Tensor | None:
        parts = [(self._query_type(q_BTNH), 1), (FP8, 2)]
        all_to_all = head_all_to_all(self.parallel, q_BTNH, parts, self.num_tokens)
        self._send_queries(layer, q_BTNH, all_to_all)
        _send_quantized(all_to_all, 1, (k_BTNH, v_BTNH), self.scales[:, layer])
        (queries,), keys_values = all_to_all.exchange()
        for number, (window, item) in enumerate(zip(self.windows, items, strict=True)):
            window.write_quantized(layer, item.frames, keys_values[:, number])
        if write_only:
            self.parallel.barrier()
            return None
        attended = [
            self._attend(window, layer, item.frames, q_TNH)
            for window, item, q_TNH in zip(self.windows, items, queries, strict=True)
        ]
        return self._to_tokens(layer, attended, q_BTNH.dtype)

    def _query_type(self, q_BTNH: torch.Tensor) -> torch.dtype:
        return q_BTNH.dtype

    def _send_queries(self, layer: int, q_BTNH: torch.Tensor, all_to_all: HeadAllToAll) -> None:
        all_to_all.send(0, q_BTNH)

    def _attend(
        self, window: KVWindow, layer: int, frames: range, q_TNH: torch.Tensor
    ) -> torch.Tensor:
        return window.attend(layer, frames, q_TNH)

    def _to_tokens(
        self, layer: int, attended_TNH: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> torch.Tensor:
        """Reshard the attention results for this rank's heads to [B, T_r, N, H]."""
        return heads_to_tokens(self.parallel, stack(attended_TNH))


class QuantizedQueriesExchange(QuantizedExchange):
    """A `QuantizedExchange` that also quantizes queries, and dequantizes the output of FP8
    attention after the all-to-all that follows it.
    """

    def __init__(
        self, parallel: ParallelContext, num_tokens: int, windows: Sequence[KVWindow]
    ) -> None:
        super().__init__(parallel, num_tokens, windows)
        k_scales, v_scales = self.scales.unbind(3)
        self.query_scales = query_scales(k_scales).unsqueeze(3)
        self.result_scales = result_scales(v_scales).contiguous()

    def _query_type(self, q_BTNH: torch.Tensor) -> torch.dtype:
        return FP8

    def _send_queries(self, layer: int, q_BTNH: torch.Tensor, all_to_all: HeadAllToAll) -> None:
        _send_quantized(all_to_all, 0, (q_BTNH,), self.query_scales[:, layer])

    def _attend(
        self, window: KVWindow, layer: int, frames: range, q_TNH: torch.Tensor
    ) -> torch.Tensor:
        return window.attend_quantized(layer, frames, q_TNH)

    def _to_tokens(
        self, layer: int, attended_TNH: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> torch.Tensor:
        quantized_BTNH = stack([x_TNH.view(torch.uint8) for x_TNH in attended_TNH]).view(FP8)
        apart = heads_apart(self.parallel, quantized_BTNH)
        out = torch.empty(apart.shape, dtype=dtype, device=apart.device)
        for row_apart, scales, row_out in zip(
            apart, self.result_scales[:, layer], out, strict=True
        ):
            dequantize_into(row_apart.transpose(0, 1), scales, row_out.transpose(0, 1))
        return out.flatten(2, 3)


def _send_quantized(
    all_to_all: HeadAllToAll, part: int, parts_BTNH: tuple[torch.Tensor, ...], scales: torch.Tensor
) -> None:
    """Quantize each rank's heads with `quantize`, directly into the send buffer.

    Shape of `scales`: [B, rank, K, N_r].
    """
    apart = [x.unflatten(-2, (scales.shape[1], -1)) for x in parts_BTNH]
    for rank in range(scales.shape[1]):
        position_KBTNH = all_to_all.send_buffer(part, rank)
        for number, of_row in enumerate(scales):
            quantize(
                tuple(x[number, :, rank] for x in apart), of_row[rank], position_KBTNH[:, number]
            )
