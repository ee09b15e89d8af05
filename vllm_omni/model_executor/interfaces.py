# SPDX-License-Identifier: Apache-2.0
"""The contract between the diffusion runner and a model, and the objects passed between the two.

The runner (`worker/diffusion/`) sequences the calls and does not depend on latents, cameras or
caches. A model does not depend on the scheduler, on sockets or on other requests' sessions. The
protocols are generic in the model's session type and working-set type, so that mypy checks both
sides.

Sequence of calls for one chunk, which is one request. Each line is one engine step of
`StreamBatchScheduler`:

    prepare_encode, denoise_step, step_scheduler        step 0
    denoise_step, step_scheduler                        steps 1 .. num_steps-1
    ... then, after the last step: post_decode, commit

The clean-context pass of a strict causal model is its last step (`DiffusionRequest.clean_passes`).
`post_decode` is called before that pass, because the latents are already final. Before `commit`, no
state of a session changes that can affect a later chunk. `commit` only replaces references and
counters, so it cannot fail half-way.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import torch

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.device_async import StageTimer
from vllm_omni.model_executor.layers.fast_path import FastPath
from vllm_omni.model_executor.layers.layer_moves import LayerMove
from vllm_omni.model_executor.layers.lora.store import Selection
from vllm_omni.outputs import RequestFailed
from vllm_omni.tensors.saved import SavedTensors

Inputs = tuple[DiffusionParams, dict[str, torch.Tensor]]

SHORT_WINDOW = "short_window"
"""Name of the degradation of a session whose K/V window could not grow to its full length
(`omni.kv_growth`).
"""


class SessionState(ABC):
    """State that one session keeps between chunks on one rank, owned by the runner's session
    store."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.chunk_index = 0
        """Number of committed chunks, which is the index of the next one."""
        self.failure: RequestFailed | None = None
        """Reason why no further chunk is possible: a chunk was committed on other ranks, but its
        decode failed on this one. None: no failure.
        """
        self.adapters: Selection = ()
        """LoRA adapters of the last committed chunk. The next chunk uses them too, unless its
        request specifies others.
        """
        self.degradations: tuple[str, ...] = ()
        """Degradations of all further chunks."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of device and host memory. Only `grow` changes this value: all other buffers are
        allocated at full size.
        """

    @property
    def growing_nbytes(self) -> int:
        """Part of `nbytes` that is not allocated by torch's allocator but by `grow`."""
        return 0

    def missing_nbytes(self) -> int:
        """Return the bytes that `grow` allocates."""
        return 0

    def grow(self) -> None:  # noqa: B027 - most sessions have a constant size
        """Allocate the memory of the next chunk.

        Raises:
            torch.OutOfMemoryError: There is not enough memory.
        """

    @property
    def held_frames(self) -> int:
        """Number of frames of the K/V window that have memory. 0: unknown, because the size is
        constant.
        """
        return 0

    def limit_window(self, frames: int) -> None:  # noqa: B027
        """Continue with a window of `frames` and set `degradations`, unless the next chunk fits."""

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor that can affect a later chunk, by a stable name.

        Used for forks, digests and snapshots. Slots of a ring buffer whose K/V no later chunk
        attends to are omitted.
        """

    @abstractmethod
    def scalars(self) -> dict[str, Any]:
        """Return every other value that can affect a later chunk, as JSON types."""

    @abstractmethod
    def fork(self, session_id: str) -> "SessionState":
        """Return an independent copy under a new id."""

    @abstractmethod
    def to(self, device: torch.device | str) -> None:
        """Move every buffer to `device`. Sleep mode uses this to move sessions to the host and
        back.
        """

    def start_params(self) -> DiffusionParams:
        """Return parameters of a first chunk for which `new_session` creates a session of the same
        size.

        Raises:
            RequestFailed: `unsupported`: sessions of this model end with their request.
        """
        raise RequestFailed(
            "unsupported", "sessions of this model end with their request and cannot be saved"
        )

    def restore(self, scalars: Mapping[str, Any], saved: SavedTensors) -> None:
        """Restore a saved session, or update it to a later state of the same session.

        Called on a new session, or on a restored session that has not run a chunk since then.

        Args:
            scalars: Result of `scalars()`, from an untrusted file.
            saved: Result of `tensors()`, from an untrusted file.

        Raises:
            RequestFailed: `invalid_snapshot`: a value or a tensor does not match.
        """
        raise RequestFailed(
            "unsupported",
            "sessions of this model end with their request and cannot be restored",
        )

    def close(self) -> None:  # noqa: B027 - most sessions hold only tensors
        """Free everything. Idempotent. The store does not use the session afterwards."""


Session = TypeVar("Session", bound=SessionState)
Work = TypeVar("Work")
Result = tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]
"""`(meta, tensors)`."""


@dataclass(eq=False)
class DiffusionRequest(Generic[Session, Work]):
    """One chunk in flight on one rank.

    `Session` and `Work` are the model's types for a session and for the working set of a chunk.
    """

    request_id: str
    """Id of the engine request."""
    params: DiffusionParams
    """Parameters of the request."""
    tensors: Mapping[str, torch.Tensor]
    """Input tensors of the request, by name."""
    session: Session
    """Session of the chunk, in its state after the last commit."""
    num_steps: int = 0
    """Number of forward passes, set by `prepare_encode`. 0: not prepared."""
    clean_passes: int = 0
    """Number of final passes that leave the latents unchanged, set by `prepare_encode`."""
    step: int = 0
    """Index of the next pass. Written only by the runner's role."""
    state: Work | None = None
    """The model's working set of this chunk: latents, noise, conditioning. Owned by the model."""
    predecessor: "DiffusionRequest[Session, Work] | None" = None
    """The previous chunk of the session if it is in flight (`SupportsChunksInFlight`). The
    predecessor has been prepared and started. None: the chunk follows the committed session. Only
    `prepare_encode` reads it; it is None afterwards.
    """
    degradations: tuple[str, ...] = ()
    """Degradations that the scheduler requests for this chunk, set before `prepare_encode`.
    `post_decode` removes those that were not applied. The metadata of the result contains the
    remaining ones.
    """
    adapters: Selection = ()
    """LoRA adapters of all forward passes of this chunk."""
    same_adapters: bool = True
    """Whether the previous chunk used the same adapters. If False, cached results that depend on
    weights are invalid.
    """
    timer: StageTimer = field(default_factory=lambda: StageTimer(torch.device("cpu")))
    """Timer for the stages (`encode`, `step`, `decode`, ...) of runner and model. The result's meta
    has the times.
    """

    @property
    def work(self) -> Work:
        """Return `state`, which `prepare_encode` has set."""
        assert self.state is not None, "prepare_encode has not run"
        return self.state

    def end_with_this_step(self) -> None:
        """Make the current step the last one. `step_scheduler` may call it."""
        self.num_steps = self.step + 1


@runtime_checkable
class SupportsStepExecution(Protocol[Session, Work]):
    """A model that can be run one denoise step at a time.

    All tensors are on the model's device, unless stated otherwise.
    """

    supports_step_execution: ClassVar[bool]
    """Marks the class for the runner."""

    def session_nbytes(self, params: DiffusionParams) -> int:
        """Return the size of `new_session(params)` on this rank in bytes.

        Called before admission; must not allocate memory.
        """

    def new_session(self, params: DiffusionParams) -> Session:
        """Create the state of a session from the parameters of its first chunk.

        Raises:
            RequestFailed: Size, prompt or options are invalid.
        """

    def prepare_encode(self, request: DiffusionRequest[Session, Work]) -> None:
        """Validate the inputs, encode text, image and camera, sample noise and set `num_steps`.

        Runs on every rank with identical results and without collectives.

        Raises:
            RequestFailed: An input is invalid.
        """

    def batch_key(self, request: DiffusionRequest[Session, Work]) -> Hashable:
        """Return the batch key: requests with equal keys may share a `denoise_step`, even at
        different steps.
        """

    def denoise_step(
        self, batch: Sequence[DiffusionRequest[Session, Work]], hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run one forward pass of the transformer. Each request is at its own step.

        Args:
            batch: Requests with equal `batch_key`.
            hidden: Return value of the previous pipeline stage. None: first stage.

        Returns:
            Hidden states, or on the last stage the prediction, one entry per request.
        """

    def step_scheduler(
        self, batch: Sequence[DiffusionRequest[Session, Work]], prediction: torch.Tensor
    ) -> None:
        """Update the latents in each request's state from t to t-1, on the last stage only.

        The runner increments `step`.
        """

    def latents(self, request: DiffusionRequest[Session, Work]) -> torch.Tensor:
        """Return the current latents, which are clean after the last step. The shape never
        changes."""

    def set_latents(self, request: DiffusionRequest[Session, Work], latents: torch.Tensor) -> None:
        """Replace the latents on other stages by those of the last stage, for the next step."""

    def post_decode(
        self, request: DiffusionRequest[Session, Work]
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return `(meta, tensors)` of the result, for example `{"frames": uint8 [T, H, W, 3]}`.

        Called on the last stage, and only on the first of the ranks that share layers, unless they
        decode together (`SupportsParallelDecode`). The latents are final. Clean-context passes may
        follow, so the state that they need must be retained.

        On CUDA it may run on a separate `cuda_stream` alongside the session's next chunk. It must
        therefore not synchronise with the device, and `request.state` must hold a reference to
        every tensor that it reads or replaces.
        """

    def commit(self, request: DiffusionRequest[Session, Work]) -> None:
        """Add the chunk to its session on this rank: lengths, caches, camera, chunk index."""

    def warmup_inputs(self) -> list[Inputs]:
        """Return requests of the largest shape, in order. The runner runs these inputs once in a
        temporary session.
        """


@runtime_checkable
class HasFastPaths(Protocol):
    """A part of a model that chooses between implementations when it is built."""

    fast_paths: Sequence[FastPath]
    """The implementations chosen on this rank."""


@runtime_checkable
class PoolsMemory(Protocol):
    """A model that pools the memory of closed sessions for new ones."""

    def trim_pool(self, nbytes: int) -> None:
        """Free pooled memory until at most `nbytes` remain."""


@runtime_checkable
class SupportsSessionWindows(Protocol):
    """A model whose sessions may choose their own window (`DiffusionParams.window_frames`)."""

    session_windows: ClassVar[bool]
    """Marks the class for the runner."""


@runtime_checkable
class SupportsTrajectory(Protocol[Session, Work]):
    """A model that can return the denoise steps of a chunk (`DiffusionParams.trajectory`)."""

    def record_trajectory(self, request: DiffusionRequest[Session, Work]) -> None:
        """Include the denoise steps in the result of a chunk. Called after `prepare_encode`.

        Raises:
            RequestFailed: The sampler of the chunk draws no noise, or its steps run on other ranks.
        """


@runtime_checkable
class SupportsBatchedDecode(Protocol[Session, Work]):
    """A model that decodes chunks of several sessions in one call, without
    `omni.batch_invariant`."""

    def most_decoded_together(self, request: DiffusionRequest[Session, Work]) -> int:
        """Return the maximum number of requests with this `batch_key` that may share a decode. 1
        disables sharing.
        """

    def post_decode_together(
        self, batch: Sequence[DiffusionRequest[Session, Work]]
    ) -> list[tuple[dict[str, Any], dict[str, torch.Tensor]]]:
        """Return `post_decode` of each request, equal within float tolerance.

        If it raises, the runner decodes each request separately.
        """


@runtime_checkable
class SupportsSharedText(Protocol[Session, Work]):
    """A model whose text encoder runs on a single rank of the engine
    (`ParallelContext.encodes`).
    """

    def texts(self, request: DiffusionRequest[Session, Work]) -> list[torch.Tensor]:
        """Return the text embeddings of the prompts that `prepare_encode` has processed.

        Number, shapes and order are equal on all ranks. On ranks without the text encoder, the
        tensors are uninitialised; the runner fills them before the chunk's first step.
        """


@runtime_checkable
class SupportsVAEStage(Protocol[Session, Work]):
    """A model whose decoder can run as a separate pipeline stage (`omni.vae_stage`).

    The model of that stage has no layers. On that stage `prepare_encode` only validates the
    request, and of the other methods only `post_decode` and `commit` are called. Before
    `unpack_decode_state`, `latents` returns a tensor of the chunk's size on any device.
    """

    def pack_decode_state(self, request: DiffusionRequest[Session, Work]) -> dict[str, Any]:
        """Return the values that decoding needs in addition to the clean latents, as JSON types.

        Called on the last stage with layers; must not synchronise with the device.
        """

    def unpack_decode_state(
        self,
        request: DiffusionRequest[Session, Work],
        latents: torch.Tensor,
        info: Mapping[str, Any],
    ) -> None:
        """Store the clean latents and the result of `pack_decode_state` on the VAE stage.

        `post_decode` follows.
        """


@runtime_checkable
class VAEStageModel(
    SupportsStepExecution[Session, Work], SupportsVAEStage[Session, Work], Protocol[Session, Work]
):
    """A model with a VAE stage."""


@runtime_checkable
class SupportsParallelDecode(Protocol):
    """A model whose decode can be split over the ranks that share layers
    (`omni.vae_parallel`)."""

    @property
    def shares_decode(self) -> bool:
        """Return whether the decode is split.

        `post_decode` is then collective: all of these ranks call it for the same chunks in the same
        order. Only the result of the first rank is used; other ranks may omit the tensors.
        """


@runtime_checkable
class SupportsLayerMoves(Protocol):
    """A model whose layers can move between pipeline stages while there are no sessions."""

    @property
    def num_layers(self) -> int:
        """Number of layers of the whole network."""

    @property
    def partition(self) -> tuple[int, ...]:
        """Current number of layers of each stage."""

    def move_layers(self, move: LayerMove) -> None:
        """Move weights with the collectives of `move`. Never called on a VAE stage."""


@runtime_checkable
class LayeredModel(
    SupportsStepExecution[Session, Work], SupportsLayerMoves, Protocol[Session, Work]
):
    """A model that runs step by step and whose layers can be moved."""


@runtime_checkable
class SupportsChunksInFlight(Protocol):
    """A model that can start a session's next chunk before the previous one is complete
    (`omni.chunks_in_flight`, or `omni.pipeline` "temporal").

    `prepare_encode` starts from `request.predecessor` if it is set, otherwise from the session. A
    step of a chunk runs only after its predecessor has run `lag_steps` more steps or is complete.
    Chunks are decoded and committed in order. If a chunk is dropped, all later ones are dropped
    too, and the session continues from its committed state. The second chunk of a session starts
    after the first is committed.

    In a temporal pipeline, each stage calls `denoise_step` and `step_scheduler` only for its own
    step. On every stage except the last, the latents of the request at `commit` are the inputs of
    the last step.
    """

    @property
    def lag_steps(self) -> int:
        """Distance in steps between consecutive chunks.

        At least 1 and greater than `clean_passes`, so that latents become final in the order of the
        chunks.
        """
