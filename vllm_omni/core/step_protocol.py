# SPDX-License-Identifier: Apache-2.0
"""What the scheduler and the diffusion workers share: the messages of an engine step, and the order of
chunks.

- `SchedulerNote`: scheduler to runner, about one request, in addition to stock vLLM's fields. It
  travels in the request's own `PoolingParams.extra_kwargs`, under a key that clients cannot set:
  the scheduler removes their value.
- `StepOutput`: runner to scheduler, after an engine step. It travels as a `ModelRunnerOutput`;
  stock schedulers read only vLLM's fields.
- `ChunkOrder`: which chunk of a session may start, or take its next step, while others of it are in
  flight. One rule, applied twice: by the scheduler to requests (`Streams`), and by the first
  pipeline stage's rank to the chunks that it has started (`ChunksInFlight`).

Tests: tests/core/test_scheduler_note.py, test_chunks_in_flight_turns.py,
tests/worker/test_chunks_in_flight_rules.py.
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
"""The step of a chunk that has none left: however far behind, the next one may move."""


class ChunkOrder:
    """limit: chunks of one session at work at once (`omni.chunks_in_flight`); with 1, one after the other."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.steps_behind = 1

    def may_move(self, step: int | None, ahead: Sequence[float], *, established: bool) -> bool:
        """Whether a chunk may take its next step; step None = it has not begun, so this would be its first one.

        ahead: the steps of the chunks of its session at work before it, oldest first. established: the session has a
        committed chunk, which those at work continue.
        """
        if not ahead:
            return True
        if step is None and len(ahead) >= self.limit:
            return False
        return established and (step or 0) + self.steps_behind <= ahead[-1]


def turn(chunk_index: int | None) -> float:
    """Requests of a session begin in this order, then by arrival: those that name no chunk come last."""
    return math.inf if chunk_index is None else chunk_index


_KEY = "omni_scheduler"


class SchedulerNote(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """refused: why this request is not served (it ends with `capacity`). degradations: to apply to its chunk."""

    refused: str | None = None
    degradations: list[str] = []

    @classmethod
    def read(cls, extra_kwargs: Mapping[str, Any] | None) -> "SchedulerNote":
        """Return the note of a request; an empty one if there is none."""
        return msgspec.convert((extra_kwargs or {}).get(_KEY, {}), cls)

    def attach(self, params: "PoolingParams") -> "PoolingParams":
        """Return a copy of `params` with this note; the client's object stays as it is."""
        noted = copy.copy(params)
        noted.extra_kwargs = {**(params.extra_kwargs or {}), _KEY: msgspec.to_builtins(self)}
        return noted


def without_note(params: "PoolingParams") -> "PoolingParams":
    """Return `params` without a client's own value under the note's key."""
    if not params.extra_kwargs or _KEY not in params.extra_kwargs:
        return params
    bare = copy.copy(params)
    bare.extra_kwargs = {key: value for key, value in params.extra_kwargs.items() if key != _KEY}
    return bare


class ChunkProgress(NamedTuple):
    """A chunk's progress after a step. size: elements of its latents, to which its forward's cost is proportional."""

    step: int
    num_steps: int
    size: int


@dataclass
class StepOutput(ModelRunnerOutput):
    """denoised: requests whose chunk is committed, while its result is still being decoded or copied.

    Such a request is scheduled once more to deliver its result; its session's next chunk may start at once.

    progress: of this step's chunks that are not done. committed: requests whose chunk was committed in this step.
    steps_behind: how many steps a chunk stays behind the one before it (`omni.chunks_in_flight`).
    before_s: device time of the step launched before this one; None = device and host keep pace, or it is not known.
    unfinished: the host is ahead, the device still runs this step.
    """

    denoised: tuple[str, ...] = ()
    committed: tuple[str, ...] = ()
    steps_behind: int = 1
    progress: dict[str, ChunkProgress] = field(default_factory=dict)
    before_s: float | None = None
    unfinished: bool = False
