# SPDX-License-Identifier: Apache-2.0
"""`FrameRings`: keys and values of streams made frame by frame, in several kinds of rings: every frame, or every n-th.

A frame's K/V are written where only later passes of the same frame read them, so that an abandoned frame leaves no
trace, and the keys that a frame sees are the first ones of a buffer. Where a frame stands and how many keys it sees are
tensors on the device (`FramePlace`): one CUDA graph serves every frame of a stream.
Held by tests/model_executor/models/waypoint/test_waypoint_rings.py.
"""

# T tokens of a frame, N key-value heads, H head dim, K kinds of rings

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_omni.model_executor.host_copies import to_device
from vllm_omni.model_executor.layers.kv_cache import KVWindow
from vllm_omni.model_executor.layers.window_set import WindowSet


class FrameWindow(KVWindow):
    """Of the last `window_frames` frames, those whose index is a multiple of `dilation`; and a frame sees itself.

    A kept frame takes the slot of the one it evicts, which it does not see any more. Any other frame stands, while it
    is made, in the slot behind the kept ones. The other arguments are `KVWindow`'s.
    """

    def __init__(self, *, window_frames: int, dilation: int, **window: Any) -> None:
        kept = window_frames // dilation
        super().__init__(window_frames=kept, sink_frames=0, spare_frames=int(dilation > 1), **window)
        self.dilation = dilation

    def _kept(self, frame: int) -> int:
        """How many slots hold kept frames once `frame` has been written."""
        return min(frame // self.dilation + 1, self.window_frames)

    def slot(self, frame: int) -> int:
        if frame % self.dilation:
            return self._kept(frame)
        return frame // self.dilation % self.window_frames

    def visible_frames(self, end_frame: int) -> list[int]:
        frame = end_frame - 1
        if frame < 0:
            return []
        newest = frame // self.dilation
        kept = [self.dilation * index for index in range(newest - self._kept(frame) + 1, newest + 1)]
        return kept if kept[-1] == frame else [*kept, frame]

    def num_keys(self, frame: int) -> int:
        """Return how many keys, the first of the buffer, `frame` sees."""
        return (self._kept(frame) + (frame % self.dilation > 0)) * self.tokens_per_frame

    def _span(self, frames: range) -> slice | None:
        return slice(0, self.num_keys(frames.stop - 1))

    def write_and_attend(
        self,
        layer: int,
        q_TNH: torch.Tensor,
        k_TNH: torch.Tensor,
        v_TNH: torch.Tensor,
        tokens_T: torch.Tensor,
        key_range: torch.Tensor,
        *,
        fits: bool,
    ) -> torch.Tensor:
        """Write a frame's keys and values; return the attention of its queries to all it sees.

        tokens_T: where its tokens stand in the buffer. key_range: as of `attention`. fits: as of `FramePlace`.
        """
        if fits:
            self.format.fit(layer, k_TNH, v_TNH)
        for kind, x_TNH in enumerate((k_TNH, v_TNH)):
            stored = self.format.encode(layer, kind, x_TNH)
            _numbers(self.buffer[layer, kind]).index_copy_(0, tokens_T, _numbers(stored))
        return self.format.attend(layer, q_TNH, self.buffer[layer], key_range=key_range)


def _numbers(x: torch.Tensor) -> torch.Tensor:
    """FP8 as bytes: it has no indexed writes of its own."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


@dataclass(frozen=True)
class RingKind:
    """Layers whose rings are alike. layers: of the whole network, those of this rank. Others: as of `FrameWindow`."""

    layers: Sequence[int]
    window_frames: int
    dilation: int = 1


@dataclass(frozen=True)
class FramePlace:
    """Where a frame stands, on the device. tokens_KT: of its tokens, in the buffer of each kind of ring, int64.

    key_ranges_K2: of each kind, as `attention` takes them, int32. fits: the frame sets the scales of stored numbers.
    """

    tokens_KT: torch.Tensor
    key_ranges_K2: torch.Tensor
    fits: bool


class FrameRings(WindowSet):
    """The rings of every layer of this rank. kinds: by the prefix of their tensors' names; the last is the longest.

    The other arguments are `KVWindow`'s.
    """

    def __init__(self, kinds: Mapping[str, RingKind], **window: Any) -> None:
        self.layers = {
            layer: (number, index)
            for number, kind in enumerate(kinds.values())
            for index, layer in enumerate(kind.layers)
        }
        super().__init__(
            {
                f"{name}.": FrameWindow(
                    window_frames=kind.window_frames, dilation=kind.dilation, num_layers=len(kind.layers), **window
                )
                for name, kind in kinds.items()
            }
        )

    @property
    def rings(self) -> list[FrameWindow]:
        return [window for window in self.windows if isinstance(window, FrameWindow)]

    def window(self, layer: int) -> tuple[FrameWindow, int]:
        """Return the layer's window and the layer's index in it."""
        kind, index = self.layers[layer]
        return self.rings[kind], index

    def place(self, frame: int) -> FramePlace:
        """Return where `frame` stands; made once for all its passes."""
        size = self.clean.tokens_per_frame
        tokens_KT = torch.tensor([[window.slot(frame) * size] for window in self.rings]) + torch.arange(size)
        ranges_K2 = torch.tensor([[0, window.num_keys(frame)] for window in self.rings], dtype=torch.int32)
        fits = frame == 0 and self.clean.format.scales() is not None
        return FramePlace(to_device(tokens_KT, self.device), to_device(ranges_K2, self.device), fits)

    def attend(
        self, layer: int, q_TNH: torch.Tensor, k_TNH: torch.Tensor, v_TNH: torch.Tensor, place: FramePlace
    ) -> torch.Tensor:
        """`FrameWindow.write_and_attend` of a layer, by its index in the whole network."""
        kind, index = self.layers[layer]
        tokens_T, key_range = place.tokens_KT[kind], place.key_ranges_K2[kind]
        return self.rings[kind].write_and_attend(index, q_TNH, k_TNH, v_TNH, tokens_T, key_range, fits=place.fits)
