# SPDX-License-Identifier: Apache-2.0
"""The state of a LingBot World session (`LingBotSession`) and the working set of a chunk
(`LingBotChunk`).

In addition to the state that every streaming session stores, a LingBot World session stores its
camera state and conditioning state.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import msgspec
import torch

from vllm_omni.model_executor.models.lingbot_world.camera import CameraTail, WorldStart
from vllm_omni.model_executor.models.wan.images.image_condition import (
    ImageStartedPipeline,
    ImageStartedScalars,
    ImageStartedSession,
)
from vllm_omni.model_executor.schedules import FewStepSchedule
from vllm_omni.model_executor.streaming.session import KVWindows, StreamingChunk
from vllm_omni.outputs import RequestFailed
from vllm_omni.tensors.saved import SavedTensors
from vllm_omni.worlds.movement import heading_of, pitch_of

REST_FRAMES = 2
"""Number of latent frames with the current pose that the window must contain before later chunks at
that pose are omitted from it.
"""


@dataclass(frozen=True)
class RestState:
    """Decides which chunks to omit from the K/V window while the camera is at rest.

    If the window filled with generated frames of one pose, the video would drift, because each
    frame inherits the errors of the frames before it. To prevent this, chunks generated while the
    camera is at rest are not written to the window, and all use the same token positions. After a
    prompt change, chunks are written until the window, except for its sink frames, contains no
    frames of the previous prompt.
    """

    frames_at_pose: int = 0
    """Number of latent frames in the window that have the current pose, excluding the session's
    first chunk."""
    frames_of_prompt: int = 0
    """Number of latent frames written to the window since the prompt changed."""

    def omits_chunk(self, *, moved: bool, same_prompt: bool, ring_frames: int) -> bool:
        """Return whether to omit the next chunk from the K/V window.

        Args:
            moved: Whether the camera moves within the chunk, or between the previous chunk and this
                one.
            same_prompt: Whether the prompt is the same as the previous chunk's.
            ring_frames: Number of latent frames in the window, excluding sink frames.
        """
        rests = not moved and self.frames_at_pose >= REST_FRAMES
        return rests and same_prompt and self.frames_of_prompt >= ring_frames

    def after_chunk(self, frames: int, *, moved: bool, same_prompt: bool) -> "RestState":
        """Return the state after a chunk of `frames` latent frames has been written to the window.
        `moved` and `same_prompt` are defined as in `omits_chunk`.
        """
        return RestState(
            0 if moved else self.frames_at_pose + frames,
            frames + (self.frames_of_prompt if same_prompt else 0),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class WorldCoordinates(ImageStartedPipeline):
    """Immutable camera and conditioning state of a session. Camera tensors are on the host."""

    tail: CameraTail
    """Camera state after the last chunk."""
    rest: RestState = RestState()

    def tensors(self) -> dict[str, torch.Tensor]:
        start = self.tail.start
        known = (
            {}
            if start is None
            else {"camera.start": start.world_44, "camera.first": start.first_44}
        )
        return {**super().tensors(), "camera.pose": self.tail.pose_44, **known}


class LingBotScalars(ImageStartedScalars, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Scalars in a session's snapshot, in the format that `LingBotSession.scalars` returns."""

    pitch_degrees: float
    """Value of `CameraTail.pitch_degrees`."""
    largest_step: float = 0.0
    """Value of `CameraTail.largest_step`."""
    knows_world: bool = False
    """Whether the session's world pose is known (`CameraTail.start`)."""
    frames_at_pose: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Value of `RestState.frames_at_pose`."""
    frames_of_prompt: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Value of `RestState.frames_of_prompt`."""


class LingBotSession(ImageStartedSession[KVWindows, WorldCoordinates]):
    """A LingBot World session. `layouts.own` is the layout of the conditioning."""

    scalars_type: ClassVar[type[LingBotScalars]] = LingBotScalars

    @property
    def tail(self) -> CameraTail | None:
        return None if self.own is None else self.own.tail

    @property
    def rest(self) -> RestState:
        # Before the first chunk, the window contains no frames of another prompt.
        ring_frames = self.plan.window_frames - self.plan.sink_frames
        return RestState(0, ring_frames) if self.own is None else self.own.rest

    def value_scalars(self) -> dict[str, Any]:
        tail = self.tail
        return {
            "pitch_degrees": None if tail is None else tail.pitch_degrees,
            "largest_step": 0.0 if tail is None else tail.largest_step,
            "knows_world": tail is not None and tail.start is not None,
            "frames_at_pose": self.rest.frames_at_pose,
            "frames_of_prompt": self.rest.frames_of_prompt,
            **super().value_scalars(),
        }

    def restore_values(
        self, retained: LingBotScalars, saved: SavedTensors, device: torch.device
    ) -> WorldCoordinates:
        if not (math.isfinite(retained.pitch_degrees) and 0 <= retained.largest_step < math.inf):
            raise RequestFailed(
                "invalid_snapshot", "the snapshot's camera has no finite pitch and largest step"
            )
        condition = self.restore_condition(self.layouts.own, retained, saved, device)
        pose_44 = saved.take_tensor("camera.pose", "cpu", torch.float64, [4, 4])
        start = None
        if retained.knows_world:
            world_44 = saved.take_tensor("camera.start", "cpu", torch.float64, [4, 4])
            start = WorldStart(
                world_44, saved.take_tensor("camera.first", "cpu", torch.float64, [4, 4])
            )
        return WorldCoordinates(
            condition=condition,
            tail=CameraTail(pose_44, retained.pitch_degrees, retained.largest_step, start),
            rest=RestState(retained.frames_at_pose, retained.frames_of_prompt),
        )


@dataclass(frozen=True)
class ChunkInputs:
    """A validated chunk request. The camera tensors are fp64 on the CPU."""

    prompt: str
    """Prompt of the chunk."""
    seed: int
    """Seed of the noise."""
    image: torch.Tensor | None
    """New start image, uint8 [H, W, 3] of any size. None: the session's image is used."""
    relative_F44: torch.Tensor
    """Pose of each latent frame relative to the previous one."""
    intrinsics_F4: torch.Tensor
    """Camera intrinsics fx, fy, cx, cy in output pixels."""
    tail: CameraTail
    """Camera state after the chunk."""
    flags_F4: torch.Tensor | None
    """Flags for the keys w a s d. None if the model is not conditioned on keys."""
    world_F44: torch.Tensor | None = None
    """World pose of each latent frame, in metres. None if the world pose is unknown."""
    moves: bool = True
    """Whether the camera moves within the chunk, or between the previous chunk and this one."""

    def world_poses_of(self) -> list[list[float]] | None:
        """Return each latent frame's x and z (metres), heading and pitch (degrees), or None if the
        world pose is unknown.
        """
        if self.world_F44 is None:
            return None
        return [
            [float(pose[0, 3]), float(pose[2, 3]), heading_of(pose), pitch_of(pose)]
            for pose in self.world_F44.unbind()
        ]


@dataclass(eq=False, kw_only=True)
class LingBotChunk(StreamingChunk[KVWindows, WorldCoordinates]):
    """Working set of one chunk in flight. `own` is the camera and conditioning state after the
    chunk.
    """

    schedule: FewStepSchedule
    """The chunk's denoise schedule."""
    y: torch.Tensor | None
    """Conditioning [20, F, h, w]. None on stages that do not embed patches."""
    camera_map: torch.Tensor | None
    """Control map [384 or 448, F, h, w]. None on the VAE stage."""
    world_features: torch.Tensor | None = None
    """World pose features (`world_pose.py`). None if the model is not a `world` model."""
    world_poses: list[list[float]] | None = None
    """Position x and z, heading and pitch of each latent frame. None if they are unknown."""

    camera: list[torch.Tensor] | None = None
    """Camera modulation of each layer. None before the first step and after the last step."""
