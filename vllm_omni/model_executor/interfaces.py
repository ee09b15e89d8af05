# SPDX-License-Identifier: Apache-2.0
"""The contract between the diffusion runner and a model, and the objects passed between the two.

The runner sequences (`worker/diffusion/`): its role calls a model with these objects and knows
nothing of latents, cameras or caches. A model knows nothing of the scheduler, other requests'
sessions, or sockets. The protocols are generic in the model's own types of a session and of a
chunk's working set, so that mypy holds both sides to them.

Life of one chunk (one request), each line one engine step under `StreamBatchScheduler`:

    prepare_encode, denoise_step, step_scheduler        step 0
    denoise_step, step_scheduler                        steps 1 .. num_steps-1
    ... then, after the last step: post_decode, commit

A strict causal model's clean-context pass is simply its last step
(`DiffusionRequest.clean_passes`); `post_decode` then comes before it, since the latents are final.
Nothing of a session that can influence a later chunk may change before `commit`; `commit` only
moves references and counters, so it cannot fail half-way.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import torch

from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.device_async import StageTimer
from vllm_omni.model_executor.layers.layer_moves import LayerMove
from vllm_omni.model_executor.layers.lora.store import Selection
from vllm_omni.outputs import RequestFailed
from vllm_omni.tensors.saved import SavedTensors

Inputs = tuple[DiffusionParams, dict[str, torch.Tensor]]


class SessionState(ABC):
    """All that one session keeps between chunks on one rank: fixed size, owned by the runner's
    session store.
    """

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.chunk_index = 0
        """Chunks committed so far = index of the next chunk."""
        self.failure: RequestFailed | None = None
        """Why no chunk can follow: one was committed on other ranks and could not be decoded on
        this one.
        """
        self.adapters: Selection = ()
        """The LoRA adapters of the last committed chunk, and of the next one unless it names
        others.
        """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Device and host bytes held; constant from creation on (buffers are allocated at full
        size).
        """

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that can influence a later chunk, by stable name: the base of fork, digest
        and snapshot.

        Dead ring slots (K/V that no later chunk can see) are left out.
        """

    @abstractmethod
    def scalars(self) -> dict[str, Any]:
        """Every other value that can influence a later chunk, JSON types only."""

    @abstractmethod
    def fork(self, session_id: str) -> "SessionState":
        """Return an independent copy under a new id."""

    @abstractmethod
    def to(self, device: torch.device | str) -> None:
        """Move every buffer (sleep mode moves sessions to the host and back)."""

    def start_params(self) -> DiffusionParams:
        """Params of a first chunk from which `new_session` makes a session of this one's sizes.

        Raises `RequestFailed("unsupported")` for a model whose sessions end with their request.
        """
        raise RequestFailed(
            "unsupported", "sessions of this model end with their request: there is nothing to save"
        )

    def restore(self, scalars: Mapping[str, Any], saved: SavedTensors) -> None:
        """Become the session that `scalars()` and `tensors()` were taken of; called once, on a
        session just made.

        Both come from an untrusted file: whatever does not fit raises
        `RequestFailed("invalid_snapshot")`.
        """
        raise RequestFailed(
            "unsupported",
            "sessions of this model end with their request: there is nothing to restore",
        )

    def close(self) -> None:  # noqa: B027 - most sessions hold only tensors, which need no closing
        """Free everything; idempotent. The store never uses the session again."""


Session = TypeVar("Session", bound=SessionState)
Work = TypeVar("Work")
Result = tuple[Mapping[str, Any], Mapping[str, torch.Tensor]]
"""`(meta, tensors)`."""


@dataclass(eq=False)
class DiffusionRequest(Generic[Session, Work]):
    """One chunk in flight on one rank.

    The runner's role writes `step`, nobody else; the model owns `state`.

    Session, Work: the model's own types of the session and of a chunk's working set.
    """

    request_id: str
    params: DiffusionParams
    tensors: Mapping[str, torch.Tensor]
    session: Session
    num_steps: int = 0
    """Forward passes this chunk needs; set by `prepare_encode` (0 = not prepared)."""
    clean_passes: int = 0
    """How many of them come last and leave the latents as they are; set by `prepare_encode`."""
    step: int = 0
    state: Work | None = None
    """The model's working set for this chunk: latents, noise, conditions.

    Dropped with the request.
    """
    predecessor: "DiffusionRequest[Session, Work] | None" = None
    """The chunk of this session that is in flight just before this one (`SupportsChunksInFlight`),
    prepared and begun; None = this one follows the committed session. For `prepare_encode` only;
    None afterwards."""
    degradations: tuple[str, ...] = ()
    """Degradations that the scheduler asks of this chunk (`SupportsDegradation`); set before
    `prepare_encode`.

    `post_decode` takes out those that did not happen; the result's meta names the rest.
    """
    adapters: Selection = ()
    """The LoRA adapters that all of this chunk's forwards use."""
    same_adapters: bool = True
    """Whether the chunk before it used the same; if not, whatever was kept of its weights'
    results is void.
    """
    timer: StageTimer = field(default_factory=lambda: StageTimer(torch.device("cpu")))
    """Runner and model time their stages with it (`encode`, `step`, `decode`, ...); the result's
    meta carries them.
    """

    @property
    def work(self) -> Work:
        """`state`, once `prepare_encode` has set it."""
        assert self.state is not None, "prepare_encode has not run"
        return self.state

    def end_with_this_step(self) -> None:
        """For a model that finds in `step_scheduler` that the chunk needs no further step."""
        self.num_steps = self.step + 1


@runtime_checkable
class SupportsStepExecution(Protocol[Session, Work]):
    """A model served one denoise step at a time.

    All tensors live on the model's device unless said otherwise.
    """

    supports_step_execution: ClassVar[bool]

    def session_nbytes(self, params: DiffusionParams) -> int:
        """Bytes `new_session(params)` will hold on this rank; asked before admission, allocates
        nothing.
        """

    def new_session(self, params: DiffusionParams) -> Session:
        """Make the state of a new session from its first chunk's params.

        Raises `RequestFailed` when size, prompt or options are not acceptable.
        """

    def prepare_encode(self, request: DiffusionRequest[Session, Work]) -> None:
        """Validate the request's inputs, encode text, image and camera, draw the first noise; set
        `num_steps`.

        Runs on every rank, deterministic, without collectives. Raises `RequestFailed` on bad input.
        """

    def batch_key(self, request: DiffusionRequest[Session, Work]) -> Hashable:
        """Requests with equal keys may share one `denoise_step`, whatever step each is at."""

    def denoise_step(
        self, batch: Sequence[DiffusionRequest[Session, Work]], hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One forward for requests at their own steps.

        On a first pipeline stage `hidden` is None, on later ones it is the previous stage's return
        value. Returns hidden states on all but the last stage, where it returns the prediction (one
        row per request).
        """

    def step_scheduler(
        self, batch: Sequence[DiffusionRequest[Session, Work]], prediction: torch.Tensor
    ) -> None:
        """Last stage only: latents_t -> latents_{t-1} in each request's state.

        `step` is advanced by the runner.
        """

    def latents(self, request: DiffusionRequest[Session, Work]) -> torch.Tensor:
        """The request's current latents; clean after the last step.

        Same shape through the whole chunk.
        """

    def set_latents(self, request: DiffusionRequest[Session, Work], latents: torch.Tensor) -> None:
        """Other stages take over the last stage's latents (they need latents to start the next
        step).
        """

    def post_decode(
        self, request: DiffusionRequest[Session, Work]
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Last stage: `(meta, tensors)` of the result, e.g. `{"frames": uint8 [T,H,W,3]}`.

        On the first of the ranks that share layers only, unless they decode together
        (`SupportsParallelDecode`).

        Called when the latents are final: clean passes may still follow, and find everything they
        need in place. On CUDA it may run on a stream of its own, beside the session's next chunk:
        it must not wait for the device, and `request.state` must keep everything it reads or
        replaces until the request is dropped.
        """

    def commit(self, request: DiffusionRequest[Session, Work]) -> None:
        """Make the chunk part of its session on this rank: lengths, caches, camera tail, chunk
        index.
        """

    def warmup_inputs(self) -> list[Inputs]:
        """Requests of the largest shape, in session order; the runner runs them once in a
        throw-away session.
        """


@runtime_checkable
class PoolsMemory(Protocol):
    """A model that keeps memory of closed sessions, to make new ones of it."""

    def trim_pool(self, nbytes: int) -> None:
        """Keep no more than `nbytes` of it."""


@runtime_checkable
class SupportsSessionWindows(Protocol):
    """A model whose sessions may see other frames than the server's
    (`DiffusionParams.window_frames`).
    """

    session_windows: ClassVar[bool]


@runtime_checkable
class SupportsBatchedDecode(Protocol[Session, Work]):
    """A model whose decoder takes chunks of several sessions in one call (never with
    `omni.batch_invariant`).
    """

    def most_decoded_together(self, request: DiffusionRequest[Session, Work]) -> int:
        """How many requests of its `batch_key` may share one decode with it; 1 = it is decoded
        alone.
        """

    def post_decode_together(
        self, batch: Sequence[DiffusionRequest[Session, Work]]
    ) -> list[tuple[dict[str, Any], dict[str, torch.Tensor]]]:
        """`post_decode` of each, equal within float tolerance.

        After an exception each is decoded alone.
        """


@runtime_checkable
class SupportsSharedText(Protocol[Session, Work]):
    """A model whose text encoder only one of an engine's ranks holds
    (`ParallelContext.encodes`).
    """

    def texts(self, request: DiffusionRequest[Session, Work]) -> list[torch.Tensor]:
        """Rows of the prompts that `prepare_encode` has read, of the same number, shapes and order
        on every rank.

        Where `encodes` is false they are memory, which the runner fills before the chunk's first
        step.
        """


@runtime_checkable
class SupportsVAEStage(Protocol[Session, Work]):
    """A model whose decoder can live on a pipeline stage of its own (`omni.vae_stage`).

    On that stage it is built without layers; `prepare_encode` only checks the request there, and of
    the rest only `post_decode` and `commit` are called. `latents` is of the chunk's size, on any
    device, before `take_over`.
    """

    def pack_decode_state(self, request: DiffusionRequest[Session, Work]) -> dict[str, Any]:
        """Last stage with layers: the result's facts beside the clean latents, JSON types,
        without waiting.
        """

    def unpack_decode_state(
        self,
        request: DiffusionRequest[Session, Work],
        latents: torch.Tensor,
        info: Mapping[str, Any],
    ) -> None:
        """VAE stage: the chunk's clean latents and the facts of `hand_over`; `post_decode`
        follows.
        """


@runtime_checkable
class VAEStageModel(
    SupportsStepExecution[Session, Work], SupportsVAEStage[Session, Work], Protocol[Session, Work]
):
    """A model on the two sides of a VAE stage."""


def check_vae_stage(model: object, omni: OmniConfig) -> None:
    """Raise ValueError unless the model's decoder can be a stage of its own, if it is asked to."""
    if omni.vae_stage and not isinstance(model, SupportsVAEStage):
        raise ValueError(
            f"omni.vae_stage: the decoder of {type(model).__name__} cannot be a stage of its own"
        )


@runtime_checkable
class SupportsParallelDecode(Protocol):
    """A model whose decode the ranks that share layers can do together, each a part of it
    (`omni.vae_parallel`).
    """

    @property
    def shares_decode(self) -> bool:
        """Whether they do.

        `post_decode` is then collective: each of these ranks calls it for the same chunks in the
        same order. Only the first one's result is used, the others may leave the tensors out.
        """


@runtime_checkable
class SupportsLayerMoves(Protocol):
    """A model whose layers can move from one pipeline stage to another while there are no
    sessions.
    """

    @property
    def num_layers(self) -> int:
        """Of the whole network."""

    @property
    def partition(self) -> tuple[int, ...]:
        """Layers of each stage now."""

    def move_layers(self, move: LayerMove) -> None:
        """Move weights by `move`'s collective calls; never on a VAE stage."""


@runtime_checkable
class LayeredModel(
    SupportsStepExecution[Session, Work], SupportsLayerMoves, Protocol[Session, Work]
):
    """A model served in steps whose layers can move."""


@runtime_checkable
class SupportsDegradation(Protocol):
    """A model that can make single chunks cheaper and worse, as `request.degradations` of each
    says.
    """

    def refuse_degradation(self, name: str) -> str | None:
        """Why this model, as it is configured, cannot do without `name` (`omni.degradations`);
        None if it can.
        """


def check_parallel_decode(model: object, omni: OmniConfig) -> bool:
    """Return whether ranks that share layers decode together.

    Raises ValueError if they are asked to and cannot.
    """
    if isinstance(model, SupportsParallelDecode):
        return model.shares_decode
    if omni.vae_parallel:
        raise ValueError(
            f"omni.vae_parallel: the decode of {type(model).__name__} cannot be split over ranks"
        )
    return False


def check_degradations(model: object, names: Sequence[str]) -> None:
    """Raise ValueError, with the reason, unless `model` can do all of `omni.degradations`."""
    for name in names:
        reason = "it has one quality only"
        if isinstance(model, SupportsDegradation):
            refusal = model.refuse_degradation(name)
            if refusal is None:
                continue
            reason = refusal
        raise ValueError(f"omni.degradations: {type(model).__name__} cannot do {name!r}: {reason}")


@runtime_checkable
class SupportsChunksInFlight(Protocol):
    """A model whose next chunk can begin before the one ahead of it in its session is done
    (`omni.chunks_in_flight`).

    Its `prepare_encode` starts from `request.predecessor` if there is one, else from the session. A
    chunk's step is run only when the chunk before it has done `lag_steps` more, or is done. Chunks
    are decoded and committed in order. If one is not, none behind it is, and the session must go on
    from its committed state as if they had never begun. A session's first chunk has no follower
    until it is committed.
    """

    @property
    def lag_steps(self) -> int:
        """At least 1, and more than a chunk has clean passes: latents are final in the order of
        the chunks.
        """

    def refuse_chunks_in_flight(self) -> str | None:
        """Why this model, as it is configured, cannot have several; None if it can."""

    def refuse_temporal_pipeline(self, num_stages: int) -> str | None:
        """Why its steps cannot be spread over `num_stages` stages (`omni.pipeline` "temporal");
        None if they can.

        If they can: each stage calls `denoise_step` and `step_scheduler` for the step of its own
        number only. On every stage but the last, `commit` finds the latents that entered the last
        step as the request's latents.
        """


def check_chunks_in_flight(model: object, omni: OmniConfig, num_stages: int) -> int:
    """Return the model's `lag_steps`.

    Raises ValueError, with the reason, unless it can serve `omni`'s options.
    """
    if omni.ahead is None:
        return 1
    reason: str | None = "its next chunk needs the one before it complete"
    if isinstance(model, SupportsChunksInFlight):
        reason = model.refuse_chunks_in_flight()
        if reason is None and omni.pipeline == "temporal":
            reason = model.refuse_temporal_pipeline(num_stages)
        if reason is None:
            return model.lag_steps
    raise ValueError(f"omni.{omni.ahead}: {type(model).__name__} cannot do that: {reason}")
