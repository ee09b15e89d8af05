# SPDX-License-Identifier: Apache-2.0
"""A Waypoint session: its keys and values, and a chunk's working set.

Local layers keep the newest frames, global layers every `dilation`-th frame of a longer stretch. A
frame's K/V are written where only later passes of the same frame read them, so that an abandoned
frame leaves no trace, and the keys that a frame sees are the first ones of a buffer. Where a frame
stands and how many keys it sees are tensors on the device (`FrameSlot`): one CUDA graph serves
every frame of a stream.

A chunk is one latent frame; a session's first chunk comes after that of the start image, if there
is one. (A later image would need the slot of a frame that its chunk, were it given up, has to find
again.)
Held by tests/model_executor/models/waypoint/test_waypoint_rings.py and test_waypoint_pipeline.py.
"""

# T tokens of a frame, N key-value heads, H head dim, C = half a head's lanes, K kinds of rings

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

# -- keys and values -------------------------------------------------------------------------------


class FrameWindow(KVWindow):
    """Of the last `window_frames` frames, those whose index is a multiple of `dilation`; and a
    frame sees itself.

    A kept frame takes the slot of the one it evicts, which it does not see any more. Any other
    frame stands, while it is made, in the slot behind the kept ones. The other arguments are
    `KVWindow`'s.
    """

    def __init__(self, *, window_frames: int, dilation: int, **window: Any) -> None:
        retained = window_frames // dilation
        super().__init__(
            window_frames=retained, sink_frames=0, spare_frames=int(dilation > 1), **window
        )
        self.dilation = dilation

    def _kept(self, frame: int) -> int:
        """How many slots hold kept frames once `frame` has been written."""
        return min(frame // self.dilation + 1, self.window_frames)

    def slot(self, frame: int) -> int:
        if frame % self.dilation:
            return self._kept(frame)
        return frame // self.dilation % self.window_frames

    def visible_frames(self, end_frame: int) -> list[int]:
        if end_frame == 0:
            return []
        frame = end_frame - 1
        newest = frame // self.dilation
        retained = [
            self.dilation * index for index in range(newest - self._kept(frame) + 1, newest + 1)
        ]
        return [*retained, frame] if frame % self.dilation else retained

    def num_keys(self, frame: int) -> int:
        """Return how many keys, the first of the buffer, `frame` sees."""
        return (self._kept(frame) + (frame % self.dilation > 0)) * self.tokens_per_frame

    def _span(self, frames: range) -> slice | None:
        return slice(0, self.num_keys(frames.stop - 1))


@dataclass(frozen=True)
class FrameSlot:
    """Where a frame stands, on the device. tokens_KT: of its tokens, in the buffer of each kind of
    ring, int64.

    key_ranges_K2: of each kind, as `attention` takes them, int32. fits: the frame sets the scales
    of stored numbers.
    """

    tokens_KT: torch.Tensor
    key_ranges_K2: torch.Tensor
    is_contiguous: bool


class FrameRings(WindowSet):
    """The rings of `layers`, those of this rank, local and global ones. window: heads, types,
    device: `KVWindow`'s.
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
        """Return the window of a layer, by its index in the whole network, and the layer's index
        in it.
        """
        kind, index = self.layers[layer]
        return self.rings[kind], index

    def frame_slot(self, frame: int) -> FrameSlot:
        """Return where `frame` stands; made once for all its passes."""
        size = self.clean.tokens_per_frame
        tokens_KT = torch.tensor(
            [[window.slot(frame) * size] for window in self.rings]
        ) + torch.arange(size)
        ranges_K2 = torch.tensor(
            [[0, window.num_keys(frame)] for window in self.rings], dtype=torch.int32
        )
        fits = frame == 0 and self.clean.format.scales is not None
        return FrameSlot(to_device(tokens_KT, self.device), to_device(ranges_K2, self.device), fits)

    def attend(
        self,
        layer: int,
        q_TNH: torch.Tensor,
        k_TNH: torch.Tensor,
        v_TNH: torch.Tensor,
        slot: FrameSlot,
    ) -> torch.Tensor:
        """Write a frame's keys and values in a layer; return the attention of its queries to all
        it sees.
        """
        window, index = self.window(layer)
        kind, _ = self.layers[layer]
        if slot.is_contiguous:
            window.format.fit_scales(index, k_TNH, v_TNH)
        for part, x_TNH in enumerate((k_TNH, v_TNH)):
            stored = window.format.encode(index, part, x_TNH)
            _numbers(window.buffer[index, part]).index_copy_(
                0, slot.tokens_KT[kind], _numbers(stored)
            )
        return window.format.attend(
            index, q_TNH, window.buffer[index], key_range=slot.key_ranges_K2[kind]
        )


def _numbers(x: torch.Tensor) -> torch.Tensor:
    """FP8 as bytes: it has no indexed writes of its own."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


# -- the session -----------------------------------------------------------------------------------


class WaypointSession(StreamingSession[FrameRings, SessionValue]):
    """A Waypoint session: it keeps nothing of its own beside its rings and the decoder's memory."""

    def next_frames(self) -> range:
        return self.check_committed(self.window.committed_frames)

    def check_committed(self, committed_frames: int) -> range:
        """A frame for each chunk, and one for a start image."""
        if committed_frames - self.chunk_index not in (0, 1):
            raise RequestFailed(
                "invalid_snapshot", "the snapshot's chunks and frames do not belong together"
            )
        return range(committed_frames, committed_frames + 1)


@dataclass(eq=False, kw_only=True)
class WaypointChunk(StreamingChunk[FrameRings, SessionValue]):
    """One chunk in flight: one latent frame, or that of a start image and one; its latents are
    those of its last frame.

    image: fp32 [C, h, w], the latent of the first of two frames. ropes, places: of each frame.
    controls: fp32 [buttons + 3], on the host. terms: of them, on the device, made before the first
    forward.
    """

    controls: torch.Tensor
    ropes: Sequence[Rotation] = ()
    slots: Sequence[FrameSlot] = ()
    image: torch.Tensor | None = None
    terms: torch.Tensor | None = None

    def frame_index(self, step: int) -> int:
        """Which of the chunk's frames pass `step` works on: an image takes one pass, the first."""
        return min(step, len(self.frames) - 1)

    def latents_at(self, step: int) -> torch.Tensor:
        """The latents [C, h, w] that go into pass `step`."""
        return self.latents[:, 0] if self.image is None or step else self.image

    def denoise_index(self, step: int) -> int | None:
        given = len(self.frames) - 1
        return super().denoise_index(step - given) if step >= given else None
