# SPDX-License-Identifier: Apache-2.0
"""`StreamingSession`: the state of a streaming session on one rank. `StreamingChunk`: the state of
one chunk in flight.

The K/V windows of a session are allocated at full size, or grow as they fill (`omni.kv_growth`).
All other state has a known maximum size, which `nbytes` includes from the start. All state except
the windows consists of immutable values. A chunk creates new values and `commit` replaces the
references, so an abandoned chunk has no effect. Model-specific state is an additional immutable
value (`own`).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar

import msgspec
import torch

from vllm_omni.inputs import DiffusionParams, Output, Text
from vllm_omni.model_executor.interfaces import SHORT_WINDOW, SessionState
from vllm_omni.model_executor.schedules import ChunkNoise, Trajectory
from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan
from vllm_omni.outputs import RequestFailed
from vllm_omni.seeds import Seed, check_seed
from vllm_omni.tensors.saved import ChunkIndex, SavedTensors, read_scalars

logger = logging.getLogger("vllm." + __name__)


class SessionValue(Protocol):
    """Immutable state of a session. A session and its forks share the same object."""

    def tensors(self) -> dict[str, torch.Tensor]: ...

    def to(self, device: torch.device | str) -> Self: ...


class DecoderLayout(Protocol):
    """Shapes and dtypes of a decoder's state between two chunks."""

    def restore(self, saved: SavedTensors, device: torch.device | str, num_latents: int) -> Any:
        """Restore the state saved after `num_latents` latent frames."""
        ...


class DenoiseSchedule(Protocol):
    """Schedule of a chunk's denoise steps."""

    @property
    def num_steps(self) -> int: ...

    def advance(
        self, latents: torch.Tensor, flow: torch.Tensor, step: int, noise: ChunkNoise
    ) -> torch.Tensor:
        """Return the latents after denoise step `step`, in fp32."""
        ...


class KVWindows(Protocol):
    """The K/V windows of a stream: one `KVWindow` or several."""

    @property
    def nbytes(self) -> int: ...

    @property
    def growing_nbytes(self) -> int: ...

    @property
    def held_frames(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def committed_frames(self) -> int: ...

    def missing_nbytes(self, end_frame: int) -> int: ...

    def grow(self, end_frame: int) -> None: ...

    def stop_growing(self, window_frames: int, sink_frames: int) -> None: ...

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
    """Properties that a session's first chunk sets for the whole session."""

    height: int
    """Height of the video in pixels."""
    width: int
    """Width of the video in pixels."""
    output: Output
    """Output of each chunk: frames (`rgb`), `latents` or `both`. A session whose output is
    `latents` has no decoder cache.
    """
    source: Source = field(default="text", kw_only=True)
    """Input of each chunk. `video`: each chunk starts from a video that the client sends, and the
    session has an encoder cache.
    """
    keeps_latents: bool = field(default=False, kw_only=True)
    """Whether the session stores the latents of the frames in its window, so that their K/V can be
    recomputed.
    """
    window: tuple[int, int] | None = field(default=None, kw_only=True)
    """`(window_frames, sink_frames)` of the session. Default: the server's window."""


class SessionScalars(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Values returned by `StreamingSession.scalars`, as read from a snapshot file. A model adds the
    fields of its own state in a subclass.
    """

    chunk_index: ChunkIndex
    """Index of the next chunk."""
    committed_frames: int
    """Number of committed latent frames."""
    omitted_frames: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Number of generated latent frames left out of the window."""
    prompt: Text
    """Prompt of the last chunk."""
    seed: Seed
    """Seed of the last chunk."""
    height: int
    """Height of the video in pixels."""
    width: int
    """Width of the video in pixels."""
    output: str
    """Output of each chunk: `rgb`, `latents` or `both` (`SessionShape.output`)."""

    def __post_init__(self) -> None:
        check_seed(self.seed)


Window = TypeVar("Window", bound=KVWindows)
OwnValue = TypeVar("OwnValue", bound=SessionValue)


@dataclass(frozen=True)
class StateLayouts:
    """Layouts of a session's state on this rank, except its K/V windows."""

    decoder: DecoderLayout | None
    """Layout of the decoder's state, or None if the session has no decoder state."""
    own: Any
    """Layout of the session's model-specific state, in a type that the model defines, or None if
    the model has no such state.
    """


@dataclass(eq=False, kw_only=True)
class StreamingChunk(Generic[Window, OwnValue]):
    """State of one chunk in flight.

    `prepare_encode` sets the fields that have no default. Later steps set the other fields.
    """

    frames: range
    """Absolute indices of the chunk's latent frames."""
    schedule: DenoiseSchedule
    """Schedule of the chunk's denoise steps."""
    latents: torch.Tensor
    """Current latents, fp32 [C, F, h, w]."""
    noise: ChunkNoise | None
    """Noise that the chunk starts from and that later steps add, or None if this rank runs no
    denoise steps.
    """
    rope: tuple[torch.Tensor, torch.Tensor]
    """Cosines and sines of the rotary embedding, fp32."""
    text: torch.Tensor | None
    """Text embeddings of the prompt, or None if they are not needed because `cross_kv` is already
    computed.
    """
    window: Window
    """K/V windows of the session. The chunk writes to them."""
    prompt: str
    """Prompt of the session after the chunk."""
    seed: int
    """Seed of the session after the chunk."""
    own: OwnValue | None
    """`StreamingSession.own` after the chunk."""

    cross_kv: torch.Tensor | None = None
    """Cross-attention K/V of the prompt."""
    decoder_cache: Any = None
    """State of the decoder after the chunk."""
    given_frames: int = 0
    """Number of latent frames at the start of the chunk that are given, for example as a start
    image. Denoise steps do not change given frames.
    """
    omitted: bool = False
    """Whether this chunk is left out of the window. If so, the next chunk takes its place."""
    trajectory: Trajectory | None = None
    """Record of the chunk's denoise steps, if the request asks for it."""
    decoded_from: Any = None
    """State of the decoder before the chunk, retained because the device may still read it."""

    @classmethod
    def to_decode(
        cls,
        frames: range,
        schedule: DenoiseSchedule,
        size: Sequence[int],
        window: Window,
        *,
        prompt: str,
        seed: int,
        own: OwnValue | None,
        **others: Any,
    ) -> Self:
        """Create the state of a chunk on the VAE stage, which receives the latents from other
        ranks.

        Args:
            frames: Absolute indices of the chunk's latent frames.
            schedule: Schedule of the chunk's denoise steps.
            size: Shape of the latents.
            window: K/V windows of the session.
            prompt: Prompt of the chunk.
            seed: Seed of the chunk.
            own: `StreamingSession.own` after the chunk.
            **others: Fields of the model's subclass.
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

    def latent_results(self, shape: SessionShape) -> dict[str, torch.Tensor]:
        """Return all tensors of the chunk's result except the frames."""
        latents = {} if shape.output == "rgb" else {"latents": self.latents}
        return latents if self.trajectory is None else latents | self.trajectory.results()

    @property
    def num_given(self) -> int:
        """Number of latent frames at the start of the chunk that denoise steps do not change."""
        return self.given_frames

    def denoise_index(self, step: int) -> int | None:
        """Return the index of a denoise step, or None for the clean-context pass."""
        return step if step < self.schedule.num_steps else None


class StreamingSession(SessionState, Generic[Window, OwnValue]):
    """State of a streaming session on one rank, as described in the module docstring.

    An attribute with an optional type is None before the first chunk, and on ranks that do not hold
    this state.

    Args:
        session_id: Id of the session.
        shape: Properties that the first chunk sets.
        plan: Chunk plan of the session.
        window: Empty K/V windows for the session.
        layouts: Layouts of the state other than the K/V windows.
        reserved_bytes: Maximum size of the state other than the K/V windows, in bytes.
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
        """Cross-attention K/V of the current prompt, cached because later chunks reuse them."""
        self.own: OwnValue | None = None
        self.decoder_cache: Any = None
        self.omitted_frames = 0
        """Number of the session's generated latent frames left out of the window."""

    # -- methods that models override --------------------------------------------------------------

    def value_scalars(self) -> dict[str, Any]:
        """Return the model-specific values that `scalars` includes, as JSON types."""
        return {}

    def restore_values(
        self, retained: Any, saved: SavedTensors, device: torch.device
    ) -> OwnValue | None:
        """Return the model-specific state (`own`) from a snapshot.

        The chunk index, prompt and seed of the session have already been restored.

        Args:
            retained: Scalars of the snapshot, of type `scalars_type`.
            saved: Tensors of the snapshot.
            device: Device of the session.

        Raises:
            RequestFailed: The snapshot's scalars are inconsistent.
        """
        return None

    def start_options(self) -> dict[str, Any]:
        """Return the request options that make `new_session` create a session of this shape."""
        return {}

    # -- methods that all models share -------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        return self.window.nbytes + self.reserved_bytes

    @property
    def growing_nbytes(self) -> int:
        return self.window.growing_nbytes

    def missing_nbytes(self) -> int:
        return self.window.missing_nbytes(self.next_frames().stop)

    def grow(self) -> None:
        self.window.grow(self.next_frames().stop)

    @property
    def held_frames(self) -> int:
        return self.window.held_frames

    def limit_window(self, frames: int) -> None:
        if frames >= min(self.next_frames().stop, self.plan.window_frames):
            return
        logger.warning(
            "session %s keeps a K/V window of %d instead of %d latent frames, because sessions may "
            "hold no more memory",
            self.session_id,
            frames,
            self.plan.window_frames,
        )
        self.plan = self.plan.shortened(frames)
        self.window.stop_growing(frames, self.plan.sink_frames)
        self.degradations = (SHORT_WINDOW,)

    def next_frames(self) -> range:
        """Return the range of the next chunk's latent frames. The range determines the frames' K/V
        slots and positions.

        Frames that were left out of the window are not counted in this range.
        """
        frames = self.plan.frames(self.chunk_index)
        return range(frames.start - self.omitted_frames, frames.stop - self.omitted_frames)

    def check_committed(self, committed_frames: int) -> range:
        """Check the frame count of a restored session and return its `next_frames`.

        Args:
            committed_frames: Number of committed latent frames in the snapshot.

        Raises:
            RequestFailed: The number does not match the chunk index.
        """
        frames = self.next_frames()
        if committed_frames != frames.start or (self.omitted_frames and not committed_frames):
            raise RequestFailed(
                "invalid_snapshot", "the snapshot's chunk index does not fit its number of frames"
            )
        return frames

    def commit(self, chunk: StreamingChunk[Window, OwnValue]) -> None:
        """Apply the state of a finished chunk. The windows already contain the chunk's K/V, unless
        the chunk is left out.
        """
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
        own_window = self.shape.window is not None or SHORT_WINDOW in self.degradations
        return DiffusionParams(
            session_id=self.session_id,
            prompt=self.prompt,
            height=self.shape.height,
            width=self.shape.width,
            output=self.shape.output,
            window_frames=self.plan.window_frames if own_window else None,
            sink_frames=self.plan.sink_frames if own_window else None,
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
        other.degradations = self.degradations
        # Both sessions share these values, because they are immutable.
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
