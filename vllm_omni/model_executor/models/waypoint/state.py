# SPDX-License-Identifier: Apache-2.0
"""State of a Waypoint session: K/V ring buffers and a chunk's working set.

Local layers retain the newest frames, global layers every `dilation`-th frame of a longer window.
The K/V of a frame are written to slots that no earlier frame reads, so an aborted frame does not
change the session. The keys that a frame attends to are always the first ones in a buffer. The slot
of a frame and its number of keys are tensors on the device (`FrameSlot`), so that one CUDA graph
serves all frames of a stream.

A chunk is one latent frame. The first chunk of a session also has the latent frame of the start
image, if there is one. An image in a later chunk is not supported, because it would overwrite the
slot of a frame that is needed again if the chunk is aborted.
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
"""(cos, sin) of a frame's tokens, fp32 [T, C]."""

# -- ring buffers --------------------------------------------------------------------------------


class FrameWindow(KVWindow):
    """K/V of the frames with an index that is a multiple of `dilation`, and of the current frame.

    A retained frame overwrites the slot of the frame that it evicts, which it does not attend to.
    All other frames use the slot after the retained ones while they are current.

    Args:
        window_frames: Number of frames covered by the window.
        dilation: Every n-th frame is retained.
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
        """Return how many keys `frame` attends to. They are the first ones in the buffer."""
        return (self._num_retained(frame) + (frame % self.dilation > 0)) * self.tokens_per_frame

    def _span(self, frames: range) -> slice | None:
        return slice(0, self.num_keys(frames.stop - 1))


@dataclass(frozen=True)
class FrameSlot:
    """Slot of a frame in the ring buffers, on the device."""

    tokens_KT: torch.Tensor
    """Slots of the frame's tokens in each kind of buffer, int64."""
    key_ranges_K2: torch.Tensor
    """Range of keys that the frame attends to in each kind of buffer, int32."""
    sets_scales: bool
    """Whether the scales of quantized K/V are computed from this frame."""


class FrameRings(WindowSet):
    """The ring buffers of a rank's layers: one of the local and one of the global layers.

    Args:
        config: Architecture.
        layers: Layers of the rank.
        window: Heads, types and device for `KVWindow`.
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
        whole network."""
        kind, index = self.layers[layer]
        return self.rings[kind], index

    def frame_slot(self, frame: int) -> FrameSlot:
        """Return the slot of `frame`. It is created once for all passes of the frame."""
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
        """Write the K/V of a frame in a layer and return the attention of its queries."""
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
    """View FP8 as bytes, because PyTorch has no indexed write for FP8."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


# -- the session -----------------------------------------------------------------------------------


class WaypointSession(StreamingSession[FrameRings, SessionValue]):
    """A Waypoint session: ring buffers and the decoder's cache."""

    def next_frames(self) -> range:
        return self.check_committed(self.window.committed_frames)

    def check_committed(self, committed_frames: int) -> range:
        """Check that the number of frames is one per chunk, plus one for a start image."""
        if committed_frames - self.chunk_index not in (0, 1):
            raise RequestFailed(
                "invalid_snapshot", "the snapshot's chunks and frames do not fit together"
            )
        return range(committed_frames, committed_frames + 1)


@dataclass(eq=False, kw_only=True)
class WaypointChunk(StreamingChunk[FrameRings, SessionValue]):
    """One chunk in flight: one latent frame, preceded by that of a start image if there is one.

    `latents` are those of the last frame.
    """

    controls: torch.Tensor
    """fp32 [buttons + 3] on the host."""
    ropes: Sequence[Rotation] = ()
    """Rotary tables of each frame."""
    slots: Sequence[FrameSlot] = ()
    """Slot of each frame."""
    image: torch.Tensor | None = None
    """Latent of the start image, fp32 [C, h, w]. None: the chunk has no image."""
    terms: torch.Tensor | None = None
    """Result of `WaypointTransformer.controls`, computed before the first pass."""

    def frame_index(self, step: int) -> int:
        """Return the index of the frame that pass `step` computes. An image uses the first pass."""
        return min(step, len(self.frames) - 1)

    def latents_at(self, step: int) -> torch.Tensor:
        """Return the input latents [C, h, w] of pass `step`."""
        return self.latents[:, 0] if self.image is None or step else self.image

    def denoise_index(self, step: int) -> int | None:
        given = len(self.frames) - 1
        return super().denoise_index(step - given) if step >= given else None
