# SPDX-License-Identifier: Apache-2.0
"""A Waypoint session, a chunk's working set, and the inputs of a forward.

Local layers see the newest frames, global layers every `dilation`-th frame of a longer stretch (`FrameRings`).
A chunk is one latent frame; a session's first chunk comes after that of the start image, if there is one. (A later
image would need the slot of a frame that its chunk, were it given up, has to find again.)
Held by tests/model_executor/models/waypoint/test_waypoint_rings.py and test_waypoint_pipeline.py.
"""

# B rows, T tokens of a frame, D width, C = half a head's lanes

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_omni.model_executor.layers.frame_rings import FramePlace, FrameRings, RingKind
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


def frame_rings(config: WaypointConfig, layers: range, **window: Any) -> FrameRings:
    """The keys and values of a session on a rank that holds `layers`. window: heads, types, device: `KVWindow`'s."""
    local = [layer for layer in layers if not config.is_global(layer)]
    others = [layer for layer in layers if config.is_global(layer)]
    kinds = {
        "local": RingKind(local, config.local_window),
        "global": RingKind(others, config.global_window, config.global_pinned_dilation),
    }
    return FrameRings(kinds, tokens_per_frame=config.tokens_per_frame, head_dim=config.head_dim, **window)


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
