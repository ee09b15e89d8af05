# SPDX-License-Identifier: Apache-2.0
"""The contract between the diffusion runner and a model, and the types that they exchange.

The runner (`worker/diffusion/`) calls the model's methods in order and does not depend on latents,
cameras or caches. A model does not depend on the scheduler, on sockets or on other requests'
sessions. The protocols are generic in the model's session type and working-set type, so that mypy
checks both sides.

One request generates one chunk, with the following calls. Each line is one engine step of
`StreamBatchScheduler`:

    prepare_encode, denoise_step, step_scheduler        step 0
    denoise_step, step_scheduler                        steps 1 .. num_steps-1
    ... then, after the last step: post_decode, commit

A strict causal model runs its clean-context pass as the last step
(`DiffusionRequest.clean_passes`). `post_decode` is called before that pass, because the latents are
already final. The session state that later chunks depend on changes only in `commit`. `commit`
cannot fail half-way, because it only replaces references and counters.
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
"""Name of the degradation that applies to a session whose K/V window could not grow to its full
length (`omni.kv_growth`).
"""


class SessionState(ABC):
    """A session's state on one rank between two chunks. The runner's session store owns it."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.chunk_index = 0
        """Number of committed chunks, which is also the index of the next chunk."""
        self.failure: RequestFailed | None = None
        """Error that all later chunks fail with. The field is set if a chunk was committed on other
        ranks but its decode failed on this rank. None: the session has not failed.
        """
        self.adapters: Selection = ()
        """LoRA adapters of the last committed chunk. The next chunk uses the same adapters, unless
        its request specifies others.
        """
        self.degradations: tuple[str, ...] = ()
        """Degradations that apply to all later chunks."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Number of bytes of device and host memory that the session occupies. Only `grow` changes
        this value, because all other buffers are allocated at full size.
        """

    @property
    def growing_nbytes(self) -> int:
        """The portion of `nbytes` that `grow` allocates outside torch's allocator."""
        return 0

    def missing_nbytes(self) -> int:
        """Return the number of bytes that `grow` will allocate for the next chunk."""
        return 0

    def grow(self) -> None:  # noqa: B027 - most sessions have a constant size
        """Allocate the K/V memory that the next chunk needs.

        Raises:
            torch.OutOfMemoryError: There is not enough memory.
        """

    @property
    def held_frames(self) -> int:
        """Number of frames in the K/V window for which memory is allocated. 0: the frames are not
        counted, because the window has a constant size.
        """
        return 0

    def limit_window(self, frames: int) -> None:  # noqa: B027
        """If the next chunk does not already fit in `frames` frames, limit the K/V window to
        `frames` frames and set `degradations`.
        """

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor that can affect a later chunk, by stable name.

        The tensors are used for digests and snapshots. If no later chunk attends to a ring buffer
        slot's K/V, the slot is omitted.
        """

    @abstractmethod
    def scalars(self) -> dict[str, Any]:
        """Return every non-tensor value that can affect a later chunk, as JSON types."""

    @abstractmethod
    def fork(self, session_id: str) -> "SessionState":
        """Return an independent copy of the session under a new id."""

    @abstractmethod
    def to(self, device: torch.device | str) -> None:
        """Move every buffer to `device`. Sleep mode uses this method to move sessions to the host
        and back.
        """

    def start_params(self) -> DiffusionParams:
        """Return parameters from which `new_session` creates a session of the same size as this
        one.

        Raises:
            RequestFailed: `unsupported` if this model's sessions end with their requests.
        """
        raise RequestFailed(
            "unsupported", "sessions of this model end with their request and cannot be saved"
        )

    def restore(self, scalars: Mapping[str, Any], saved: SavedTensors) -> None:
        """Restore a saved session, or update it to a later state of the same session.

        The session must be new, or must not have run a chunk since it was last restored.

        Args:
            scalars: Values that `scalars` returned, read from an untrusted file.
            saved: Tensors that `tensors` returned, read from an untrusted file.

        Raises:
            RequestFailed: `invalid_snapshot` if a value or a tensor does not match this session.
        """
        raise RequestFailed(
            "unsupported",
            "sessions of this model end with their request and cannot be restored",
        )

    def close(self) -> None:  # noqa: B027 - most sessions hold only tensors
        """Free all of the session's memory. Idempotent. The store does not use a session after
        closing it.
        """


Session = TypeVar("Session", bound=SessionState)
Work = TypeVar("Work")
Result = tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]
"""A request's result: `(meta, tensors)`."""


@dataclass(eq=False)
class DiffusionRequest(Generic[Session, Work]):
    """One chunk in flight on one rank.

    `Session` and `Work` are the model's types for a session and for a chunk's working set.
    """

    request_id: str
    """Id of the engine request that generates the chunk."""
    params: DiffusionParams
    """Request parameters."""
    tensors: Mapping[str, torch.Tensor]
    """The request's input tensors, by name."""
    session: Session
    """Session that the chunk belongs to, in its state after the last commit."""
    num_steps: int = 0
    """Number of forward passes, set by `prepare_encode`. 0: the request has not been prepared."""
    clean_passes: int = 0
    """Number of final forward passes that leave the latents unchanged, set by `prepare_encode`."""
    step: int = 0
    """Index of the next forward pass. Only the runner changes it, according to the rank's role."""
    state: Work | None = None
    """The chunk's working set: latents, noise and conditioning. The model owns it."""
    predecessor: "DiffusionRequest[Session, Work] | None" = None
    """The session's previous chunk if that chunk is in flight (`SupportsChunksInFlight`). A
    predecessor has always been prepared and started. None: the chunk continues from the committed
    session. Only `prepare_encode` reads this field, and the field is None after `prepare_encode`.
    """
    degradations: tuple[str, ...] = ()
    """This chunk's degradations, which the scheduler requests before `prepare_encode`.
    `post_decode` removes the degradations that were not applied, and the result's metadata lists
    the remaining ones.
    """
    adapters: Selection = ()
    """LoRA adapters for all of this chunk's forward passes."""
    same_adapters: bool = True
    """Whether the previous chunk used the same adapters as this chunk. If False, cached results
    that depend on the weights are invalid.
    """
    timer: StageTimer = field(default_factory=lambda: StageTimer(torch.device("cpu")))
    """Timer for the stages of the runner and the model (`encode`, `step`, `decode`, ...). The
    result's metadata contains the measured times.
    """

    @property
    def work(self) -> Work:
        """Return `state`, which `prepare_encode` has set."""
        assert self.state is not None, "prepare_encode has not run"
        return self.state

    def end_with_this_step(self) -> None:
        """Make the current step the chunk's last step. A model may call this method in
        `step_scheduler`.
        """
        self.num_steps = self.step + 1


@runtime_checkable
class SupportsStepExecution(Protocol[Session, Work]):
    """A model that the runner can run one denoise step at a time.

    All tensors are on the model's device, unless stated otherwise.
    """

    supports_step_execution: ClassVar[bool]
    """Marker that the runner uses to recognise the class. Always True."""

    def session_nbytes(self, params: DiffusionParams) -> int:
        """Return the size in bytes of a session from `new_session(params)` on this rank.

        The runner calls this method before it admits a session, so the method must not allocate
        memory.
        """

    def new_session(self, params: DiffusionParams) -> Session:
        """Create a session's state from the parameters of its first chunk.

        Raises:
            RequestFailed: The size, the prompt or an option is invalid.
        """

    def prepare_encode(self, request: DiffusionRequest[Session, Work]) -> None:
        """Validate the inputs, encode text, image and camera, sample the noise, and set
        `num_steps`.

        Every rank runs this method without collectives and obtains identical results.

        Raises:
            RequestFailed: An input is invalid.
        """

    def batch_key(self, request: DiffusionRequest[Session, Work]) -> Hashable:
        """Return the batch key of a request. Requests with equal keys may share a `denoise_step`,
        even if they are at different steps.
        """

    def denoise_step(
        self, batch: Sequence[DiffusionRequest[Session, Work]], hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run one forward pass of the transformer. The requests in a batch may be at different
        steps.

        Args:
            batch: Requests with equal `batch_key`.
            hidden: Hidden states from the previous pipeline stage. None: this is the first stage.

        Returns:
            One entry per request: hidden states or, on the last stage, the prediction.
        """

    def step_scheduler(
        self, batch: Sequence[DiffusionRequest[Session, Work]], prediction: torch.Tensor
    ) -> None:
        """Advance the latents of each request by one denoise step. Called only on the last stage.

        The runner increments `DiffusionRequest.step` itself.
        """

    def latents(self, request: DiffusionRequest[Session, Work]) -> torch.Tensor:
        """Return the current latents, which are clean after the last step. The shape of the latents
        never changes.
        """

    def set_latents(self, request: DiffusionRequest[Session, Work], latents: torch.Tensor) -> None:
        """Set the latents for the next step. Called on all stages except the last, with the last
        stage's latents.
        """

    def post_decode(
        self, request: DiffusionRequest[Session, Work]
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the result's `(meta, tensors)`, for example `{"frames": uint8 [T, H, W, 3]}`.

        Called on the last stage when the latents are final. If several ranks share the layers of
        this stage, `post_decode` is called only on the first of these ranks, unless they decode
        together (`SupportsParallelDecode`). Clean-context passes may follow, so the state that such
        passes need must be retained.

        On CUDA, the decode may run on a separate `cuda_stream` alongside the session's next chunk.
        `post_decode` must therefore not synchronise with the device, and `request.state` must hold
        a reference to every tensor that it reads or replaces.
        """

    def commit(self, request: DiffusionRequest[Session, Work]) -> None:
        """Update the chunk's session on this rank: its lengths, caches, camera and chunk index."""

    def warmup_inputs(self) -> list[Inputs]:
        """Return the warm-up requests, which have the largest shape. The runner runs them
        once, in order, in each temporary session of the warm-up.
        """


@runtime_checkable
class WarmsUpTwice(Protocol):
    """A model that can run its warm-up requests twice."""

    warms_up_twice: bool
    """Whether to run the warm-up requests in a second temporary session. Equal on all ranks."""


@runtime_checkable
class HasFastPaths(Protocol):
    """A model component that chooses between implementations when it is built."""

    fast_paths: Sequence[FastPath]
    """The component's fast paths on this rank, each of which is on or off."""


@runtime_checkable
class PoolsMemory(Protocol):
    """A model that pools closed sessions' memory for use by new sessions."""

    def trim_pool(self, nbytes: int) -> None:
        """Free pooled memory until at most `nbytes` bytes remain pooled."""


@runtime_checkable
class SupportsSessionWindows(Protocol):
    """A model whose sessions may choose their own window (`DiffusionParams.window_frames`)."""

    session_windows: ClassVar[bool]
    """Marker that the runner uses to recognise the class. Always True."""


@runtime_checkable
class SupportsTrajectory(Protocol[Session, Work]):
    """A model that can return a chunk's denoise steps (`DiffusionParams.trajectory`)."""

    def record_trajectory(self, request: DiffusionRequest[Session, Work]) -> None:
        """Record a chunk's denoise steps, so that its result includes them. The runner calls this
        method after `prepare_encode`.

        Raises:
            RequestFailed: The chunk's sampler draws no noise, or the denoise steps run on other
                ranks.
        """


@runtime_checkable
class SupportsBatchedDecode(Protocol[Session, Work]):
    """A model that can decode several sessions' chunks in a single call if `omni.batch_invariant`
    is off.
    """

    def most_decoded_together(self, request: DiffusionRequest[Session, Work]) -> int:
        """Return the maximum number of requests with `request`'s `batch_key` that may share a
        decode. The value 1 disables sharing.
        """

    def post_decode_together(
        self, batch: Sequence[DiffusionRequest[Session, Work]]
    ) -> list[tuple[dict[str, Any], dict[str, torch.Tensor]]]:
        """Return what `post_decode` would return for each request, within floating-point tolerance.

        If this method raises an exception, the runner decodes each request separately.
        """


@runtime_checkable
class SupportsSharedText(Protocol[Session, Work]):
    """A model whose text encoder runs on only one rank of the engine
    (`ParallelContext.encodes`).
    """

    def texts(self, request: DiffusionRequest[Session, Work]) -> list[torch.Tensor]:
        """Return the text embeddings of the prompts that `prepare_encode` has processed.

        All ranks return the same number of tensors, with the same shapes and in the same order. On
        ranks without the text encoder, the tensors are uninitialised, and the runner fills them
        before the chunk's first step.
        """


@runtime_checkable
class SupportsVAEStage(Protocol[Session, Work]):
    """A model whose decoder can run as a separate pipeline stage (`omni.vae_stage`).

    On the VAE stage, the model has no layers, `prepare_encode` only validates the request, and the
    runner then calls only `post_decode` and `commit`. Until `unpack_decode_state` is called,
    `latents` returns a tensor of the chunk's size on any device.
    """

    def pack_decode_state(self, request: DiffusionRequest[Session, Work]) -> dict[str, Any]:
        """Return the values that decoding needs in addition to the clean latents, as JSON types.

        Called on the last stage that has layers. This method must not synchronise with the device.
        """

    def unpack_decode_state(
        self,
        request: DiffusionRequest[Session, Work],
        latents: torch.Tensor,
        info: Mapping[str, Any],
    ) -> None:
        """Store the clean latents and the result of `pack_decode_state` on the VAE stage.

        The runner then calls `post_decode`.
        """


@runtime_checkable
class VAEStageModel(
    SupportsStepExecution[Session, Work], SupportsVAEStage[Session, Work], Protocol[Session, Work]
):
    """A model that runs step by step and whose decoder can be a separate pipeline stage."""


@runtime_checkable
class SupportsParallelDecode(Protocol):
    """A model whose decode can be split across the ranks that share layers
    (`omni.vae_parallel`).
    """

    @property
    def shares_decode(self) -> bool:
        """Return whether the decode is split across the ranks that share layers.

        If the decode is split, `post_decode` is a collective: all ranks that share layers call it
        for the same chunks in the same order. Only the first rank's result is used, so other ranks
        may omit the tensors.
        """


@runtime_checkable
class SupportsLayerMoves(Protocol):
    """A model whose layers can move between pipeline stages while there are no sessions."""

    @property
    def num_layers(self) -> int:
        """Number of layers in the whole network."""

    @property
    def partition(self) -> tuple[int, ...]:
        """Current number of layers on each pipeline stage."""

    def move_layers(self, move: LayerMove) -> None:
        """Move layer weights between stages with `move`'s collectives. Never called on a VAE
        stage.
        """


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
    chunk runs a step only if its predecessor is complete or is at least `lag_steps` steps ahead.
    Chunks are decoded and committed in order. If a chunk is dropped, all later chunks are dropped
    too, and the session continues from its committed state. A session's second chunk starts only
    after its first chunk is committed.

    In a temporal pipeline, the runner calls `denoise_step` and `step_scheduler` on each stage only
    for the step that the stage runs. On every stage except the last, the request holds the last
    step's input latents when `commit` is called.
    """

    @property
    def lag_steps(self) -> int:
        """Minimum number of steps by which a chunk trails its predecessor.

        The value is at least 1 and greater than `clean_passes`, so latents become final in chunk
        order.
        """
