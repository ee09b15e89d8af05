# SPDX-License-Identifier: Apache-2.0
"""Sessions with pinned tokens, for example those of reference images, and the positions of the
sessions' frames.

Frame f has position f - base, so the base determines only how far frames are from the pinned
tokens.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, Self

import msgspec
import torch

from vllm_omni.model_executor.layers.kv_cache.pinned_window import PinnedWindow
from vllm_omni.model_executor.streaming.session import SessionScalars, StreamingSession
from vllm_omni.tensors.saved import SavedTensors

Positions = Literal["carried", "window"]
_CONTEXT_POSITIONS: Final = 1024
_LARGEST_POSITION: Final = 256


@dataclass(frozen=True)
class FramePositions:
    """Positions of a session's frames relative to its pinned tokens. Immutable."""

    base: int
    """Index of the frame that had position 0 in the last chunk."""

    def tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def to(self, device: torch.device | str) -> Self:
        return self


class PinnedScalars(SessionScalars, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Values returned by `PinnedSession.scalars`, as read from a snapshot file."""

    base: Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
    """Value of `FramePositions.base`."""


class PinnedSession(StreamingSession[PinnedWindow, FramePositions]):
    """A streaming session with pinned tokens in its K/V window."""

    scalars_type: ClassVar[type[PinnedScalars]] = PinnedScalars

    @property
    def base(self) -> int:
        return 0 if self.own is None else self.own.base

    def value_scalars(self) -> dict[str, Any]:
        return {"base": self.base}

    def restore_values(
        self, retained: Any, saved: SavedTensors, device: torch.device
    ) -> FramePositions:
        return FramePositions(retained.base)


def next_base(
    base: int,
    frames: range,
    window_frames: int,
    positions: Positions,
    largest: int = _LARGEST_POSITION,
) -> int:
    """Return the index of the frame that has position 0 during a chunk.

    Args:
        base: Index that this function returned for the previous chunk, or 0 for the first chunk.
        frames: Latent frames of the chunk.
        window_frames: Number of frames that a chunk attends to, including its own.
        positions: How frames are positioned. `carried`: the position of a frame is its index
            minus the base. The base moves to the oldest frame in the window before a position
            exceeds `largest`. `window`: the oldest frame in the window always has position 0.
        largest: Largest position allowed with `carried`.
    """
    oldest = max(0, frames.stop - window_frames)
    if positions == "window":
        return oldest
    limit = min(largest, _CONTEXT_POSITIONS - window_frames - len(frames))
    return oldest if frames.stop - base > limit else base
