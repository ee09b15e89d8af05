# SPDX-License-Identifier: Apache-2.0
"""`LingBotSession`: LingBot World's part of a `StreamingSession`, and `Chunk`, one chunk's working set.

Its own value is where camera and condition stream stand. Held by
tests/model_executor/models/lingbot_world/test_lingbot_pipeline.py.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import msgspec
import torch

from vllm_omni.model_executor.models.lingbot_world.camera import CameraTail
from vllm_omni.model_executor.models.wan.image_condition import ConditionLayout, ConditionState
from vllm_omni.model_executor.streaming.session import (
    SessionScalars,
    SessionShape,
    StreamingChunk,
    StreamingSession,
    Windows,
)
from vllm_omni.outputs import RequestFailed
from vllm_omni.sessions.snapshot import SavedTensors


@dataclass(frozen=True, eq=False)
class World:
    """Where a session's camera and condition stream stand. Immutable.

    condition: None on ranks that embed no patches.
    """

    tail: CameraTail
    condition: ConditionState | None

    def tensors(self) -> dict[str, torch.Tensor]:
        condition = {} if self.condition is None else self.condition.tensors()
        return {**{f"condition.{name}": tensor for name, tensor in condition.items()}, "camera.pose": self.tail.pose_44}

    def to(self, device: torch.device | str) -> "World":
        """The camera stays on the host."""
        return self if self.condition is None else replace(self, condition=self.condition.to(device))


class LingBotScalars(SessionScalars, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The result of `LingBotSession.scalars`, as read from a file."""

    pitch_degrees: float
    largest_step: float = 0.0
    condition_settled: bool | None
    condition_encoded: Annotated[int, msgspec.Meta(ge=1)] = 1


class LingBotSession(StreamingSession[SessionShape, Windows, World, ConditionLayout, LingBotScalars]):
    """A LingBot World session; `layouts.own` is the layout of the condition stream."""

    scalars_type: ClassVar[type[LingBotScalars]] = LingBotScalars

    @property
    def tail(self) -> CameraTail | None:
        return None if self.own is None else self.own.tail

    @property
    def condition(self) -> ConditionState | None:
        return None if self.own is None else self.own.condition

    def own_scalars(self) -> dict[str, Any]:
        tail, condition = self.tail, self.condition
        return {
            "pitch_degrees": None if tail is None else tail.pitch_degrees,
            "largest_step": 0.0 if tail is None else tail.largest_step,
            "condition_settled": None if condition is None else condition.settled,
            "condition_encoded": 1 if condition is None else condition.num_encoded,
        }

    def restore_own(self, kept: LingBotScalars, saved: SavedTensors, device: torch.device) -> World:
        camera = math.isfinite(kept.pitch_degrees) and 0 <= kept.largest_step < math.inf
        if kept.condition_encoded > kept.committed_frames or not camera:
            raise RequestFailed("invalid_snapshot", "the snapshot's frames, condition and camera do not fit together")
        pose_44 = saved.take("camera.pose", "cpu", torch.float64, [4, 4])
        tail = CameraTail(pose_44, kept.pitch_degrees, kept.largest_step)
        layout, settled = self.layouts.own, kept.condition_settled
        if (layout is None) != (settled is None):
            raise RequestFailed("invalid_snapshot", f"the snapshot's condition_settled is {settled}")
        if layout is None or settled is None:
            return World(tail, None)
        part = saved.under("condition.")
        return World(tail, layout.restore(part, device, settled=settled, num_encoded=kept.condition_encoded))


@dataclass(frozen=True)
class ChunkInputs:
    """A checked request. relative_F44, intrinsics_F4: fp64, CPU; `tail` is where the camera ends.

    flags_F4: the keys w a s d, fp64, CPU; None = the model is not told any.
    image: uint8 [H, W, 3] of any size, or None to go on from the session's.
    """

    prompt: str
    seed: int
    image: torch.Tensor | None
    relative_F44: torch.Tensor
    intrinsics_F4: torch.Tensor
    tail: CameraTail
    flags_F4: torch.Tensor | None


@dataclass(eq=False, kw_only=True)
class Chunk(StreamingChunk[Windows, World]):
    """One chunk in flight; `own` is where camera and condition stand after it.

    y: [20, F, h, w], None on stages that embed no patches. camera_map: [384 or 448, F, h, w], dropped once
    `camera` is there.
    """

    y: torch.Tensor | None
    camera_map: torch.Tensor | None

    camera: torch.Tensor | None = None
