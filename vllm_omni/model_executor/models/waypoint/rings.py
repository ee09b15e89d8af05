# SPDX-License-Identifier: Apache-2.0
"""`FrameRings`: a session's keys and values, in two kinds of rings.

Local layers see the newest frames: a `KVWindow` without sinks. Global layers see every `dilation`-th frame of a longer
stretch: `DilatedWindow`. A forward's K/V are written where only later passes of the same frame read them, so that an
abandoned frame leaves no trace, and the keys of a frame are always one slice of a buffer.
Held by tests/model_executor/models/waypoint/test_waypoint_rings.py.
"""

# L layers of a kind, T tokens of a frame, N key-value heads, H head dim

from collections.abc import Hashable
from typing import Any

import torch

from vllm_omni.model_executor.layers.forward_graphs import identity
from vllm_omni.model_executor.layers.kv_cache import KVWindow, kv_window_nbytes
from vllm_omni.model_executor.layers.window_set import WindowSet
from vllm_omni.model_executor.models.waypoint.config import WaypointConfig


class DilatedWindow(KVWindow):
    """Of the last `window_frames` frames, those whose index is a multiple of `dilation`; and a frame sees itself.

    A kept frame takes the slot of the one it evicts, which it does not see any more. Any other frame stands, while it
    is made, in the slot behind the kept ones. The other arguments are `KVWindow`'s.
    """

    def __init__(self, *, window_frames: int, dilation: int, **window: Any) -> None:
        super().__init__(window_frames=window_frames // dilation, sink_frames=0, spare_frames=1, **window)
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

    def _span(self, frames: range) -> slice | None:
        frame = frames.stop - 1
        slots = self._kept(frame) + (frame % self.dilation > 0)
        return slice(0, slots * self.tokens_per_frame)

    def graph_key(self, frames: range) -> Hashable | None:
        span = self._span(frames)
        assert span is not None
        if self._kept(frames.start) < self.window_frames:
            return None
        return identity(self.buffer), self.slot(frames.start), span.stop


class FrameRings(WindowSet):
    """The rings of every layer of this rank. layers: the range of layers it holds."""

    def __init__(
        self,
        config: WaypointConfig,
        layers: range,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        storage: torch.dtype | None = None,
    ) -> None:
        windows: dict[str, KVWindow] = {}
        self.places: dict[int, tuple[str, int]] = {}
        for name, kept in layers_by_kind(config, layers).items():
            self.places |= {layer: (name, index) for index, layer in enumerate(kept)}
            sizes: dict[str, Any] = {
                "num_layers": len(kept),
                "tokens_per_frame": config.tokens_per_frame,
                "num_heads": config.n_kv_heads,
                "head_dim": config.head_dim,
                "dtype": dtype,
                "device": device,
                "storage": storage,
            }
            windows[name] = (
                DilatedWindow(window_frames=config.global_window, dilation=config.global_pinned_dilation, **sizes)
                if name == "global."
                else KVWindow(window_frames=config.local_window, sink_frames=0, **sizes)
            )
        super().__init__(windows)

    def window(self, layer: int) -> tuple[KVWindow, int]:
        """Return the layer's window and the layer's index in it."""
        name, index = self.places[layer]
        return self.by_name[name], index

    def write(self, layer: int, frames: range, k_TNH: torch.Tensor, v_TNH: torch.Tensor) -> None:
        window, index = self.window(layer)
        window.write(index, frames, k_TNH, v_TNH)

    def visible(self, layer: int, frames: range) -> tuple[torch.Tensor, torch.Tensor]:
        window, index = self.window(layer)
        return window.visible(index, frames)

    def history(self, layer: int, frame: int) -> list[int]:
        """Return the frames that `frame` sees besides itself, oldest first."""
        return self.window(layer)[0].visible_frames(frame + 1)[:-1]

    def stored(self, layer: int) -> list[int]:
        """Return the committed frames that are kept, oldest first."""
        window, _ = self.window(layer)
        dilation = window.dilation if isinstance(window, DilatedWindow) else 1
        return [frame for frame in window.visible_frames(self.committed_frames) if frame % dilation == 0]

    def frames_kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of (k, v) [frames T, N, H] of `stored(layer)`, in that order."""
        window, index = self.window(layer)
        tokens = window.token_positions([window.slot(frame) for frame in self.stored(layer)])
        k, v = window.buffer[index].index_select(1, tokens)
        return window.format.load(index, 0, k), window.format.load(index, 1, v)

    def commit(self, end_frame: int) -> None:
        for window in self.windows:
            window.commit(end_frame)


def layers_by_kind(config: WaypointConfig, layers: range) -> dict[str, list[int]]:
    """Return the prefix of each kind of ring -> its layers; kinds without a layer are left out."""
    kinds = {
        "local.": [layer for layer in layers if not config.is_global(layer)],
        "global.": [layer for layer in layers if config.is_global(layer)],
    }
    return {name: kept for name, kept in kinds.items() if kept}


def rings_nbytes(config: WaypointConfig, layers: range, dtype: torch.dtype, storage: torch.dtype | None = None) -> int:
    """Return the bytes that `FrameRings` of these arguments will hold."""
    slots = {"local.": config.local_window, "global.": config.global_window // config.global_pinned_dilation + 1}
    return sum(
        kv_window_nbytes(
            num_layers=len(kept),
            window_frames=slots[name],
            tokens_per_frame=config.tokens_per_frame,
            num_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            storage=storage,
        )
        for name, kept in layers_by_kind(config, layers).items()
    )
