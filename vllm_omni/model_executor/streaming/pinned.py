# SPDX-License-Identifier: Apache-2.0
"""Sessions with pinned tokens, for example of reference images, and the positions of their frames.

Frame f has position f - base. The base only determines the distance to the pinned tokens.
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
    """Frame with position 0 in the last chunk."""

    def tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def to(self, device: torch.device | str) -> Self:
        return self


class PinnedScalars(SessionScalars, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The result of `PinnedSession.scalars`, as read from a file."""

    base: Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
    """`FramePositions.base`."""


class PinnedSession(StreamingSession[PinnedWindow, FramePositions]):
    """A session whose window has pinned tokens."""

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
    """Return the frame with position 0 during a chunk.

    Args:
        base: The base of the previous chunk, 0 at the start.
        frames: Latent frames of the chunk.
        window_frames: Frames that a chunk sees, including its own.
        positions: `carried`: the index of the frame, rebased to the oldest visible frame before it
            exceeds `largest`. `window`: the oldest visible frame is always at 0.
        largest: Position after which carried positions are rebased.
    """
    oldest = max(0, frames.stop - window_frames)
    if positions == "window":
        return oldest
    limit = min(largest, _CONTEXT_POSITIONS - window_frames - len(frames))
    return oldest if frames.stop - base > limit else base
