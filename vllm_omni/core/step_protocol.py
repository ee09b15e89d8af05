# SPDX-License-Identifier: Apache-2.0
"""The protocol between the scheduler and the diffusion workers: an engine step's messages, and the
order of chunks.

- `SchedulerNote`: a message from the scheduler to the runner about one request. The note is sent in
  the `extra_kwargs` of the request's `PoolingParams`. Clients cannot send notes, because the
  scheduler removes the note's key from incoming requests.
- `StepOutput`: a message from the diffusion runner to the scheduler after one engine step. The
  message is a `ModelRunnerOutput` with additional fields, sent from the worker process to the
  engine. vLLM's own schedulers ignore these fields.
- `ChunkOrder`: the rule that determines when a chunk may run a step while other chunks of its
  session are in flight. A chunk may run a step only while its predecessor in the session is at
  least `lag_steps` steps ahead. The first chunk of a session runs alone, because later chunks have
  nothing to continue until it has been committed. The rule is applied in two places: the scheduler
  applies it to requests (`ScheduledStreams`), and the first pipeline stage applies it to the chunks
  that it has started (`ChunksInFlight`).
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from vllm.v1.outputs import ModelRunnerOutput

if TYPE_CHECKING:
    from vllm import PoolingParams


DONE = math.inf
"""Step number of a chunk with no remaining steps. A chunk with this number never delays its
successor.
"""


class ChunkOrder:
    """Order of a session's chunks.

    Args:
        limit: Maximum number of chunks in flight per session (`omni.chunks_in_flight`). If 1,
            chunks run one after another.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.lag_steps = 1

    def may_move(self, step: int | None, ahead: Sequence[float], *, established: bool) -> bool:
        """Return whether a chunk may run its next step.

        Args:
            step: Number of steps that the chunk has run; None if it has not started.
            ahead: Number of steps run by each of the session's earlier chunks that are still in
                flight, oldest chunk first.
            established: Whether the session has a committed chunk that the chunks in flight
                continue.
        """
        if not ahead:
            return True
        if step is None and len(ahead) >= self.limit:
            return False
        return established and (step or 0) + self.lag_steps <= ahead[-1]


def turn(chunk_index: int | None) -> float:
    """Return a request's sort key within its session. Requests without a chunk index come last."""
    return math.inf if chunk_index is None else chunk_index


_KEY = "omni_scheduler"


class SchedulerNote(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Message from the scheduler to the runner about one request."""

    refused: str | None = None
    """Reason for refusing the request with `capacity`; None if the request is not refused."""
    degradations: list[str] = []
    """Degradations that the runner applies to the request's chunk."""

    @classmethod
    def read_extra_kwargs(cls, extra_kwargs: Mapping[str, Any] | None) -> "SchedulerNote":
        """Return the scheduler's note about a request, or an empty note if there is none."""
        return msgspec.convert((extra_kwargs or {}).get(_KEY, {}), cls)

    def attach_to_params(self, params: "PoolingParams") -> "PoolingParams":
        """Return a copy of `params` with this note. The client's object is not modified."""
        noted = copy.copy(params)
        noted.extra_kwargs = {**(params.extra_kwargs or {}), _KEY: msgspec.to_builtins(self)}
        return noted


def without_note(params: "PoolingParams") -> "PoolingParams":
    """Return `params` without any value that a client has set for the note's key."""
    if not params.extra_kwargs or _KEY not in params.extra_kwargs:
        return params
    bare = copy.copy(params)
    bare.extra_kwargs = {key: value for key, value in params.extra_kwargs.items() if key != _KEY}
    return bare


class ChunkProgress(NamedTuple):
    """Progress of a chunk after a step."""

    step: int
    """Number of steps that the chunk has finished."""
    num_steps: int
    """The chunk's total number of steps."""
    size: int
    """Number of latent elements. The cost of a forward pass is proportional to this number."""


@dataclass
class StepOutput(ModelRunnerOutput):
    """Output of the diffusion runner for one engine step."""

    denoised: tuple[str, ...] = ()
    """Requests whose chunks have been committed while their results are still being decoded or
    copied. Each of these requests is scheduled once more to deliver its result. The session's next
    chunk may start immediately.
    """
    committed: tuple[str, ...] = ()
    """Requests whose chunks were committed in this step."""
    lag_steps: int = 1
    """Minimum number of steps by which a chunk lags behind its predecessor
    (`omni.chunks_in_flight`).
    """
    progress: dict[str, ChunkProgress] = field(default_factory=dict)
    """Progress of the unfinished chunks in this step, by request id."""
    before_s: float | None = None
    """Device time in seconds of the step that was launched before this one. None if the time is
    unknown or if the host does not run ahead of the device.
    """
    unfinished: bool = False
    """Whether the device is still running this step. This is possible because the host runs ahead
    of the device.
    """
