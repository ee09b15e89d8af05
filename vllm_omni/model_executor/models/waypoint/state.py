# SPDX-License-Identifier: Apache-2.0
"""State of a Waypoint session (K/V ring buffers) and working set of a chunk.

Local layers retain the newest frames. Global layers retain every `dilation`-th frame of a longer
window. The K/V of a frame are written to slots that no earlier frame reads, so an aborted frame
does not change the session. The keys that a frame attends to are always at the beginning of a
buffer. The slot of a frame and the number of its keys are tensors on the device (`FrameSlot`), so
one CUDA graph serves all frames of a stream.

A chunk is one latent frame. If there is a start image, the first chunk of a session also contains
the latent frame of this image. An image in a later chunk is not supported, because it would
overwrite the slot of a frame that is needed again if the chunk is aborted.
"""

# T tokens of a frame, N key/value heads, H head dim, C = H/2 channel pairs, K kinds of ring buffers

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_omni.model_executor.device_async import to_device
from vllm_omni.model_executor.layers.kv_cache.window import KVWindow
from vllm_omni.model_executor.layers.kv_cache.window_set import WindowSet
from vllm_omni.model_executor.models.waypoint.config import WaypointConfig
from vllm_omni.model_executor.streaming.session import (
    SessionValue,
    StreamingChunk,
    StreamingSession,
)
from vllm_omni.outputs import RequestFailed

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Rotary tables (cos, sin) of a frame's tokens, fp32 [T, C]."""

# -- ring buffers --------------------------------------------------------------------------------


class FrameWindow(KVWindow):
    """A window with the K/V of the current frame and of the earlier frames whose indices are
    divisible by `dilation`.

    A retained frame overwrites the slot of the frame that it evicts, and it does not attend to the
    evicted frame. Every other frame uses the slot after the retained frames while it is the current
    frame.

    Args:
        window_frames: Number of frames that the window covers.
        dilation: Distance between retained frames: every `dilation`-th frame is retained.
        window: Other arguments of `KVWindow`.
    """

    def __init__(self, *, window_frames: int, dilation: int, **window: Any) -> None:
        retained = window_frames // dilation
        super().__init__(
            window_frames=retained, sink_frames=0, spare_frames=int(dilation > 1), **window
        )
        self.dilation = dilation

    def _num_retained(self, frame: int) -> int:
        """Return the number of slots that contain retained frames after `frame` has been
        written.
        """
        return min(frame // self.dilation + 1, self.window_frames)

    def slot(self, frame: int) -> int:
        if frame % self.dilation:
            return self._num_retained(frame)
        return frame // self.dilation % self.window_frames

    def visible_frames(self, end_frame: int) -> list[int]:
        if end_frame == 0:
            return []
        frame = end_frame - 1
        newest = frame // self.dilation
        retained = [
            self.dilation * index
            for index in range(newest - self._num_retained(frame) + 1, newest + 1)
        ]
        return [*retained, frame] if frame % self.dilation else retained

    def num_keys(self, frame: int) -> int:
        """Return the number of keys that `frame` attends to. These keys are at the beginning of the
        buffer.
        """
        return (self._num_retained(frame) + (frame % self.dilation > 0)) * self.tokens_per_frame

    def _span(self, frames: range) -> slice | None:
        return slice(0, self.num_keys(frames.stop - 1))


@dataclass(frozen=True)
class FrameSlot:
    """The slot of a frame in the ring buffers, as tensors on the device."""

    tokens_KT: torch.Tensor
    """Slots of the frame's tokens in each kind of buffer, int64."""
    key_ranges_K2: torch.Tensor
    """Range of keys that the frame attends to in each kind of buffer, int32."""
    sets_scales: bool
    """Whether the scales of quantized K/V are computed from this frame."""


class FrameRings(WindowSet):
    """The ring buffers of a rank's layers: one for the local layers and one for the global layers.

    Args:
        config: Architecture of the network.
        layers: Indices of the rank's layers.
        window: Other arguments of `KVWindow`: heads, types and device.
    """

    def __init__(self, config: WaypointConfig, layers: range, **window: Any) -> None:
        common = {
            "tokens_per_frame": config.tokens_per_frame,
            "head_dim": config.head_dim,
            **window,
        }
        sizes = ((config.local_window, 1), (config.global_window, config.global_pinned_dilation))
        own = [
            [layer for layer in layers if config.is_global(layer) is kind] for kind in (False, True)
        ]
        self.layers = {
            layer: (kind, index) for kind in (0, 1) for index, layer in enumerate(own[kind])
        }
        local, spread = (
            FrameWindow(window_frames=frames, dilation=dilation, num_layers=len(held), **common)
            for held, (frames, dilation) in zip(own, sizes, strict=True)
        )
        super().__init__({"local.": local, "global.": spread})

    @property
    def rings(self) -> list[FrameWindow]:
        return [window for window in self.windows if isinstance(window, FrameWindow)]

    def window(self, layer: int) -> tuple[FrameWindow, int]:
        """Return the window of a layer, and the layer's index in it. `layer` is the index in the
        whole network.
        """
        kind, index = self.layers[layer]
        return self.rings[kind], index

    def frame_slot(self, frame: int) -> FrameSlot:
        """Return the slot of `frame`. Call this once per frame, because all passes of the frame use
        the same slot.
        """
        size = self.clean.tokens_per_frame
        tokens_KT = torch.tensor(
            [[window.slot(frame) * size] for window in self.rings]
        ) + torch.arange(size)
        ranges_K2 = torch.tensor(
            [[0, window.num_keys(frame)] for window in self.rings], dtype=torch.int32
        )
        sets_scales = frame == 0 and self.clean.format.scales is not None
        return FrameSlot(
            to_device(tokens_KT, self.device), to_device(ranges_K2, self.device), sets_scales
        )

    def attend(
        self,
        layer: int,
        q_TNH: torch.Tensor,
        k_TNH: torch.Tensor,
        v_TNH: torch.Tensor,
        slot: FrameSlot,
    ) -> torch.Tensor:
        """Write a frame's K/V for one layer, and return the attention output for the frame's
        queries.
        """
        window, index = self.window(layer)
        kind, _ = self.layers[layer]
        if slot.sets_scales:
            window.format.fit_scales(index, k_TNH, v_TNH)
        for part, x_TNH in enumerate((k_TNH, v_TNH)):
            stored = window.format.encode(index, part, x_TNH)
            _bytes(window.buffer[index, part]).index_copy_(0, slot.tokens_KT[kind], _bytes(stored))
        return window.format.attend(
            index, q_TNH, window.buffer[index], key_range=slot.key_ranges_K2[kind]
        )


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """View an FP8 tensor as bytes, because PyTorch has no indexed write for FP8."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


# -- the session -----------------------------------------------------------------------------------


class WaypointSession(StreamingSession[FrameRings, SessionValue]):
    """A Waypoint session: ring buffers and the decoder's cache."""

    def next_frames(self) -> range:
        return self.check_committed(self.window.committed_frames)

    def check_committed(self, committed_frames: int) -> range:
        """Check that there is one committed frame per chunk, and at most one more for a start
        image. Return the frame of the next chunk.
        """
        if committed_frames - self.chunk_index not in (0, 1):
            raise RequestFailed(
                "invalid_snapshot", "the snapshot's chunks and frames do not fit together"
            )
        return range(committed_frames, committed_frames + 1)


@dataclass(eq=False, kw_only=True)
class WaypointChunk(StreamingChunk[FrameRings, SessionValue]):
    """One chunk in flight: one latent frame, preceded by the latent frame of a start image if there
    is one.

    `latents` contains the latents of the last frame.
    """

    controls: torch.Tensor
    """Controls of the chunk, fp32 [buttons + 3] on the host."""
    ropes: Sequence[Rotation] = ()
    """Rotary tables of each frame in the chunk."""
    slots: Sequence[FrameSlot] = ()
    """Slot of each frame in the chunk."""
    image: torch.Tensor | None = None
    """Latent of the start image, fp32 [C, h, w], or None if the chunk has no image."""
    terms: torch.Tensor | None = None
    """Result of `WaypointTransformer.controls`, computed before the first pass."""

    def frame_index(self, step: int) -> int:
        """Return which frame pass `step` computes, as an index within the chunk. The first pass
        computes the start image, if there is one.
        """
        return min(step, len(self.frames) - 1)

    def latents_at(self, step: int) -> torch.Tensor:
        """Return the input latents [C, h, w] of pass `step`."""
        return self.latents[:, 0] if self.image is None or step else self.image

    def denoise_index(self, step: int) -> int | None:
        given = len(self.frames) - 1
        return super().denoise_index(step - given) if step >= given else None
