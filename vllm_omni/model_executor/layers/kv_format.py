# SPDX-License-Identifier: Apache-2.0
"""How a `KVWindow` stores keys and values: as they are, or as FP8 (e4m3) with a scale per layer and head.

An e4m3 number has four significant bits over a range of 2^18, so a scale only has to bring the values into that range;
it does not decide the precision. It is a power of two (multiplying by it is exact) and leaves `_HEADROOM` above the
largest value of the session's first chunk, each pass over which sets it anew. Later values beyond that are cut to the
largest e4m3 number. The scale of a head depends on that head of that session alone, so results do not change with the
batch, the ranks or the order of chunks.
Held by tests/model_executor/layers/test_kv_format.py.
"""

# L layers, T tokens, N heads, H head dim

from typing import Self

import torch

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
_HEADROOM = 16.0
_TINIEST = 2.0**-10
"""Of a head whose values are all zero."""


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

    def store(self, layer: int, kind: int, x_TNH: torch.Tensor, target_TNH: torch.Tensor) -> None:
        """Write keys (kind 0) or values (1) into a part of the buffer."""
        target_TNH.copy_(self.encode(layer, kind, x_TNH))

    def encode(self, layer: int, kind: int, x_TNH: torch.Tensor) -> torch.Tensor:
        """Return keys (kind 0) or values (1) as the buffer holds them."""
        return x_TNH

    def load(self, layer: int, kind: int, stored_TNH: torch.Tensor) -> torch.Tensor:
        """Return a part of the buffer in `dtype`; possibly a view."""
        return stored_TNH

    def rounded(self, stored: torch.Tensor) -> torch.Tensor:
        """Return float numbers in units of the buffer as the buffer would hold them."""
        return stored.to(self.storage)

    def scales(self) -> torch.Tensor | None:
        """[L, 2, N] fp32 by which the buffer's numbers are to be multiplied; None = 1."""
        return None

    def take_scales(self, other: Self) -> None:
        """Use another window's scales: its buffer is copied into this one's."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """A snapshot's tensors beside the buffer, by name."""
        return {}

    def fork(self) -> "KVFormat":
        return self

    def to(self, device: torch.device | str) -> None:
        pass


class ScaledFP8(KVFormat):
    """See the module docstring."""

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
            self._scales_L2N[layer, kind] = torch.exp2(torch.ceil(torch.log2(largest_N * (_HEADROOM / _LARGEST))))

    def encode(self, layer: int, kind: int, x_TNH: torch.Tensor) -> torch.Tensor:
        return (x_TNH / self._scale(layer, kind)).clamp_(-_LARGEST, _LARGEST).to(FP8)

    def load(self, layer: int, kind: int, stored_TNH: torch.Tensor) -> torch.Tensor:
        return stored_TNH.to(self.dtype).mul_(self._scale(layer, kind))

    def _scale(self, layer: int, kind: int) -> torch.Tensor:
        return self._scales_L2N[layer, kind].unsqueeze(-1).to(self.dtype)

    def rounded(self, stored: torch.Tensor) -> torch.Tensor:
        return stored.clamp(-_LARGEST, _LARGEST).to(FP8)

    def scales(self) -> torch.Tensor | None:
        return self._scales_L2N

    def take_scales(self, other: KVFormat) -> None:
        scales = other.scales()
        assert scales is not None
        self._scales_L2N.copy_(scales)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"kv.scales": self._scales_L2N}

    def fork(self) -> "ScaledFP8":
        other = object.__new__(ScaledFP8)
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
