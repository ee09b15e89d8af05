# SPDX-License-Identifier: Apache-2.0
"""`StreamingSession`: all that one live stream keeps between chunks on one rank, and
`StreamingChunk`, one chunk.

A session's K/V windows have their full size from the start; its other state has a known largest
size that `nbytes` counts from the start. Everything beside the windows is an immutable value: a
chunk makes new ones and `commit` swaps the references, so an abandoned chunk leaves no trace. State
of one model alone is one more such value, `own`.
Held by tests/model_executor/models/causal_wan/test_causal_wan_pipeline.py and
tests/model_executor/models/lingbot_world/test_lingbot_pipeline.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar

import msgspec
import torch

from vllm_omni.inputs import DiffusionParams, Output, Text
from vllm_omni.model_executor.interfaces import SessionState
from vllm_omni.model_executor.schedules import ChunkNoise
from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan
from vllm_omni.outputs import RequestFailed
from vllm_omni.seeds import Seed, check_seed
from vllm_omni.tensors.saved import ChunkIndex, SavedTensors, read_scalars


class SessionValue(Protocol):
    """An immutable value that a session keeps; forks share it."""

    def tensors(self) -> dict[str, torch.Tensor]: ...

    def to(self, device: torch.device | str) -> Self: ...


class DecoderLayout(Protocol):
    """Shapes and types of a decoder's state between a stream's chunks."""

    def restore(self, saved: SavedTensors, device: torch.device | str, num_latents: int) -> Any: ...


class Schedule(Protocol):
    """Denoise steps of a chunk."""

    @property
    def num_steps(self) -> int: ...

    def advance(
        self, latents: torch.Tensor, flow: torch.Tensor, step: int, noise: ChunkNoise
    ) -> torch.Tensor:
        """Return the latents that `step` leaves, fp32."""
        ...


class Windows(Protocol):
    """A stream's K/V: one window or several."""

    @property
    def nbytes(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def committed_frames(self) -> int: ...

    def check_frames(self, frames: range) -> None: ...

    def commit(self, end_frame: int) -> None: ...

    def tensors(self, next_frames: int) -> dict[str, torch.Tensor]: ...

    def restore(self, saved: SavedTensors, committed_frames: int, next_frames: int) -> None: ...

    def fork(self) -> Self: ...

    def to(self, device: torch.device | str) -> None: ...

    def close(self) -> None: ...


Source = Literal["text", "video"]


@dataclass(frozen=True)
class SessionShape:
    """Sizes fixed by a session's first chunk."""

    height: int
    """Of the video, in pixels."""
    width: int
    """Of the video, in pixels."""
    output: Output
    """`latents` sessions keep no decoder cache, the others do."""
    source: Source = field(default="text", kw_only=True)
    """`video` sessions start each chunk from the client's video and keep an encoder cache."""
    keeps_latents: bool = field(default=False, kw_only=True)
    """Whether the latents of the frames in the window are kept, so that their K/V can be
    computed again.
    """
    window: tuple[int, int] | None = field(default=None, kw_only=True)
    """(window_frames, sink_frames) of this session. Default: the server's."""


class SessionScalars(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The result of `StreamingSession.scalars`, as read from a file; a model adds its own fields.

    written_from: of older versions, 0 unless the window had been recomputed under another prompt.
    """

    chunk_index: ChunkIndex
    committed_frames: int
    omitted_frames: Annotated[int, msgspec.Meta(ge=0)] = 0
    written_from: int = 0
    prompt: Text
    seed: Seed
    height: int
    width: int
    output: str

    def __post_init__(self) -> None:
        check_seed(self.seed)


Window = TypeVar("Window", bound=Windows)
OwnValue = TypeVar("OwnValue", bound=SessionValue)


@dataclass(frozen=True)
class StateLayouts:
    """Layouts of a session's state beside its K/V windows on this rank; None = it has no such
    state.
    """

    decoder: DecoderLayout | None
    """Of the decoder's state."""
    own: Any
    """Of the state that only this model's sessions have, in the model's own type."""


@dataclass(eq=False, kw_only=True)
class StreamingChunk(Generic[Window, OwnValue]):
    """One chunk in flight. The first group is made by `prepare_encode`, the second by later steps.

    latents: fp32 [C, F, h, w]. noise: the initial latents, and the noise added before steps 1, 2,
    ...; None where no step is run. text: the encoded prompt, None if `cross_kv` is known. window:
    the session's, where the chunk writes its K/V. The others are the session's state once the chunk
    is committed.
    """

    frames: range
    schedule: Schedule
    latents: torch.Tensor
    noise: ChunkNoise | None
    rope: tuple[torch.Tensor, torch.Tensor]
    text: torch.Tensor | None
    window: Window
    prompt: str
    seed: int
    own: OwnValue | None

    cross_kv: torch.Tensor | None = None
    decoder_cache: Any = None
    omitted: bool = False
    """Whether the window leaves this chunk out, so that the next chunk replaces it there."""
    decoded_from: Any = None
    """Kept while the decode may still be reading it on the device."""

    @classmethod
    def to_decode(
        cls,
        frames: range,
        schedule: Schedule,
        size: Sequence[int],
        window: Window,
        *,
        prompt: str,
        seed: int,
        own: OwnValue | None,
        **others: Any,
    ) -> Self:
        """A chunk on the VAE stage: its latents, of `size`, come when other ranks have made
        them.
        """
        nothing = torch.empty(tuple(size), device="meta")
        return cls(
            frames=frames,
            schedule=schedule,
            latents=nothing,
            noise=None,
            rope=(nothing, nothing),
            text=None,
            window=window,
            prompt=prompt,
            seed=seed,
            own=own,
            **others,
        )

    def latents_with_frames(self, shape: SessionShape) -> dict[str, torch.Tensor]:
        """The latents of a result that has frames, for a session that wants both."""
        return {"latents": self.latents} if shape.output == "both" else {}

    def denoise_index(self, step: int) -> int | None:
        """Return which denoise step `step` is; None at the clean pass."""
        return step if step < self.schedule.num_steps else None


class StreamingSession(SessionState, Generic[Window, OwnValue]):
    """See the module docstring.

    `None` in an optional field: this chunk has not happened, or not on this rank.

    reserved_bytes: the largest size of everything but the K/V windows.
    """

    scalars_type: ClassVar[type[SessionScalars]] = SessionScalars

    def __init__(
        self,
        session_id: str,
        shape: SessionShape,
        plan: ChunkPlan,
        window: Window,
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
        self.cross_kv: torch.Tensor | None = None
        """A function of `prompt`; kept so that it is computed once."""
        self.own: OwnValue | None = None
        self.decoder_cache: Any = None
        self.omitted_frames = 0
        """Latent frames that the session generated and its window left out."""

    # -- of each model -----------------------------------------------------------------------------

    def value_scalars(self) -> dict[str, Any]:
        """The model's own part of `scalars`, JSON types only."""
        return {}

    def restore_values(
        self, retained: Any, saved: SavedTensors, device: torch.device
    ) -> OwnValue | None:
        """Take `own` out of a snapshot, whose chunk the session has already become.

        Args:
            kept: The snapshot's scalars, of `scalars_type`.
            saved: Its tensors.
            device: Of the session.

        Raises:
            RequestFailed: The scalars do not fit together.
        """
        return None

    def start_options(self) -> dict[str, Any]:
        """The request options that `new_session` needs to make a session of this one's shape."""
        return {}

    # -- of all ------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        return self.window.nbytes + self.reserved_bytes

    def next_frames(self) -> range:
        """Return the latent frames of the next chunk, as its window and its positions count them.

        Omitted frames are not counted.
        """
        frames = self.plan.frames(self.chunk_index)
        return range(frames.start - self.omitted_frames, frames.stop - self.omitted_frames)

    def check_committed(self, committed_frames: int) -> range:
        """Return `next_frames` if so many frames are committed.

        Raises `RequestFailed` if that cannot be.
        """
        frames = self.next_frames()
        if committed_frames != frames.start or (self.omitted_frames and not committed_frames):
            raise RequestFailed(
                "invalid_snapshot", "the snapshot's chunk and frames do not belong together"
            )
        return frames

    def commit(self, chunk: StreamingChunk[Window, OwnValue]) -> None:
        """Take over the state of `chunk`; the window has its frames already, unless omitted."""
        self.omitted_frames += len(chunk.frames) if chunk.omitted else 0
        self.prompt, self.seed = chunk.prompt, chunk.seed
        self.cross_kv, self.own, self.decoder_cache = chunk.cross_kv, chunk.own, chunk.decoder_cache
        self.chunk_index += 1

    def tensors(self) -> dict[str, torch.Tensor]:
        named = self.window.tensors(len(self.next_frames()))
        if self.decoder_cache is not None:
            named |= {
                f"decoder.{name}": tensor for name, tensor in self.decoder_cache.tensors().items()
            }
        return named if self.own is None else named | self.own.tensors()

    def scalars(self) -> dict[str, Any]:
        return {
            "chunk_index": self.chunk_index,
            "committed_frames": self.window.committed_frames,
            "omitted_frames": self.omitted_frames,
            "prompt": self.prompt,
            "seed": self.seed,
            "height": self.shape.height,
            "width": self.shape.width,
            "output": self.shape.output,
            **self.value_scalars(),
        }

    def start_params(self) -> DiffusionParams:
        return DiffusionParams(
            session_id=self.session_id,
            prompt=self.prompt,
            height=self.shape.height,
            width=self.shape.width,
            output=self.shape.output,
            window_frames=None if self.shape.window is None else self.shape.window[0],
            sink_frames=None if self.shape.window is None else self.shape.window[1],
            options=self.start_options(),
        )

    def restore(self, scalars: Mapping[str, Any], saved: SavedTensors) -> None:
        retained = read_scalars(scalars, self.scalars_type)
        device = self.window.device
        self.chunk_index, self.prompt, self.seed = (
            retained.chunk_index,
            retained.prompt,
            retained.seed,
        )
        self.omitted_frames = retained.omitted_frames
        frames = self.check_committed(retained.committed_frames)
        if retained.written_from:
            raise RequestFailed(
                "invalid_snapshot",
                "the snapshot's window was recomputed, which is not done any more",
            )
        self.window.restore(saved, retained.committed_frames, len(frames))
        if self.layouts.decoder is not None:
            self.decoder_cache = self.layouts.decoder.restore(
                saved.under("decoder."), device, self.plan.frames(self.chunk_index).start
            )
        self.own = self.restore_values(retained, saved, device)

    def fork(self, session_id: str) -> Self:
        other = type(self)(
            session_id, self.shape, self.plan, self.window.fork(), self.layouts, self.reserved_bytes
        )
        other.chunk_index, other.omitted_frames = self.chunk_index, self.omitted_frames
        other.prompt, other.seed = self.prompt, self.seed
        # Immutable values: sharing them is as good as copying.
        other.cross_kv, other.own = self.cross_kv, self.own
        other.decoder_cache = self.decoder_cache
        return other

    def to(self, device: torch.device | str) -> None:
        self.window.to(device)
        self.cross_kv = None if self.cross_kv is None else self.cross_kv.to(device)
        self.own = None if self.own is None else self.own.to(device)
        self.decoder_cache = None if self.decoder_cache is None else self.decoder_cache.to(device)

    def close(self) -> None:
        self.window.close()
        self.cross_kv = self.own = self.decoder_cache = None
