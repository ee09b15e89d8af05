# SPDX-License-Identifier: Apache-2.0
"""The state of a causal Wan session (`StreamSession`) and the working set of a chunk
(`CausalWanChunk`).

The session state specific to this family consists of the input video's state and, if the options
require them, the clean latents of earlier frames.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from vllm_omni.model_executor.models.causal_wan.cache import ChunkCache
from vllm_omni.model_executor.models.wan.vae.latents import LATENT_CHANNELS, VAE_SPATIAL
from vllm_omni.model_executor.models.wan.vae.vae import VAECache
from vllm_omni.model_executor.schedules import FewStepSchedule
from vllm_omni.model_executor.streaming.session import (
    SessionScalars,
    StreamingChunk,
    StreamingSession,
)
from vllm_omni.outputs import RequestFailed
from vllm_omni.tensors.saved import SavedTensors


@dataclass(frozen=True, eq=False)
class VideoInput:
    """Immutable input state of a video-to-video stream."""

    encoder: VAECache
    """VAE encoder cache."""
    last_frame: torch.Tensor
    """The most recent input frame, uint8 [H, W, 3]."""
    noise_scale: float
    """Noise scale of the most recent chunk."""

    def tensors(self) -> dict[str, torch.Tensor]:
        encoder = {f"encoder.{name}": tensor for name, tensor in self.encoder.tensors().items()}
        return {**encoder, "video.last_frame": self.last_frame}

    def to(self, device: torch.device | str) -> "VideoInput":
        return VideoInput(self.encoder.to(device), self.last_frame.to(device), self.noise_scale)


@dataclass(frozen=True, eq=False)
class StreamPosition:
    """A stream's state before a chunk, that is, after the last committed chunk or after a chunk in
    flight.
    """

    chunk_index: int
    """Index of the chunk."""
    prompt: str | None
    """Prompt of the previous chunk. None: there is no previous chunk."""
    seed: int | None
    """Seed of the previous chunk. None: there is no previous chunk."""
    cross_kv: torch.Tensor | None
    """K/V of `prompt`. None: the K/V have not been computed."""
    video: VideoInput | None
    """State of the input video. None: the stream has no input video."""


class StreamScalars(SessionScalars, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The result of `StreamSession.scalars`, as read from a snapshot."""

    source: str
    """Whether the stream is generated from text or from an input video (`SessionShape.source`)."""
    noise_scale: float | None
    """`VideoInput.noise_scale`. None: the stream has no input video."""


class StreamSession(StreamingSession[ChunkCache, VideoInput]):
    """A causal Wan stream. `layouts.own` is the layout of the encoder cache."""

    scalars_type: ClassVar[type[StreamScalars]] = StreamScalars
    past: torch.Tensor | None = None
    """Clean latents of the earlier frames that the next chunk attends to, fp32 [16, F, h, w]. The
    tensor is immutable, and forks share it. None: there are no such frames, or the options do not
    require them.
    """

    def position(self) -> StreamPosition:
        return StreamPosition(self.chunk_index, self.prompt, self.seed, self.cross_kv, self.own)

    def value_scalars(self) -> dict[str, Any]:
        noise_scale = None if self.own is None else self.own.noise_scale
        return {"source": self.shape.source, "noise_scale": noise_scale}

    def start_options(self) -> dict[str, Any]:
        return {"source": self.shape.source}

    def commit(self, chunk: StreamingChunk[ChunkCache, VideoInput]) -> None:
        if chunk.window is not self.window:
            self.window.close()
            self.window = chunk.window
        super().commit(chunk)
        if self.shape.keeps_latents:
            latents = (
                chunk.latents if self.past is None else torch.cat([self.past, chunk.latents], dim=1)
            )
            visible = self._past_frames()
            self.past = latents[:, -visible:].contiguous() if visible else None

    def past_latents(self) -> list[tuple[range, torch.Tensor]]:
        """Return the frames and clean latents of the earlier chunks that the next chunk attends to,
        oldest first.
        """
        if self.past is None:
            return []
        chunks = self.plan.past_chunks(self.chunk_index)
        parts = self.past.split([len(frames) for frames in chunks], dim=1)
        return list(zip(chunks, parts, strict=True))

    def _past_frames(self) -> int:
        return sum(len(frames) for frames in self.plan.past_chunks(self.chunk_index))

    def tensors(self) -> dict[str, torch.Tensor]:
        return super().tensors() | ({} if self.past is None else {"past.latents": self.past})

    def restore(self, scalars: Mapping[str, Any], saved: SavedTensors) -> None:
        super().restore(scalars, saved)
        if self.shape.keeps_latents and (visible := self._past_frames()):
            size = [
                LATENT_CHANNELS,
                visible,
                self.shape.height // VAE_SPATIAL,
                self.shape.width // VAE_SPATIAL,
            ]
            self.past = saved.take_tensor("past.latents", self.window.device, torch.float32, size)

    def fork(self, session_id: str) -> Self:
        other = super().fork(session_id)
        other.past = self.past
        return other

    def to(self, device: torch.device | str) -> None:
        super().to(device)
        self.past = None if self.past is None else self.past.to(device)

    def close(self) -> None:
        super().close()
        self.past = None

    def restore_values(
        self, retained: StreamScalars, saved: SavedTensors, device: torch.device
    ) -> VideoInput | None:
        encoder, scale = self.layouts.own, retained.noise_scale
        if (encoder is None) != (scale is None) or not 0 <= (scale or 0) <= 1:
            raise RequestFailed("invalid_snapshot", f"the snapshot's noise_scale is {scale}")
        if encoder is None or scale is None:
            return None
        last_frame = saved.take_tensor(
            "video.last_frame", device, torch.uint8, [self.shape.height, self.shape.width, 3]
        )
        return VideoInput(encoder.restore(saved.under("encoder."), device), last_frame, scale)


@dataclass(frozen=True)
class ChunkInputs:
    """A validated request for one chunk."""

    prompt: str
    """Prompt of the chunk."""
    seed: int
    """Seed of the chunk's noise."""
    video: torch.Tensor | None
    """Input video of the chunk, uint8 [T, H, W, 3]. None: the stream is text-to-video."""
    image: torch.Tensor | None
    """Start image of the stream, uint8 [H, W, 3]. None: there is no start image."""
    latents: torch.Tensor | None
    """First G latent frames of the chunk, fp32 [16, G, h, w]. None: the client does not provide
    any."""


@dataclass(frozen=True, eq=False)
class PastChunk:
    """Inputs for repeating an earlier chunk's clean-context pass."""

    frames: range
    """Absolute indices of the latent frames."""
    latents: torch.Tensor
    """Clean latents of these frames, fp32 [16, F, h, w]."""
    rope: tuple[torch.Tensor, torch.Tensor]
    """Rotary tables (cos, sin) of these frames."""


@dataclass(eq=False, kw_only=True)
class CausalWanChunk(StreamingChunk[ChunkCache, VideoInput]):
    """One chunk in flight. `own` is the state of the input video after the chunk."""

    schedule: FewStepSchedule
    """The chunk's denoise schedule."""
    index: int
    """Index of the chunk."""
    noise_scale: float | None = None
    """Noise scale of the input video. It is set on every rank. None: there is no input video."""
    given: int = 0
    """Number of leading latent frames that the client provides. These frames do not change. A
    clean-context pass writes their K/V before the denoise steps generate the frames that follow.
    """
    given_rope: tuple[torch.Tensor, torch.Tensor] | None = None
    """Rotary tables for the clean-context pass over the `given` frames. None: the client does not
    provide frames.
    """
    past: tuple[PastChunk, ...] = ()
    """Earlier chunks whose clean-context passes run first. These passes write to a new `window`,
    which replaces the session's window when the chunk is committed.
    """

    @property
    def num_steps(self) -> int:
        """Return the number of forward passes that the chunk needs, excluding the final
        clean-context pass.
        """
        if self.given == len(self.frames):
            return len(self.past) + 1
        return len(self.past) + int(self.given > 0) + self.schedule.num_steps

    @property
    def num_given(self) -> int:
        return self.given

    def is_given(self, step: int) -> bool:
        """Return whether forward pass `step` processes the frames that the client provides."""
        return self.given > 0 and step == len(self.past)

    def denoise_index(self, step: int) -> int | None:
        index = step - len(self.past) - int(self.given > 0)
        return super().denoise_index(index) if index >= 0 else None

    def part(self, step: int) -> range:
        """Return the absolute indices of the latent frames that forward pass `step` processes."""
        if step < len(self.past):
            return self.past[step].frames
        if self.given == 0:
            return self.frames
        after = self.frames.start + self.given
        return (
            range(self.frames.start, after)
            if self.is_given(step)
            else range(after, self.frames.stop)
        )

    def latents_of(self, part: range) -> torch.Tensor:
        """Return the latents of the chunk's frames in `part`, [16, len(part), h, w]."""
        if len(part) == len(self.frames):
            return self.latents
        return self.latents[:, part.start - self.frames.start : part.stop - self.frames.start]

    def position(self) -> StreamPosition:
        """Return the stream's state after this chunk, assuming that the chunk succeeds. The chunk's
        first step must have run.
        """
        return StreamPosition(self.index + 1, self.prompt, self.seed, self.cross_kv, self.own)
