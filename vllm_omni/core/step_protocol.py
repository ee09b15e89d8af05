# SPDX-License-Identifier: Apache-2.0
"""What the scheduler and the diffusion workers share: messages of an engine step, order of chunks.

- `SchedulerNote`: message of the scheduler to the runner about one request. It travels in the
  `extra_kwargs` of the request's `PoolingParams`, under a key that clients cannot set, because the
  scheduler removes it.
- `StepOutput`: message of the diffusion runner to the scheduler after one engine step. It is a
  `ModelRunnerOutput` with additional fields and travels from the worker process to the engine.
  Stock schedulers read only vLLM's fields.
- `ChunkOrder`: when a chunk may run a step while others of its session are in flight. The rule
  applies twice: the scheduler applies it to requests (`ScheduledStreams`), and the first pipeline
  stage applies it to the chunks that it has started (`ChunksInFlight`). A chunk may start, and run
  each further step, while its predecessor in the session is at least `lag_steps` steps ahead. The
  first chunk of a session runs alone, because until it is committed there is no session to
  continue.
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
"""Step of a chunk that has no steps left. It never delays its successor."""


class ChunkOrder:
    """Order of the chunks of a session.

    Args:
        limit: Maximum number of chunks of a session in flight (`omni.chunks_in_flight`). With 1,
            they run one after the other.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.lag_steps = 1

    def may_move(self, step: int | None, ahead: Sequence[float], *, established: bool) -> bool:
        """Whether a chunk may run its next step.

        Args:
            step: Steps that the chunk has run; None if it has not started.
            ahead: Steps of the earlier chunks in flight of its session, oldest first.
            established: Whether the session has a committed chunk, which the chunks in flight
                continue.
        """
        if not ahead:
            return True
        if step is None and len(ahead) >= self.limit:
            return False
        return established and (step or 0) + self.lag_steps <= ahead[-1]


def turn(chunk_index: int | None) -> float:
    """Return the sort key of a session's requests. Requests without an index come last."""
    return math.inf if chunk_index is None else chunk_index


_KEY = "omni_scheduler"


class SchedulerNote(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Message about one request."""

    refused: str | None = None
    """Reason why the request is refused with `capacity`, if it is."""
    degradations: list[str] = []
    """Degradations to apply to the request's chunk."""

    @classmethod
    def read_extra_kwargs(cls, extra_kwargs: Mapping[str, Any] | None) -> "SchedulerNote":
        """Return the note of a request, which is empty if the request has none."""
        return msgspec.convert((extra_kwargs or {}).get(_KEY, {}), cls)

    def attach_to_params(self, params: "PoolingParams") -> "PoolingParams":
        """Return a copy of `params` with this note. The client's object is not modified."""
        noted = copy.copy(params)
        noted.extra_kwargs = {**(params.extra_kwargs or {}), _KEY: msgspec.to_builtins(self)}
        return noted


def without_note(params: "PoolingParams") -> "PoolingParams":
    """Return `params` without a value that a client has set under the note's key."""
    if not params.extra_kwargs or _KEY not in params.extra_kwargs:
        return params
    bare = copy.copy(params)
    bare.extra_kwargs = {key: value for key, value in params.extra_kwargs.items() if key != _KEY}
    return bare


class ChunkProgress(NamedTuple):
    """Progress of a chunk after a step."""

    step: int
    """Steps done."""
    num_steps: int
    """Steps in total."""
    size: int
    """Number of elements of the latents, to which the cost of a forward pass is proportional."""


@dataclass
class StepOutput(ModelRunnerOutput):
    """Output of the diffusion runner for one engine step."""

    denoised: tuple[str, ...] = ()
    """Requests whose chunk is committed while its result is still being decoded or copied. Each is
    scheduled once more to deliver the result; the session's next chunk may start at once."""
    committed: tuple[str, ...] = ()
    """Requests whose chunk was committed in this step."""
    lag_steps: int = 1
    """Number of steps between a chunk and its predecessor (`omni.chunks_in_flight`)."""
    progress: dict[str, ChunkProgress] = field(default_factory=dict)
    """Progress of this step's unfinished chunks by request id."""
    before_s: float | None = None
    """Device time in seconds of the step launched before this one. None if it is unknown or if the
    host does not run ahead of the device."""
    unfinished: bool = False
    """Whether the device is still running this step, because the host is ahead."""
