# SPDX-License-Identifier: Apache-2.0
"""`KVWindow`: one session's K/V cache for this rank's layers, consisting of sink frames and a ring
buffer.

A session's first `sink_frames` frames are retained for its whole lifetime. Later frames share the
`window_frames - sink_frames` slots of a ring buffer. Frame f is in slot f if f < sink, otherwise in
slot sink + (f - sink) % (window - sink). Everything else follows from frame indices, so the only
state is the number of committed frames:

- A chunk writes into its own slots at every denoise step. These slots previously held frames that
  neither this chunk nor a later chunk may see, so an abandoned chunk needs no cleanup.
- `spare_frames` makes the ring buffer longer than the visible window by the number of frames that
  chunks may write ahead of the oldest uncommitted chunk. All frames that the oldest uncommitted
  chunk sees are therefore still present if that chunk is run again.
- A chunk [a, b) sees slots [0, b) while b <= window, and all slots afterwards. Attention does not
  depend on the key order, because positions are encoded by rotating the keys. The ring buffer can
  therefore be read in place: nothing is copied, moved or masked. With spare frames, a full window
  is copied into the order that it would have without spare frames, so results are bitwise identical
  with and without spare frames.

Each chunk sees exactly the keys that it would see in the original code, which shifts its buffer to
the left instead of using a ring buffer. For comparison, `chronological`
(`testing/parity/rollouts.py`) rebuilds that buffer. `sink_frames == window_frames` means global
attention: nothing is evicted, and a session that outgrows its buffer is refused.

Pinned tokens, for example those of reference images, precede the frame slots. The session's first
chunk provides the pinned tokens before the tokens of its frames, and every chunk sees the pinned
tokens (`PinnedWindow`).

`quantized_storage.py` defines how the buffer stores keys and values.
"""

# T tokens of a chunk, S visible tokens, N heads, H head dim

from collections.abc import Hashable, Sequence
from typing import Protocol, Self

import torch

from vllm_omni.model_executor.device_async import to_device
from vllm_omni.model_executor.layers.attention.attention import stack
from vllm_omni.model_executor.layers.kv_cache.growing_buffer import grown_nbytes, page_bytes
from vllm_omni.model_executor.layers.kv_cache.memory_pool import MemoryPool, Ring
from vllm_omni.model_executor.layers.kv_cache.quantized_storage import (
    KVFormat,
    KVSlot,
    kv_format,
    kv_nbytes,
)
from vllm_omni.outputs import RequestFailed
from vllm_omni.tensors.saved import SavedTensors


class KVWindow:
    """K/V cache with a ring buffer, `[layers, 2, pinned_tokens + (window_frames + spare_frames) *
    tokens_per_frame, heads, head_dim]`.

    Args:
        num_layers: Number of layers on this rank.
        window_frames: Number of frames that a chunk can see, including its own and the sink frames.
        sink_frames: Number of the session's first frames that are never evicted.
        tokens_per_frame: Number of tokens per latent frame.
        num_heads: Number of heads on this rank.
        head_dim: Head width.
        dtype: Dtype of keys and values in `write` and `visible`.
        device: The buffer's device.
        storage: Dtype of the buffer. Default: `dtype`.
        max_attention_tokens: Maximum number of tokens that a chunk sees: the newest visible tokens,
            in chronological order. Sink frames are dropped first, as in the original code when its
            attention size is smaller than its cache size. Default: no limit.
        spare_frames: Number of additional slots for chunks written ahead of the oldest uncommitted
            chunk.
        rings: Pool that the window takes its memory from and that `close` returns it to. Default:
            the window allocates and frees its own memory.
        first_frames: Number of frames that have memory initially. `grow` allocates more memory, and
            `stop_growing` shortens the window to the allocated frames. Requires a window that
            evicts frames and has no spare frames. Default: all frames.
        pinned_tokens: Number of tokens before the first frame. Every chunk sees these tokens.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        window_frames: int,
        sink_frames: int,
        tokens_per_frame: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        storage: torch.dtype | None = None,
        max_attention_tokens: int | None = None,
        spare_frames: int = 0,
        rings: MemoryPool[Ring] | None = None,
        first_frames: int | None = None,
        pinned_tokens: int = 0,
    ) -> None:
        if not 0 <= sink_frames <= window_frames or window_frames < 1:
            raise ValueError(
                f"a KV window needs 0 <= sink_frames <= window_frames, got sink {sink_frames} "
                f"window {window_frames}"
            )
        self.window_frames = window_frames
        self.sink_frames = sink_frames
        self.ring_frames = window_frames - sink_frames
        self.tokens_per_frame = tokens_per_frame
        self.max_attention_tokens = max_attention_tokens
        # with global attention, no slot is ever overwritten
        self.spare_frames = spare_frames if sink_frames < window_frames else 0
        self.pinned_tokens = pinned_tokens
        assert not pinned_tokens or (self.spare_frames == 0 and max_attention_tokens is None)
        self.committed_frames = 0
        self.valid_from = 0
        grows = first_frames is not None and num_layers > 0
        assert not grows or (self.ring_frames and not self.spare_frames)
        shape = (
            num_layers,
            2,
            pinned_tokens + (window_frames + self.spare_frames) * tokens_per_frame,
            num_heads,
            head_dim,
        )

        def new_ring() -> Ring:
            stored = kv_format(
                dtype, storage, num_layers=num_layers, num_heads=num_heads, device=device
            )
            if grows:
                return Ring.growing(shape, stored, device, self._num_tokens(first_frames))
            return Ring(torch.zeros(shape, dtype=stored.storage, device=device), stored)

        self._rings = rings if num_layers else None
        self._device_type = torch.device(device).type
        sizes = torch.Size(shape), storage or dtype, torch.device(device), dtype, grows
        self._ring = new_ring() if self._rings is None else self._rings.take_memory(sizes, new_ring)
        self._ring.grow(self._num_tokens(first_frames))
        self._seen: tuple[int, tuple[int, ...]] | None = None

    @property
    def buffer(self) -> torch.Tensor:
        return self._ring.buffer

    @property
    def format(self) -> KVFormat:
        return self._ring.format

    @property
    def nbytes(self) -> int:
        return self._ring.nbytes

    @property
    def growing_nbytes(self) -> int:
        """Return the number of allocated bytes if the window grows with its session, otherwise
        0.
        """
        return 0 if self._ring.memory is None else self._ring.memory.nbytes

    @property
    def device(self) -> torch.device:
        return self.buffer.device

    def _num_tokens(self, num_frames: int | None) -> int:
        """Return the number of token slots that the first `num_frames` frames of the stream need,
        at most the window size. If `num_frames` is None, return the window size.
        """
        slots = self.window_frames + self.spare_frames
        frames = slots if num_frames is None else min(num_frames, slots)
        return self.pinned_tokens + self.tokens_per_frame * frames

    def missing_nbytes(self, end_frame: int) -> int:
        """Return the number of bytes that `grow(end_frame)` allocates."""
        return self._ring.missing_nbytes(self._num_tokens(end_frame))

    def grow(self, end_frame: int) -> None:
        """Allocate memory for all frames before `end_frame` that the window holds.

        Raises:
            torch.OutOfMemoryError: There is not enough memory. The window is unchanged.
        """
        self._ring.grow(self._num_tokens(end_frame))

    @property
    def held_frames(self) -> int:
        """Return the number of frames that have memory."""
        return (self._ring.num_tokens - self.pinned_tokens) // self.tokens_per_frame

    def stop_growing(self, window_frames: int, sink_frames: int) -> None:
        """Shorten the window to `window_frames` frames, including `sink_frames` sink frames. All of
        these frames must have memory.

        No frame has left the window yet, so frame f is in slot f, as in a window created with these
        sizes.
        """
        assert self.committed_frames <= window_frames <= self.held_frames
        self.window_frames, self.sink_frames = window_frames, sink_frames
        self.ring_frames = window_frames - sink_frames
        self._seen = None

    def slot(self, frame: int) -> int:
        """Return the slot that holds `frame` while the frame is visible."""
        if frame < self.sink_frames:
            return frame
        return self.sink_frames + (frame - self.sink_frames) % (
            self.ring_frames + self.spare_frames
        )

    def _slot_without_spares(self, frame: int) -> int:
        if frame < self.sink_frames:
            return frame
        return self.sink_frames + (frame - self.sink_frames) % self.ring_frames

    def check_frames(self, frames: range) -> None:
        """Raise `RequestFailed` if this window cannot serve a chunk with these `frames`."""
        if self.ring_frames == 0:
            if frames.stop > self.window_frames:
                raise RequestFailed(
                    "session_full",
                    f"global attention holds {self.window_frames} latent frames and this chunk "
                    "ends at "
                    f"{frames.stop}; start a new session or serve with a sliding window",
                )
        elif frames.stop - max(frames.start, self.sink_frames) > self.ring_frames:
            raise RequestFailed(
                "chunk_too_large",
                f"a chunk of {len(frames)} latent frames does not fit the {self.ring_frames} "
                "frames that a window of "
                f"{self.window_frames} leaves next to its {self.sink_frames} sink frames",
            )

    def write(self, layer: int, frames: range, k_TNH: torch.Tensor, v_TNH: torch.Tensor) -> None:
        """Write a chunk's keys and values into its slots, overwriting those of its earlier denoise
        steps.
        """
        if frames.start == 0:
            self.format.fit_scales(layer, k_TNH, v_TNH)
        for source, target in self._token_runs(frames):
            self.format.store(layer, k_TNH[source], v_TNH[source], self.buffer[layer, :, target])

    def write_slot(self, layer: int, frames: range) -> KVSlot | None:
        """Return the memory that `write` would fill, or None if that memory is not contiguous or
        `write` would also compute the scales.
        """
        runs, scales = self._token_runs(frames), self.format.layer_scales(layer)
        if len(runs) > 1 or (frames.start == 0 and scales is not None):
            return None
        ((_, tokens),) = runs
        return KVSlot(self.buffer[layer, :, tokens], scales)

    def quantized_ahead(self, frames: range) -> Self | None:
        """Return this window if the keys and values of chunk `frames` may be quantized before
        `write_quantized`, otherwise None.

        The result is None for a session's first chunk, because `scales` are computed from that
        chunk.
        """
        return self if frames.start > 0 and self.format.scales is not None else None

    @property
    def scales(self) -> torch.Tensor:
        """Return the divisors for quantization, which are fp32 powers of two.
        Shape: [layers, 2, heads].
        """
        assert self.format.scales is not None, "only a quantized window has scales"
        return self.format.scales

    def write_quantized(self, layer: int, frames: range, quantized_2TNH: torch.Tensor) -> None:
        """Write keys and values that were already divided by `scales` and quantized."""
        for source, target in self._token_runs(frames):
            self.format.store_quantized(quantized_2TNH[:, source], self.buffer[layer, :, target])

    def visible(self, layer: int, frames: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values `(k_SNH, v_SNH)` that chunk `frames` attends to, in slot
        order. The chunk must have been written.

        The tensors are views if the buffer stores them contiguously and in `dtype`.
        """
        k, v = self.format.load(layer, *self._seen_by(layer, frames))
        return k, v

    def attend(self, layer: int, frames: range, q_TNH: torch.Tensor) -> torch.Tensor:
        """Return attention for the queries of chunk `frames` over all keys that are `visible` to
        the chunk. The chunk must have been written.
        """
        stored_2SNH, tokens = self._seen_by(layer, frames)
        return self.format.attend(layer, q_TNH, stored_2SNH, tokens)

    def quantizes_queries(self, frames: range, num_queries: int) -> bool:
        """Return whether `attend` quantizes the queries of chunk `frames`. If so,
        `attend_quantized` may be called.
        """
        return self.format.quantizes_queries(num_queries, *self._seen_by(0, frames))

    def attend_quantized(self, layer: int, frames: range, q_TNH: torch.Tensor) -> torch.Tensor:
        """Return the result of `attend` in e4m3, for queries in e4m3.

        Call this method only if `quantizes_queries` returns True; see
        `fp8_attention.quantized_attention`.
        """
        return self.format.attend_quantized(q_TNH, *self._seen_by(layer, frames))

    def _seen_by(self, layer: int, frames: range) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a part of the buffer, and the positions of the tokens in it that chunk `frames`
        sees (None: all positions).
        """
        span = self._span(frames)
        if span is not None:
            return self.buffer[layer, :, span], None
        return self.buffer[layer], self._positions(self._seen_slots(frames.stop))

    def _span(self, frames: range) -> slice | None:
        """Return the slice of tokens that chunk `frames` sees, or None if they are not
        contiguous.
        """
        valid = self._num_tokens(min(frames.stop, self.window_frames))
        limit = self.max_attention_tokens
        if self.spare_frames and frames.stop > self.window_frames:
            return None
        if self.valid_from > self._oldest_ring_frame(frames.stop):
            return None
        if limit is None or limit >= valid:
            return slice(0, valid)
        # The slice is in slot order, which is chronological until the ring buffer wraps around.
        return slice(valid - limit, valid) if frames.stop <= self.window_frames else None

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that `write` and `attend` read and write in place."""
        return self._ring.buffers

    def graph_key(self, frames: range) -> Hashable:
        """Return a key that determines which kernels `write` and `attend` launch for chunk
        `frames`, and which slots they access.
        """
        span = self._span(frames)
        if span is not None:
            return tuple(self._runs(frames)), span.start, span.stop, frames.start == 0
        slots = self._seen_slots(frames.stop)
        self._positions(slots)  # cached now, because a capture cannot copy from the host
        return tuple(self._runs(frames)), slots, frames.start == 0

    def graph_kind(self, frames: range) -> Hashable:
        """Return a key that is the same for all chunks whose `write` and `attend` launch the same
        kernels, possibly with different slots.
        """
        span = self._span(frames)
        seen = None if span is None else span.stop - span.start
        return tuple(count for _, _, count in self._runs(frames)), seen, frames.start == 0

    def commit(self, end_frame: int, *, retained_sinks: bool = False) -> None:
        """Commit the frames before `end_frame` to the session. The clean-context pass must have
        written the latest keys and values of these frames.

        Args:
            end_frame: Index of the first frame that is not committed.
            retained_sinks: Whether `SinkWindow.retain_sinks` has already stored the committed sink
                frames.
        """
        self.committed_frames = end_frame

    def tensors(self, next_frames: int) -> dict[str, torch.Tensor]:
        """Return, by name, views `[layers, 2, tokens, N, H]` of all frames that the next chunk, of
        `next_frames` frames, can see.

        The other slots have no effect on later results.
        """
        end = self.committed_frames + next_frames
        size = self.tokens_per_frame
        live = [frame for frame in self.visible_frames(end) if frame < self.committed_frames]
        starts = {frame: self.pinned_tokens + self.slot(frame) * size for frame in live}
        named = {
            f"kv.frame{frame}": self.buffer[:, :, start : start + size]
            for frame, start in starts.items()
        }
        return {**named, **self.format.tensors()} if live else named

    def hide_before(self, frame: int) -> None:
        """Set `valid_from` so that later chunks see no frames in the ring buffer before `frame`.

        The frames before `frame` are no longer in the ring buffer. After this call, the caller must
        rewrite the frames from `frame` on.
        """
        self.valid_from, self._seen = frame, None

    def take_first_frames(self, other: Self, num_frames: int) -> None:
        """Copy the stream's first `num_frames` frames from another window of the same sizes."""
        part = slice(0, num_frames * self.tokens_per_frame)
        self.buffer[:, :, part].copy_(other.buffer[:, :, part])
        self.format.take_scales(other.format)

    def restore(self, saved: SavedTensors, committed_frames: int, next_frames: int) -> None:
        """Fill a new window with the tensors that `tensors(next_frames)` of another window
        returned.

        Raises:
            RequestFailed: The tensors do not match this window.
        """
        self.committed_frames = committed_frames
        self.grow(committed_frames)
        saved.fill(self.tensors(next_frames))

    def fork(self) -> Self:
        """Return an independent copy of this window."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        held, rings = self._ring, self._rings
        other._ring = (
            held.another() if rings is None else rings.take_memory(held.sizes, held.another)
        )
        other._ring.copy_from(held)
        return other

    def to(self, device: torch.device | str) -> None:
        """Move the keys and values to `device`.

        While the keys and values are on the host, their device memory is in the pool, so another
        session can use it and replay the CUDA graphs captured with it.
        """
        held, rings, device = self._ring, self._rings, torch.device(device)
        same_type = held.buffer.device.type == device.type
        if rings is None or held.memory is not None or same_type or not held.buffer.numel():
            self._ring = held.to(device)
            self._rings = None  # no CUDA graph was captured with the new memory
            return
        with torch.inference_mode():  # the memory was also allocated in inference mode
            if device.type == "cpu":
                self._ring = held.copy_on(device)
                rings.return_memory(held)
            else:
                self._ring = rings.take_memory(held.sizes_on(device), lambda: held.copy_on(device))
                self._ring.copy_from(held)

    def close(self) -> None:
        """Return the memory to the pool. Idempotent."""
        is_at_home = self.buffer.device.type == self._device_type
        if self._rings is not None and is_at_home and self.buffer.numel():
            self._rings.return_memory(self._ring)
        self._ring = Ring(self.buffer.new_empty(0), self.format)

    def _runs(self, frames: range) -> list[tuple[int, int, int]]:
        """Return (frame offset in the chunk, first slot, number of frames) for each run of
        consecutive slots.
        """
        runs: list[tuple[int, int, int]] = []
        for offset, frame in enumerate(frames):
            slot = self.slot(frame)
            if runs and slot == runs[-1][1] + runs[-1][2]:
                runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
            else:
                runs.append((offset, slot, 1))
        return runs

    def _token_runs(self, frames: range) -> list[tuple[slice, slice]]:
        """Return (tokens of the chunk, tokens of the buffer) for each run of consecutive slots.

        The first run of a session's first chunk includes the pinned tokens.
        """
        size, pinned = self.tokens_per_frame, self.pinned_tokens
        lead = pinned if frames.start == 0 else 0
        runs = [
            (
                slice(lead + offset * size, lead + (offset + count) * size),
                slice(pinned + slot * size, pinned + (slot + count) * size),
            )
            for offset, slot, count in self._runs(frames)
        ]
        if lead:
            (source, target), *others = runs
            runs = [(slice(0, source.stop), slice(0, target.stop)), *others]
        return runs

    def visible_frames(self, end_frame: int) -> list[int]:
        """Return the frames that a chunk ending at `end_frame` sees, oldest first."""
        ring = range(max(self.valid_from, self._oldest_ring_frame(end_frame)), end_frame)
        return [*range(min(self.sink_frames, end_frame)), *ring]

    def _oldest_ring_frame(self, end_frame: int) -> int:
        """Return the first frame after the sink frames that a chunk ending at `end_frame` may
        see.
        """
        return max(self.sink_frames, end_frame - self.ring_frames)

    def token_positions(self, slots: list[int]) -> torch.Tensor:
        """Return the token positions of `slots`, on the buffer's device."""
        size = self.tokens_per_frame
        starts = torch.tensor(slots, dtype=torch.int64).unsqueeze(1) * size + self.pinned_tokens
        return to_device((starts + torch.arange(size)).flatten(), self.buffer.device)

    def _seen_slots(self, end_frame: int) -> tuple[int, ...]:
        """Return the slots that a chunk ending at `end_frame` sees, oldest first.

        With spare frames, the slots are in the order that a window without spare frames would have.
        The result is cached for one chunk, because every layer needs it.
        """
        if self._seen is None or self._seen[0] != end_frame:
            frames = self.visible_frames(end_frame)
            if self.spare_frames and self.max_attention_tokens is None:
                frames.sort(key=self._slot_without_spares)
            self._seen = end_frame, tuple(self.slot(frame) for frame in frames)
        return self._seen[1]

    def _positions(self, slots: tuple[int, ...]) -> torch.Tensor:
        """Return the last `max_attention_tokens` entries of `token_positions(slots)`, cached with
        the ring buffer.
        """
        limit, orders = self.max_attention_tokens, self._ring.orders
        if (slots, limit) not in orders:
            order = self.token_positions(list(slots))
            orders[slots, limit] = order if limit is None else order[-limit:]
        return orders[slots, limit]


def kv_window_nbytes(
    *,
    num_layers: int,
    window_frames: int,
    tokens_per_frame: int,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    storage: torch.dtype | None = None,
    first_frames: int | None = None,
    pinned_tokens: int = 0,
    device: torch.device | str = "cpu",
) -> int:
    """Return the size in bytes of a new `KVWindow` with these sizes.

    `window_frames` includes the spare frames. `device` determines the page size of a window that
    grows.
    """
    tokens = pinned_tokens + window_frames * tokens_per_frame
    numel = 2 * num_layers * tokens * num_heads * head_dim
    if first_frames is not None:
        shape = (num_layers, 2, tokens, num_heads, head_dim)
        itemsize = (storage or dtype).itemsize
        num_tokens = pinned_tokens + first_frames * tokens_per_frame
        pages = grown_nbytes(shape, itemsize, num_tokens, page_bytes(torch.device(device)))
        numel = pages // itemsize
    return kv_nbytes(dtype, storage, num_layers=num_layers, num_heads=num_heads, numel=numel)


# -- attention over windows ------------------------------------------------------------------------


class KVView(Protocol):
    """The `KVWindow` operations that attention uses: write the K/V of a chunk, then attend to the
    visible frames.
    """

    def write(
        self, layer: int, frames: range, k_TNH: torch.Tensor, v_TNH: torch.Tensor
    ) -> None: ...

    def write_slot(self, layer: int, frames: range) -> KVSlot | None: ...

    def attend(self, layer: int, frames: range, q_TNH: torch.Tensor) -> torch.Tensor: ...

    def quantized_ahead(self, frames: range) -> KVWindow | None: ...


class WindowItem(Protocol):
    """One batch entry: a chunk with the absolute frame indices `frames`, and its window."""

    @property
    def frames(self) -> range: ...
    @property
    def window(self) -> KVView: ...


class WindowAttention:
    """Self-attention of a batch over its K/V windows, on a rank that has all tokens for its heads.

    `HeadExchange` is the version for sequence-parallel ranks.
    """

    def buffers(self, items: Sequence[WindowItem], layer: int) -> list[KVSlot] | None:
        """Return the memory for each batch entry's K/V in `layer`, or None if the caller cannot
        write there directly.

        The caller writes K/V there and calls `attend_to_written`. If the result is None, the caller
        passes K/V to `attend` instead.
        """
        buffers = [row.window.write_slot(layer, row.frames) for row in items]
        known = [position for position in buffers if position is not None]
        return known if len(known) == len(items) else None

    def attend_to_written(
        self, rows: Sequence[WindowItem], layer: int, q_BTNH: torch.Tensor
    ) -> torch.Tensor:
        """Return the attention output, [B, T, N, H], for windows that already hold the batch's K/V
        of `layer`.
        """
        return stack(
            [
                row.window.attend(layer, row.frames, q_TNH)
                for row, q_TNH in zip(rows, q_BTNH, strict=True)
            ]
        )

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
        for row, k_TNH, v_TNH in zip(items, k_BTNH, v_BTNH, strict=True):
            row.window.write(layer, row.frames, k_TNH, v_TNH)
        return None if write_only else self.attend_to_written(items, layer, q_BTNH)
