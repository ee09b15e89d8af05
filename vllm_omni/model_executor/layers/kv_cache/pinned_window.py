# SPDX-License-Identifier: Apache-2.0
"""`PinnedWindow`: a `KVWindow` with pinned tokens and a configurable rotary distance between them
and the frames.

Pinned tokens, for example those of reference images, are visible to every chunk. The keys of frames
are rotated by absolute positions, so the distance to the pinned keys would grow without bound,
whereas the network was trained on short distances. To give frame f the position f - base, the
pinned keys are rotated forward by the base, while the frames' keys do not change. The result is the
same as with rotated frames, because attention depends only on position differences.

The first chunk's pinned keys are stored separately. The pinned part of the buffer is a copy that
`place_pinned` computes from them. As a result, an abandoned chunk needs no cleanup, and rounding
errors do not accumulate over a long session.
"""

# L layers, T pinned tokens, N heads, H head dim, C temporal channels

from typing import Any, Self

import torch

from vllm_omni.model_executor.layers.attention.rope import temporal_frequencies
from vllm_omni.model_executor.layers.kv_cache.window import KVWindow
from vllm_omni.tensors.saved import SavedTensors


class PinnedWindow(KVWindow):
    """A `KVWindow` with pinned tokens; see the module docstring.

    Args:
        window: Arguments for `KVWindow`, including `pinned_tokens`.
    """

    def __init__(self, **window: Any) -> None:
        super().__init__(**window)
        layers, _, _, heads, head_dim = self.buffer.shape
        self.pinned_keys = self.buffer.new_zeros(layers, self.pinned_tokens, heads, head_dim)
        """The pinned tokens' keys as written by the first chunk, in the buffer's format."""
        self.base = 0
        """Number of frame positions by which the pinned keys in the buffer are rotated forward."""
        self._frequencies = temporal_frequencies(head_dim)

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.pinned_keys.nbytes

    def place_pinned(self, base: int) -> None:
        """Rotate the pinned keys so that frame f appears at position f - `base`.

        Call this method before a chunk's first forward pass. The first chunk has base 0.
        """
        if base == self.base or not self.committed_frames:
            return
        self.base = base
        if not self.pinned_keys.numel():
            return
        angles_C = base * self._frequencies
        cos, sin = (x.float().to(self.device) for x in (angles_C.cos(), angles_C.sin()))
        pairs = 2 * len(angles_C)
        for source, target in zip(self.pinned_keys, self.buffer[:, 0], strict=True):
            even, odd = source[..., :pairs].float().unflatten(-1, (-1, 2)).unbind(-1)
            turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
            target[: self.pinned_tokens, :, :pairs].copy_(self.format.quantized(turned.flatten(-2)))

    def commit(self, end_frame: int, *, retained_sinks: bool = False) -> None:
        if self.committed_frames == 0:
            self.pinned_keys.copy_(self.buffer[:, 0, : self.pinned_tokens])
            self.base = 0
        super().commit(end_frame, retained_sinks=retained_sinks)

    def tensors(self, next_frames: int) -> dict[str, torch.Tensor]:
        named = super().tensors(next_frames)
        if not self.committed_frames or not self.pinned_tokens:
            return named
        values = self.buffer[:, 1, : self.pinned_tokens]
        return {**named, "kv.pinned_keys": self.pinned_keys, "kv.pinned_values": values}

    def restore(self, saved: SavedTensors, committed_frames: int, next_frames: int) -> None:
        super().restore(saved, committed_frames, next_frames)
        if committed_frames and self.pinned_tokens:
            saved.read_tensors()
            self.buffer[:, 0, : self.pinned_tokens].copy_(self.pinned_keys)
        self.base = 0

    def fork(self) -> Self:
        other = super().fork()
        other.pinned_keys = self.pinned_keys.clone()
        return other

    def to(self, device: torch.device | str) -> None:
        super().to(device)
        self.pinned_keys = self.pinned_keys.to(device)

    def close(self) -> None:
        super().close()
        self.pinned_keys = self.pinned_keys.new_empty(0)


def pinned_extra_nbytes(
    *,
    num_layers: int,
    pinned_tokens: int,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    storage: torch.dtype | None = None,
) -> int:
    """Return how many more bytes a `PinnedWindow` uses than a `KVWindow` of the same sizes."""
    itemsize = (storage or dtype).itemsize
    return num_layers * pinned_tokens * num_heads * head_dim * itemsize
