# SPDX-License-Identifier: Apache-2.0
"""The state of a Matrix-Game session (three K/V windows) and the working set of a chunk.

`StreamingSession.own` contains the conditioning state, the image embeddings for cross-attention,
and the most recent actions, which condition later latent frames.
"""

# F latent frames of a chunk, P video frames of a chunk, K keyboard and mouse values of a video
# frame, R video frames that condition a latent frame

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from vllm_omni.actions import ActionFrames
from vllm_omni.model_executor.layers.kv_cache.quantized_storage import KVSlot
from vllm_omni.model_executor.layers.kv_cache.window import KVWindow
from vllm_omni.model_executor.layers.kv_cache.window_set import WindowSet
from vllm_omni.model_executor.models.matrix_game.config import MatrixGameVariant
from vllm_omni.model_executor.models.wan.images.image_condition import (
    ConditionLayout,
    ImageStartedPipeline,
    ImageStartedScalars,
    ImageStartedSession,
)
from vllm_omni.model_executor.models.wan.vae.latents import VAE_TEMPORAL
from vllm_omni.model_executor.schedules import FewStepSchedule
from vllm_omni.model_executor.streaming.session import StreamingChunk
from vllm_omni.tensors.saved import SavedTensors

# -- keys and values -------------------------------------------------------------------------------


class ActionWindows(WindowSet):
    """A session's K/V windows on one rank.

    As a `KVView`, this object behaves like `trunk`, the self-attention window. A stage with action
    modules also has a `mouse` window, with K/V for every token of a frame, and a `keyboard` window,
    with one key and one value per frame.
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
class MatrixGameConditioning(ImageStartedPipeline):
    """Immutable image and action state of a session."""

    actions: torch.Tensor
    """Actions of the latest video frames, which condition the next chunk, fp32 [R - 3, K] on the
    host.
    """
    image: torch.Tensor | None
    """CLIP's hidden states for the start image. None: the rank has no layers."""

    def tensors(self) -> dict[str, torch.Tensor]:
        image = {} if self.image is None else {"image": self.image}
        return {**super().tensors(), **image, "actions": self.actions}

    def to(self, device: torch.device | str) -> Self:
        return replace(
            super().to(device), image=None if self.image is None else self.image.to(device)
        )


@dataclass(frozen=True)
class MatrixGameConditioningLayout:
    """Shapes and dtypes of the tensors in a `MatrixGameConditioning`. A field is None if this rank
    does not store the corresponding tensor.
    """

    actions: tuple[int, int]
    """Shape of `MatrixGameConditioning.actions`."""
    image: tuple[tuple[int, int], torch.dtype] | None
    """Shape and dtype of the CLIP hidden states."""
    condition: ConditionLayout | None
    """Layout of `ImageStartedPipeline.condition`."""

    @property
    def nbytes(self) -> int:
        """Return the size of `actions` and `image` in bytes."""
        rows = 0 if self.image is None else math.prod(self.image[0]) * self.image[1].itemsize
        return rows + math.prod(self.actions) * torch.float32.itemsize


class MatrixGameSession(ImageStartedSession[ActionWindows, MatrixGameConditioning]):
    """A Matrix-Game session. `layouts.own` is always set."""

    def restore_values(
        self, retained: ImageStartedScalars, saved: SavedTensors, device: torch.device
    ) -> MatrixGameConditioning:
        layout, image = self.layouts.own, None
        assert isinstance(layout, MatrixGameConditioningLayout)
        condition = self.restore_condition(layout.condition, retained, saved, device)
        if layout.image is not None:
            shape, dtype = layout.image
            image = saved.take_tensor("image", device, dtype, shape)
        actions = saved.take_tensor("actions", "cpu", torch.float32, layout.actions)
        return MatrixGameConditioning(condition=condition, actions=actions, image=image)


@dataclass(eq=False, kw_only=True)
class MatrixGameChunk(StreamingChunk[ActionWindows, MatrixGameConditioning]):
    """One chunk in flight.

    `own` is the value of `StreamingSession.own` after the chunk. `text` contains CLIP's hidden
    states if `cross_kv` is not cached.
    """

    schedule: FewStepSchedule
    """The chunk's denoise schedule."""
    y: torch.Tensor | None
    """Conditioning on the start image, [20, F, h, w]. None on stages that do not embed patches."""
    windows: torch.Tensor
    """Actions of each latent frame, fp32 [F, R, K] on the host."""
    actions: Any = None
    """Result of `MatrixGameTransformer.actions` on the device, set before the chunk's first forward
    pass.
    """


# -- actions ---------------------------------------------------------------------------------------


def action_values(rows: ActionFrames, variant: MatrixGameVariant) -> torch.Tensor:
    """Convert controls to fp32 keyboard values, followed by the mouse values (pitch, yaw) if the
    model has mouse input.
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
    """Return the actions that condition each latent frame of a chunk.

    Latent frame k is conditioned on the actions of video frames 4 k - R to 4 k - 1, which do not
    include the last video frame of latent frame k. For frames before the start of the stream, the
    actions of the stream's first video frame are used.

    Returns:
        The actions [F, R, K], and the latest actions, which the next chunk requires.
    """
    past = rows_PK[:1].expand(span, -1) if before is None else before
    known = torch.cat((past, rows_PK))
    windows_FRK = known.unfold(0, span, VAE_TEMPORAL)[:num_frames].transpose(1, 2).contiguous()
    return windows_FRK, known[-(span - VAE_TEMPORAL + 1) :].clone()
