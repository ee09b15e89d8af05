# SPDX-License-Identifier: Apache-2.0
"""`ChunkSource`: a request's chunks and the controls for each chunk.

A planned request (`PlannedChunks`) contains its whole camera path or all its actions, so its chunks
are known in advance. A live request (`LiveChunks`, which endpoints subclass) samples each chunk's
controls when the chunk starts. This module is independent of message formats, sockets and the
engine.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from vllm_omni.actions import ActionEntry
from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.entrypoints.realtime.controls.camera import CameraPath, PosePolicy, plan_frames
from vllm_omni.entrypoints.realtime.encoding.frames import InputId
from vllm_omni.inputs import Lora


class ChunkControls(msgspec.Struct, frozen=True, kw_only=True):
    """Controls for generating one chunk."""

    actions: Sequence[ActionEntry] | None = None
    """Actions for each latent frame. None: the chunk has no actions."""
    camera: CameraPath | None = None
    """Camera path with one pose per pixel frame. None: the chunk has no poses."""
    prompt: str | None = None
    """New prompt. None: the prompt does not change."""
    lora: Sequence[Lora] | None = None
    """New LoRA adapters. None: the adapters do not change."""
    input_id: InputId | None = None
    """Id of the newest input that affects the chunk. None: no input affects it."""
    mark: Any = None
    """Endpoint-specific data, which is returned unchanged with the finished chunk."""


class ChunkSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Position of one chunk in its session and its request."""

    chunk_index: int
    """Index of the chunk within the session, starting at 0."""
    number: int
    """Index of the chunk within the request, starting at 0."""
    first_frame: int
    """Index of the chunk's first pixel frame within the request."""
    num_frames: int
    """Number of pixel frames in the chunk."""
    first_latent: int
    """Index of the chunk's first latent frame within the request."""
    num_latents: int
    """Number of latent frames in the chunk."""


class ChunkSource(ABC):
    """Source of one request's chunks and their controls."""

    num_chunks: int | None = None
    """Length of a live request in chunks. None: the request continues until it is cancelled."""

    @property
    def ready(self) -> bool:
        """Whether the next chunk may start, that is, whether the stream is not paused and has
        credit left.
        """
        return True

    async def wait_until_ready(self) -> None:
        return

    @abstractmethod
    def plan(
        self, info: StreamInfo, limits: EndpointLimits, *, starts_session: bool
    ) -> tuple[int, ...]:
        """Return the number of pixel frames in every chunk, or () for a live request.

        Raises:
            EndpointError: The request does not match the model's chunks or exceeds a limit.
        """

    @abstractmethod
    def most_in_flight(self, info: StreamInfo, limits: EndpointLimits) -> int:
        """Return the maximum number of chunks in the engine at the same time."""

    @abstractmethod
    def sample(self, span: ChunkSpan) -> ChunkControls:
        """Return the controls for the next chunk. This method is called once for each chunk, in
        order.
        """

    def state(self) -> bytes | None:
        """Return the state of a live request, encoded by `encode_state`, so that another server can
        continue the request after a chunk. None: the client itself sends the rest of its request.
        """
        return None

    def note_result(self, meta: Mapping[str, Any]) -> None:  # noqa: B027  (most sources ignore results)
        """Process a finished chunk's metadata before the next chunk is sampled."""


class PlannedChunks(ChunkSource):
    """Chunks for a camera path (one pose per pixel frame) or a script (actions per latent frame).

    Args:
        camera: The camera path.
        actions: The script.
        num_frames: Number of pixel frames that the client requested. Default: one frame per pose.
        policy: Policy for frames that do not fill a chunk.
        prompt: Prompt that takes effect with the first chunk.
        lora: LoRA adapters that take effect with the first chunk.
        input_id: The client's id for the request.
    """

    def __init__(
        self,
        *,
        camera: CameraPath | None = None,
        actions: Sequence[ActionEntry] | None = None,
        num_frames: int | None = None,
        policy: PosePolicy = "error",
        prompt: str | None = None,
        lora: Sequence[Lora] | None = None,
        input_id: InputId | None = None,
    ) -> None:
        self._input_id = input_id
        self._camera, self._actions, self._lora = camera, actions, lora
        self._num_frames, self._policy, self._prompt = num_frames, policy, prompt

    def plan(
        self, info: StreamInfo, limits: EndpointLimits, *, starts_session: bool
    ) -> tuple[int, ...]:
        num_actions: int | None = None
        if self._camera is not None:
            poses = len(self._camera)
        else:
            num_actions = len(self._actions or ())
            poses = info.pixel_frames(num_actions, starts_session)
        sizes = plan_frames(
            poses, self._num_frames, self._policy, info, starts_session, num_actions
        )
        if sum(sizes) > limits.max_frames_per_request:
            raise EndpointError(
                "invalid_request",
                f"{sum(sizes)} frames requested; one request may generate at most "
                f"{limits.max_frames_per_request}",
                param="poses" if num_actions is None else "actions",
            )
        return tuple(sizes)

    def most_in_flight(self, info: StreamInfo, limits: EndpointLimits) -> int:
        """Return `limits.chunks_in_flight`. If the engine processes several of a session's chunks
        at the same time, the result is at least their number plus one queued chunk.
        """
        at_work = info.chunks_in_flight
        return max(limits.chunks_in_flight, at_work + 1 if at_work > 1 else 1)

    def sample(self, span: ChunkSpan) -> ChunkControls:
        camera, actions = None, None
        if self._camera is not None:
            end = span.first_frame + span.num_frames
            camera = self._camera.resized(end).slice(span.first_frame, end)
        elif self._actions is not None:
            given = self._actions[span.first_latent : span.first_latent + span.num_latents]
            actions = [*given, *([] for _ in range(span.num_latents - len(given)))]
        is_first = span.number == 0
        prompt, lora = (self._prompt, self._lora) if is_first else (None, None)
        return ChunkControls(
            actions=actions, camera=camera, prompt=prompt, lora=lora, input_id=self._input_id
        )


class LiveChunks(ChunkSource):
    """Chunks of a live request, whose controls are sampled when each chunk starts.

    As few chunks as possible are in flight because controls should be sampled as late as possible.
    """

    def plan(
        self, info: StreamInfo, limits: EndpointLimits, *, starts_session: bool
    ) -> tuple[int, ...]:
        return ()

    def most_in_flight(self, info: StreamInfo, limits: EndpointLimits) -> int:
        return info.chunks_in_flight
