# SPDX-License-Identifier: Apache-2.0
"""`ChunkSource`: which chunks a request asks for, and the controls of each.

A planned request (`PlannedChunks`) brings its whole camera path or all its actions, so its chunks are known when its
turn comes. A live request (`LiveChunks`, which the doors extend) takes the controls of each chunk when that chunk
begins. Knows no message format, no sockets and no engine.
Held by tests/entrypoints/realtime/{test_chunk_source,test_session,test_generate_door}.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from vllm_omni.actions import ActionEntry
from vllm_omni.entrypoints.realtime.camera import CameraPath, PosePolicy, plan_frames
from vllm_omni.entrypoints.realtime.errors import DoorError
from vllm_omni.entrypoints.realtime.facts import WorldFacts
from vllm_omni.entrypoints.realtime.limits import DoorLimits
from vllm_omni.inputs import Lora


class Controls(msgspec.Struct, frozen=True, kw_only=True):
    """Controls of one chunk: actions per latent frame, or a pose per pixel frame, or neither; prompt and adapters.

    prompt, lora: None = as before. mark: the door's own data, returned unchanged in the finished chunk.
    """

    actions: Sequence[ActionEntry] | None = None
    camera: CameraPath | None = None
    prompt: str | None = None
    lora: Sequence[Lora] | None = None
    mark: Any = None


class ChunkSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Place of one chunk: `chunk_index` in the session, the rest in its request.

    number: chunks of the request before it. first_frame, num_frames: pixel frames. first_latent, num_latents: latent
    frames.
    """

    chunk_index: int
    number: int
    first_frame: int
    num_frames: int
    first_latent: int
    num_latents: int


class ChunkSource(ABC):
    """The chunks of one request. `num_chunks`: where a live request ends, None = when it is cancelled."""

    num_chunks: int | None = None

    @property
    def ready(self) -> bool:
        """Whether the next chunk may begin (not paused, credit left)."""
        return True

    async def wait_until_ready(self) -> None:
        return

    @abstractmethod
    def plan(self, facts: WorldFacts, limits: DoorLimits, *, starts_world: bool) -> tuple[int, ...]:
        """Return the pixel frames of all chunks, () for a live request. Raises `DoorError`."""

    @abstractmethod
    def most_in_flight(self, facts: WorldFacts, limits: DoorLimits) -> int:
        """Return how many chunks may be in the engine at once."""

    @abstractmethod
    def sample(self, span: ChunkSpan) -> Controls:
        """Return the controls of the chunk that is about to be generated; called once for each chunk, in order."""

    def note_result(self, meta: Mapping[str, Any]) -> None:  # noqa: B027  (most sources do not follow the results)
        """Read the metadata of a chunk that is done, before the next one is sampled."""


class PlannedChunks(ChunkSource):
    """A camera path (a pose per pixel frame) or a script (actions per latent frame), cut into chunks.

    num_frames: pixel frames asked for besides the poses, None = as many as poses. policy: for a number of
    frames that does not fill chunks. prompt, lora: from the first chunk on.
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
    ) -> None:
        self._camera, self._actions, self._lora = camera, actions, lora
        self._num_frames, self._policy, self._prompt = num_frames, policy, prompt

    def plan(self, facts: WorldFacts, limits: DoorLimits, *, starts_world: bool) -> tuple[int, ...]:
        if self._camera is not None:
            poses = len(self._camera)
        else:
            poses = facts.pixel_frames(len(self._actions or ()), starts_world)
        sizes = plan_frames(poses, self._num_frames, self._policy, facts, starts_world)
        if sum(sizes) > limits.max_frames_per_request:
            raise DoorError(
                "invalid_request",
                f"{sum(sizes)} frames asked for; one request makes at most {limits.max_frames_per_request}",
                param="poses",
            )
        return tuple(sizes)

    def most_in_flight(self, facts: WorldFacts, limits: DoorLimits) -> int:
        """One waits in the engine while as many as it takes are at work."""
        at_work = facts.chunks_in_flight
        return max(limits.chunks_in_flight, at_work + 1 if at_work > 1 else 1)

    def sample(self, span: ChunkSpan) -> Controls:
        camera, actions = None, None
        if self._camera is not None:
            end = span.first_frame + span.num_frames
            camera = self._camera.resized(end).slice(span.first_frame, end)
        elif self._actions is not None:
            given = self._actions[span.first_latent : span.first_latent + span.num_latents]
            actions = [*given, *([] for _ in range(span.num_latents - len(given)))]
        is_first = span.number == 0
        prompt, lora = (self._prompt, self._lora) if is_first else (None, None)
        return Controls(actions=actions, camera=camera, prompt=prompt, lora=lora)


class LiveChunks(ChunkSource):
    """Steered while it runs: as few chunks in the engine as keep it at work, so that controls are taken late."""

    def plan(self, facts: WorldFacts, limits: DoorLimits, *, starts_world: bool) -> tuple[int, ...]:
        return ()

    def most_in_flight(self, facts: WorldFacts, limits: DoorLimits) -> int:
        return facts.chunks_in_flight
