# SPDX-License-Identifier: Apache-2.0
"""Storage formats for a `KVWindow`: unquantized, or FP8 (e4m3) with separate scales for the keys
and the values of each head in each layer.

An e4m3 value has four significant bits across a dynamic range of 2^18. A scale therefore only has
to bring the values into this range; it does not determine the precision. Each scale is a power of
two, because multiplying by it is exact. A head's scale maps the head's largest absolute value in
the session's first chunk to a value that is at least a factor of `_HEADROOM` below the e4m3
maximum. Every forward pass over the first chunk recomputes the scale. Later values beyond the range
are clamped to the e4m3 maximum. The scale depends only on this head's values in this session, so
results do not change with the batch, the ranks or the order of chunks.

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
from vllm_omni.model_executor.layers.quantization.e4m3 import FP8, LARGEST
from vllm_omni.model_executor.layers.quantization.fp8_kernels import (
    dequantize,
    fit_scales,
    plain_quantize,
    quantize,
)

_quantize = torch.compiler.disable(quantize)
"""`quantize`, excluded from compilation because compiled code does not support e4m3 on CPUs."""
_HEADROOM = 16.0
"""Minimum factor by which a head's later values may exceed its largest value in the first chunk
before they are clamped.
"""
_TINIEST = 2.0**-10
"""Lower bound on the largest absolute value from which a head's scale is computed. The bound keeps
the scale above zero for a head whose values are all zero.
"""


@dataclass(frozen=True)
class KVSlot:
    """Memory for one chunk's keys and values in one layer."""

    stored_2TNH: torch.Tensor
    """The chunk's part of the window's buffer: first the keys, then the values."""
    scales_2N: torch.Tensor | None
    """fp32 powers of two by which keys and values are divided before quantization to FP8. None:
    keys and values are stored unquantized.
    """


def store(
    parts: tuple[torch.Tensor, ...], scales_KN: torch.Tensor | None, target_KTNH: torch.Tensor
) -> None:
    """Write one or two tensors [T, N, H] into a window's memory. `scales_KN` contains scales as
    described in `KVSlot`.
    """
    if scales_KN is not None:
        _quantize(parts, scales_KN, target_KTNH)
        return
    for target_TNH, x_TNH in zip(target_KTNH, parts, strict=True):
        in_words(target_TNH).copy_(in_words(x_TNH.to(target_TNH.dtype)))


class KVFormat:
    """Unquantized storage of keys and values. Base class for the other formats."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        """Dtype of keys and values outside the buffer."""
        self.storage = dtype
        """Dtype of the values in the buffer."""
        self.scales: torch.Tensor | None = None
        """Factors by which dequantization multiplies stored values, fp32 [L, 2, N]. None: all
        factors are 1.
        """

    @property
    def nbytes(self) -> int:
        return 0

    def fit_scales(self, layer: int, k_TNH: torch.Tensor, v_TNH: torch.Tensor) -> None:
        """Set the scales from the session's first keys and values, before they are stored."""

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
        """Return the keys and values in a part of the buffer, converted to `dtype`. Shape:
        [2, S, N, H]. The result may be a view.

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
        in `load`.
        """
        k_SNH, v_SNH = self.load(layer, stored_2SNH, tokens)
        return attention(q_TNH, k_SNH, v_SNH, key_range=key_range)

    def quantizes_queries(
        self, num_queries: int, stored_2SNH: torch.Tensor, tokens: torch.Tensor | None = None
    ) -> bool:
        """Return whether `attend` quantizes this number of queries to e4m3. If so,
        `attend_quantized` may be called.
        """
        return False

    def attend_quantized(
        self, q_TNH: torch.Tensor, stored_2SNH: torch.Tensor, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the result of `attend` in e4m3, for queries in e4m3. Call this method only if
        `quantizes_queries` returns True; see `fp8_attention.quantized_attention`.
        """
        raise NotImplementedError

    def quantized(self, stored: torch.Tensor) -> torch.Tensor:
        """Convert scaled floating-point values to the buffer's dtype."""
        return stored.to(self.storage)

    def layer_scales(self, layer: int) -> torch.Tensor | None:
        """Return the `scales` for one layer. Shape: [2, N]."""
        return None if self.scales is None else self.scales[layer]

    def take_scales(self, other: Self) -> None:
        """Copy another window's scales. The caller also copies that window's buffer into this
        window's buffer.
        """

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

    Attention runs in FP8 where that is faster (`../attention/fp8_attention.py`). Otherwise, all
    keys and values that a chunk sees are first dequantized to `dtype`.
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
    """Return a window's storage format.

    Args:
        dtype: Dtype of keys and values outside the window.
        storage: Dtype of the buffer. None: `dtype`.
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
    `kv_format` returns.
    """
    if storage is None or storage == dtype:
        return numel * dtype.itemsize
    return numel * storage.itemsize + num_layers * 2 * num_heads * torch.float32.itemsize
