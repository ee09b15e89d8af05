# SPDX-License-Identifier: Apache-2.0
"""`ImageWorldModel`: a Wan world that begins with an image, and `ImageWorldSession`, a session's share of it.

The image and the grey frames behind it are the condition of every chunk (`image_condition.py`). The first stage, which
embeds patches, makes it; each session of that stage keeps where it stands. A family adds its own state and controls.
Held by the pipeline tests of LingBot World and Matrix-Game.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

import msgspec
import torch

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import Inputs
from vllm_omni.model_executor.models.wan.chunk_model import Layout, Setup, WanChunkModel
from vllm_omni.model_executor.models.wan.components import LaterCondition
from vllm_omni.model_executor.models.wan.image_condition import ConditionLayout, ConditionState, GreyCondition
from vllm_omni.model_executor.streaming.model import Chunk
from vllm_omni.model_executor.streaming.request import read_size, read_window
from vllm_omni.model_executor.streaming.session import (
    OwnLayout,
    SessionScalars,
    SessionShape,
    StreamingSession,
    Window,
)
from vllm_omni.outputs import RequestFailed
from vllm_omni.saved_tensors import SavedTensors


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageWorld:
    """Where a session's condition stands. Immutable. condition: None on ranks that embed no patches."""

    condition: ConditionState | None

    def tensors(self) -> dict[str, torch.Tensor]:
        kept: Mapping[str, torch.Tensor] = {} if self.condition is None else self.condition.resolved().tensors()
        return {f"condition.{name}": tensor for name, tensor in kept.items()}

    def to(self, device: torch.device | str) -> Self:
        return self if self.condition is None else replace(self, condition=self.condition.resolved().to(device))


class ImageWorldScalars(SessionScalars, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The result of `ImageWorldSession.scalars`, as read from a file."""

    condition_settled: bool | None
    condition_encoded: Annotated[int, msgspec.Meta(ge=1)] = 1


World = TypeVar("World", bound=ImageWorld)
Scalars = TypeVar("Scalars", bound=ImageWorldScalars)


class ImageWorldSession(
    StreamingSession[SessionShape, Window, World, OwnLayout, Scalars], Generic[Window, World, OwnLayout, Scalars]
):
    """A session of such a world; its `own` is the family's `ImageWorld`."""

    @property
    def condition(self) -> ConditionState | None:
        return None if self.own is None else self.own.condition

    def own_scalars(self) -> dict[str, Any]:
        condition = None if self.condition is None else self.condition.resolved()
        return {
            "condition_settled": None if condition is None else condition.settled,
            "condition_encoded": 1 if condition is None else condition.num_encoded,
        }

    def restore_condition(
        self, layout: ConditionLayout | None, kept: Scalars, saved: SavedTensors, device: torch.device
    ) -> ConditionState | None:
        """Take the condition out of a snapshot. layout: None = this rank has none. Raises `RequestFailed`."""
        settled = kept.condition_settled
        if (layout is None) != (settled is None) or kept.condition_encoded > kept.committed_frames:
            raise RequestFailed("invalid_snapshot", "the snapshot's frames and condition do not fit together")
        if layout is None or settled is None:
            return None
        part = saved.under("condition.")
        return layout.restore(part, device, settled=settled, num_encoded=kept.condition_encoded)


Session = TypeVar("Session", bound=ImageWorldSession[Any, Any, Any, Any])


class ImageWorldModel(
    WanChunkModel[SessionShape, Session, Chunk, Setup, Layout], Generic[Session, Chunk, Setup, Layout]
):
    """Base of such a world. A family's `build` ends with `_add_condition`."""

    session_windows: ClassVar[bool] = True

    condition: GreyCondition | None
    """None on ranks that embed no patches."""

    def _add_condition(self, later: LaterCondition = "streamed") -> None:
        self.condition = None
        if self.parallel.first_stage:
            self.condition = GreyCondition(self.vae, later, chunk_frames=self.plan.chunk_frames)

    def read_shape(self, params: DiffusionParams) -> SessionShape:
        window = read_window(params, self.plan)
        shape = SessionShape(*read_size(params, self.config, self.omni), params.output, window=window)
        self.vae.check_height(shape.height)
        return shape

    def own_bytes(self, shape: SessionShape) -> int:
        return 0 if self.condition is None else self.condition.state_nbytes(shape.height, shape.width)

    def condition_layout(self, shape: SessionShape) -> ConditionLayout | None:
        return None if self.condition is None else self.condition.state_layout(shape.height, shape.width)

    def warmup_inputs(self) -> list[Inputs]:
        """A first and a later chunk of the largest size: a later one decodes more frames."""
        image = torch.zeros(self.omni.height, self.omni.width, 3, dtype=torch.uint8)
        prompt = None if self.action_space.prompt == "none" else "warm-up"
        first = DiffusionParams(session_id="warm-up", prompt=prompt, actions=[])
        return [(first, {"image": image}), (msgspec.structs.replace(first, prompt=None), {})]
