# SPDX-License-Identifier: Apache-2.0
"""`StreamSession`: causal Wan's part of a `StreamingSession`, and `Chunk`, one chunk's working set.

Its own value is where the input video stands. Held by
tests/model_executor/models/causal_wan/test_causal_wan_pipeline.py.
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
    """Where a video-to-video stream's input stands. Immutable.

    encoder: the VAE encoder's cache. last_frame: the last input frame, uint8 [H, W, 3].
    noise_scale: the chunk's.
    """

    encoder: VAECache
    last_frame: torch.Tensor
    noise_scale: float

    def tensors(self) -> dict[str, torch.Tensor]:
        encoder = {f"encoder.{name}": tensor for name, tensor in self.encoder.tensors().items()}
        return {**encoder, "video.last_frame": self.last_frame}

    def to(self, device: torch.device | str) -> "VideoInput":
        return VideoInput(self.encoder.to(device), self.last_frame.to(device), self.noise_scale)


@dataclass(frozen=True, eq=False)
class StreamPosition:
    """Where a stream stands when a chunk begins: after its last committed chunk, or after one
    still in flight.
    """

    chunk_index: int
    prompt: str | None
    seed: int | None
    cross_kv: torch.Tensor | None
    video: VideoInput | None


class StreamScalars(SessionScalars, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The result of `StreamSession.scalars`, as read from a file."""

    source: str
    noise_scale: float | None


class StreamSession(StreamingSession[ChunkCache, VideoInput]):
    """A causal Wan stream; `layouts.own` is the layout of the encoder's cache."""

    scalars_type: ClassVar[type[StreamScalars]] = StreamScalars
    past: torch.Tensor | None = None
    """Clean latents of the earlier frames that the next chunk sees, fp32 [16, F, h, w].

    Immutable; shared by forks. None = there are none, or the shape does not keep them."""

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
        """Return the frames and clean latents of the earlier chunks that the next one sees,
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
    """A checked request. video: uint8 [T, H, W, 3], exactly the chunk's frames, or None in a
    text-to-video stream.

    image: uint8 [H, W, 3], the stream's first frame. latents: fp32 [16, G, h, w], the chunk's first
    G latent frames.
    """

    prompt: str
    seed: int
    video: torch.Tensor | None
    image: torch.Tensor | None
    latents: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class PastChunk:
    """The inputs of an earlier chunk's clean pass, run again. latents: fp32 [16, F, h, w]."""

    frames: range
    latents: torch.Tensor
    rope: tuple[torch.Tensor, torch.Tensor]


@dataclass(eq=False, kw_only=True)
class CausalWanChunk(StreamingChunk[ChunkCache, VideoInput]):
    """One chunk in flight; `own` is where the input video stands after it.

    given: so many of its latent frames, from the first on, are the client's and stay as they are:
    the chunk's first pass, a clean one, leaves their K/V, and the other passes make the frames
    behind them. given_rope: of that pass.
    past: earlier chunks whose clean passes come before all of these, into a `window` that replaces
    the session's.
    """

    schedule: FewStepSchedule
    index: int
    noise_scale: float | None = None
    """The video input's, also where that is not."""
    given: int = 0
    given_rope: tuple[torch.Tensor, torch.Tensor] | None = None
    past: tuple[PastChunk, ...] = ()

    @property
    def num_steps(self) -> int:
        """Passes but for the clean one at the end."""
        if self.given == len(self.frames):
            return len(self.past) + 1
        return len(self.past) + int(self.given > 0) + self.schedule.num_steps

    def is_given(self, step: int) -> bool:
        """Whether pass `step` is that of the given frames."""
        return self.given > 0 and step == len(self.past)

    def denoise_index(self, step: int) -> int | None:
        index = step - len(self.past) - int(self.given > 0)
        return super().denoise_index(index) if index >= 0 else None

    def part(self, step: int) -> range:
        """The latent frames, by absolute index, that pass `step` works on."""
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
        """The latents of some of the chunk's frames, [16, len(part), h, w]."""
        if len(part) == len(self.frames):
            return self.latents
        return self.latents[:, part.start - self.frames.start : part.stop - self.frames.start]

    def position(self) -> StreamPosition:
        """Where the stream stands if this chunk succeeds; its first step has been run."""
        return StreamPosition(self.index + 1, self.prompt, self.seed, self.cross_kv, self.own)
