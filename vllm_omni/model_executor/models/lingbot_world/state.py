# SPDX-License-Identifier: Apache-2.0
"""`LingBotSession`: all that one live world keeps between chunks on one rank, and `Chunk`, one chunk's working set.

A session's K/V window has its full size from the start; what else it holds has a known largest size that `nbytes`
counts from the start. Caches of the VAE are immutable values: a chunk makes new ones and `commit` swaps the
references, so an abandoned chunk leaves no trace.
Held by tests/model_executor/models/lingbot_world/test_lingbot_pipeline.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import torch

from vllm_omni.inputs import DiffusionParams, Seed, Text
from vllm_omni.model_executor.interfaces import SessionState
from vllm_omni.model_executor.layers.kv_cache import KVWindow
from vllm_omni.model_executor.models.lingbot_world.camera import CameraTail
from vllm_omni.model_executor.models.lingbot_world.condition import ConditionLayout, ConditionState
from vllm_omni.model_executor.models.lingbot_world.replay import PastChunk
from vllm_omni.model_executor.models.wan.chunk_decoder import DecoderLayout, DecoderState
from vllm_omni.model_executor.noise import ChunkNoise
from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan
from vllm_omni.model_executor.streaming.replay import saved_chunks
from vllm_omni.outputs import RequestFailed
from vllm_omni.snapshot import ChunkIndex, SavedTensors, read_scalars


@dataclass(frozen=True)
class SessionShape:
    """What a session's first chunk fixes. output: `rgb` sessions keep a decoder cache, `latents` sessions none."""

    height: int
    width: int
    output: str


@dataclass(frozen=True)
class StateLayouts:
    """What a session keeps beside its K/V window on this rank; None = nothing of that kind.

    remembers: it keeps chunks that a prompt switch may recompute.
    """

    decoder: DecoderLayout | None
    condition: ConditionLayout | None
    remembers: bool


class LingBotScalars(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `LingBotSession.scalars` returns, as a file may bring it back."""

    chunk_index: ChunkIndex
    committed_frames: int
    written_from: int
    prompt: Text
    seed: Seed
    height: int
    width: int
    output: str
    pitch_degrees: float
    largest_step: float = 0.0
    condition_settled: bool | None
    condition_encoded: Annotated[int, msgspec.Meta(ge=1)] = 1


class LingBotSession(SessionState):
    """See the module docstring. `None` in an optional field: this chunk has not happened, or not on this rank.

    reserved_bytes: the largest size of everything but the K/V window.
    """

    def __init__(
        self,
        session_id: str,
        shape: SessionShape,
        plan: ChunkPlan,
        window: KVWindow,
        layouts: StateLayouts,
        reserved_bytes: int,
    ) -> None:
        super().__init__(session_id)
        self.shape = shape
        self.plan = plan
        self.window = window
        self.layouts = layouts
        self.reserved_bytes = reserved_bytes
        self.prompt: str | None = None
        self.seed: int | None = None
        self.tail: CameraTail | None = None
        self.cross_kv: torch.Tensor | None = None
        """A function of `prompt`; kept so that it is computed once."""
        self.condition: ConditionState | None = None
        self.decoder_cache: DecoderState | None = None
        self.past: tuple[PastChunk, ...] = ()
        """Chunks still in the window; remembered only when a prompt switch may recompute it."""

    @property
    def nbytes(self) -> int:
        return self.window.nbytes + self.reserved_bytes

    def next_frames(self) -> range:
        """Return the latent frames of the next chunk."""
        return self.plan.frames(self.chunk_index)

    def tensors(self) -> dict[str, torch.Tensor]:
        named = self.window.tensors(len(self.next_frames()))
        if self.decoder_cache is not None:
            named |= {f"decoder.{name}": tensor for name, tensor in self.decoder_cache.tensors().items()}
        if self.condition is not None:
            named |= {f"condition.{name}": tensor for name, tensor in self.condition.tensors().items()}
        if self.tail is not None:
            named["camera.pose"] = self.tail.pose_44
        for chunk in self.past:
            named |= {f"past.frame{chunk.frames.start}.{name}": tensor for name, tensor in chunk.tensors().items()}
        return named

    def scalars(self) -> dict[str, Any]:
        return {
            "chunk_index": self.chunk_index,
            "committed_frames": self.window.committed_frames,
            "written_from": self.window.written_from,
            "prompt": self.prompt,
            "seed": self.seed,
            "height": self.shape.height,
            "width": self.shape.width,
            "output": self.shape.output,
            "pitch_degrees": None if self.tail is None else self.tail.pitch_degrees,
            "largest_step": 0.0 if self.tail is None else self.tail.largest_step,
            "condition_settled": None if self.condition is None else self.condition.settled,
            "condition_encoded": 1 if self.condition is None else self.condition.num_encoded,
        }

    def opening_params(self) -> DiffusionParams:
        shape = self.shape
        return DiffusionParams(
            session_id=self.session_id,
            prompt=self.prompt,
            height=shape.height,
            width=shape.width,
            output="latents" if shape.output == "latents" else "rgb",
        )

    def restore(self, scalars: Mapping[str, Any], saved: SavedTensors) -> None:
        kept = read_scalars(scalars, LingBotScalars)
        device = self.window.buffer.device
        self.chunk_index, self.prompt, self.seed = kept.chunk_index, kept.prompt, kept.seed
        frames = self.next_frames()
        camera = math.isfinite(kept.pitch_degrees) and 0 <= kept.largest_step < math.inf
        if kept.committed_frames != frames.start or kept.condition_encoded > frames.start or not camera:
            raise RequestFailed(
                "invalid_snapshot", "the snapshot's chunk, frames, condition and camera do not fit together"
            )
        self.window.restore(saved, kept.committed_frames, kept.written_from, len(frames))
        size = (self.shape.height, self.shape.width)
        decoder, condition = self.layouts.decoder, self.layouts.condition
        if decoder is not None:
            self.decoder_cache = decoder.restore(saved.under("decoder."), device, frames.start)
        pose_44 = saved.take("camera.pose", "cpu", torch.float64, [4, 4])
        self.tail = CameraTail(pose_44, kept.pitch_degrees, kept.largest_step)
        if (condition is None) != (kept.condition_settled is None):
            raise RequestFailed("invalid_snapshot", f"the snapshot's condition_settled is {kept.condition_settled}")
        if condition is not None and kept.condition_settled is not None:
            self.condition = condition.restore(
                saved.under("condition."),
                device,
                settled=kept.condition_settled,
                num_encoded=kept.condition_encoded,
            )
        remembered = saved_chunks(saved, self.plan, self.chunk_index) if self.layouts.remembers else []
        self.past = tuple(
            PastChunk.restore(saved, self.plan.frames(index), size, device, with_condition=condition is not None)
            for index in remembered
        )

    def fork(self, session_id: str) -> "LingBotSession":
        other = LingBotSession(session_id, self.shape, self.plan, self.window.fork(), self.layouts, self.reserved_bytes)
        other.chunk_index = self.chunk_index
        other.prompt, other.seed = self.prompt, self.seed
        # Immutable values: sharing them is as good as copying.
        other.tail, other.cross_kv = self.tail, self.cross_kv
        other.condition, other.decoder_cache, other.past = self.condition, self.decoder_cache, self.past
        return other

    def to(self, device: torch.device | str) -> None:
        self.window.to(device)
        self.cross_kv = None if self.cross_kv is None else self.cross_kv.to(device)
        self.condition = None if self.condition is None else self.condition.to(device)
        self.decoder_cache = None if self.decoder_cache is None else self.decoder_cache.to(device)
        self.past = tuple(chunk.to(device) for chunk in self.past)

    def close(self) -> None:
        self.window.close()
        self.cross_kv = self.condition = self.decoder_cache = None
        self.past = ()


@dataclass(frozen=True)
class ChunkInputs:
    """A checked request. relative_F44, intrinsics_F4: fp64, CPU; `tail` is where the camera ends.

    image: uint8 [H, W, 3] of any size, or None to go on from the session's.
    """

    prompt: str
    seed: int
    image: torch.Tensor | None
    relative_F44: torch.Tensor
    intrinsics_F4: torch.Tensor
    tail: CameraTail


@dataclass(eq=False)
class Chunk:
    """One chunk in flight. The first group is made by `prepare_encode`, the second by the first denoise step.

    latents: fp32 [16, F, h, w]. noise: what the first of them were, and what re-enters before steps 1, 2, ...; None
    where no step is run. y: [20, F, h, w], None on stages that embed no patches. camera_map: [384, F, h, w], dropped
    once `camera` is there. text: the encoded prompt, None if the session's `cross_kv` still stands. window: where the
    chunk writes its K/V, the session's own or, after `replay` has filled it, the one that will replace it.
    relative_F44, intrinsics_F4: the camera behind `camera_map`. The others are what the session becomes when the chunk
    succeeds.
    """

    frames: range
    latents: torch.Tensor
    noise: ChunkNoise | None
    y: torch.Tensor | None
    rope: tuple[torch.Tensor, torch.Tensor]
    camera_map: torch.Tensor | None
    text: torch.Tensor | None
    window: KVWindow
    replay: tuple[PastChunk, ...]
    relative_F44: torch.Tensor
    intrinsics_F4: torch.Tensor
    prompt: str
    seed: int
    tail: CameraTail
    condition: ConditionState | None

    camera: torch.Tensor | None = None
    cross_kv: torch.Tensor | None = None
    decoder_cache: DecoderState | None = None
    decoded_from: DecoderState | None = None
    """Kept while the decode may still be reading it on the device."""

    @classmethod
    def to_decode(cls, frames: range, size: Sequence[int], window: KVWindow, inputs: ChunkInputs) -> "Chunk":
        """A chunk on the VAE stage: its latents, of `size`, come when other ranks have made them."""
        nothing = torch.empty(size, device="meta")
        return cls(
            frames=frames,
            latents=nothing,
            noise=None,
            y=None,
            rope=(nothing, nothing),
            camera_map=None,
            text=None,
            window=window,
            replay=(),
            relative_F44=inputs.relative_F44,
            intrinsics_F4=inputs.intrinsics_F4,
            prompt=inputs.prompt,
            seed=inputs.seed,
            tail=inputs.tail,
            condition=None,
        )
