# SPDX-License-Identifier: Apache-2.0
"""A Waypoint session: its keys and values in two kinds of rings, and a chunk's working set.

Local layers see the newest frames, global layers every `dilation`-th frame of a longer stretch. A forward's K/V are
written where only later passes of the same frame read them, so that an abandoned frame leaves no trace, and the keys
that a frame sees are the first ones of a buffer. Where a frame stands and how many keys it sees are tensors on the
device (`FramePlace`): one CUDA graph serves every frame of a session.

A chunk is one latent frame; a session's first chunk comes after that of the start image, if there is one. (A later
image would need the slot of a frame that its chunk, were it given up, has to find again.)
Held by tests/model_executor/models/waypoint/test_waypoint_rings.py and test_waypoint_pipeline.py.
"""

# L layers of a kind, T tokens of a frame, N key-value heads, H head dim, K kinds of rings

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_omni.model_executor.host_copies import to_device
from vllm_omni.model_executor.layers.forward_graphs import identity
from vllm_omni.model_executor.layers.kv_cache import KVWindow
from vllm_omni.model_executor.layers.ring_pool import RingPool
from vllm_omni.model_executor.layers.window_set import WindowSet
from vllm_omni.model_executor.models.wan.layers import stack
from vllm_omni.model_executor.models.waypoint.config import WaypointConfig
from vllm_omni.model_executor.streaming.session import (
    Kept,
    SessionScalars,
    SessionShape,
    StreamingChunk,
    StreamingSession,
)
from vllm_omni.outputs import RequestFailed

Rotation = tuple[torch.Tensor, torch.Tensor]

# -- keys and values ---------------------------------------------------------------------------------------------------


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
class FramePlace:
    """Where a frame stands, on the device. tokens_KT: of its tokens, in the buffer of each kind of ring, int64.

    key_ranges_K2: of each kind, as `attention` takes them, int32. fits: the frame sets the scales of stored numbers.
    """

    tokens_KT: torch.Tensor
    key_ranges_K2: torch.Tensor
    fits: bool


class FrameRings(WindowSet):
    """The rings of every layer of this rank. layers: the range of layers it holds. num_heads: this rank's share.

    rings: as of `KVWindow`.
    """

    def __init__(
        self,
        config: WaypointConfig,
        layers: range,
        *,
        num_heads: int,
        dtype: torch.dtype,
        device: torch.device | str,
        storage: torch.dtype | None = None,
        rings: RingPool | None = None,
    ) -> None:
        windows: dict[str, KVWindow] = {}
        self.layers: dict[int, tuple[int, int]] = {}
        for kind, (name, window_frames, dilation, kept) in enumerate(_kinds(config, layers)):
            self.layers |= {layer: (kind, index) for index, layer in enumerate(kept)}
            windows[name] = FrameWindow(
                window_frames=window_frames,
                dilation=dilation,
                num_layers=len(kept),
                tokens_per_frame=config.tokens_per_frame,
                num_heads=num_heads,
                head_dim=config.head_dim,
                dtype=dtype,
                device=device,
                storage=storage,
                rings=rings,
            )
        super().__init__(windows)

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


def _kinds(config: WaypointConfig, layers: range) -> list[tuple[str, int, int, list[int]]]:
    """Of each kind of ring: the prefix of its tensors' names, its frames, their distance, and its layers."""
    local = [layer for layer in layers if not config.is_global(layer)]
    others = [layer for layer in layers if config.is_global(layer)]
    return [
        ("local.", config.local_window, 1, local),
        ("global.", config.global_window, config.global_pinned_dilation, others),
    ]


# -- the session -------------------------------------------------------------------------------------------------------


class WaypointSession(StreamingSession[SessionShape, FrameRings, Kept, None, SessionScalars]):
    """A Waypoint session: it keeps nothing of its own beside its rings and the decoder's memory."""

    def next_frames(self) -> range:
        return self.frames_behind(self.window.committed_frames)

    def frames_behind(self, committed_frames: int) -> range:
        """A frame for each chunk, and one for a start image."""
        if committed_frames - self.chunk_index not in (0, 1):
            raise RequestFailed("invalid_snapshot", "the snapshot's chunks and frames do not belong together")
        return range(committed_frames, committed_frames + 1)


@dataclass(frozen=True, eq=False)
class LatentFrame:
    """What the passes of one of a chunk's latent frames share: its rotations, and where it stands."""

    rope: Rotation
    place: FramePlace


@dataclass(eq=False, kw_only=True)
class Chunk(StreamingChunk[FrameRings, Kept]):
    """One chunk in flight; its latents are those of its last frame.

    parts: its latent frames. image: fp32 [C, h, w], the latent of the first of two. controls: fp32 [buttons + 3], on
    the host. terms: of them, on the device, made before the first forward.
    """

    controls: torch.Tensor
    parts: Sequence[LatentFrame] = ()
    image: torch.Tensor | None = None
    terms: torch.Tensor | None = None

    @property
    def num_given(self) -> int:
        return len(self.frames) - 1

    def latents_at(self, step: int) -> torch.Tensor:
        """The latents [C, h, w] that go into pass `step`."""
        return self.latents[:, 0] if self.image is None or step >= self.num_given else self.image

    def denoise_index(self, step: int) -> int | None:
        return super().denoise_index(step - self.num_given) if step >= self.num_given else None

    def part(self, step: int) -> LatentFrame:
        """The latent frame that pass `step` works on."""
        return self.parts[min(step, self.num_given)]


# -- a forward ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FrameRow:
    """Inputs of one row of a forward; on the model's device.

    latents: fp32 [C, h, w]. sigma: noise level, 0 for the pass that makes the K/V that stay. rope: (cos, sin) [T, C]
    fp32, of `rope`. control: of `controls`. window: the session's, where every block writes at `place`. prompt_kv: of
    `cross_attention_kv`.
    """

    latents: torch.Tensor
    sigma: float
    rope: Rotation
    control: torch.Tensor
    window: FrameRings
    place: FramePlace
    prompt_kv: torch.Tensor | None = None


@dataclass(frozen=True)
class Pass:
    """A forward's rows, as its layers see them. cos, sin: fp32 [B, T, C]. control: [B, control blocks, D]."""

    windows: Sequence[FrameRings]
    places: Sequence[FramePlace]
    prompts: Sequence[torch.Tensor | None]
    cos: torch.Tensor
    sin: torch.Tensor
    control: torch.Tensor

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = zip(self.windows, self.places, q, k, v, strict=True)
        return stack([window.attend(layer, own_q, own_k, own_v, place) for window, place, own_q, own_k, own_v in rows])
