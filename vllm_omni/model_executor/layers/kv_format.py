# SPDX-License-Identifier: Apache-2.0
"""How a `KVWindow` stores keys and values: as they are, or as FP8 (e4m3) with a scale per layer and head.

An e4m3 number has four significant bits over a range of 2^18, so a scale only has to bring the values into that range;
it does not decide the precision. It is a power of two (multiplying by it is exact) and leaves `_HEADROOM` above the
largest value of the session's first chunk, each pass over which sets it anew. Later values beyond that are cut to the
largest e4m3 number. The scale of a head depends on that head of that session alone, so results do not change with the
batch, the ranks or the order of chunks.
A format also attends: the fastest product of queries and stored numbers depends on how these are stored.
Held by tests/model_executor/layers/test_kv_format.py.
"""

# L layers, T tokens of a chunk, S stored tokens, N heads, H head dim

from dataclasses import dataclass
from typing import Self

import torch

from vllm_omni.model_executor.layers.attention import attention, in_words
from vllm_omni.model_executor.layers.fp8_attention import fp8_attention, fp8_product, rounded_attention
from vllm_omni.model_executor.layers.fp8_kernels import FP8, LARGEST, narrow, plain_narrow, widen

_narrow = torch.compiler.disable(narrow)
"""Left out of compiled code, which has no e4m3 on a CPU."""
_HEADROOM = 16.0
_TINIEST = 2.0**-10
"""Of a head whose values are all zero."""


@dataclass(frozen=True)
class KVPlace:
    """Where a chunk's keys and values of a layer are kept.

    stored_2TNH: a part of the buffer. scales_2N: fp32 powers of two by which they are divided before they are rounded
    to FP8; None = they are kept as they are.
    """

    stored_2TNH: torch.Tensor
    scales_2N: torch.Tensor | None


def store(parts: tuple[torch.Tensor, ...], scales_KN: torch.Tensor | None, target_KTNH: torch.Tensor) -> None:
    """Write one or two tensors [T, N, H] where a window keeps them. scales_KN: as of `KVPlace`."""
    if scales_KN is not None:
        _narrow(parts, scales_KN, target_KTNH)
        return
    for target_TNH, x_TNH in zip(target_KTNH, parts, strict=True):
        in_words(target_TNH).copy_(in_words(x_TNH.to(target_TNH.dtype)))


class KVFormat:
    """Keys and values as they are. dtype: of keys and values outside; storage: of the buffer."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.storage = dtype

    @property
    def nbytes(self) -> int:
        return 0

    def fit(self, layer: int, k_TNH: torch.Tensor, v_TNH: torch.Tensor) -> None:
        """Take note of the session's first keys and values, before they are stored."""

    def store(self, layer: int, k_TNH: torch.Tensor, v_TNH: torch.Tensor, target_2TNH: torch.Tensor) -> None:
        """Write keys and values into a part of the buffer."""
        store((k_TNH, v_TNH), self.layer_scales(layer), target_2TNH)

    def keep(self, rounded_2TNH: torch.Tensor, target_2TNH: torch.Tensor) -> None:
        """Write keys and values that are as the buffer holds them into a part of it."""
        in_words(target_2TNH).copy_(in_words(rounded_2TNH))

    def encode(self, layer: int, kind: int, x_TNH: torch.Tensor) -> torch.Tensor:
        """Return keys (kind 0) or values (1) as the buffer holds them."""
        return x_TNH

    def load(self, layer: int, stored_2SNH: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Return a part of the buffer, keys and values, in `dtype` [2, S, N, H]; possibly a view.

        tokens: int64, the places of the wanted tokens in it, in that order; None = all.
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
        """`attention` of queries to a part of the buffer. tokens: as of `load`."""
        k_SNH, v_SNH = self.load(layer, stored_2SNH, tokens)
        return attention(q_TNH, k_SNH, v_SNH, key_range=key_range)

    def rounds_queries(self, num_queries: int, stored_2SNH: torch.Tensor, tokens: torch.Tensor | None = None) -> bool:
        """Whether `attend` rounds so many queries to e4m3, so that `attend_rounded` can take them rounded."""
        return False

    def attend_rounded(
        self, q_TNH: torch.Tensor, stored_2SNH: torch.Tensor, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`attend` from e4m3 to e4m3, where `rounds_queries`; see `fp8_attention.rounded_attention`."""
        raise NotImplementedError

    def rounded(self, stored: torch.Tensor) -> torch.Tensor:
        """Return float numbers in units of the buffer as the buffer would hold them."""
        return stored.to(self.storage)

    def scales(self) -> torch.Tensor | None:
        """[L, 2, N] fp32 by which the buffer's numbers are to be multiplied; None = 1."""
        return None

    def layer_scales(self, layer: int) -> torch.Tensor | None:
        """[2, N] of `scales`."""
        scales = self.scales()
        return None if scales is None else scales[layer]

    def take_scales(self, other: Self) -> None:
        """Use another window's scales: its buffer is copied into this one's."""

    def clear(self) -> None:
        """Forget the session's first keys and values."""

    @property
    def places(self) -> tuple[torch.Tensor, ...]:
        """Tensors beside the buffer that are read and written in place."""
        return ()

    def tensors(self) -> dict[str, torch.Tensor]:
        """A snapshot's tensors beside the buffer, by name."""
        return {}

    def fork(self) -> Self:
        return self

    def to(self, device: torch.device | str) -> None:
        pass


class ScaledFP8(KVFormat):
    """See the module docstring. Attention multiplies them as they are where that is faster (`fp8_attention.py`);
    elsewhere one pass converts all that a chunk sees to `dtype`."""

    def __init__(self, dtype: torch.dtype, num_layers: int, num_heads: int, device: torch.device | str) -> None:
        super().__init__(dtype)
        self.storage = FP8
        self._scales_L2N = torch.ones(num_layers, 2, num_heads, dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        return self._scales_L2N.nbytes

    def fit(self, layer: int, k_TNH: torch.Tensor, v_TNH: torch.Tensor) -> None:
        for kind, x_TNH in enumerate((k_TNH, v_TNH)):
            largest_N = x_TNH.abs().amax(dim=(0, 2)).float().clamp_min(_TINIEST)
            self._scales_L2N[layer, kind] = torch.exp2(torch.ceil(torch.log2(largest_N * (_HEADROOM / LARGEST))))

    def encode(self, layer: int, kind: int, x_TNH: torch.Tensor) -> torch.Tensor:
        return plain_narrow(x_TNH, self._scales_L2N[layer, kind])

    def load(self, layer: int, stored_2SNH: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        return widen(stored_2SNH, self._scales_L2N[layer], self.dtype, tokens)

    def attend(
        self,
        layer: int,
        q_TNH: torch.Tensor,
        stored_2SNH: torch.Tensor,
        tokens: torch.Tensor | None = None,
        key_range: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if key_range is None:
            out_TNH = fp8_attention(q_TNH, stored_2SNH, self._scales_L2N[layer], tokens)
            if out_TNH is not None:
                return out_TNH
        return super().attend(layer, q_TNH, stored_2SNH, tokens, key_range)

    def rounds_queries(self, num_queries: int, stored_2SNH: torch.Tensor, tokens: torch.Tensor | None = None) -> bool:
        return fp8_product(num_queries, stored_2SNH, tokens) is not None

    def attend_rounded(
        self, q_TNH: torch.Tensor, stored_2SNH: torch.Tensor, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        return rounded_attention(q_TNH, stored_2SNH, tokens)

    def rounded(self, stored: torch.Tensor) -> torch.Tensor:
        return stored.clamp(-LARGEST, LARGEST).to(FP8)

    def scales(self) -> torch.Tensor | None:
        return self._scales_L2N

    def take_scales(self, other: KVFormat) -> None:
        scales = other.scales()
        assert scales is not None
        self._scales_L2N.copy_(scales)

    def clear(self) -> None:
        self._scales_L2N.fill_(1)

    @property
    def places(self) -> tuple[torch.Tensor, ...]:
        return (self._scales_L2N,)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"kv.scales": self._scales_L2N}

    def fork(self) -> Self:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._scales_L2N = self._scales_L2N.clone()
        return other

    def to(self, device: torch.device | str) -> None:
        self._scales_L2N = self._scales_L2N.to(device)


def kv_format(
    dtype: torch.dtype, storage: torch.dtype | None, *, num_layers: int, num_heads: int, device: torch.device | str
) -> KVFormat:
    """Return the format of a window. storage: None = `dtype`. Raises ValueError for a type that is not offered."""
    if storage is None or storage == dtype:
        return KVFormat(dtype)
    if storage != FP8:
        raise ValueError(f"keys and values can be kept as {dtype} or {FP8}, not {storage}")
    return ScaledFP8(dtype, num_layers, num_heads, device)


def kv_nbytes(dtype: torch.dtype, storage: torch.dtype | None, *, num_layers: int, num_heads: int, numel: int) -> int:
    """Return the bytes of `numel` stored numbers and their scales, as `kv_format` would keep them."""
    if storage is None or storage == dtype:
        return numel * dtype.itemsize
    return numel * storage.itemsize + num_layers * 2 * num_heads * torch.float32.itemsize
