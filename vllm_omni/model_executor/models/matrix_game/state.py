# SPDX-License-Identifier: Apache-2.0
"""`MatrixGameSession`: Matrix-Game's part of a `StreamingSession`, its three K/V windows, and a
chunk's actions.

Its own value is where the condition stream stands, the image's rows for cross-attention, and the
newest actions, which later latent frames look back to. Held by
tests/model_executor/models/matrix_game/test_matrix_game_pipeline.py and
test_matrix_game_actions.py.
"""

# F latent frames of a chunk, P video frames of a chunk, K values of a video frame's keyboard and
# mouse, R video frames a latent frame's actions span

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from vllm_omni.actions import ActionFrames
from vllm_omni.model_executor.layers.kv_cache.format import KVSlot
from vllm_omni.model_executor.layers.kv_cache.window import KVWindow
from vllm_omni.model_executor.layers.kv_cache.window_set import WindowSet
from vllm_omni.model_executor.models.matrix_game.config import Variant
from vllm_omni.model_executor.models.wan.images.image_condition import (
    ConditionLayout,
    ImageStartedPipeline,
    ImageStartedScalars,
    ImageStartedSession,
)
from vllm_omni.model_executor.models.wan.vae.latents import VAE_TEMPORAL
from vllm_omni.model_executor.streaming.session import StreamingChunk
from vllm_omni.tensors.saved import SavedTensors

# -- keys and values -------------------------------------------------------------------------------


class ActionWindows(WindowSet):
    """A session's K/V on one rank: the `trunk`'s, which it stands for as `KVView`, and, where the
    stage has action modules, those of their two attentions: `mouse` of every place of a frame,
    `keyboard` one key and value a frame.
    """

    def __init__(self, **windows: KVWindow) -> None:
        super().__init__({f"{name}.": window for name, window in windows.items()})
        self.tokens_per_frame = windows["trunk"].tokens_per_frame

    def __getitem__(self, name: str) -> KVWindow:
        return self.by_name[f"{name}."]

    def write(self, layer: int, frames: range, k_TNH: torch.Tensor, v_TNH: torch.Tensor) -> None:
        self["trunk"].write(layer, frames, k_TNH, v_TNH)

    def write_slot(self, layer: int, frames: range) -> KVSlot | None:
        return self["trunk"].write_slot(layer, frames)

    def attend(self, layer: int, frames: range, q_TNH: torch.Tensor) -> torch.Tensor:
        return self["trunk"].attend(layer, frames, q_TNH)

    def quantized_ahead(self, frames: range) -> KVWindow | None:
        return self["trunk"].quantized_ahead(frames)

    def graph_key(self, frames: range) -> Hashable:
        return tuple(window.graph_key(frames) for window in self.windows)

    def graph_kind(self, frames: range) -> Hashable:
        return tuple(window.graph_kind(frames) for window in self.windows)


# -- the session -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class World(ImageStartedPipeline):
    """A session's share of its image and its actions. Immutable.

    actions: the newest video frames' rows that a next chunk looks back to, fp32 [R - 3, K]; they
    stay on the host.
    image: CLIP's rows; None on ranks without layers.
    """

    actions: torch.Tensor
    image: torch.Tensor | None

    def tensors(self) -> dict[str, torch.Tensor]:
        image = {} if self.image is None else {"image": self.image}
        return {**super().tensors(), **image, "actions": self.actions}

    def to(self, device: torch.device | str) -> Self:
        return replace(
            super().to(device), image=None if self.image is None else self.image.to(device)
        )


@dataclass(frozen=True)
class WorldLayout:
    """Sizes of a `World`. image: shape and type of CLIP's rows.

    As there, None = this rank has none.
    """

    actions: tuple[int, int]
    image: tuple[tuple[int, int], torch.dtype] | None
    condition: ConditionLayout | None

    @property
    def nbytes(self) -> int:
        """Without the condition."""
        rows = 0 if self.image is None else math.prod(self.image[0]) * self.image[1].itemsize
        return rows + math.prod(self.actions) * torch.float32.itemsize


class MatrixGameSession(ImageStartedSession[ActionWindows, World]):
    """A Matrix-Game session; `layouts.own` is always there."""

    def restore_values(
        self, retained: ImageStartedScalars, saved: SavedTensors, device: torch.device
    ) -> World:
        layout, image = self.layouts.own, None
        assert isinstance(layout, WorldLayout)
        condition = self.restore_condition(layout.condition, retained, saved, device)
        if layout.image is not None:
            shape, dtype = layout.image
            image = saved.take_tensor("image", device, dtype, shape)
        actions = saved.take_tensor("actions", "cpu", torch.float32, layout.actions)
        return World(condition=condition, actions=actions, image=image)


@dataclass(eq=False, kw_only=True)
class Chunk(StreamingChunk[ActionWindows, World]):
    """One chunk in flight; `own` is the session's part of it, `text` CLIP's rows where `cross_kv`
    is not known yet.

    y: [20, F, h, w], None on stages that embed no patches. windows: its action rows, [F, R, K] fp32
    on the host.
    actions: those on the device, made before the first forward.
    """

    y: torch.Tensor | None
    windows: torch.Tensor
    actions: Any = None


# -- actions ---------------------------------------------------------------------------------------


def action_values(rows: ActionFrames, variant: Variant) -> torch.Tensor:
    """Controls -> the keyboard's values, then the mouse's [pitch, yaw] where the model takes a
    mouse; fp32.
    """
    space = variant.space
    held = dict(zip(space.button_names, rows.buttons_NB.float().unbind(1), strict=True))
    idle = 1 - rows.buttons_NB.any(1).float()
    columns = [idle if name is None else held[name] for name in variant.keyboard]
    if space.axes:
        axes = dict(zip(space.axis_names, rows.axes_NA.unbind(1), strict=True))
        for index, name in enumerate(("pitch", "yaw")):
            turned = sum(
                (held[button] * turn[index] for button, turn in variant.turns.items()),
                torch.zeros_like(idle),
            )
            columns.append(turned + axes[name] if name in axes else turned)
    return torch.stack(columns, dim=1)


def action_windows(
    rows_PK: torch.Tensor, before: torch.Tensor | None, num_frames: int, span: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the rows that each latent frame of a chunk sees [F, R, K], those that the next chunk
    looks back to).

    Latent frame k sees video frames 4 k - R .. 4 k - 1: not its own last one. Before the first
    video frame its row is repeated. before: of the chunk before; None at a session's start. span:
    R.
    """
    past = rows_PK[:1].expand(span, -1) if before is None else before
    known = torch.cat((past, rows_PK))
    windows_FRK = known.unfold(0, span, VAE_TEMPORAL)[:num_frames].transpose(1, 2).contiguous()
    return windows_FRK, known[-(span - VAE_TEMPORAL + 1) :].clone()
