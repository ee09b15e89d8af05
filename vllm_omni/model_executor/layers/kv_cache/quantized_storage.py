# SPDX-License-Identifier: Apache-2.0
"""Storage formats of a `KVWindow`: unquantized, or FP8 (e4m3) with a scale per layer and head.

An e4m3 value has four significant bits over a range of 2^18. A scale therefore only has to bring
the values into this range; it does not determine the precision. Each scale is a power of two,
because multiplying by it is exact. The scale of a head maps the largest absolute value of that head
in the session's first chunk to at least a factor `_HEADROOM` below the e4m3 maximum. Every pass
over the first chunk recomputes the scale. Later values beyond the range are clamped to the e4m3
maximum. The scale depends only on the values of this head in this session, so results do not change
with the batch, the ranks or the order of chunks.

A format also implements attention, because the fastest way to multiply queries by stored keys
depends on the storage format.
"""

# L layers, T tokens of a chunk, S stored tokens, N heads, H head dim

from dataclasses import dataclass
from typing import Self

import torch

from vllm_omni.model_executor.layers.attention.attention import attention, in_words
from vllm_omni.model_executor.layers.attention.fp8_attention import (
    fp8_attention,
    fp8_product,
    quantized_attention,
)
from vllm_omni.model_executor.layers.quantization.fp8_kernels import (
    FP8,
    LARGEST,
    dequantize,
    fit_scales,
    plain_quantize,
    quantize,
)

_quantize = torch.compiler.disable(quantize)
"""`quantize`, excluded from compilation because compiled code does not support e4m3 on CPUs."""
_HEADROOM = 16.0
"""Minimum factor by which later values of a head may exceed those of the first chunk before they
are clamped.
"""
_TINIEST = 2.0**-10
"""Lower bound for the largest absolute value of a head, from which its scale is computed. The bound
keeps the scale above zero for a head whose values are all zero.
"""


@dataclass(frozen=True)
class KVSlot:
    """Memory for the keys and values of one chunk in one layer."""

    stored_2TNH: torch.Tensor
    """Part of the window's buffer: first the keys, then the values."""
    scales_2N: torch.Tensor | None
    """fp32 powers of two that divide keys and values before quantization to FP8. None: keys and
    values are stored unquantized."""


def store(
    parts: tuple[torch.Tensor, ...], scales_KN: torch.Tensor | None, target_KTNH: torch.Tensor
) -> None:
    """Write one or two tensors [T, N, H] into a window's memory. `scales_KN` contains scales as
    described in `KVSlot`."""
    if scales_KN is not None:
        _quantize(parts, scales_KN, target_KTNH)
        return
    for target_TNH, x_TNH in zip(target_KTNH, parts, strict=True):
        in_words(target_TNH).copy_(in_words(x_TNH.to(target_TNH.dtype)))


class KVFormat:
    """Unquantized storage of keys and values. Base class of the other formats."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        """Dtype of keys and values outside the buffer."""
        self.storage = dtype
        """Dtype of the values in the buffer."""
        self.scales: torch.Tensor | None = None
        """Factors by which dequantization multiplies stored values, [L, 2, N] fp32. None: all
        factors are 1."""

    @property
    def nbytes(self) -> int:
        return 0

    def fit_scales(self, layer: int, k_TNH: torch.Tensor, v_TNH: torch.Tensor) -> None:
        """Set the scales from the first keys and values of the session, before they are stored."""

    def store(
        self, layer: int, k_TNH: torch.Tensor, v_TNH: torch.Tensor, target_2TNH: torch.Tensor
    ) -> None:
        """Write keys and values into a part of the buffer, in the buffer's format."""
        store((k_TNH, v_TNH), self.layer_scales(layer), target_2TNH)

    def store_quantized(self, quantized_2TNH: torch.Tensor, target_2TNH: torch.Tensor) -> None:
        """Copy keys and values that are already in the buffer's format into a part of the
        buffer.
        """
        in_words(target_2TNH).copy_(in_words(quantized_2TNH))

    def encode(self, layer: int, kind: int, x_TNH: torch.Tensor) -> torch.Tensor:
        """Return keys (kind 0) or values (kind 1) in the buffer's format."""
        return x_TNH

    def load(
        self, layer: int, stored_2SNH: torch.Tensor, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the keys and values of a part of the buffer in `dtype`, [2, S, N, H]. The result
        may be a view.

        Args:
            layer: Index of the layer on this rank.
            stored_2SNH: The part of the buffer.
            tokens: int64 positions of the tokens to return, in order. Default: all.
        """
        return stored_2SNH if tokens is None else stored_2SNH.index_select(1, tokens)

    def attend(
        self,
        layer: int,
        q_TNH: torch.Tensor,
        stored_2SNH: torch.Tensor,
        tokens: torch.Tensor | None = None,
        key_range: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return `attention` of queries over a part of the buffer. `tokens` has the same meaning as
        in `load`."""
        k_SNH, v_SNH = self.load(layer, stored_2SNH, tokens)
        return attention(q_TNH, k_SNH, v_SNH, key_range=key_range)

    def quantizes_queries(
        self, num_queries: int, stored_2SNH: torch.Tensor, tokens: torch.Tensor | None = None
    ) -> bool:
        """Return whether `attend` quantizes this number of queries to e4m3, so that
        `attend_quantized` may be called."""
        return False

    def attend_quantized(
        self, q_TNH: torch.Tensor, stored_2SNH: torch.Tensor, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the result of `attend` in e4m3, for queries in e4m3. Call this only if
        `quantizes_queries` returns True; see `fp8_attention.quantized_attention`."""
        raise NotImplementedError

    def quantized(self, stored: torch.Tensor) -> torch.Tensor:
        """Convert scaled floating-point values to the type of the buffer."""
        return stored.to(self.storage)

    def layer_scales(self, layer: int) -> torch.Tensor | None:
        """Return `scales` of one layer, [2, N]."""
        return None if self.scales is None else self.scales[layer]

    def take_scales(self, other: Self) -> None:
        """Copy the scales of another window. The caller also copies that window's buffer into the
        buffer of this window."""

    def clear(self) -> None:
        """Reset the scales for a new session."""

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors, other than the buffer, that forward passes read and write in
        place.
        """
        return ()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return, by name, the tensors other than the buffer that a snapshot contains."""
        return {}

    def fork(self) -> Self:
        return self

    def to(self, device: torch.device | str) -> None:
        pass


class ScaledFP8(KVFormat):
    """Scaled e4m3 storage; see the module docstring.

    Attention multiplies in FP8 where that is faster (`../attention/fp8_attention.py`). Otherwise,
    all keys and values that a chunk sees are first dequantized to `dtype`.
    """

    scales: torch.Tensor

    def __init__(
        self, dtype: torch.dtype, num_layers: int, num_heads: int, device: torch.device | str
    ) -> None:
        super().__init__(dtype)
        self.storage = FP8
        self.scales = torch.ones(num_layers, 2, num_heads, dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        return self.scales.nbytes

    def fit_scales(self, layer: int, k_TNH: torch.Tensor, v_TNH: torch.Tensor) -> None:
        fit_scales((k_TNH, v_TNH), LARGEST / _HEADROOM, _TINIEST, self.scales[layer])

    def encode(self, layer: int, kind: int, x_TNH: torch.Tensor) -> torch.Tensor:
        return plain_quantize(x_TNH, self.scales[layer, kind])

    def load(
        self, layer: int, stored_2SNH: torch.Tensor, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        return dequantize(stored_2SNH, self.scales[layer], self.dtype, tokens)

    def attend(
        self,
        layer: int,
        q_TNH: torch.Tensor,
        stored_2SNH: torch.Tensor,
        tokens: torch.Tensor | None = None,
        key_range: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if key_range is None:
            out_TNH = fp8_attention(q_TNH, stored_2SNH, self.scales[layer], tokens)
            if out_TNH is not None:
                return out_TNH
        return super().attend(layer, q_TNH, stored_2SNH, tokens, key_range)

    def quantizes_queries(
        self, num_queries: int, stored_2SNH: torch.Tensor, tokens: torch.Tensor | None = None
    ) -> bool:
        return fp8_product(num_queries, stored_2SNH, tokens) is not None

    def attend_quantized(
        self, q_TNH: torch.Tensor, stored_2SNH: torch.Tensor, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        return quantized_attention(q_TNH, stored_2SNH, tokens)

    def quantized(self, stored: torch.Tensor) -> torch.Tensor:
        return stored.clamp(-LARGEST, LARGEST).to(FP8)

    def take_scales(self, other: KVFormat) -> None:
        assert other.scales is not None
        self.scales.copy_(other.scales)

    def clear(self) -> None:
        self.scales.fill_(1)

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        return (self.scales,)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"kv.scales": self.scales}

    def fork(self) -> Self:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.scales = self.scales.clone()
        return other

    def to(self, device: torch.device | str) -> None:
        self.scales = self.scales.to(device)


def kv_format(
    dtype: torch.dtype,
    storage: torch.dtype | None,
    *,
    num_layers: int,
    num_heads: int,
    device: torch.device | str,
) -> KVFormat:
    """Return the storage format of a window.

    Args:
        dtype: Type of keys and values outside the window.
        storage: Type of the buffer. None: `dtype`.
        num_layers: Number of layers on this rank.
        num_heads: Number of heads on this rank.
        device: Device of the scales.

    Raises:
        ValueError: `storage` is neither `dtype` nor e4m3.
    """
    if storage is None or storage == dtype:
        return KVFormat(dtype)
    if storage != FP8:
        raise ValueError(f"keys and values can be kept as {dtype} or {FP8}, not {storage}")
    return ScaledFP8(dtype, num_layers, num_heads, device)


def kv_nbytes(
    dtype: torch.dtype, storage: torch.dtype | None, *, num_layers: int, num_heads: int, numel: int
) -> int:
    """Return the size in bytes of `numel` elements and their scales, stored in the format that
    `kv_format` returns."""
    if storage is None or storage == dtype:
        return numel * dtype.itemsize
    return numel * storage.itemsize + num_layers * 2 * num_heads * torch.float32.itemsize
