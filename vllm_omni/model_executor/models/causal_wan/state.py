# SPDX-License-Identifier: Apache-2.0
"""`StreamSession`: all that one live stream keeps between chunks on one rank, and `Chunk`, one chunk's working set.

A stream's K/V windows have their full size from the start; what else it holds has a known largest size that `nbytes`
counts from the start. Caches of the VAE are immutable values: a chunk makes new ones and `commit` swaps the
references, so an abandoned chunk leaves no trace.
Held by tests/model_executor/models/causal_wan/test_causal_wan_pipeline.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import torch

from vllm_omni.inputs import DiffusionParams, Seed, Text
from vllm_omni.model_executor.interfaces import SessionState
from vllm_omni.model_executor.layers.narrow_view import NarrowView
from vllm_omni.model_executor.models.causal_wan.cache import ChunkCache
from vllm_omni.model_executor.models.wan.chunk_decoder import DecoderLayout, DecoderState
from vllm_omni.model_executor.models.wan.latents import LATENT_CHANNELS, VAE_SPATIAL
from vllm_omni.model_executor.models.wan.vae import CacheLayout, VAECache
from vllm_omni.model_executor.noise import ChunkNoise
from vllm_omni.model_executor.schedules import FewStepSchedule
from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan
from vllm_omni.model_executor.streaming.replay import saved_chunks
from vllm_omni.outputs import RequestFailed
from vllm_omni.snapshot import ChunkIndex, SavedTensors, read_scalars

Source = Literal["text", "video"]


@dataclass(frozen=True)
class StreamShape:
    """What a stream's first chunk fixes. `rgb` output keeps a decoder cache, a `video` source an encoder cache."""

    height: int
    width: int
    output: str
    source: Source


@dataclass(frozen=True, eq=False)
class VideoInput:
    """Where a video-to-video stream's input stands. Immutable.

    encoder: the VAE encoder's cache. last_frame: the last input frame, uint8 [H, W, 3]. noise_scale: the chunk's.
    """

    encoder: VAECache
    last_frame: torch.Tensor
    noise_scale: float

    def to(self, device: torch.device | str) -> "VideoInput":
        return VideoInput(self.encoder.to(device), self.last_frame.to(device), self.noise_scale)


@dataclass(frozen=True, eq=False)
class Standing:
    """Where a stream stands when a chunk begins: after its last committed chunk, or after one still in flight."""

    chunk_index: int
    prompt: str | None
    seed: int | None
    cross_kv: torch.Tensor | None
    video: VideoInput | None


@dataclass(frozen=True, eq=False)
class PastChunk:
    """A committed chunk's clean latents, fp32 [16, F, h, w]: enough to run its clean pass again. Shared by forks."""

    frames: range
    latents: torch.Tensor


@dataclass(frozen=True)
class StateLayouts:
    """What a stream keeps beside its K/V windows on this rank; None = nothing of that kind.

    remembers: it keeps chunks that a prompt switch may recompute.
    """

    decoder: DecoderLayout | None
    encoder: CacheLayout | None
    remembers: bool


class StreamScalars(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `StreamSession.scalars` returns, as a file may bring it back."""

    chunk_index: ChunkIndex
    committed_frames: int
    written_from: int
    prompt: Text
    seed: Seed
    height: int
    width: int
    output: str
    source: str
    noise_scale: float | None


class StreamSession(SessionState):
    """See the module docstring. `None` in an optional field: this chunk has not happened, or not on this rank.

    reserved_bytes: the largest size of everything but the K/V windows.
    """

    def __init__(
        self,
        session_id: str,
        shape: StreamShape,
        plan: ChunkPlan,
        cache: ChunkCache,
        layouts: StateLayouts,
        reserved_bytes: int,
    ) -> None:
        super().__init__(session_id)
        self.shape = shape
        self.plan = plan
        self.cache = cache
        self.layouts = layouts
        self.reserved_bytes = reserved_bytes
        self.prompt: str | None = None
        self.seed: int | None = None
        self.cross_kv: torch.Tensor | None = None
        """A function of `prompt`; kept so that it is computed once."""
        self.video: VideoInput | None = None
        self.decoder_cache: DecoderState | None = None
        self.past: tuple[PastChunk, ...] = ()
        """Chunks still in the window; remembered only when a prompt switch may recompute it."""

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes + self.reserved_bytes

    def next_frames(self) -> range:
        """Return the latent frames of the next chunk."""
        return self.plan.frames(self.chunk_index)

    def standing(self) -> Standing:
        return Standing(self.chunk_index, self.prompt, self.seed, self.cross_kv, self.video)

    def tensors(self) -> dict[str, torch.Tensor]:
        named = self.cache.tensors(len(self.next_frames()))
        if self.decoder_cache is not None:
            named |= {f"decoder.{name}": tensor for name, tensor in self.decoder_cache.tensors().items()}
        if self.video is not None:
            named |= {f"encoder.{name}": tensor for name, tensor in self.video.encoder.tensors().items()}
            named["video.last_frame"] = self.video.last_frame
        for chunk in self.past:
            named[f"past.frame{chunk.frames.start}"] = chunk.latents
        return named

    def scalars(self) -> dict[str, Any]:
        return {
            "chunk_index": self.chunk_index,
            "committed_frames": self.cache.committed_frames,
            "written_from": self.cache.written_from,
            "prompt": self.prompt,
            "seed": self.seed,
            "height": self.shape.height,
            "width": self.shape.width,
            "output": self.shape.output,
            "source": self.shape.source,
            "noise_scale": None if self.video is None else self.video.noise_scale,
        }

    def opening_params(self) -> DiffusionParams:
        shape = self.shape
        return DiffusionParams(
            session_id=self.session_id,
            prompt=self.prompt,
            height=shape.height,
            width=shape.width,
            output="latents" if shape.output == "latents" else "rgb",
            options={"source": shape.source},
        )

    def restore(self, scalars: Mapping[str, Any], saved: SavedTensors) -> None:
        kept = read_scalars(scalars, StreamScalars)
        device = self.cache.clean.buffer.device
        self.chunk_index, self.prompt, self.seed = kept.chunk_index, kept.prompt, kept.seed
        frames, height, width = self.next_frames(), self.shape.height, self.shape.width
        if kept.committed_frames != frames.start:
            raise RequestFailed("invalid_snapshot", "the snapshot's chunk and frames do not belong together")
        self.cache.restore(saved, kept.committed_frames, kept.written_from, len(frames))
        decoder, encoder = self.layouts.decoder, self.layouts.encoder
        if decoder is not None:
            self.decoder_cache = decoder.restore(saved.under("decoder."), device, frames.start)
        if (encoder is None) != (kept.noise_scale is None) or not 0 <= (kept.noise_scale or 0) <= 1:
            raise RequestFailed("invalid_snapshot", f"the snapshot's noise_scale is {kept.noise_scale}")
        if encoder is not None and kept.noise_scale is not None:
            last_frame = saved.take("video.last_frame", device, torch.uint8, [height, width, 3])
            cache = VAECache.restore(saved, "encoder.", device, encoder)
            self.video = VideoInput(cache, last_frame, kept.noise_scale)
        past = []
        for index in saved_chunks(saved, self.plan, self.chunk_index) if self.layouts.remembers else ():
            chunk = self.plan.frames(index)
            cells = [LATENT_CHANNELS, len(chunk), height // VAE_SPATIAL, width // VAE_SPATIAL]
            past.append(PastChunk(chunk, saved.take(f"past.frame{chunk.start}", device, torch.float32, cells)))
        self.past = tuple(past)

    def fork(self, session_id: str) -> "StreamSession":
        other = StreamSession(session_id, self.shape, self.plan, self.cache.fork(), self.layouts, self.reserved_bytes)
        other.chunk_index = self.chunk_index
        other.prompt, other.seed = self.prompt, self.seed
        # Immutable values: sharing them is as good as copying.
        other.cross_kv, other.video = self.cross_kv, self.video
        other.decoder_cache, other.past = self.decoder_cache, self.past
        return other

    def to(self, device: torch.device | str) -> None:
        self.cache.to(device)
        self.cross_kv = None if self.cross_kv is None else self.cross_kv.to(device)
        self.video = None if self.video is None else self.video.to(device)
        self.decoder_cache = None if self.decoder_cache is None else self.decoder_cache.to(device)
        self.past = tuple(PastChunk(chunk.frames, chunk.latents.to(device)) for chunk in self.past)

    def close(self) -> None:
        self.cache.close()
        self.cross_kv = self.video = self.decoder_cache = None
        self.past = ()


@dataclass(frozen=True)
class ChunkInputs:
    """A checked request. video: uint8 [T, H, W, 3], exactly the chunk's frames, or None in a text-to-video stream."""

    prompt: str
    seed: int
    video: torch.Tensor | None


@dataclass(eq=False)
class Chunk:
    """One chunk in flight. The first group is made by `prepare_encode`, the second by later steps.

    latents: fp32 [16, F, h, w]. noise: what the first of them were, and what re-enters before steps 1, 2, ...; None
    where no step is run. text: the encoded prompt, None if `cross_kv` is known. cache: where the chunk writes its K/V,
    the session's own or, after `replay` has filled it, the one that will replace it. The others are what the session
    becomes when the chunk succeeds.
    """

    frames: range
    schedule: FewStepSchedule
    latents: torch.Tensor
    noise: ChunkNoise | None
    rope: tuple[torch.Tensor, torch.Tensor]
    text: torch.Tensor | None
    cache: ChunkCache
    replay: tuple[PastChunk, ...]
    prompt: str
    seed: int
    video: VideoInput | None

    noise_scale: float | None = None
    """The video input's, also where that is not."""
    cross_kv: torch.Tensor | None = None
    index: int = 0
    narrow: NarrowView | None = None
    """What the chunk sees of `cache` if it goes with a smaller window."""
    decoder_cache: DecoderState | None = None
    decoded_from: DecoderState | None = None
    """Kept while the decode may still be reading it on the device."""

    def standing(self) -> Standing:
        """Where the stream stands if this chunk succeeds; its first step has been run."""
        return Standing(self.index + 1, self.prompt, self.seed, self.cross_kv, self.video)

    @classmethod
    def to_decode(
        cls,
        frames: range,
        schedule: FewStepSchedule,
        size: Sequence[int],
        cache: ChunkCache,
        inputs: ChunkInputs,
        index: int,
    ) -> "Chunk":
        """Chunk `index` on the VAE stage: its latents, of `size`, come when other ranks have made them."""
        nothing = torch.empty(size, device="meta")
        prompt, seed = inputs.prompt, inputs.seed
        return cls(
            frames, schedule, nothing, None, (nothing, nothing), None, cache, (), prompt, seed, None, index=index
        )
