# SPDX-License-Identifier: Apache-2.0
"""`StreamingModel`: the part of `SupportsStepExecution` that streaming models do the same way.

Sessions and their bytes, keys of batches, latents between ranks, hand-over to a VAE stage,
moving layers. A model brings its networks (`build`, which calls `_begin` and `_add_transformer`), its conditions
(`prepare_encode`), its forward (`denoise_step`) and its decoder's call (`decode`).
Held by the pipeline and parallel tests of the models.
"""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import nn

from vllm_omni.actions import ActionSpace
from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.dtypes import default_dtype
from vllm_omni.model_executor.interfaces import DiffusionRequest
from vllm_omni.model_executor.layers.layer_moves import LayerMove
from vllm_omni.model_executor.layers.parallel import ParallelContext
from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan
from vllm_omni.model_executor.streaming.options import StreamingOptions
from vllm_omni.model_executor.streaming.request import check_prompt
from vllm_omni.model_executor.streaming.session import (
    DecoderLayout,
    SessionShape,
    StateLayouts,
    StreamingChunk,
    StreamingSession,
    Windows,
)
from vllm_omni.model_executor.streaming.setup import StreamingSetup


class _Config(Protocol):
    @property
    def num_layers(self) -> int: ...


class _Decoder(Protocol):
    """A decoder's state in a stream of `height` x `width` pixels; layout None = it keeps none."""

    def state_nbytes(self, height: int, width: int) -> int: ...

    def state_layout(self, height: int, width: int) -> DecoderLayout | None: ...


Shape = TypeVar("Shape", bound=SessionShape)
Session = TypeVar("Session", bound=StreamingSession[Any, Any, Any, Any, Any])
Chunk = TypeVar("Chunk", bound=StreamingChunk[Any, Any])


class StreamingModel(nn.Module, Generic[Shape, Session, Chunk]):
    """Base of a streaming model; `build` sets the attributes that are only declared here."""

    supports_step_execution: ClassVar[bool] = True
    session_type: ClassVar[type[Any]]
    """Of the model's `Session`."""

    config: _Config
    options: StreamingOptions
    omni: OmniConfig
    parallel: ParallelContext
    plan: ChunkPlan
    kv_dtype: torch.dtype | None
    transformer: Any
    text_encoder: Any
    """None on a VAE stage, and of a model that takes no prompts."""
    prompts: Any
    decoder: _Decoder | None
    action_space: ActionSpace = ActionSpace()
    """Here only for `prompt`, whether a session's first chunk needs one."""

    # -- of each model -------------------------------------------------------------------------------------------------

    @abstractmethod
    def read_shape(self, params: DiffusionParams) -> Shape:
        """Read the sizes that a session's first chunk fixes. Raises `RequestFailed`."""

    @abstractmethod
    def window_nbytes(self, shape: Shape) -> int:
        """Bytes of a session's K/V windows on this rank; allocates nothing."""

    @abstractmethod
    def make_window(self, shape: Shape) -> Windows:
        """Make the windows that a session's passes write their K/V to."""

    @abstractmethod
    def decode(self, request: DiffusionRequest[Session, Chunk]) -> dict[str, torch.Tensor]:
        """Return the frames of a chunk's latents; the chunk gets the decoder's next state."""

    def own_layout(self, shape: Shape) -> Any:
        """Layout of the state that only this model's sessions have on this rank; None = they have none."""
        return None

    def own_bytes(self, shape: Shape) -> int:
        """Most bytes of a session's state that only this model has."""
        return 0

    # -- sessions ------------------------------------------------------------------------------------------------------

    def session_nbytes(self, params: DiffusionParams) -> int:
        shape = self.read_shape(params)
        return self.window_nbytes(shape) + self._reserved_bytes(shape)

    def new_session(self, params: DiffusionParams) -> Session:
        shape = self.read_shape(params)
        check_prompt(params, self.action_space, first_chunk=True)
        return self.make_session(params.session_id, shape, self._reserved_bytes(shape))

    def make_session(self, session_id: str, shape: Shape, reserved_bytes: int) -> Session:
        """Make an empty session, its K/V windows included."""
        decoder = self.decoder if shape.output != "latents" else None
        layout = None if decoder is None else decoder.state_layout(shape.height, shape.width)
        layouts, window = StateLayouts(layout, self.own_layout(shape)), self.make_window(shape)
        session: Session = self.session_type(session_id, shape, self.plan_of(shape), window, layouts, reserved_bytes)
        return session

    def plan_of(self, shape: Shape) -> ChunkPlan:
        """Return the chunk plan of sessions of this shape: the server's, with their own window."""
        if shape.window is None:
            return self.plan
        window_frames, sink_frames = shape.window
        return replace(self.plan, window_frames=window_frames, sink_frames=sink_frames)

    def _reserved_bytes(self, shape: Shape) -> int:
        """Bytes a session may come to hold beside its K/V windows: VAE caches, cross-attention K/V."""
        total: int = self.transformer.cross_kv_nbytes + self.own_bytes(shape)
        if self.decoder is not None and shape.output != "latents":
            total += self.decoder.state_nbytes(shape.height, shape.width)
        return total

    def trim_kept(self, nbytes: int) -> None:
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
        self.prompts.forget()

    # -- one chunk -----------------------------------------------------------------------------------------------------

    def texts(self, request: DiffusionRequest[Session, Chunk]) -> list[torch.Tensor]:
        text = request.work.text
        return [] if self.text_encoder is None or text is None else [text]

    def batch_key(self, request: DiffusionRequest[Session, Chunk]) -> Hashable:
        return request.work.latents.shape

    @torch.no_grad()
    def step_scheduler(self, batch: Sequence[DiffusionRequest[Session, Chunk]], prediction: torch.Tensor) -> None:
        for request, flow in zip(batch, prediction, strict=True):
            chunk = request.work
            step = chunk.denoise_index(request.step)
            if step is None:
                continue
            assert chunk.noise is not None
            chunk.latents = chunk.schedule.advance(chunk.latents, flow, step, chunk.noise)

    @torch.no_grad()
    def post_decode(self, request: DiffusionRequest[Session, Chunk]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        session, chunk, meta = request.session, request.work, self.result_meta(request)
        if session.shape.output == "latents":
            return meta, {"latents": chunk.latents}
        chunk.decoded_from = session.decoder_cache
        return meta, self.decode(request) | chunk.latents_beside(session.shape)

    def commit(self, request: DiffusionRequest[Session, Chunk]) -> None:
        request.work.window.commit(request.work.frames.stop)
        request.session.commit(request.work)

    def latents(self, request: DiffusionRequest[Session, Chunk]) -> torch.Tensor:
        return request.work.latents

    def set_latents(self, request: DiffusionRequest[Session, Chunk], latents: torch.Tensor) -> None:
        request.work.latents = latents.clone()

    def result_meta(self, request: DiffusionRequest[Session, Chunk]) -> dict[str, Any]:
        """Metadata of every chunk's result."""
        session = request.session
        pixel_frames = self.plan.pixel_frames(session.chunk_index)
        return {
            "first_frame": pixel_frames.start,
            "num_frames": len(pixel_frames),
            "height": session.shape.height,
            "width": session.shape.width,
            "seed": request.work.seed,
        }

    def hand_over(self, request: DiffusionRequest[Session, Chunk]) -> dict[str, Any]:
        return {}

    def take_over(
        self, request: DiffusionRequest[Session, Chunk], latents: torch.Tensor, facts: Mapping[str, Any]
    ) -> None:
        request.work.latents = latents

    # -- for `build` ---------------------------------------------------------------------------------------------------

    def _begin(self, setup: StreamingSetup[Any, Any, Any]) -> None:
        self.config, self.options = setup.config, setup.options
        self.omni, self.parallel, self.plan = setup.omni, setup.parallel, setup.plan
        self.kv_dtype = setup.kv_dtype

    def _add_transformer(
        self,
        setup: StreamingSetup[Any, Any, Any],
        network: Callable[..., nn.Module],
        *,
        parallel: ParallelContext | None = None,
        **own: Any,
    ) -> None:
        """parallel: None = the setup's. own: arguments that only this model's network has."""
        with default_dtype(setup.dtype):
            self.transformer = network(
                setup.config,
                parallel or setup.parallel,
                compiled=setup.compiled,
                cuda_graphs=setup.cuda_graphs,
                quantization=setup.quantization,
                **own,
            )
