# SPDX-License-Identifier: Apache-2.0
"""`StreamingModel`: the base class of all streaming models.

`StreamingModel` implements everything that does not depend on the model: sessions and their sizes,
batch keys, denoise steps, decoding, and the transfer of latents between ranks. A subclass creates
its components in `__init__`, for example the transformer, the encoders and the decoder. The
subclass also implements the conditioning of a chunk (`prepare_encode`) and the inputs of a forward
pass (`start_step`, `items`).
"""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import nn

from vllm_omni.actions import ActionSpace
from vllm_omni.config import Degradation, OmniConfig
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.dtypes import default_dtype
from vllm_omni.model_executor.interfaces import (
    SHORT_WINDOW,
    DiffusionRequest,
    Inputs,
    SupportsStepExecution,
)
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.layers.layer_moves import LayerMove
from vllm_omni.model_executor.schedules import FewStepSchedule, Trajectory, with_most_steps
from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan
from vllm_omni.model_executor.streaming.degradations import (
    FEWER_STEPS,
    TINY_VAE,
    degraded_steps,
)
from vllm_omni.model_executor.streaming.options import StreamingOptions
from vllm_omni.model_executor.streaming.request import check_prompt, read_size, read_window
from vllm_omni.model_executor.streaming.session import (
    DecoderLayout,
    KVWindows,
    SessionShape,
    StateLayouts,
    StreamingChunk,
    StreamingSession,
)
from vllm_omni.model_executor.streaming.setup import StreamingSetup
from vllm_omni.outputs import RequestFailed


class ChunkLatentsDecoder(Protocol):
    """Decodes the latents of a chunk to frames. The state that the decoder keeps between two chunks
    is immutable.
    """

    def state_nbytes(self, height: int, width: int) -> int:
        """Return the maximum size in bytes of the decoder state for a stream of `height` x `width`
        pixels.
        """

    def state_layout(self, height: int, width: int) -> DecoderLayout | None:
        """Return the layout of the decoder state, or None if the decoder has no state between
        chunks.
        """

    def decode_frames(
        self, latents_CFhw: torch.Tensor, size: tuple[int, int], before: Any, *, tiny: bool = False
    ) -> tuple[torch.Tensor | None, Any]:
        """Decode the latents of a chunk to frames.

        Args:
            latents_CFhw: Final latents of the chunk.
            size: Height and width of the frames, in pixels.
            before: Decoder state after the session's previous chunk, or None if this is the
                session's first chunk.
            tiny: Whether to decode with the second, tiny decoder.

        Returns:
            The frames, uint8 [T, H, W, 3] (None if another rank has them), and the new state.
        """

    def can_be_tiny(self, before: Any) -> bool:
        """Return whether the second, tiny decoder can decode the chunk after the state `before`."""

    def most_streams(self, before: Any, latents_CFhw: torch.Tensor) -> int:
        """Return the maximum number of chunks of this size that may share a decode. A maximum of 1
        disables sharing.
        """

    def decode_frames_together(
        self, latents_CFhw: Sequence[torch.Tensor], before: Sequence[Any]
    ) -> list[tuple[torch.Tensor, Any]]:
        """Decode several chunks together, at most `most_streams`, and return the result of
        `decode_frames` for each chunk.
        """


Session = TypeVar("Session", bound=StreamingSession[Any, Any])
Chunk = TypeVar("Chunk", bound=StreamingChunk[Any, Any])
Network = TypeVar("Network", bound=nn.Module)


class StreamingModel(nn.Module, Generic[Session, Chunk]):
    """Base class of a streaming model. Subclasses create the components that the attributes below
    declare.

    Args:
        setup: Checkpoint, options and ranks of the model.
    """

    supports_step_execution: ClassVar[bool] = True
    """Tells the runner that the model runs one denoise step per engine step."""
    session_type: ClassVar[type[Any]]
    """Class of the model's sessions."""

    config: Any
    """Architecture of the checkpoint."""
    options: StreamingOptions
    """Streaming options of the model."""
    omni: OmniConfig
    """Server options."""
    parallel: ParallelContext
    """Position of this rank in the parallel groups."""
    plan: ChunkPlan
    """Chunk plan of every session that does not choose its own window."""
    kv_dtype: torch.dtype | None
    """Dtype of stored keys and values, or None to use the transformer's dtype."""
    transformer: Any
    """Layers and shards of the transformer that this rank holds."""
    text_encoder: Any
    """Text encoder. None on a VAE stage, and for a model that takes no prompts."""
    prompts: Any
    """Cache of cross-attention K/V, keyed by prompt."""
    decoder: ChunkLatentsDecoder | None
    """Network that decodes latents to frames. None on a rank that does not decode."""
    action_space: ActionSpace = ActionSpace()
    """Controls of the model. `StreamingModel` itself reads only `prompt`, which states whether a
    first chunk needs a prompt.
    """

    def __init__(self, setup: StreamingSetup[Any, Any]) -> None:
        super().__init__()
        self.config, self.options = setup.config, setup.options
        self.omni, self.parallel, self.plan = setup.omni, setup.parallel, setup.plan
        self.kv_dtype = setup.kv_dtype
        self.fast_paths = setup.fast_paths
        # A pass is captured the second time it runs, and if a session's first chunk has only one
        # denoise step, this pass runs once per session.
        self.warms_up_twice = setup.cuda_graphs

    # -- methods that each model implements --------------------------------------------------------

    @abstractmethod
    def window_nbytes(self, shape: SessionShape) -> int:
        """Return the size in bytes of a session's K/V windows on this rank, without allocating
        them.
        """

    @abstractmethod
    def make_window(self, shape: SessionShape) -> KVWindows:
        """Allocate the K/V windows of a session."""

    @abstractmethod
    def warmup_inputs(self) -> list[Inputs]:
        """Return warm-up chunks of the largest size. Together, they run each kind of work once."""

    @abstractmethod
    def prepare_encode(self, request: DiffusionRequest[Session, Chunk]) -> None:
        """Validate the request of a chunk and set `request.state`.

        Raises:
            RequestFailed: The request is invalid.
        """

    @abstractmethod
    def start_step(self, request: DiffusionRequest[Session, Chunk]) -> None:
        """Compute the inputs that all forward passes of a chunk share, unless they are already
        computed.

        With tensor parallelism, this is a collective operation.
        """

    @abstractmethod
    def items(self, request: DiffusionRequest[Session, Chunk]) -> Sequence[object]:
        """Return the batch entries of a chunk in the next forward pass of the transformer."""

    def read_shape(self, params: DiffusionParams) -> SessionShape:
        """Read the properties of a session from the parameters of its first chunk.

        Raises:
            RequestFailed: The properties are not supported.
        """
        window = read_window(params, self.plan)
        return SessionShape(
            *read_size(params, self.config, self.omni), params.output, window=window
        )

    def chunk_schedule(
        self, request: DiffusionRequest[Session, Chunk], schedule: FewStepSchedule
    ) -> FewStepSchedule:
        """Return the denoise steps of a chunk: `schedule`, or fewer steps if the chunk is a
        session's first one (`first_chunk_steps`) or would otherwise be late.
        """
        first, degraded = self.options.first_chunk_steps, degraded_steps(self.options)
        most = schedule.num_steps
        if request.session.chunk_index == 0 and first is not None:
            most = min(most, first)
        if FEWER_STEPS in request.degradations:
            if degraded is not None and degraded < most:
                most = degraded
            else:
                self._not_degraded(request, FEWER_STEPS)
        return with_most_steps(schedule, most)

    def _not_degraded(
        self, request: DiffusionRequest[Session, Chunk], degradation: Degradation
    ) -> None:
        """Remove a degradation from a request, because the result must name only those that were
        applied.
        """
        request.degradations = tuple(name for name in request.degradations if name != degradation)

    def start_chunk(self, request: DiffusionRequest[Session, Chunk], chunk: Chunk) -> None:
        """Set the state of a chunk and its number of forward passes. Subclasses call this method in
        `prepare_encode`.
        """
        request.state = chunk
        if chunk.noise is None:
            request.num_steps = 1  # not used on a VAE stage
            return
        request.clean_passes = (
            0 if chunk.omitted else self.clean_passes(chunk, request.session.plan)
        )
        request.num_steps = chunk.schedule.num_steps + request.clean_passes

    def decodes_tiny(self, request: DiffusionRequest[Session, Chunk]) -> bool:
        """Return whether a chunk is decoded by the second, tiny decoder because it would otherwise
        be late.
        """
        return TINY_VAE in request.degradations

    def decoder_of(self, request: DiffusionRequest[Session, Chunk]) -> ChunkLatentsDecoder | None:
        """Return the decoder for a chunk: `decoder`, or a variant that the options of the request
        select.
        """
        return self.decoder

    def value_layout(self, shape: SessionShape) -> Any:
        """Return the layout of `StreamingSession.own` on this rank, or None if the model has no
        such state.
        """
        return None

    def own_bytes(self, shape: SessionShape) -> int:
        """Return the maximum size in bytes of `StreamingSession.own` on this rank."""
        return 0

    # -- sessions ----------------------------------------------------------------------------------

    def session_nbytes(self, params: DiffusionParams) -> int:
        shape = self.read_shape(params)
        return self.window_nbytes(shape) + self._reserved_bytes(shape)

    def new_session(self, params: DiffusionParams) -> Session:
        shape = self.read_shape(params)
        check_prompt(params, self.action_space, first_chunk=True)
        return self.make_session(params.session_id, shape, self._reserved_bytes(shape))

    def make_session(self, session_id: str, shape: SessionShape, reserved_bytes: int) -> Session:
        """Create an empty session with its K/V windows."""
        decoder = self.decoder if shape.output != "latents" else None
        layout = None if decoder is None else decoder.state_layout(shape.height, shape.width)
        layouts, window = StateLayouts(layout, self.value_layout(shape)), self.make_window(shape)
        session: Session = self.session_type(
            session_id, shape, self.plan_of(shape), window, layouts, reserved_bytes
        )
        return session

    def plan_of(self, shape: SessionShape) -> ChunkPlan:
        """Return the chunk plan of a session: the server's plan, with the session's own window if
        it has one.
        """
        if shape.window is None:
            return self.plan
        window_frames, sink_frames = shape.window
        return replace(self.plan, window_frames=window_frames, sink_frames=sink_frames)

    def first_frames(self, shape: SessionShape) -> int | None:
        """Return the number of frames that the K/V windows of a new session have memory for, or
        None if they have memory for all frames.
        """
        plan = self.plan_of(shape)
        grows = self.omni.kv_growth and plan.shortest_window < plan.window_frames
        return plan.shortest_window if grows else None

    def latent_shape(self, shape: SessionShape, num_frames: int) -> tuple[int, int, int, int]:
        """Return the shape [C, F, h, w] of a chunk's latents."""
        height, width = self.config.latent_size(shape.height, shape.width)
        return self.config.out_channels, num_frames, height, width

    def window_sizes(self, shape: SessionShape) -> dict[str, Any]:
        """Return the constructor arguments of a session's K/V window on this rank, except for the
        number of sink frames and the memory pool.
        """
        tokens = self.config.tokens_per_frame(shape.height, shape.width)
        return {
            **self.transformer.window_sizes(tokens),
            "window_frames": self.plan_of(shape).window_frames,
            "first_frames": self.first_frames(shape),
            "storage": self.kv_dtype,
            "device": self.transformer.device,
        }

    def clean_passes(self, chunk: StreamingChunk[Any, Any], plan: ChunkPlan) -> int:
        """Return the number of clean-context passes that a chunk needs.

        No clean-context pass is needed if later chunks attend to the keys and values of the last
        denoise step. A session's first chunk and its sink frames always have a clean-context pass,
        because the first chunk may contain a given image and every later chunk attends to the sink
        frames.
        """
        shares_last_step = (
            self.options.context_kv == "last_step"
            and chunk.schedule.num_steps > 1
            and chunk.frames.start >= max(1, plan.sink_frames)
        )
        return 0 if shares_last_step else 1

    def _reserved_bytes(self, shape: SessionShape) -> int:
        """Return the maximum size in bytes of a session's state other than its K/V windows.

        This state consists of the VAE caches, the cross-attention K/V and the model-specific state.
        """
        total: int = self.transformer.cross_kv_nbytes + self.own_bytes(shape)
        if self.decoder is not None and shape.output != "latents":
            total += self.decoder.state_nbytes(shape.height, shape.width)
        return total

    def trim_pool(self, nbytes: int) -> None:
        if self.transformer.rings is not None:
            self.transformer.rings.trim(nbytes)

    @property
    def shares_decode(self) -> bool:
        return self.parallel.shares_decode

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def partition(self) -> tuple[int, ...]:
        return tuple(self.parallel.lengths(self.config.num_layers))

    def move_layers(self, move: LayerMove) -> None:
        self.transformer.move_layers(move)
        self.parallel = self.transformer.parallel
        self.prompts.clear_prompt()

    # -- one chunk ---------------------------------------------------------------------------------

    def texts(self, request: DiffusionRequest[Session, Chunk]) -> list[torch.Tensor]:
        text = request.work.text
        return [] if self.text_encoder is None or text is None else [text]

    @torch.no_grad()
    def denoise_step(
        self, batch: Sequence[DiffusionRequest[Session, Chunk]], hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        items: list[object] = []
        for request in batch:
            self.start_step(request)
            items += self.items(request)
        kv_only = all(request.work.denoise_index(request.step) is None for request in batch)
        prediction: torch.Tensor = self.transformer(items, hidden, kv_only=kv_only)
        return prediction

    def batch_key(self, request: DiffusionRequest[Session, Chunk]) -> Hashable:
        return request.work.latents.shape

    def record_trajectory(self, request: DiffusionRequest[Session, Chunk]) -> None:
        chunk = request.work
        if not isinstance(chunk.schedule, FewStepSchedule):
            raise RequestFailed(
                "invalid_request",
                "trajectory: this model's sampler draws no noise between its steps, so they have "
                "no log-probabilities; leave it out",
            )
        if self.parallel.num_stages > 1 or self.omni.vae_stage:
            raise RequestFailed(
                "invalid_request",
                "trajectory: only servers with one pipeline stage return it; leave it out",
            )
        if self.options.first_chunk_steps is not None:
            raise RequestFailed(
                "invalid_request",
                "trajectory: all chunks need equally many denoise steps; leave it out, or start "
                "the server without omni.model.first_chunk_steps",
            )
        chunk.trajectory = Trajectory(chunk.schedule)

    @torch.no_grad()
    def step_scheduler(
        self, batch: Sequence[DiffusionRequest[Session, Chunk]], prediction: torch.Tensor
    ) -> None:
        for request, flow in zip(batch, prediction, strict=True):
            chunk = request.work
            step = chunk.denoise_index(request.step)
            if step is None:
                continue
            assert chunk.noise is not None
            if chunk.trajectory is not None:
                chunk.trajectory.add_step(chunk.latents, step, chunk.noise, chunk.num_given)
            given = chunk.latents[:, : chunk.given_frames]
            chunk.latents = chunk.schedule.advance(chunk.latents, flow, step, chunk.noise)
            if chunk.given_frames:
                chunk.latents[:, : chunk.given_frames] = given

    @torch.no_grad()
    def post_decode(
        self, request: DiffusionRequest[Session, Chunk]
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        session, chunk, meta = request.session, request.work, self.result_meta(request)
        decoder = None if session.shape.output == "latents" else self.decoder_of(request)
        if decoder is None or not decoder.can_be_tiny(session.decoder_cache):
            self._not_degraded(request, TINY_VAE)
        if session.shape.output == "latents":
            return meta, chunk.latent_results(session.shape)
        assert decoder is not None, "ranks of the last stage decode: one, or all of them together"
        chunk.decoded_from = session.decoder_cache
        frames, chunk.decoder_cache = decoder.decode_frames(
            chunk.latents,
            (session.shape.height, session.shape.width),
            chunk.decoded_from,
            tiny=self.decodes_tiny(request),
        )
        return meta, ({} if frames is None else {"frames": frames}) | chunk.latent_results(
            session.shape
        )

    def most_decoded_together(self, request: DiffusionRequest[Session, Chunk]) -> int:
        if (
            self.decoder is None
            or self.decodes_tiny(request)
            or request.session.shape.output == "latents"
        ):
            return 1
        return self.decoder.most_streams(request.session.decoder_cache, request.work.latents)

    @torch.no_grad()
    def post_decode_together(
        self, batch: Sequence[DiffusionRequest[Session, Chunk]]
    ) -> list[tuple[dict[str, Any], dict[str, torch.Tensor]]]:
        assert self.decoder is not None
        before = [request.session.decoder_cache for request in batch]
        decoded = self.decoder.decode_frames_together(
            [request.work.latents for request in batch], before
        )
        results = []
        for request, state, (frames, next_state) in zip(batch, before, decoded, strict=True):
            chunk = request.work
            chunk.decoded_from, chunk.decoder_cache = state, next_state
            results.append(
                (
                    self.result_meta(request),
                    {"frames": frames} | chunk.latent_results(request.session.shape),
                )
            )
        return results

    def commit(self, request: DiffusionRequest[Session, Chunk]) -> None:
        if not request.work.omitted:
            request.work.window.commit(request.work.frames.stop)
        request.session.commit(request.work)

    def latents(self, request: DiffusionRequest[Session, Chunk]) -> torch.Tensor:
        return request.work.latents

    def set_latents(self, request: DiffusionRequest[Session, Chunk], latents: torch.Tensor) -> None:
        request.work.latents = latents.clone()

    def result_meta(self, request: DiffusionRequest[Session, Chunk]) -> dict[str, Any]:
        """Return the metadata of a chunk's result."""
        session = request.session
        pixel_frames = self.plan.pixel_frames(session.chunk_index)
        window = {
            "window_frames": session.plan.window_frames,
            "sink_frames": session.plan.sink_frames,
        }
        return {
            **(window if SHORT_WINDOW in session.degradations else {}),
            "first_frame": pixel_frames.start,
            "num_frames": len(pixel_frames),
            "height": session.shape.height,
            "width": session.shape.width,
            "seed": request.work.seed,
        }

    def pack_decode_state(self, request: DiffusionRequest[Session, Chunk]) -> dict[str, Any]:
        return {}

    def unpack_decode_state(
        self,
        request: DiffusionRequest[Session, Chunk],
        latents: torch.Tensor,
        info: Mapping[str, Any],
    ) -> None:
        request.work.latents = latents


def build_transformer(
    setup: StreamingSetup[Any, Any],
    network: Callable[..., Network],
    *,
    parallel: ParallelContext | None = None,
    **own: Any,
) -> Network:
    """Build this rank's part of the transformer, with uninitialised parameters.

    Args:
        setup: Setup of the streaming model.
        network: Class of the transformer, or a function that builds it.
        parallel: Position of this rank in the parallel groups. Default: `setup.parallel`.
        **own: Additional arguments for `network`.
    """
    with default_dtype(setup.dtype):
        return network(
            setup.config,
            parallel or setup.parallel,
            compiled=setup.compiled,
            cuda_graphs=setup.cuda_graphs,
            quantization=setup.quantization,
            **own,
        )


if TYPE_CHECKING:

    def _meets_protocol(
        model: StreamingModel[Session, Chunk],
    ) -> SupportsStepExecution[Session, Chunk]:
        return model
