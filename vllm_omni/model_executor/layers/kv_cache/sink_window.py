# SPDX-License-Identifier: Apache-2.0
"""`SinkWindow`: a `KVWindow` for endless streams. The sink frames move along with the stream and
may be replaced by newer frames.

Permanent sink frames cause two problems in a long stream. First, the rotary distance between sink
frames and current frames grows without bound, whereas the network was trained on short distances.
Second, the scene changes until the current frames no longer resemble the sink frames.

- Moving: a chunk sees sink frames as if they were directly before the oldest frame in its window.
  Keys are stored rotated for their original frame, so moving them is an additional rotation of the
  temporal channels. As long as the stream fits in its window, the rotation is zero.
- Refreshing: a frame that is about to leave the ring buffer may replace the sink frame that it
  resembles least, separately in each layer. If the two frames' similarity (the cosine of the token
  means, averaged over K and V) is below a threshold, the sink frame is replaced. No frame is ever
  visible twice, and sink frames that have not been written are not compared. The decision stays on
  the device, so the host does not wait for it.

The original sink frames are stored separately (`sinks`). The sink slots in the buffer are a copy
that `open` computes for each chunk, so an abandoned chunk needs no cleanup. Refreshes by
uncommitted chunks are kept in a list and applied to that copy: a chunk in flight sees the refreshes
of its predecessors in flight. A chunk that restarts drops its own refreshes and those of its
successors.
"""

# L layers, S sink frames, T tokens of a frame, N heads, H head dim, C temporal channels

from typing import Any, Self

import torch

from vllm_omni.model_executor.layers.attention.rope import temporal_frequencies
from vllm_omni.model_executor.layers.kv_cache.window import KVWindow
from vllm_omni.tensors.saved import SavedTensors


class SinkWindow(KVWindow):
    """A `KVWindow` with moving or refreshed sink frames; see the module docstring.

    Args:
        moving: Whether sink frames move along with the window.
        refresh_threshold: Similarity below which a sink frame is refreshed. Requires chunks of one
            frame. None: sink frames are never refreshed.
        window: Arguments for `KVWindow`.
    """

    def __init__(
        self, *, moving: bool, refresh_threshold: float | None = None, **window: Any
    ) -> None:
        super().__init__(**window)
        self.moving = moving
        self.refresh_threshold = refresh_threshold
        layers, kv, _, heads, head_dim = self.buffer.shape
        retained = self.sink_frames * self.tokens_per_frame
        self.sinks = self.buffer.new_zeros(layers, kv, retained, heads, head_dim)
        frames = torch.arange(self.sink_frames, device=self.buffer.device)
        self.sink_at = frames.expand(layers, -1).contiguous()
        """Index of the frame that each sink frame was taken from. Shape: [L, S]."""
        self._frequencies = temporal_frequencies(head_dim).to(self.buffer.device)
        self._slot_order = False
        """Whether the sink slots in the buffer differ from the original sink frames."""
        self._renewals: tuple[tuple[int, torch.Tensor], ...] = ()
        """Decisions of uncommitted chunks, one per frame: (end_frame, mask [L, S] of the sink
        frames to refresh).
        """

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.sinks.nbytes

    def open(self, frames: range) -> None:
        """Write the sink slots for chunk `frames`. Call this method once per chunk, before the
        chunk's first forward pass. Without sink frames, the call has no effect.
        """
        if frames.start < self.sink_frames:
            if self._slot_order:  # a later chunk wrote the sink slots; this one restarts
                own = slice(0, frames.start * self.tokens_per_frame)
                self.buffer[:, :, own].copy_(self.sinks[:, :, own])
                self._slot_order = False
            return
        if self.sink_frames == 0:
            return
        shift = max(0, frames.stop - self.window_frames) if self.moving else 0
        if shift == 0 and self.refresh_threshold is None and not self._slot_order:
            return
        self._slot_order = shift > 0 or bool(self._renewals)
        self._renewals = tuple(renewal for renewal in self._renewals if renewal[0] <= frames.start)
        retained = self.sinks.shape[2]
        placed, sink_at = self.buffer[:, :, :retained], self.sink_at
        placed.copy_(self.sinks)
        for end_frame, renewed_LS in self._renewals:
            frame = end_frame - self.ring_frames
            sink_at = torch.where(renewed_LS, frame, sink_at)
            self._put(placed, frame, renewed_LS)
        if self.moving and (shift or self.refresh_threshold is not None):
            targets = torch.arange(self.sink_frames, device=self.buffer.device) + shift
            self._rotate_sinks(targets - sink_at)

    def _rotate_sinks(self, distances_LS: torch.Tensor) -> None:
        """Rotate the sink keys in the buffer by `distances_LS` frames, layer by layer."""
        pairs = 2 * len(self._frequencies)
        angles_LSC = distances_LS.double().unsqueeze(-1) * self._frequencies
        cos_LSC, sin_LSC = angles_LSC.cos().float(), angles_LSC.sin().float()
        for keys, cos_SC, sin_SC in zip(self.buffer[:, 0], cos_LSC, sin_LSC, strict=True):
            # [S, T, N, 2C]
            turned = keys[: self.sinks.shape[2], :, :pairs].unflatten(0, (self.sink_frames, -1))
            even, odd = turned.float().unflatten(-1, (-1, 2)).unbind(-1)
            cos, sin = cos_SC[:, None, None], sin_SC[:, None, None]
            placed = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(
                -2
            )
            turned.copy_(self.format.quantized(placed))

    def resemblance(self, end_frame: int) -> torch.Tensor | None:
        """Return the sums needed to compare every sink frame with the frame that is about to leave
        the window, or None if no frames are compared.

        The compared frame is the one that leaves the window after a chunk that ends at `end_frame`.
        The result is [L, S, 2, 3]: for K and for V, the dot product of the two frames and the
        square of each frame, summed over this rank's heads. Ranks that shard the heads sum their
        results before `decide`.
        """
        leaving = end_frame - self.ring_frames
        if self.refresh_threshold is None or leaving < self.sink_frames:
            return None
        # [L, 2, S, N * H]
        mean_LKS = self._token_means(self.sinks.unflatten(2, (self.sink_frames, -1)))
        for end, renewed_LS in self._renewals:
            if end < end_frame:
                newer_LK = self._token_means(self._frame(end - self.ring_frames).unsqueeze(2))
                mean_LKS = torch.where(renewed_LS[:, None, :, None], newer_LK, mean_LKS)
        frame_LK = self._token_means(self._frame(leaving).unsqueeze(2))
        sums = (mean_LKS * frame_LK, mean_LKS.square(), frame_LK.square().expand_as(mean_LKS))
        return torch.stack([values.sum(-1) for values in sums], dim=-1).transpose(1, 2)

    def _token_means(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the mean of each frame's tokens: stored [L, 2, S, T, N, H] -> fp32 [L, 2, S, N *
        H].
        """
        mean_LKSNH, scales_LKN = stored.float().mean(3), self.format.scales
        if scales_LKN is not None:
            mean_LKSNH = mean_LKSNH * scales_LKN[:, :, None, :, None]
        return mean_LKSNH.flatten(3)

    def decide(self, end_frame: int, sums_LSK3: torch.Tensor) -> None:
        """Decide which sink frames `commit(end_frame)` refreshes, based on the results of
        `resemblance` summed over all ranks that shard the heads.
        """
        assert self.refresh_threshold is not None
        dot, ours, theirs = sums_LSK3.unbind(-1)
        similarity_LS = (dot * torch.rsqrt((ours * theirs).clamp_min(1e-30))).mean(-1)
        least, index = similarity_LS.min(dim=-1, keepdim=True)
        renewed_LS = torch.zeros_like(similarity_LS, dtype=torch.bool).scatter_(1, index, True)
        earlier = (renewal for renewal in self._renewals if renewal[0] < end_frame)
        self._renewals = (*earlier, (end_frame, renewed_LS & (least < self.refresh_threshold)))

    def commit(self, end_frame: int, *, retained_sinks: bool = False) -> None:
        if self.committed_frames < self.sink_frames and not retained_sinks:
            self.retain_sinks(range(self.committed_frames, end_frame))
        for end, renewed_LS in self._renewals:
            if end == end_frame:
                self._renew(end_frame - self.ring_frames, renewed_LS)
        self._renewals = tuple(renewal for renewal in self._renewals if renewal[0] > end_frame)
        super().commit(end_frame)

    def retain_sinks(self, frames: range) -> None:
        """Store the sink frames among `frames`, with their current values from the buffer."""
        part = slice(
            frames.start * self.tokens_per_frame,
            min(frames.stop, self.sink_frames) * self.tokens_per_frame,
        )
        self.sinks[:, :, part].copy_(self.buffer[:, :, part])

    def _renew(self, frame: int, renewed_LS: torch.Tensor) -> None:
        self._put(self.sinks, frame, renewed_LS)
        self.sink_at = torch.where(renewed_LS, frame, self.sink_at)

    def _put(self, target: torch.Tensor, frame: int, renewed_LS: torch.Tensor) -> None:
        """Overwrite the refreshed sink frames in `target` [L, 2, S * T, N, H] with K and V of a
        frame in the ring buffer.
        """
        sinks = target.unflatten(2, (self.sink_frames, -1))  # a view [L, 2, S, T, N, H]
        sinks.copy_(
            torch.where(
                renewed_LS[:, None, :, None, None, None], self._frame(frame).unsqueeze(2), sinks
            )
        )

    def _frame(self, frame: int) -> torch.Tensor:
        """Return K and V of one frame in the ring buffer. Shape: [L, 2, T, N, H]."""
        start = self.slot(frame) * self.tokens_per_frame
        return self.buffer[:, :, start : start + self.tokens_per_frame]

    def tensors(self, next_frames: int) -> dict[str, torch.Tensor]:
        named = super().tensors(next_frames)
        size = self.tokens_per_frame
        for frame in range(min(self.sink_frames, self.committed_frames)):
            named[f"kv.frame{frame}"] = self.sinks[:, :, frame * size : (frame + 1) * size]
        if self.refresh_threshold is not None:
            named["kv.sink_at"] = self.sink_at
        return named

    def restore(self, saved: SavedTensors, committed_frames: int, next_frames: int) -> None:
        super().restore(saved, committed_frames, next_frames)
        saved.read_tensors()
        # Attention reads the sink frames from here if `open` does nothing.
        self.buffer[:, :, : self.sinks.shape[2]].copy_(self.sinks)

    def fork(self) -> Self:
        other = super().fork()
        other.sinks = self.sinks.clone()
        other.sink_at = self.sink_at.clone()
        return other

    def to(self, device: torch.device | str) -> None:
        super().to(device)
        self.sinks, self.sink_at = self.sinks.to(device), self.sink_at.to(device)
        self._frequencies = self._frequencies.to(device)
        # Called between chunks, because a chunk in flight would not survive the move.
        self._renewals = ()

    def close(self) -> None:
        super().close()
        self.sinks = self.sinks.new_empty(0)
        self._renewals = ()


def sink_window_extra_nbytes(
    *,
    num_layers: int,
    sink_frames: int,
    tokens_per_frame: int,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    storage: torch.dtype | None = None,
) -> int:
    """Return how many more bytes a `SinkWindow` uses than a `KVWindow` of the same sizes."""
    itemsize = (storage or dtype).itemsize
    return 2 * num_layers * sink_frames * tokens_per_frame * num_heads * head_dim * itemsize
